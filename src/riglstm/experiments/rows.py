"""Results as rows of a CSV file, one figure a row; rows are added and never changed."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class ResultRow:
    """One figure of one run, with what leads back to the run."""

    table: str
    model: str
    seed: int
    metric: str
    """With its condition: accuracy@19x19; or FAILED, of a run that has no figures."""
    value: float
    """As measured: a share from 0 to 1, or nats; 1 for a run that failed."""
    chosen_on: str
    """The data that chose the checkpoint: validation@14x14; empty where none was chosen."""
    updates: int
    seconds: float
    device: str
    commit: str
    budget: str
    setting: str
    """What the model was trained in: M=2."""
    precision: str
    """Of matrix products: fp32, tf32, bf16."""
    jobs: int
    """Runs that shared the device, and its time: `seconds` are of the clock on the wall."""
    recipe: str
    """A digest of the run's configuration without its seed: runs that have it are alike."""
    run: str
    """The name of the run's folder, which ends in a digest of its configuration."""


FAILED = "failed"
"""The metric of a run that diverged."""
HEAD = tuple(f.name for f in fields(ResultRow))


def append(path: Path, rows: Iterable[ResultRow]) -> int:
    """Add those rows that are not there yet; returns how many that were. All of them, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        _lock(file.fileno())
        before = os.fstat(file.fileno()).st_size
        # An empty file is what a full disk, or a kill, leaves of the first write.
        there = set(read(path)) if before else set()
        new = [row for row in dict.fromkeys(rows) if row not in there]
        lines: list[Sequence[object]] = [astuple(row) for row in new]
        if not before:
            lines = [HEAD, *lines]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        content = text.getvalue().encode()
        if before and lines and not _ends_in_newline(path):
            content = b"\n" + content
        try:
            if file.write(content) != len(content):
                raise OSError(f"{path} could not be written in full; is the disk full?")
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, before)
            raise
    return len(new)


def _lock(handle: int) -> None:
    """No other program adds rows to the file until it is closed."""
    # Windows has no fcntl, and some network file systems have no locks: then there is none.
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)


def _ends_in_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read(path: Path) -> list[ResultRow]:
    """All rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    head = tuple(lines[0]) if lines else ()
    if head != HEAD:
        raise ValueError(
            f"{path} must begin with the line {','.join(HEAD)}, got {','.join(head) or 'nothing'}; "
            "give another file"
        )
    return [_row(path, number, line) for number, line in enumerate(lines[1:], start=2)]


def _row(path: Path, number: int, line: Sequence[str]) -> ResultRow:
    convert = {"seed": int, "value": float, "updates": int, "seconds": float, "jobs": int}
    try:
        pairs = zip(HEAD, line, strict=True)
        return ResultRow(**{name: convert.get(name, str)(text) for name, text in pairs})
    except ValueError as error:
        raise ValueError(
            f"line {number} of {path} must be a result of {len(HEAD)} fields, got "
            f"{','.join(line)!r} ({error}); mend or remove the line"
        ) from error
