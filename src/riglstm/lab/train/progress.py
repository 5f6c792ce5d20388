"""What a run reports: metrics.csv, TensorBoard's files, and a bar or lines for the user."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from riglstm.lab.tasks.base import Metric
from riglstm.lab.train.folder import RunFolder, atomic_write, unwritten

HEADER = "step,name,value\n"

TEST_SECONDS = 10
"""After which a test says for the first time how long it will take."""
FIRST_SECONDS = 30
"""Where there is no bar, a first line says by then how long the run will take: the first
evaluation may be hours off."""


class Bar:
    """Lines for the user on stderr, above a bar while there is one."""

    bar: Any = None

    def say(self, line: str) -> None:
        """Print a line for the user, whatever is shown."""
        if self.bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self.bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Show no more."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class Progress(Bar):
    """How far a run is, on stderr: a bar on a terminal, elsewhere a line for each evaluation.

    `shown` False: nothing but what `say` is told.
    """

    def __init__(self, updates: int, metric: Metric, shown: bool) -> None:
        self.updates = updates
        self.metric = metric
        self.lines = shown and not sys.stderr.isatty()
        self.shown = shown
        self.began = time.monotonic()
        self.first = 0
        """Where this session began."""
        self.silent = True
        """Whether no line has come yet."""

    def start(self, step: int) -> None:
        """Begin, or resume, after `step` updates."""
        self.first = step
        self.began = time.monotonic()
        if self.shown and not self.lines:
            self.bar = tqdm(total=self.updates, initial=step, unit="update", dynamic_ncols=True)

    def tick(self, step: int) -> None:
        """Note that an update is done."""
        if self.bar is not None:
            self.bar.update()
        elif self.lines and self.silent and time.monotonic() - self.began > FIRST_SECONDS:
            self.silent = False
            self.say(f"update {step} of {self.updates}; {self._left(step)}")

    def training(self, loss: float, metric: float) -> None:
        """Show means of the last updates."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4g}, {self._words(metric)}", refresh=False)

    def evaluation(self, step: int, values: Mapping[str, float], speed: float) -> None:
        """Show the metric on each condition; `speed`: updates a second, 0 while not known."""
        if self.lines:
            words = ", ".join(f"{name} {self._words(value)}" for name, value in values.items())
            rest = [f"{speed:.3g} updates/s"] if speed else []
            rest += [self._left(step)]
            self.silent = False
            self.say(f"update {step} of {self.updates}: validation {words}; {', '.join(rest)}")

    def _left(self, step: int) -> str:
        """The time left, by that which has gone, so that evaluations are counted in."""
        each = (time.monotonic() - self.began) / max(step - self.first, 1)
        return f"{duration(each * (self.updates - step))} left"

    def _words(self, value: float) -> str:
        return f"{self.metric.name} {self.metric.scale * value:.4g}{self.metric.unit}"


@contextlib.contextmanager
def tell_testing(
    net: nn.Module, condition: str, sequences: int, show: Callable[[str], None] | None
) -> Iterator[None]:
    """Tell `show` within it how far a test is: soon after the start, then every minute."""
    if show is None:
        yield
        return
    began, done = time.monotonic(), 0
    due = began + TEST_SECONDS

    def tell(_: nn.Module, given: tuple[Tensor, ...], __: object) -> None:
        nonlocal done, due
        now, done = time.monotonic(), done + given[0].shape[1]
        if now >= due and done < sequences:
            left = (now - began) * (sequences - done) / done
            show(f"testing {condition}: {done:,} of {sequences:,}; {duration(left)} left")
            due = now + 60

    # A task scores in batches of its own, and calls the network once for each.
    hook = net.register_forward_hook(tell)
    try:
        yield
    finally:
        hook.remove()


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


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
            file.write(HEADER.encode())
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
