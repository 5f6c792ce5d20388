"""How this process was started and when it has to end, so that a message can say how to go on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from riglstm.lab.cli import UsageError
from riglstm.lab.train.stopping import Deadline

SEEDS = 10_000
"""At most, of one command: each is planned before the first is run."""


def again(verb: str, args: Sequence[str], *extra: str) -> str:
    """The command that runs a verb with the same arguments, and with `extra` once."""
    more = [word for word in extra if word not in args]
    return f"{_program()} {shlex.join([verb, *args, *more])}"


def deadline(minutes: float | None) -> Deadline:
    """The flag --minutes, from now on."""
    try:
        return Deadline.after(minutes)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def _program() -> str:
    """`riglstm`, or what stood in its place: a module run by torchrun or by Python."""
    where = os.environ.get("PYTHONPATH")
    path = f"PYTHONPATH={shlex.quote(where)} " if where else ""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        workers = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return f"{path}torchrun --nproc-per-node {workers} -m riglstm"
    if Path(sys.argv[0]).name == "__main__.py":
        return f"{path}{shlex.quote(sys.executable)} -m riglstm"
    return "riglstm"
