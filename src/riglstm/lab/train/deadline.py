"""A time by which a run has to have stopped, for machines that end every command after a while."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

SPARE = 20.0
"""Seconds kept for the last checkpoint, the table and the end of the process."""
LONGER = 1.5
"""How much longer than the last one an evaluation may take, beside other processes."""


class Interrupted(KeyboardInterrupt):
    """The run was stopped from outside; says what was saved and how to go on."""


class OutOfTime(Interrupted):
    """The run has stopped by itself, and been saved, as its time was over."""


def untested(again: str) -> str:
    """What a stop between training and tests leaves; `again`: the command that goes on."""
    how = f"; go on with: {again}" if again else ""
    return f"trained to the end, and saved; not tested yet{how}"


class Deadline(NamedTuple):
    """A moment, by the clock that all processes of a machine share."""

    at: float = math.inf
    """As `time.time` counts."""

    @classmethod
    def after(cls, minutes: float | None) -> Deadline:
        """So many minutes from now; None: never."""
        if minutes is None:
            return cls()
        if not 0 < minutes < math.inf:
            raise ValueError(f"minutes must be a number above 0, got {minutes!r}")
        return cls(time.time() + 60 * minutes)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.at - time.time()

    def near(self, pause: float) -> bool:
        """Whether nothing may begin any more that takes as long as `pause` did."""
        return self.left < SPARE + LONGER * pause


NEVER = Deadline()
