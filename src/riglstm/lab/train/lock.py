"""A lock on a folder, so that one process at a time trains in it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems that have no locks answer."""


class BusyError(ValueError):
    """Another process trains in the folder."""


def take(path: Path) -> int | None:
    """Hold the lock, which is a file; a process that dies lets go of it.

    Gives what `release` wants; None where there are no locks, and runs do without. Raises
    BusyError where another holds it.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if isinstance(error, BlockingIOError):
                raise BusyError(
                    f"{path.parent} is being trained in by another process; expected a run that "
                    "nobody works on; wait for its end, stop it, or give another folder"
                ) from None
            if error.errno in WITHOUT:
                return None
            raise
        # Whoever held it may have removed the file after it was opened here.
        if path.exists() and os.path.samestat(os.stat(path), os.fstat(handle)):
            return handle
        os.close(handle)


def release(path: Path, handle: int | None) -> None:
    """Let go of the lock, and remove its file."""
    path.unlink(missing_ok=True)
    if handle is not None:
        os.close(handle)
