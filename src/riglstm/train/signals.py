"""Ctrl-C, and the signal that ends a job, as a wish that is granted after the update."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopNow(BaseException):
    """The wish was repeated: stop at once, without saving."""


class Wish:
    """Whether somebody has asked the run to stop; within it, signals are put back at the end."""

    def __init__(self, speaks: bool) -> None:
        self.made = False
        self.speaks = speaks
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Wish:
        # Only the main thread may handle signals; elsewhere whoever runs the thread does.
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.getsignal(number) for number in SIGNALS}
        return self

    def listen(self) -> None:
        """From now on signals make the wish; after Lightning has set its own handlers."""
        for number in self.before:
            signal.signal(number, self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if self.made:
            raise StopNow
        self.made = True
        if self.speaks:
            # Not by print: the signal may have come in the middle of one.
            os.write(2, b"\nstopping after this update, to save it; once more stops at once\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
