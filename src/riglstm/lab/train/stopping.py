"""What ends a run early: a signal, a deadline, or a loss that is no longer a number."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""The last one comes when a terminal is closed, or a connection lost; Windows has none."""
SPARE_SECONDS = 20.0
"""Kept for the last checkpoint, the table and the end of the process."""
SLOWER = 1.5
"""How much longer than the last one an evaluation may take, beside other processes."""


class Interrupted(KeyboardInterrupt):
    """The run was stopped from outside; says what was saved and how to resume."""


class OutOfTime(Interrupted):
    """The run has saved and stopped by itself, before its deadline."""


class StopNow(BaseException):
    """Ctrl-C was repeated: stop at once, without saving."""


class Diverged(RuntimeError):  # noqa: N818
    """The loss, or a weight, is no longer a number; `cost`: updates and seconds until then."""

    def __init__(self, words: str, **cost: float) -> None:
        super().__init__(words)
        self.cost = cost


def go_on(how: str, again: str) -> str:
    """The message of a stop; `again`: the command that resumes, empty where nobody said it."""
    return f"{how}; go on with: {again}" if again else how


def untested(again: str) -> str:
    """The message of a stop between training and tests."""
    return go_on("trained to the end, and saved; not tested yet", again)


class Deadline(NamedTuple):
    """A time by which a run has to have stopped, where every command is ended after a while."""

    at: float = math.inf
    """As `time.time` counts: all processes of a machine share that clock."""

    @classmethod
    def after(cls, minutes: float | None) -> Deadline:
        """The deadline so many minutes from now; None: never."""
        if minutes is None:
            return cls()
        if not 0 < minutes < math.inf:
            raise ValueError(f"minutes must be a number above 0, got {minutes!r}")
        return cls(time.time() + 60 * minutes)

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self.at - time.time()

    def near(self, pause: float) -> bool:
        """True if another `pause` seconds might pass the deadline."""
        return self.left < SPARE_SECONDS + SLOWER * pause


NEVER = Deadline()


class StopRequest:
    """Within it a signal asks the run to stop after its update, and does not end the process."""

    def __init__(self, speaks: bool, deadline: Deadline = NEVER) -> None:
        self.made = self.by_hand = False
        self.speaks = speaks
        self.deadline = deadline
        self.before: dict[signal.Signals, Any] = {}

    def due(self, pause: float) -> bool:
        """True if a signal has come, or another `pause` seconds might pass the deadline."""
        return self.made or self.deadline.near(pause)

    def __enter__(self) -> StopRequest:
        # Only the main thread may handle signals; elsewhere whoever runs the thread does.
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in self.before.items():
            # What `nohup` has silenced stays so.
            if number not in SIGNALS[2:] or handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Note the request; raise StopNow at a second Ctrl-C.

        SIGTERM and SIGHUP may come several times, from whoever ends all processes of a job, and
        change nothing once there is a request.
        """
        by_hand = signum == signal.SIGINT
        if by_hand and self.by_hand:
            raise StopNow
        heard, self.made, self.by_hand = self.made, True, self.by_hand or by_hand
        if self.speaks and (by_hand or not heard):
            more = b"; Ctrl-C once more stops at once" if by_hand else b""
            # Not by print: the signal may have come in the middle of one. Where nobody hears it any
            # more, the run is to be saved all the same.
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this update, to save it%s\n" % more)
