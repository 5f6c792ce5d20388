"""Training a network on a task with Lightning's Trainer: devices, precision, the loop, resuming.

The batch of an update depends on the seed and the number of the update alone, so the loader gives
nothing but ticks, and a checkpoint holds no state of data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import nn

from riglstm.lab.tasks.base import Task
from riglstm.lab.train.callbacks import Steward, Stopped
from riglstm.lab.train.capture import captured
from riglstm.lab.train.checkpoints import CheckpointError, Checkpoints
from riglstm.lab.train.choice import Chosen
from riglstm.lab.train.config import Fit
from riglstm.lab.train.deadline import NEVER, Deadline, Interrupted, OutOfTime, untested
from riglstm.lab.train.devices import check, environment, launched, products
from riglstm.lab.train.diverged import Diverged
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.learner import Learner, Ticks
from riglstm.lab.train.progress import Progress
from riglstm.lab.train.rng import kept
from riglstm.lab.train.signals import StopNow, Wish

__all__ = ["CheckpointError", "Diverged", "Fitted", "Interrupted", "OutOfTime", "fit"]


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What a training gave; the network holds its last weights, as the last update left them."""

    chosen: dict[str, Chosen]
    """For each condition the weights, or means of them, that were best on its validation data."""
    updates: int
    """Updates that were made."""
    seconds: float
    """Of all the sessions that the run took."""
    stopped: Literal["updates", "patience"]
    """What ended it."""


def fit(
    net: nn.Module,
    task: Task,
    config: Fit,
    seed: int,
    folder: RunFolder,
    *,
    resume: bool = False,
    progress: bool = True,
    again: str = "",
    deadline: Deadline = NEVER,
) -> Fitted:
    """Train `net` in place, on the task's device; everything that is written goes to `folder`.

    `resume` goes on from the last checkpoint in the folder, or begins where there is none yet: the
    end is the same as without a stop, on a CPU with as many threads to the bit. `again` is the
    command that does so, for the user who stops a run. In several processes all call this, and the
    first one writes.
    `deadline`: the run stops in good time before it, saved, and makes one update at the least.

    Raises Diverged, Interrupted, OutOfTime, CheckpointError; BusyError where another process trains
    in the folder; ValueError for options that do not fit.
    """
    check(config, task.device)
    with folder.held():
        if folder.state == "new":
            # Without a configuration the folder would be nobody's; the checkpoints say the rest.
            folder.write_json(folder.config, {"task": "its own", "fit": {}, "seed": seed})
        return _fit(net, task, config, seed, folder, resume, progress, again, deadline)


def _fit(
    net: nn.Module,
    task: Task,
    config: Fit,
    seed: int,
    folder: RunFolder,
    resume: bool,
    progress: bool,
    again: str,
    deadline: Deadline,
) -> Fitted:
    """What `fit` does while it holds the folder."""
    checkpoints = Checkpoints(folder, _identity(net, config, seed, folder))
    if checkpoints.there() and not resume:
        raise ValueError(
            f"{folder.path} holds checkpoints of a run that was stopped; go on with it by "
            "--resume, or give another folder"
        )
    shown = Progress(config.updates, task.metric, progress and folder.writes)
    start = checkpoints.latest(shown.say if folder.writes else _say_nothing)
    wish = Wish(folder.writes, deadline)
    steward = Steward(net, task, config, seed, folder, checkpoints, shown, wish)
    if start is not None and _over(checkpoints.found[start], net, steward):
        return _fitted(steward)
    task.ready()
    learner = Learner(net, task, config, seed, steward)
    capture = config.capture and task.device.type == "cuda"
    try:
        with (
            quiet(),
            # Processes that Lightning starts stay, and make the next run of the command together
            # too: what it has told them must stay as well.
            environment() if config.devices == 1 else contextlib.nullcontext(),
            wish,
            kept(task.device),
            products(config.precision, task.device),
            captured(net.get_submodule("core"), capture),
        ):
            trainer = _trainer(config, task.device, steward, checkpoints)
            trainer.fit(learner, Ticks(), ckpt_path=start)
    except (Stopped, StopNow) as stop:
        saved = isinstance(stop, Stopped)
        kind = OutOfTime if saved and not wish.made else Interrupted
        raise kind(_words(steward, saved, again)) from None
    finally:
        steward.close()
        # Lightning leaves it on the CPU.
        net.to(task.device)
    # Too late for this training; whoever asked wants no tests now either.
    if wish.made or deadline.near(_tests(task, steward.pause) if config.test else 0.0):
        kind = Interrupted if wish.made else OutOfTime
        raise kind(untested(again))
    return _fitted(steward)


def _trainer(
    config: Fit, device: torch.device, steward: Steward, checkpoints: Checkpoints
) -> pl.Trainer:
    """Lightning's Trainer for devices, processes and checkpoints; the rest of it is off.

    The steward ends the run. Precision is ours, as evaluations need it outside of training too.
    """
    processes = launched()
    here = config.devices if processes is None else int(os.environ["LOCAL_WORLD_SIZE"])
    several = (processes or here) > 1
    return pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index] if device.type == "cuda" and not several else here,
        num_nodes=(processes or here) // here,
        strategy="ddp" if several else "auto",
        max_epochs=-1,
        callbacks=[steward],
        plugins=[checkpoints],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what Lightning tells its own users, and a deprecation inside it."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in UNHELPFUL:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


UNHELPFUL = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"GPU available but not used",
    r"The `srun` command is available on your system",
)


def _identity(net: nn.Module, config: Fit, seed: int, folder: RunFolder) -> dict[str, Any]:
    """What two runs must share for one to go on from the other's checkpoint."""
    return {
        "config": folder.read_json(folder.config) if folder.config.exists() else {},
        "fit": dataclasses.asdict(config),
        "seed": seed,
        "weights": {name: list(weight.shape) for name, weight in net.state_dict().items()},
    }


def _say_nothing(line: str) -> None:
    """The first process speaks for all."""


def _over(checkpoint: Mapping[str, Any], net: nn.Module, steward: Steward) -> bool:
    """Whether a run had come to its end; if so, the network and the steward are as they were."""
    state = checkpoint["callbacks"][steward.state_key]
    if state["stopped"] is None:
        return False
    steward.load_state_dict(state)
    weights = checkpoint["state_dict"].items()
    net.load_state_dict({name.removeprefix("net."): weight for name, weight in weights})
    return True


def _tests(task: Task, pause: float) -> float:
    """Seconds that the tests after a training take, from those of an evaluation."""
    # Each condition, and all but the training one a second time, by its own choice.
    rules = 1 if len(task.conditions) == 1 else 2
    return rules * pause * task.size("test") / task.size("validation")


def _fitted(steward: Steward) -> Fitted:
    assert steward.stopped is not None
    assert steward.saved is not None
    return Fitted(dict(steward.choice.best), steward.saved, steward.seconds, steward.stopped)


def _words(steward: Steward, saved: bool, again: str) -> str:
    """What an interruption leaves behind."""
    there = "there is no checkpoint yet"
    if steward.saved is not None:
        there = f"the last checkpoint is {steward.checkpoints.path(steward.saved)}"
    how = "stopped, and saved" if saved else "stopped at once, without saving"
    return f"{how}; {there}" + (f"; go on with: {again}" if again else "")
