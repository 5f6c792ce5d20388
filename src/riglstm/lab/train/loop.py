"""The training loop: an update, then what is due after it: log, evaluate, choose, save, stop.

Lightning Fabric starts the processes and averages their gradients; the loop is ours. The batch of
an update depends on the seed and the number of the update alone, so a checkpoint holds no state of
data, and a run that is killed anywhere and resumed ends with the same bits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from riglstm.lab.tasks.base import Task, generator, means
from riglstm.lab.train.checkpoints import Checkpoints, Choice, Fitted, save_weights
from riglstm.lab.train.config import (
    Fit,
    autocast,
    fork_rng,
    launched,
    make_optimizer,
    products,
    rate,
    rngs,
    score,
    seed_rng,
)
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.graphed import captured
from riglstm.lab.train.progress import Log, Progress
from riglstm.lab.train.stopping import (
    NEVER,
    Deadline,
    Diverged,
    Interrupted,
    OutOfTime,
    StopNow,
    StopRequest,
    go_on,
    untested,
)

LOST = 50
"""Updates in a row with an infinite norm of the gradient, by which a run has diverged."""


def fit(
    net: nn.Module,
    task: Task,
    config: Fit,
    seed: int,
    folder: RunFolder,
    *,
    again: str = "",
    deadline: Deadline = NEVER,
) -> Fitted:
    """Train `net` in place, on the task's device; everything that is written goes to `folder`.

    The folder is held, and begun for this run. The run continues from the last checkpoint in it,
    or begins where there is none yet: the end is the same as without a stop, on a CPU with as many
    threads to the bit. `again` is the command that does so, for the user who stops a run. In
    several processes all call this, and the first one writes.
    `deadline`: the run stops in good time before it, saved, and makes one update at the least.

    Raises Diverged, Interrupted, OutOfTime, CheckpointError; ValueError for options that do not
    fit.
    """
    training = Training(net, task, config, seed, folder)
    state = training.checkpoints.latest()
    if state is not None:
        training.load_state_dict(state)
    if training.stopped is None:
        _train(training, StopRequest(folder.writes, deadline), again)
    assert training.stopped is not None
    return Fitted(training.choice.best, training.step, training.seconds, training.stopped)


def _train(training: Training, request: StopRequest, again: str) -> None:
    """Run the loop to its end; Interrupted or OutOfTime where it has stopped before."""
    task, config = training.task, training.config
    capture = config.capture and task.device.type == "cuda"
    try:
        with (
            _quiet(),
            fork_rng(task.device),
            products(config.precision, task.device),
            captured(training.net) if capture else contextlib.nullcontext(),
        ):
            training.start(_launch(config, task.device))
            with contextlib.closing(training.log), contextlib.closing(training.progress), request:
                ended = training.run(request)
    except StopNow:
        raise Interrupted(training.stop_message("stopped at once, without saving", again)) from None
    kind = Interrupted if request.made else OutOfTime
    if not ended:
        raise kind(training.stop_message("stopped, and saved", again))
    # Too late for this training; whoever asked wants no tests now either.
    if request.due(training.seconds_of_tests() if config.test else 0.0):
        raise kind(untested(again))


def _launch(config: Fit, device: torch.device) -> Fabric:
    """Fabric on the device, in as many processes as are wanted, started where nobody has.

    Precision is ours, as evaluations need it outside of training too.
    """
    processes = launched()
    here = config.devices if processes is None else int(os.environ["LOCAL_WORLD_SIZE"])
    several = (processes or here) > 1
    fabric = Fabric(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index] if device.type == "cuda" and not several else here,
        num_nodes=(processes or here) // here,
        strategy="ddp" if several else "auto",
    )
    fabric.launch()
    return fabric


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Fabric tells its own users."""
    logger = logging.getLogger("lightning_fabric")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The `srun` command is available on your sys")
            yield
    finally:
        logger.setLevel(level)


class Training:
    """A run: its state, which every checkpoint holds, and the loop that changes it."""

    fabric: Fabric
    model: nn.Module
    """The network, or what averages its gradients over the processes."""
    log: Log
    progress: Progress
    last_finite: int
    """The last update whose gradient's norm was a finite number, or where the process began."""

    def __init__(
        self, net: nn.Module, task: Task, config: Fit, seed: int, folder: RunFolder
    ) -> None:
        self.net, self.task, self.config, self.seed = net.to(task.device), task, config, seed
        self.folder, self.checkpoints = folder, Checkpoints(folder, net)
        self.weights = list(net.parameters())
        self.optimizer = make_optimizer(net, config)
        self.average = Average(self.weights, config.average)
        self.choice = Choice(task.trained_on, task.metric.higher_is_better, config.patience)
        self.step = 0
        """Updates so far."""
        self.figures: list[Tensor] = []
        """Loss, metric and gradient norm (3,) of each update since the last line of the log: they
        stay on the device, so that nothing waits for it before they are read."""
        self.rng_states: list[dict[str, Tensor]] = []
        """Of each process, in the last checkpoint."""
        self.stopped: Literal["updates", "patience"] | None = None
        self.seconds = 0.0
        """Of the whole run, until the last checkpoint."""
        self.pause = 0.0
        """Seconds of the last evaluation; 0 before the first, for which no time is kept free."""
        self.saved: int | None = None
        """Updates in the last checkpoint."""
        self.referenced: set[int] = set()
        """Weights that the last checkpoint refers to."""

    def start(self, fabric: Fabric) -> None:
        """Begin or resume, in all processes: network, rows of each batch, log, generators."""
        rank, world = fabric.global_rank, fabric.world_size
        self.fabric, self.net = fabric, self.net.train()
        self.last_finite = self.step
        self.model = self.net if world == 1 else fabric.setup_module(self.net)
        self.rows = slice(None) if world == 1 else slice(rank, None, world)
        if world > 1:
            own = self.task.batch(self.seed, 0, self.rows)
            shapes = self._of_every_process(tuple(own.targets.shape))
            if len(set(shapes)) > 1:
                raise ValueError(
                    f"the batch must be a multiple of the number of processes, {world}, so that "
                    f"each has as much of it, got parts of {shapes}; change batch_size or devices"
                )
        self.log = Log(self.folder, self.step, self.config.tensorboard)
        self.progress = Progress(self.config.updates, "update", self.step, self.folder.writes)
        numbers = generator(torch.device("cpu"), self.seed, rank, self.step)
        seed_rng(numbers.initial_seed(), self.task.device)
        # A run may be resumed in more processes than it had, and on another kind of device.
        states = self.rng_states[rank] if rank < len(self.rng_states) else {}
        for name, rng in rngs(self.task.device).items():
            if name in states:
                rng.set_state(states[name])

    def run(self, request: StopRequest) -> bool:
        """Make updates and all that is due after them; False: stopped on request, and saved."""
        config, alone = self.config, self.fabric.world_size == 1
        self.began = self.resting = time.monotonic()
        self.worked, self.logged = 0.0, self.step
        while True:
            self._update()
            last = self.step == config.updates
            log = last or len(self.figures) == config.log_every
            evaluate = last or self.step % config.evaluate_every == 0
            save = last or self.step % config.checkpoint_every == 0
            # Several processes hear of each other's requests at the log only, and stop together.
            stop = (alone or log) and self._requested(request)
            if not (log or evaluate or save or stop):
                continue
            # No evaluation, no choice and no checkpoint of what is no longer a number.
            self._check_finite()
            pausing = time.monotonic()
            self.worked += pausing - self.resting
            if log:
                self._log()
            if evaluate:
                with self.average.applied():
                    self._evaluate()
                # Before the checkpoint, which holds it: a resumed run has to know it.
                self.pause = time.monotonic() - pausing
            if last or self.choice.exhausted:
                self.stopped = "patience" if self.choice.exhausted else "updates"
            if save or stop or self.stopped:
                self._save()
            self.resting = time.monotonic()
            if self.stopped or stop:
                return self.stopped is not None

    def _update(self) -> None:
        config, task = self.config, self.task
        batch = task.batch(self.seed, self.step, self.rows)
        with autocast(config.precision, task.device):
            loss, metric = task.loss(self.model, batch)
        learned = loss
        if config.flood:
            # By the loss of the whole batch: how many processes share it makes no difference.
            of_all = self._over_processes(loss.detach(), "mean")
            learned = torch.where(of_all < config.flood, -loss, loss)
        self.optimizer.zero_grad()
        self.fabric.backward(learned)
        if config.clip_norm is None:
            norm = nn.utils.get_total_norm([w.grad for w in self.weights if w.grad is not None])
        else:
            norm = nn.utils.clip_grad_norm_(self.weights, config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(config, self.step) * group["factor"]
        self.optimizer.step()
        self.step += 1
        self.average.update(self.step)
        self.figures.append(torch.stack([x.detach().float() for x in (loss, metric, norm)]))
        self.progress.move(self.step)

    def _requested(self, request: StopRequest) -> bool:
        due = request.due(self.pause)
        if self.fabric.world_size == 1:
            return due
        asked = torch.tensor(float(due), device=self.task.device)
        return bool(self._over_processes(asked, "sum") > 0)

    def _check_finite(self) -> None:
        rows = self._over_processes(torch.stack(self.figures), "mean")
        for number, (loss, _, norm) in enumerate(rows.tolist(), self.step - len(rows) + 1):
            if not math.isfinite(loss):
                raise self._diverged(f"the loss of update {number}")
            if math.isfinite(norm):
                self.last_finite = number
        # A gradient whose norm is infinite is clipped to zero. With no other, nothing is learned.
        if (lost := self.step - self.last_finite) >= LOST:
            raise self._diverged(f"the gradient's norm in each of the last {lost} updates")
        # All processes now hold the means over all, as one checkpoint has to serve them all.
        self.figures = [*rows]
        if not torch.isfinite(nn.utils.get_total_norm([w.detach() for w in self.weights])):
            raise self._diverged(f"a weight after update {self.step}")

    def _diverged(self, what: str) -> Diverged:
        there = "there is no checkpoint from before it"
        if self.saved is not None:
            there = f"the last good checkpoint is {self.checkpoints.path(self.saved)}"
        now, names = vars(self.config), ("lr", "warmup", "clip_norm", "precision")
        options = ", ".join(f"{name} {now[name]}" for name in names)
        return Diverged(
            f"{what} is not a finite number; {there}. Train anew, into another folder, with a "
            "smaller --lr, a longer --warmup, a smaller --clip-norm or --precision fp32 (now "
            f"{options})",
            updates=self.step,
            seconds=self.seconds + time.monotonic() - self.began,
        )

    def _log(self) -> None:
        rows, self.figures = torch.stack(self.figures).double(), []
        loss, metric, norm = rows.mean(dim=0).tolist()
        # Evaluations left out.
        speed = (self.step - self.logged) / max(self.worked, 1e-9)
        self.worked, self.logged = 0.0, self.step
        self.log.add(
            self.step,
            {
                "train/loss": loss,
                f"train/{self.task.metric.name}": metric,
                "gradient_norm": norm,
                "gradient_norm_max": rows[:, 2].max().item(),
                "lr": rate(self.config, self.step - 1),
                "updates_per_second": speed,
            },
        )
        self.progress.move(self.step, f"loss {loss:.4g}, {self._words(metric)}")

    def _evaluate(self) -> None:
        """Score every condition; save the weights if a choice falls on them."""
        task, share = self.task, (self.fabric.global_rank, self.fabric.world_size)
        found: dict[str, dict[str, float]] = {}
        for condition in task.conditions:
            # Some models draw in eval mode too; when they are evaluated must not change the run.
            with fork_rng(task.device, self.seed):
                totals = score(
                    *(self.net, task, condition, "validation"),
                    precision=self.config.precision,
                    share=share,
                )
            found[condition] = means(
                {name: self._over_processes(total, "sum") for name, total in totals.items()}
            )
        self.log.add(
            self.step,
            {f"validation/{k}@{c}": v for c, kinds in found.items() for k, v in kinds.items()},
        )
        values = {c: kinds[task.metric.name] for c, kinds in found.items()}
        losses = {c: kinds["loss"] for c, kinds in found.items()}
        if self.choice.add(self.step, values, losses) and self.folder.writes:
            save_weights(self.net, self.folder.weights_of(self.step))
        said = ", ".join(f"{name} {self._words(value)}" for name, value in values.items())
        self.progress.line(self.step, f"validation {said}")

    def _words(self, value: float) -> str:
        """The metric as it is shown."""
        metric = self.task.metric
        return f"{metric.name} {metric.scale * value:.4g}{metric.unit}"

    def _save(self) -> None:
        self.log.flush()
        states = {name: rng.get_state() for name, rng in rngs(self.task.device).items()}
        self.rng_states = self._of_every_process(states)
        now = time.monotonic()
        self.seconds, self.began = self.seconds + now - self.began, now
        if self.folder.writes:
            self.checkpoints.save(self.step, self.state_dict())
        # A process that ended before the first has saved would end that one, too.
        self.fabric.barrier()
        self.saved = self.step
        # The checkpoint before this one may yet be resumed from: what it refers to stays.
        chosen = self.choice.steps()
        self.folder.keep_weights(chosen | self.referenced)
        self.referenced = chosen

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint holds."""
        return {
            "step": self.step,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.mean,
            "choice": self.choice.state_dict(),
            "figures": torch.stack(self.figures) if self.figures else None,
            "rng": self.rng_states,
            "stopped": self.stopped,
            "seconds": self.seconds,
            "pause": self.pause,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint."""
        self.step = self.saved = state["step"]
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.mean = [mean.to(self.task.device) for mean in state["average"]]
        self.choice.load_state_dict(state["choice"])
        if state["figures"] is not None:
            self.figures = [*state["figures"].to(self.task.device)]
        self.rng_states = state["rng"]
        self.stopped = state["stopped"]
        self.seconds = state["seconds"]
        self.pause = state["pause"]
        self.referenced = self.choice.steps()

    def seconds_of_tests(self) -> float:
        """Seconds that the tests after a training take, from those of an evaluation."""
        # Each condition, and all but the training one a second time, by its own choice.
        rules = 1 if len(self.task.conditions) == 1 else 2
        return rules * self.pause * self.task.size("test") / self.task.size("validation")

    def stop_message(self, how: str, again: str) -> str:
        """The message of a stop: how it came, the last checkpoint, the command that resumes."""
        there = "there is no checkpoint yet"
        if self.saved is not None:
            there = f"the last checkpoint is {self.checkpoints.path(self.saved)}"
        return go_on(f"{how}; {there}", again)

    def _over_processes(self, x: Tensor, how: Literal["sum", "mean"]) -> Tensor:
        """The sum or mean over all processes; the tensor that was given stays as it is."""
        if self.fabric.world_size == 1:
            return x
        total = x.clone()
        # Not by Fabric, which has all processes meet before, and so waits for the GPU.
        torch.distributed.all_reduce(total)
        return total if how == "sum" else total / self.fabric.world_size

    def _of_every_process(self, own: Any) -> list[Any]:
        """What each process has, in the order of their ranks."""
        found = [own] * self.fabric.world_size
        if len(found) > 1:
            torch.distributed.all_gather_object(found, own)
        return found


class Average:
    """A running mean of the weights, m ← β m + (1 - β) w, steadier than they are.

    `decay` None: there is no mean, and nothing is done. Buffers stay as they are. Processes that
    share a run have the same weights, and so the same mean.
    """

    def __init__(self, weights: list[nn.Parameter], decay: float | None) -> None:
        self.decay = decay
        self.weights = weights if decay is not None else []
        self.mean = [w.detach().clone() for w in self.weights]

    def update(self, updates: int) -> None:
        """Add the weights after so many updates."""
        if self.decay is not None:
            # Early on the mean is of the last updates, and soon nothing of the start is in it.
            beta = min(self.decay, (1 + updates) / (10 + updates))
            get_ema_multi_avg_fn(beta)(self.mean, self.weights, updates)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the network's weights are the mean.

        Values are copied and the tensors stay: captured CUDA graphs know weights by their address.
        """
        own = [w.detach().clone() for w in self.weights]
        self._set(self.mean)
        yield
        self._set(own)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)
