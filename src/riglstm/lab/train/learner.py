"""The updates themselves, inside Lightning's loop.

Lightning's loop costs about half a millisecond, which would be much of a small update. So one turn
of it makes all the updates until the steward has something to do, and costs the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from riglstm import no_decay_parameters
from riglstm.lab.tasks.base import Task
from riglstm.lab.train.callbacks import Steward
from riglstm.lab.train.config import Fit, rate
from riglstm.lab.train.devices import autocast

FACTOR = "factor"
"""Of a group's step size, in the optimizer's groups."""


def _of_input(name: str) -> bool:
    """Whether a parameter of that name is a table of tokens, or of a map to views."""
    own = name.rpartition(".")[2]
    return name.startswith("tables.") or own.startswith(("weight_in_", "bias_in_"))


class Learner(pl.LightningModule):
    """The network and its task, as Lightning wants them."""

    def __init__(
        self, net: nn.Module, task: Task, config: Fit, seed: int, steward: Steward
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = net.train()
        self.task, self.config, self.seed, self.steward = task, config, seed, steward
        self.rows = slice(None)
        """The part of each batch that is this process's."""

    def configure_optimizers(self) -> Optimizer:
        """Adam; what has a step size or a decay of its own is a group of its own."""
        config, named = self.config, list(self.net.named_parameters())
        if config.input_rate != 1 and not any(_of_input(name) for name, _ in named):
            raise ValueError(
                "input_rate must be 1 for a network without tables of tokens and without maps to "
                f"views, got {config.input_rate}; leave it out"
            )
        if config.input_rate == 1 and config.weight_decay == 0:
            return Adam(self.net.parameters(), config.lr, fused=True)
        free = set(no_decay_parameters(self.net))
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        # Tables and views last, as they were before there was a decay: checkpoints count groups.
        for name, parameter in sorted(named, key=lambda pair: _of_input(pair[0])):
            factor = config.input_rate if _of_input(name) else 1.0
            decay = 0.0 if parameter in free else config.weight_decay
            groups.setdefault((factor, decay), []).append(parameter)
        own: list[dict[str, Any]] = [
            {"params": parameters, FACTOR: factor, "weight_decay": decay}
            for (factor, decay), parameters in groups.items()
        ]
        return (AdamW if config.weight_decay else Adam)(own, config.lr, fused=True)

    def on_fit_start(self) -> None:
        """Share the batch among the processes."""
        rank, world = self.trainer.global_rank, self.trainer.world_size
        if world == 1:
            return
        self.rows = slice(rank, None, world)
        shapes: list[Any] = [None] * world
        own = self.task.batch(self.seed, 0, self.rows)
        torch.distributed.all_gather_object(shapes, tuple(own.targets.shape))
        if len(set(shapes)) > 1:
            raise ValueError(
                f"the batch must be a multiple of the number of processes, {world}, so that each "
                f"has as much of it, got parts of {shapes}; change batch_size or devices"
            )

    def training_step(self, tick: int, index: int) -> None:
        """Updates, until something else is due."""
        config, task, net, steward = self.config, self.task, self.net, self.steward
        adam = self.optimizers(use_pl_optimizer=False)
        assert isinstance(adam, Optimizer)
        weights = list(net.parameters())
        shared = self.trainer.world_size > 1
        while not steward.due(shared):
            batch = task.batch(self.seed, steward.step, self.rows)
            with autocast(config.precision, task.device):
                loss, metric = task.loss(net, batch)
            learned = loss
            if config.flood:
                learned = torch.where(self._of_all(loss) < config.flood, -loss, loss)
            adam.zero_grad()
            # Lightning's is needed where gradients are summed over processes, and only there.
            if shared:
                self.manual_backward(learned)
            else:
                learned.backward()
            if config.clip_norm is None:
                norm = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
            else:
                norm = nn.utils.clip_grad_norm_(weights, config.clip_norm)
            for group in adam.param_groups:
                group["lr"] = rate(config, steward.step) * group.get(FACTOR, 1.0)
            adam.step()
            steward.count(loss, metric, norm)

    def _of_all(self, loss: Tensor) -> Tensor:
        """The loss of the whole batch: how many processes share it is to make no difference."""
        total = loss.detach().clone()
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(total)
        return total / self.trainer.world_size


class Ticks:
    """A loader without data, and without end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0)
