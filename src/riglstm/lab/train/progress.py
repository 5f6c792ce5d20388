"""How far a run is: a bar on a terminal, elsewhere a line soon, and one for each evaluation."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from riglstm.lab.tasks.base import Metric

REFRESH_SECONDS = 0.2
FIRST_SECONDS = 30
"""Where there is no bar, a run says by then how long it will take: evaluations may be hours off."""


class Bar:
    """Lines for the user on stderr, above a bar while there is one."""

    bar: Any = None

    def say(self, line: str) -> None:
        """A line for the user, whatever is shown."""
        if self.bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self.bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """No more will come."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class Progress(Bar):
    """On stderr; `shown` False: nothing but what `say` is told."""

    def __init__(self, updates: int, metric: Metric, shown: bool) -> None:
        self.updates = updates
        self.metric = metric
        self.lines = shown and not sys.stderr.isatty()
        self.shown = shown
        self.at = 0
        self.since = self.began = time.monotonic()
        self.first = 0
        """Where this session began."""
        self.silent = True
        """Whether no line has come yet."""

    def start(self, step: int) -> None:
        """The run begins, or goes on, after `step` updates."""
        self.at = self.first = step
        self.began = time.monotonic()
        if self.shown and not self.lines:
            self.bar = tqdm(total=self.updates, initial=step, unit="update", dynamic_ncols=True)

    def tick(self, step: int) -> None:
        """An update is done."""
        if self.bar is not None and time.monotonic() - self.since > REFRESH_SECONDS:
            self._move(step)
        elif self.lines and self.silent and time.monotonic() - self.began > FIRST_SECONDS:
            self.silent = False
            self.say(f"update {step} of {self.updates}; {self._left(step)}")

    def training(self, step: int, loss: float, metric: float) -> None:
        """Means of the last updates."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4g}, {self._words(metric)}", refresh=False)
            self._move(step)

    def evaluation(self, step: int, values: Mapping[str, float], speed: float) -> None:
        """The metric on validation data of each condition; `speed`: 0 while it is not known."""
        if self.lines:
            words = ", ".join(f"{name} {self._words(value)}" for name, value in values.items())
            rest = [f"{speed:.3g} updates/s"] if speed else []
            rest += [self._left(step)]
            self.silent = False
            self.say(f"update {step} of {self.updates}: validation {words}; {', '.join(rest)}")

    def _move(self, step: int) -> None:
        assert self.bar is not None
        self.bar.update(step - self.at)
        self.at, self.since = step, time.monotonic()

    def _left(self, step: int) -> str:
        """By the time that has gone, so that the evaluations to come are in it."""
        each = (time.monotonic() - self.began) / max(step - self.first, 1)
        return f"{_duration(each * (self.updates - step))} left"

    def _words(self, value: float) -> str:
        return f"{self.metric.name} {self.metric.scale * value:.4g}{self.metric.unit}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
