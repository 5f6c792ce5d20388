"""What a run measures, by step: metrics.csv, and TensorBoard's files where it is installed.

A kill may leave lines that are newer than the checkpoint, and lines that are none; going on removes
them.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from riglstm.lab.train.folder import RunFolder, aside, unwritten

HEADER = "step,name,value\n"


class Log:
    """Writes metrics, from `step` on; what is newer than `step` is removed."""

    def __init__(self, folder: RunFolder, step: int, tensorboard: bool) -> None:
        self.folder = folder
        self.path = folder.metrics
        self.writes = folder.writes
        self.board: Any = None
        if not self.writes:
            return
        text = self.path.read_bytes().decode("utf-8", "replace") if self.path.exists() else ""
        *lines, _ = text.split("\n")
        with aside(self.path) as file:
            file.write(HEADER.encode())
            for line in lines:
                at = line.partition(",")[0]
                if at.isdecimal() and int(at) <= step:
                    file.write(f"{line}\n".encode())
        if tensorboard and importlib.util.find_spec("tensorboard"):
            from pytorch_lightning.loggers import TensorBoardLogger

            self.board = TensorBoardLogger(
                folder.tensorboard, name="", version="", purge_step=step + 1
            )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics after `step` updates."""
        if not self.writes:
            return
        with _explained(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerows((step, name, repr(value)) for name, value in values.items())
        if self.board is not None:
            with _explained(self.folder.tensorboard):
                self.board.log_metrics(dict(values), step)

    def flush(self) -> None:
        """Put everything on disk; to be done before a checkpoint says that it is there."""
        if not self.writes:
            return
        with _explained(self.path), self.path.open("a") as file:
            os.fsync(file.fileno())
        if self.board is not None:
            with _explained(self.folder.tensorboard):
                self.board.save()

    def close(self) -> None:
        """No more metrics will come."""
        if self.board is not None:
            with contextlib.suppress(OSError):
                self.board.finalize("success")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What goes wrong within it is said of that file."""
    try:
        yield
    except OSError as error:
        raise unwritten(path, error) from error
