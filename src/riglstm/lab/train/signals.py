"""Ctrl-C, the signal that ends a job, and the end of its time: granted after the update."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from riglstm.lab.train.deadline import NEVER, Deadline

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""The last one comes when a terminal is closed, or a connection lost; Windows has none."""


class StopNow(BaseException):
    """Ctrl-C was repeated: stop at once, without saving."""


class Wish:
    """Whether somebody has asked the run to stop; within it, signals are put back at the end."""

    def __init__(self, speaks: bool, deadline: Deadline = NEVER) -> None:
        self.made = self.by_hand = False
        self.speaks = speaks
        self.deadline = deadline
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Wish:
        # Only the main thread may handle signals; elsewhere whoever runs the thread does.
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.getsignal(number) for number in SIGNALS}
        return self

    def listen(self) -> None:
        """From now on signals make the wish; after Lightning has set its own handlers."""
        for number, handler in self.before.items():
            # What `nohup` has silenced stays so.
            if number not in SIGNALS[2:] or handler is not signal.SIG_IGN:
                signal.signal(number, self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """A signal has come.

        SIGTERM and SIGHUP may come several times, from whoever ends all processes of a job, and
        change nothing once there is a wish.
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

    def due(self, pause: float) -> bool:
        """Whether the run stops here: it was asked to, or a `pause` may not end in time."""
        return self.made or self.deadline.near(pause)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
