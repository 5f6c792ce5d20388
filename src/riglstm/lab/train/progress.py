"""What a run reports: metrics.csv, TensorBoard's files, and a bar or lines for the user."""

from __future__ import annotations

import contextlib
import csv
import datetime
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from riglstm.lab.train.folder import RunFolder, atomic_write, unwritten

SECONDS = 30.0
"""Between two lines, where there is no bar: an evaluation may be hours off."""


class Progress:
    """How far a run is, on stderr: a bar on a terminal, elsewhere lines; `shown` False: nothing.

    `unit`: what is counted, an update or a frame; `done`: how many there are before this session.
    """

    def __init__(self, total: int, unit: str, done: int, shown: bool = True) -> None:
        self.total, self.unit, self.first = total, unit, done
        self.shown = shown
        self.began = self.said = time.monotonic()
        self.bar: Any = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]

            self.bar = tqdm(
                total=total, initial=done, unit=unit, unit_scale=total > 10**6, dynamic_ncols=True
            )

    def move(self, done: int, said: str = "") -> None:
        """So many are done; `said`: figures to show beside the bar, or in the next line."""
        if self.bar is not None:
            if said:
                self.bar.set_postfix_str(said, refresh=False)
            self.bar.update(done - self.bar.n)
        elif time.monotonic() - self.said > SECONDS:
            self.line(done, said)

    def line(self, done: int, said: str = "") -> None:
        """Print figures, the speed and the time left, where there is no bar."""
        if not self.shown or self.bar is not None:
            return
        self.said = time.monotonic()
        # By the time that has gone, so that evaluations are counted in.
        speed = max(done - self.first, 1) / max(self.said - self.began, 1e-9)
        left = datetime.timedelta(seconds=round((self.total - done) / speed))
        say(
            f"{self.unit} {done:,} of {self.total:,}{said and f': {said}'}; "
            f"{speed:,.3g} {self.unit}s/s, {left} left"
        )

    def close(self) -> None:
        """Show no more."""
        if self.bar is not None:
            self.bar.close()


def say(line: str) -> None:
    """A line for the user, beside what a program may read."""
    # Where nobody hears it any more, the runs are to be made all the same.
    with contextlib.suppress(OSError):
        # In one piece, as several threads may have something to say.
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Log:
    """Writes metrics after `step`, to metrics.csv and to TensorBoard where it is installed.

    A kill may leave lines that are newer than the checkpoint, at `step`, and lines that are
    damaged; both are removed.
    """

    def __init__(self, folder: RunFolder, step: int, tensorboard: bool) -> None:
        self.folder = folder
        self.path = folder.metrics
        self.writes = folder.writes
        self.board: Any = None
        if not self.writes:
            return
        text = self.path.read_bytes().decode("utf-8", "replace") if self.path.exists() else ""
        *lines, _ = text.split("\n")
        with atomic_write(self.path) as file:
            file.write(b"step,name,value\n")
            for line in lines:
                at = line.partition(",")[0]
                if at.isdecimal() and int(at) <= step:
                    file.write(f"{line}\n".encode())
        if tensorboard and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            with _explained(folder.tensorboard):
                self.board = SummaryWriter(str(folder.tensorboard), purge_step=step + 1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics after `step` updates."""
        if not self.writes:
            return
        with _explained(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerows((step, name, repr(value)) for name, value in values.items())
        if self.board is not None:
            with _explained(self.folder.tensorboard):
                for name, value in values.items():
                    self.board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Put everything on disk; to be done before a checkpoint is written."""
        if not self.writes:
            return
        with _explained(self.path), self.path.open("a") as file:
            os.fsync(file.fileno())
        if self.board is not None:
            with _explained(self.folder.tensorboard):
                self.board.flush()

    def close(self) -> None:
        """Write no more."""
        if self.board is not None:
            with contextlib.suppress(OSError):
                self.board.close()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say of errors within it which file they concern, and the way out."""
    try:
        yield
    except OSError as error:
        raise unwritten(path, error) from error
