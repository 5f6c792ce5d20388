"""Which weights a run is judged by: their score on held-out data, the best so far, patience.

The honest rule chooses on validation data of the training condition. The rule of earlier papers
chooses for each test condition on validation data of that condition; both are kept track of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from riglstm.lab.tasks.base import Split, Task, Totals
from riglstm.lab.train.config import Precision
from riglstm.lab.train.devices import autocast, products


def score(
    net: nn.Module,
    task: Task,
    condition: str,
    split: Split,
    *,
    precision: Precision = "fp32",
    share: tuple[int, int] = (0, 1),
) -> Totals:
    """`task.score` in eval mode, without gradients, in the precision of the training.

    Training and the tests after it come here, so that both give the same figures.
    """
    training = net.training
    net.eval()
    try:
        with torch.no_grad(), products(precision, task.device), autocast(precision, task.device):
            return task.score(net, condition, split, share)
    finally:
        net.train(training)


class Chosen(NamedTuple):
    """The weights that were best on a condition's validation data."""

    step: int
    """Updates they have had."""
    value: float
    """The metric."""
    loss: float
    """The loss on the same data."""


class Choice:
    """The best so far on each condition, and the evaluations since the training condition's."""

    def __init__(self, trained_on: str, higher_is_better: bool, patience: int | None) -> None:
        self.trained_on = trained_on
        self.sign = 1.0 if higher_is_better else -1.0
        self.patience = patience
        self.best: dict[str, Chosen] = {}
        self.waited = 0

    def add(self, step: int, values: Mapping[str, float], losses: Mapping[str, float]) -> bool:
        """Add an evaluation, by metric and by loss; True if a choice falls on it.

        A metric that can be perfect may be so from early on, while the network goes on learning: of
        equals the one with the lower loss is taken, and of equals in that, too, the earlier.
        """
        better, improved = {}, False
        for name, value in values.items():
            found, before = Chosen(step, value, losses[name]), self.best.get(name)
            gain = 1 if before is None else self._order(value, before.value)
            if before is None or gain > 0 or (gain == 0 and found.loss < before.loss):
                better[name] = found
            improved |= name == self.trained_on and gain > 0
        self.best |= better
        self.waited = 0 if improved else self.waited + 1
        return bool(better)

    @property
    def exhausted(self) -> bool:
        """True if the run has stopped improving for as long as its patience lasts."""
        return self.patience is not None and self.waited >= self.patience

    def steps(self) -> set[int]:
        """The updates whose weights a choice fell on."""
        return {chosen.step for chosen in self.best.values()}

    def _order(self, value: float, before: float) -> int:
        """1 if better, 0 if as good, -1 if worse; NaN is worse than any number."""
        now, then = (-math.inf if math.isnan(v) else self.sign * v for v in (value, before))
        return (now > then) - (now < then)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": {k: tuple(c) for k, c in self.best.items()}, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.best = {name: Chosen(*chosen) for name, chosen in state["best"].items()}
        self.waited = state["waited"]
