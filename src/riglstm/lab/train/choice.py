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
    loss: float = math.nan
    """The loss on the same data; not known of runs that began before it was asked for."""


class Choice:
    """The best so far on each condition, and the evaluations since the training condition's."""

    def __init__(self, trained_on: str, higher_is_better: bool, patience: int | None) -> None:
        self.trained_on = trained_on
        self.sign = 1.0 if higher_is_better else -1.0
        self.patience = patience
        self.best: dict[str, Chosen] = {}
        self.waited = 0

    def hear(self, step: int, values: Mapping[str, float], losses: Mapping[str, float]) -> bool:
        """An evaluation, by metric and by loss; says whether a choice falls on it.

        A metric that can be perfect may be so from early on, while the network goes on learning: of
        equals the one with the lower loss is taken, and of equals in that, too, the earlier.
        """
        better, improved = {}, False
        for name, value in values.items():
            found, before = Chosen(step, value, losses[name]), self.best.get(name)
            gain = 1 if before is None else self._order(value, before.value)
            # No number is below a loss that is not known, nor is that below a number.
            if before is None or gain > 0 or (gain == 0 and found.loss < before.loss):
                better[name] = found
            improved |= name == self.trained_on and gain > 0
        self.best |= better
        self.waited = 0 if improved else self.waited + 1
        return bool(better)

    @property
    def exhausted(self) -> bool:
        """Whether patience is at its end."""
        return self.patience is not None and self.waited >= self.patience

    def steps(self) -> set[int]:
        """The weights that a choice fell on."""
        return {chosen.step for chosen in self.best.values()}

    def _order(self, value: float, before: float) -> int:
        """1, 0, -1: better, as good, worse. NaN is worse than any number."""
        now, then = (-math.inf if math.isnan(v) else self.sign * v for v in (value, before))
        return (now > then) - (now < then)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": {k: tuple(c) for k, c in self.best.items()}, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.best = {name: Chosen(*chosen) for name, chosen in state["best"].items()}
        self.waited = state["waited"]
