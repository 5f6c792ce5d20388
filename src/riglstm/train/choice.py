"""Which weights a run is judged by, and when it has stopped improving.

The honest rule chooses on validation data of the training condition. The rule of earlier papers
chooses for each test condition on validation data of that condition; both are kept track of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Chosen(NamedTuple):
    """The weights that were best on a condition's validation data."""

    step: int
    """Updates they have had."""
    value: float
    """The metric."""


class Choice:
    """The best so far on each condition, and the evaluations since the training condition's."""

    def __init__(self, trained_on: str, higher_is_better: bool, patience: int | None) -> None:
        self.trained_on = trained_on
        self.sign = 1.0 if higher_is_better else -1.0
        self.patience = patience
        self.best: dict[str, Chosen] = {}
        self.waited = 0

    def hear(self, step: int, values: Mapping[str, float]) -> bool:
        """An evaluation; says whether it is the best so far on any condition."""
        better = {
            name: Chosen(step, value) for name, value in values.items() if self._better(name, value)
        }
        self.best |= better
        self.waited = 0 if self.trained_on in better else self.waited + 1
        return bool(better)

    @property
    def exhausted(self) -> bool:
        """Whether patience is at its end."""
        return self.patience is not None and self.waited >= self.patience

    def steps(self) -> set[int]:
        """The weights that a choice fell on."""
        return {chosen.step for chosen in self.best.values()}

    def _better(self, name: str, value: float) -> bool:
        """An equal value is not better: the earlier weights stay. NaN is worse than any number."""
        if name not in self.best:
            return True
        before = self.best[name].value
        if math.isnan(value) or math.isnan(before):
            return math.isnan(before) and not math.isnan(value)
        return self.sign * value > self.sign * before

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": {k: tuple(c) for k, c in self.best.items()}, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.best = {name: Chosen(*chosen) for name, chosen in state["best"].items()}
        self.waited = state["waited"]
