"""Several runs of a table at a time on one device, each in a process of its own.

The parent trains nothing: it starts processes, prints their lines, and hears how they end. Its only
hold on a process is that one's stdin, see `riglstm.experiments.worker`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import NamedTuple, NoReturn

from riglstm.experiments.attempt import fresh
from riglstm.experiments.plan import Planned
from riglstm.experiments.run import say
from riglstm.experiments.worker import Job, written

WORKER = (sys.executable, "-m", "riglstm.experiments.worker")

TO_BEGIN = 60.0
"""Seconds that have to be left for another run to be begun: loading and compiling take some."""


class Ended(NamedTuple):
    """How a run's process ended."""

    planned: Planned
    code: int
    """0: done, failed or out of time, as its folder says."""
    last: str
    """The last line that it printed."""


def together(waiting: Sequence[Planned], job: Job, ended: Callable[[Ended], None]) -> int:
    """Make runs, `job.jobs` at a time; `ended` hears of each. Returns how many were not begun.

    Ctrl-C and SIGTERM are passed on: all runs save and end, then KeyboardInterrupt is raised. Once
    more ends them at once.
    """
    todo = deque(waiting)
    ends: SimpleQueue[Ended] = SimpleQueue()
    running: dict[Path, _Process] = {}
    begun = 0
    with _terminable():
        try:
            while todo or running:
                while todo and len(running) < job.jobs:
                    # The first ones are begun in any case: each call gets further.
                    if begun >= job.jobs and job.deadline.left < TO_BEGIN:
                        break
                    planned = fresh(todo.popleft())
                    running[planned.folder] = _Process(planned, job, ends.put)
                    begun += 1
                if not running:
                    break
                end = ends.get()
                del running[end.planned.folder]
                ended(end)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_stop(running.values())) from None
        finally:
            _stop(running.values())
    return len(todo)


def label(planned: Planned) -> str:
    """A run in a few words."""
    return f"{planned.row} {planned.setting} seed {planned.spec.seed}"


class _Process:
    """A run's process, and a thread that hears what it says."""

    def __init__(self, planned: Planned, job: Job, end: Callable[[Ended], None]) -> None:
        self.planned, self.shown, self.end = planned, job.progress, end
        self.process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=environment(job.jobs),
            # A terminal's Ctrl-C is for the parent: heard twice, it would mean “at once”.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{written(planned, job)}\n")
            self.process.stdin.flush()
        # Not the thread's join: a Ctrl-C in one makes the next return too early.
        self.over = threading.Event()
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        last = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip():
                last = line.strip()
                if self.shown:
                    say(f"{label(self.planned)}: {line.rstrip()}")
        code = self.process.wait()
        self.ask_to_stop()
        self.process.stdout.close()
        self.end(Ended(self.planned, code, last))
        self.over.set()

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def environment(jobs: int) -> dict[str, str]:
    """That of a run which shares the machine: its part of the cores, unless the user says more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = str(max(1, (cores or 1) // jobs))
    return {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ}


def _stop(processes: Collection[_Process]) -> str:
    """Let all of them save and end; a Ctrl-C meanwhile ends them at once. Says which it was."""
    try:
        for process in processes:
            process.ask_to_stop()
        for process in processes:
            process.over.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.process.kill()
        for process in processes:
            process.over.wait()
        return "stopped at once, without saving"
    return "stopped, and all runs are saved"


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within it SIGTERM is a Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
