"""What a task is: its data, the network around a core, its loss, and how it scores a condition.

Shapes: T steps, B sequences, D input features; time first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from riglstm.models.base import Core

Split: TypeAlias = Literal["validation", "test"]
"""Data that no update has seen: one part to choose a checkpoint by, one to report."""

SPLITS = ("training", "validation", "test")
"""All the parts of a task's data; the first is no `Split`."""

Totals: TypeAlias = dict[str, Tensor]
"""Sums over what was scored, 0-d float64, and their number under "count"."""


class Batch(NamedTuple):
    """What one update learns from, on the device of the task."""

    inputs: Tensor
    targets: Tensor


class Metric(NamedTuple):
    """The figure by which a task compares models."""

    name: str
    """As in `Totals`: "accuracy", "bce"."""
    higher_is_better: bool
    scale: float = 100.0
    """Factor for print: shares as percent."""
    unit: str = "%"


class Task(Protocol):
    """A task with its data on one device.

    Conditions are strings that the task itself reads: `P=100`, `19x19`, `curtain`.
    """

    input_size: int
    """Width of the core's input."""
    metric: Metric
    trained_on: str
    """The condition of the training data; checkpoints are chosen on its validation data."""
    conditions: tuple[str, ...]
    """Where the trained model is tested, `trained_on` first."""
    device: torch.device

    def ready(self) -> None:
        """Make or read all that training and testing will use: what fails, fails before training.

        Without it, that happens when a part of the data is first used.
        """

    def size(self, split: Split) -> int:
        """Sequences of each condition that are scored."""

    def network(self, core: Core) -> nn.Module:
        """Encoder, core (as the attribute `core`) and head.

        On a GPU the core's training step runs as CUDA graphs; with the attribute `capture_whole`
        set, the whole network's does.
        """

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        """The training batch of an update, and of it the sequences `rows`.

        Depends on the arguments alone, so that a run that goes on after a stop sees what it would
        have seen, and several devices share one batch.
        """

    def loss(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """What is minimised, and the metric on this batch, detached; both 0-d on the device."""

    def score(
        self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
    ) -> Totals:
        """Sums of "loss" and the metric; `share` (i, n): the i-th of n equal parts of the data.

        Called in eval mode without gradients, by `riglstm.lab.train.config.score`.
        """


class TaskConfig(Protocol):
    """A task's options: a frozen dataclass whose fields are flags, recorded with every run."""

    def open(
        self,
        device: torch.device,
        data_dir: Path | None = None,
        show: Callable[[str], None] | None = None,
    ) -> Task:
        """The task with its data; `show` hears in a line what takes long."""


def means(totals: Totals) -> dict[str, float]:
    """The sums of `Task.score`, of all parts together, as means."""
    count = totals["count"]
    return {name: float(total / count) for name, total in totals.items() if name != "count"}


def generator(device: torch.device, *numbers: int) -> torch.Generator:
    """A generator for one purpose: the same numbers give the same draws, others unrelated ones.

    Two lists of numbers give the same draws by chance alone: once in 2^32 on a CPU, whose
    generator takes the low 32 bits of a seed, once in 2^63 on a GPU.
    """
    # A hash, so that these low bits, too, depend on all bits of all numbers.
    digest = hashlib.sha256(",".join(str(int(number)) for number in numbers).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") % 2**63)


def check_split(split: str, allowed: tuple[str, ...] = SPLITS[1:]) -> None:
    """A part of the data that there is."""
    if split not in allowed:
        raise ValueError(f"the split must be {' or '.join(allowed)}, got {split!r}")


def part(length: int, share: tuple[int, int]) -> slice:
    """The `share` (i, n) of that many things: the i-th of n parts, equal to one."""
    i, n = share
    return slice(length * i // n, length * (i + 1) // n)


def options(config: Any) -> dict[str, Any]:
    """The fields of a configuration, as JSON has them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(config).items()
    }
