"""What `riglstm.lab.train` adds to an update, beside the loop that one writes by hand.

Both make the same updates of the same network on the same batches, in turns: batch, forward,
loss, backward, clipping, Adam. Evaluations and checkpoints are left out, the log is not.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from riglstm.lab.bench.timing import Spread, spread
from riglstm.lab.tasks.base import Batch, Task
from riglstm.lab.train.config import Fit, autocast, fork_rng, products, rate
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.graphed import captured


@dataclass(frozen=True)
class Overhead:
    """Milliseconds an update, over the rounds."""

    bare: Spread
    """Of the loop by hand."""
    harness: Spread
    """Of `fit`."""
    ratio: Spread
    """Of the second to the first, in the same round."""
    updates: int
    rounds: int


def overhead(
    task: Task,
    build: Callable[[], nn.Module],
    config: Fit,
    *,
    updates: int,
    rounds: int,
    warmup: int = 3,
    seed: int = 0,
) -> Overhead:
    """Time `updates` updates of each in every round, after `warmup` that are not counted.

    `build` makes the network anew, on the task's device.
    """
    # One more, whose batch ends the time: up to there both have done the same.
    total = warmup + updates + 1
    config = replace(
        config,
        updates=total,
        warmup=min(config.warmup, total - 1),
        log_every=min(config.log_every, updates),
        evaluate_every=total,
        checkpoint_every=total,
        patience=None,
        devices=1,
        tensorboard=False,
    )
    seconds: dict[str, list[float]] = {name: [] for name in TURNS}
    for _ in range(rounds):
        for name, turn in TURNS.items():
            clocked = Clocked(task, first=warmup, last=warmup + updates)
            turn(build(), clocked, config, seed)
            seconds[name].append(clocked.seconds)
    ms = {name: [1e3 * s / updates for s in taken] for name, taken in seconds.items()}
    ratios = [b / a for a, b in zip(ms["bare"], ms["fit"], strict=True)]
    return Overhead(spread(ms["bare"]), spread(ms["fit"]), spread(ratios), updates, rounds)


class Clocked:
    """A task that times the updates between two batches, and scores nothing."""

    conditions: tuple[str, ...] = ()

    def __init__(self, task: Task, first: int, last: int) -> None:
        self.task = task
        self.first, self.last = first, last
        self.since = self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        if step == self.first:
            self.since = self._now()
        if step == self.last:
            self.seconds = self._now() - self.since
        return self.task.batch(seed, step, rows)

    def _now(self) -> float:
        if self.task.device.type == "cuda":
            torch.cuda.synchronize(self.task.device)
        return time.perf_counter()


def _bare(net: nn.Module, task: Any, config: Fit, seed: int) -> None:
    """The loop by hand."""
    weights = list(net.train().parameters())
    adam = torch.optim.Adam(weights, config.lr, fused=True)
    capture = config.capture and task.device.type == "cuda"
    with (
        fork_rng(task.device),
        products(config.precision, task.device),
        captured(net.get_submodule("core")) if capture else contextlib.nullcontext(),
    ):
        for step in range(config.updates):
            batch = task.batch(seed, step)
            with autocast(config.precision, task.device):
                loss, _ = task.loss(net, batch)
            adam.zero_grad()
            loss.backward()
            if config.clip_norm is not None:
                nn.utils.clip_grad_norm_(weights, config.clip_norm)
            for group in adam.param_groups:
                group["lr"] = rate(config, step)
            adam.step()


def _harness(net: nn.Module, task: Any, config: Fit, seed: int) -> None:
    """`fit`, into a folder that is thrown away."""
    # Only here: Lightning takes seconds to load, and the other benchmarks do without.
    from riglstm.lab.train.loop import fit

    with tempfile.TemporaryDirectory() as path:
        fit(net, task, config, seed, RunFolder(path), progress=False)


TURNS: dict[str, Callable[[nn.Module, Any, Fit, int], None]] = {"bare": _bare, "fit": _harness}
