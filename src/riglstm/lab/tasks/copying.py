"""Copying: remember L steps of M digits through P dormant steps, then repeat them.

Shapes: T = 2·L + P steps, B sequences, M digits a step.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.lab.tasks.base import SPLITS, Batch, Metric, Split, Totals, check_split, generator
from riglstm.lab.tasks.common import (
    CPU,
    AboveZero,
    BelowOne,
    Count,
    Options,
    TokenNetwork,
    batches,
    check_core,
    check_network,
    check_whole,
    empty_totals,
    whole,
)
from riglstm.lab.tasks.datasets import Show
from riglstm.models.base import Core

TRAINING = SPLITS.index("training")
"""The first number of a seed is that of its split, so that none draws what another does."""


@dataclass(frozen=True)
class Copying(Options):
    """Remember digits through a dormant phase, then repeat them."""

    M: Count = 1
    """Digits a step."""
    L: Count = 10
    """Steps that show digits, and steps that repeat them."""
    P: Count = 50
    """Dormant steps in training, the marker included."""
    P_from: int | None = None
    """Shortest dormant phase in training, drawn anew for each batch; None: always P."""
    digits: Annotated[int, whole(2, 250)] = 10
    """How many different digits there are."""
    conditions: tuple[str, ...] = ("P=100", "P=200", "P=400")
    """Where the model is tested besides training's own: P=100, or L=20,P=100."""
    batch_size: Count = 64
    """Sequences an update."""
    dropout: BelowOne = 0.0
    """On the embedded tokens and on the core's output."""
    loss_on: Literal["all", "answer"] = "all"
    """Cross entropy of all steps, or of the last L alone."""
    validation_size: Count = 1000
    """Sequences by which a checkpoint is chosen, for each condition."""
    test_size: Count = 2000
    """Sequences of the test, for each condition."""
    input_size: Count = 600
    """Width of the embedded tokens of a step, all M together."""
    start_range: AboveZero | None = None
    """Tables and read-out start in ± this, the read-out's bias at 0; none: as torch starts them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.P_from is not None:
            check_whole("P_from", self.P_from, high=self.P)
        check_network(self.input_size, self.M, f"M = {self.M}")
        for condition in self.conditions:
            self.read(condition)

    def read(self, condition: str) -> tuple[int, int]:
        """L and P of `P=100`, or with another L: of `L=20,P=100`."""
        found = re.fullmatch(r"(?:L=(\d{1,9}),)?P=(\d{1,9})", condition)
        if found is None:
            raise ValueError(
                f"a condition of copying must be like P=100 or L=20,P=100, got {condition!r}"
            )
        L, P = self.L if found[1] is None else int(found[1]), int(found[2])
        check_whole(f"L in {condition!r}", L)
        check_whole(f"P in {condition!r}", P)
        return L, P

    def name(self, condition: str) -> str:
        """The one way to write a condition."""
        L, P = self.read(condition)
        return f"P={P}" if L == self.L else f"L={L},P={P}"

    def open(
        self, device: torch.device, data_dir: Path | None = None, show: Show | None = None
    ) -> CopyingTask:
        """The task; it needs no files."""
        return CopyingTask(self, torch.device(device))


def sequences(digits: Tensor, P: int, kinds: int) -> Batch:
    """Digits (L, B, M) to tokens and targets (T, B, M): digits 0.., the blank, the marker.

    Tokens: the digits, P - 1 blanks, the marker, L blanks. Targets: L + P blanks, the digits.
    """
    blank, marker = kinds, kinds + 1
    L = len(digits)
    tokens = digits.new_full((2 * L + P, *digits.shape[1:]), blank)
    targets = tokens.long()
    tokens[:L] = digits
    tokens[L + P - 1] = marker
    targets[-L:] = digits
    return Batch(tokens, targets)


class CopyingTask:
    """See `Copying`; tokens are made on the device."""

    metric = Metric("accuracy", higher_is_better=True)

    def __init__(self, config: Copying, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.input_size = config.input_size
        self.trained_on = f"P={config.P}"
        named = map(config.name, config.conditions)
        self.conditions = tuple(dict.fromkeys((self.trained_on, *named)))

    def ready(self) -> None:
        """Nothing takes long here."""

    def network(self, core: Core) -> nn.Module:
        """M tables of digits, blank and marker; the core; M readings of digits and blank a step."""
        check_core(core, self.input_size)
        M, kinds = self.config.M, self.config.digits
        return TokenNetwork(
            *(core, M, kinds + 2, (M, kinds + 1)),
            dropout=self.config.dropout,
            summarise=False,
            start_range=self.config.start_range,
        )

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        """Fresh sequences for every update."""
        config = self.config
        P = config.P
        if config.P_from is not None:
            gen = generator(CPU, TRAINING, seed, step, 1)
            P = int(torch.randint(config.P_from, P + 1, (), generator=gen, device=CPU))
        gen = generator(self.device, TRAINING, seed, step)
        shape = (config.L, config.batch_size, config.M)
        digits = torch.randint(
            config.digits, shape, generator=gen, device=self.device, dtype=torch.uint8
        )
        return sequences(digits[:, rows], P, config.digits)

    def loss(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy of all steps or of the answer, and the share of right digits in it."""
        logits = net(batch.inputs)
        L = self.config.L
        right = logits[-L:].detach().argmax(-1) == batch.targets[-L:]
        if self.config.loss_on == "answer":
            return cross_entropy(logits[-L:], batch.targets[-L:]), right.float().mean()
        return cross_entropy(logits, batch.targets), right.float().mean()

    def score(
        self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
    ) -> Totals:
        """Sums over sequences; "answer_loss" is the cross entropy of the last L steps."""
        L, P = self.config.read(condition)
        totals = empty_totals(self.device, "loss", "accuracy", "answer_loss", "count")
        for rows in batches(self.size(split), 2 * L + P, self.device, share):
            batch = self.examples(condition, split, rows)
            logits = net(batch.inputs)
            answer, digits = logits[-L:], batch.targets[-L:]
            number = rows.stop - rows.start
            asked = cross_entropy(answer, digits).double()
            all_steps = self.config.loss_on == "all"
            loss = cross_entropy(logits, batch.targets).double() if all_steps else asked
            right = (answer.argmax(-1) == digits).sum().double()
            totals["loss"] += number * loss
            totals["answer_loss"] += number * asked
            totals["accuracy"] += right / (L * self.config.M)
            totals["count"] += number
        return totals

    def size(self, split: Split) -> int:
        """Sequences of each condition."""
        check_split(split)
        return self.config.validation_size if split == "validation" else self.config.test_size

    def examples(self, condition: str, split: Split, rows: slice = slice(None)) -> Batch:
        """Sequences of the validation or the test data."""
        config, (L, P) = self.config, self.config.read(condition)
        drawn = _drawn(
            *(self.device, self.size(split), SPLITS.index(split), L, P, config.M, config.digits)
        )
        return sequences(drawn[:, rows], P, config.digits)


# All batches of a condition need the same.
@functools.lru_cache(maxsize=8)
def _drawn(
    device: torch.device, size: int, split: int, L: int, P: int, M: int, digits: int
) -> Tensor:
    """(L, size, M): the digits of a condition, drawn on the CPU, so that devices see the same."""
    gen = generator(CPU, split, L, P, M, digits)
    drawn = torch.randint(digits, (L, size, M), generator=gen, device=CPU, dtype=torch.uint8)
    return drawn.to(device)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all steps, sequences and channels, of logits (T, B, M, kinds)."""
    return F.cross_entropy(logits.flatten(0, 2).float(), targets.flatten())
