"""Signals and streams of the command `riglstm`, set before torch loads; nothing elsewhere.

Ctrl-C ends a command that is still loading, which takes seconds, without a traceback; its
`main` sets Python's own handler again. A standard stream that is closed is opened, or the next file
that is opened would be taken for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

SCRIPTS = ("riglstm", "riglstm.exe")


def _is_command() -> bool:
    """True if this process is the command: its script, or `python -m riglstm`."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    words = sys.orig_argv
    return name in SCRIPTS or (name == "-m" and "riglstm" in words[words.index("-m") + 1 :][:1])


if _is_command() and threading.current_thread() is threading.main_thread():
    for number in range(3):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        # The lowest number that is free is the one that is given.
        os.open(os.devnull, os.O_RDWR)
    # What a shell has silenced stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
