"""Standard output and error that may go away: what is printed is lost then, and the work is not."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any


class Stream:
    """A stream of text whose errors are remembered and not raised; after one, it is silent."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.error: OSError | None = None
        """What was lost to; a reader that has gone has seen enough, and loses nothing."""
        with contextlib.suppress(AttributeError, ValueError):
            # A terminal without the signs of tables gets others.
            self.stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """As far as it goes."""
        with self._kept():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As far as it goes."""
        with self._kept():
            self.stream.flush()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EBADF, errno.EIO):
                self.error = error
            self._silence()

    def _silence(self) -> None:
        """What is still in its buffer goes nowhere, too: Python writes it once more at its end."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def kept() -> Iterator[Stream]:
    """Within it neither stream raises; gives the standard output."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        # Python has none where it was closed when the process began.
        out, err = Stream(before[0] or nowhere), Stream(before[1] or nowhere)
        sys.stdout, sys.stderr = out, err
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = before
