"""How far many runs are: one view of all, read from their folders, whoever makes them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from riglstm.lab.tables.plan import Planned, RunSpec
from riglstm.lab.train.folder import RunFolder, atomic_write

FILE = "progress.txt"
"""In the folder of the runs."""
EVERY = 10.0
"""Seconds between two writes of the file."""
TAIL = 400
"""Bytes at the end of metrics.csv that hold a whole line."""
STATES = ("done", "running", "waiting", "failed")


class Standing(NamedTuple):
    """How far one run is."""

    state: str
    """One of `STATES`."""
    updates: int
    """As its log has them; it lags behind by `log_every` updates."""


def standing(planned: Planned) -> Standing:
    """How far a run is, from its folder alone; one that was stopped waits."""
    folder = RunFolder(planned.folder)
    updates = _last_step(folder.metrics)
    if folder.state == "done":
        return Standing("done", updates)
    if folder.failed.exists():
        return Standing("failed", updates)
    return Standing("running" if folder.lock.exists() else "waiting", updates)


def _last_step(metrics: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), metrics.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL))
        return int(file.read().split(b"\n")[-2].partition(b",")[0])
    return 0


class Overview:
    """The view of all runs of a command, in a file that is written anew while they are made."""

    def __init__(self, runs: Sequence[Planned]) -> None:
        self.runs = runs
        self.path = runs[0].folder.parent / FILE if runs else None
        self.began, self.first = time.monotonic(), self._shares(self._standings())
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._keep, daemon=True)

    def line(self) -> str:
        """All runs in a line: how many are done, running, waiting, failed, and the time left."""
        return self._line(self._standings())

    def _line(self, found: Sequence[Standing]) -> str:
        count = Counter(run.state for run in found)
        counts = ", ".join(f"{count[state]} {state}" for state in STATES)
        # All runs count alike: what a run of another model takes is not known before one is made.
        gone, shares = time.monotonic() - self.began, self._shares(found)
        if shares == len(found):
            return f"{len(found)} runs: {counts}"
        left = "time left not known yet"
        if shares > self.first:
            # It needs tqdm, which is not installed with torch.
            from riglstm.lab.train.progress import duration

            left = f"about {duration(gone * (len(found) - shares) / (shares - self.first))} left"
        return f"{len(found)} runs: {counts}; {left}"

    def _standings(self) -> list[Standing]:
        return [standing(run) for run in self.runs]

    def _shares(self, found: Sequence[Standing]) -> float:
        """Runs that are over, with parts of those that are not."""
        return sum(
            1.0 if now.state in ("done", "failed") else now.updates / run.spec.fit.updates
            for run, now in zip(self.runs, found, strict=True)
            if isinstance(run.spec, RunSpec) or now.state in ("done", "failed")
        )

    def write(self) -> None:
        """Write the file; nothing depends on it, so that a full disk costs the view alone."""
        if self.path is None:
            return
        found = self._standings()
        rows = [
            f"{now.state:<8} {now.updates:>9,}  {run.row} {run.setting} seed {run.spec.seed}"
            for run, now in zip(self.runs, found, strict=True)
        ]
        head = f"{'state':<8} {'updates':>9}  run"
        with contextlib.suppress(OSError), atomic_write(self.path) as file:
            file.write("\n".join((self._line(found), "", head, *rows, "")).encode())

    def _keep(self) -> None:
        while not self.over.wait(EVERY):
            self.write()

    def __enter__(self) -> Overview:
        self.write()
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.over.set()
        self.thread.join()
        self.write()
