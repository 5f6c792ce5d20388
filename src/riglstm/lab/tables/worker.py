"""One run in a process of its own: `python -m riglstm.lab.tables.worker FOLDER`.

Its stdin begins with a pickle, of what makes the run and of the command that was given. When stdin
ends, the program that asked for the run wants it to stop, or is gone: the run saves and ends, so
that none is left behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from riglstm.lab.tables.errors import FEWER_RUNS, in_words
from riglstm.lab.train.stopping import SIGNALS, Interrupted, OutOfTime

FAILED, STOPPED = 2, 130
"""Exit codes, as of the command: it cannot be done; it was asked to stop, as shells count it."""


def main() -> int:
    """Make the run that stdin names; returns the exit code."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    make, sys.argv = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_stop_at_the_end_of_stdin, daemon=True).start()
    sys.stdout = sys.stderr = _Lines()
    try:
        make()
    except Interrupted as stop:
        print(stop)
        return 0 if isinstance(stop, OutOfTime) else STOPPED
    except Exception as error:
        said = in_words(error, FEWER_RUNS)
        if said is None:
            raise
        print(said)
        return FAILED
    return 0


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """While the run does not train: there is nothing to save, or all is saved."""
    sys.exit(STOPPED)


class _Lines(io.TextIOBase):
    """What the run says, to whoever hears it: if nobody is left, it has to save all the same."""

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, text.encode())
        return len(text)


def _stop_at_the_end_of_stdin() -> None:
    # Not by sys.stdin, whose lock this thread would still hold when the process ends.
    while os.read(0, 1):
        pass
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
