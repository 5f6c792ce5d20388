"""Several runs of a table at a time on one device, each in a process of its own.

The parent trains nothing: it starts processes, prints their lines, and hears how they end. Its only
hold on a process is that one's stdin, see `riglstm.lab.tables.worker`.
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
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NamedTuple

from riglstm.lab.tables.attempt import fresh
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.run import say
from riglstm.lab.tables.worker import STOPPED, Job, written
from riglstm.lab.train.stopping import SIGNALS

WORKER = (sys.executable, "-m", "riglstm.lab.tables.worker")

TO_BEGIN = 60.0
"""Seconds that have to be left for another run to be begun: loading and compiling take some."""
TO_SAVE = 15.0
"""Seconds before the deadline at which runs are asked to stop that have not done so themselves."""
TO_READ = 1.0
"""Seconds for what a process said last, should one that it has left behind hold its output."""
ASKED = (0, STOPPED, -signal.SIGTERM)
"""Exit codes of a run that was asked to stop; the last one's, before it could listen."""


class Ended(NamedTuple):
    """How a run's process ended."""

    planned: Planned
    code: int
    """0: done, failed or out of time, as its folder says."""
    last: str
    """The last line that it printed."""


def together(waiting: Sequence[Planned], job: Job, ended: Callable[[Ended], None]) -> int:
    """Make runs, `job.jobs` at a time; `ended` hears of each. Returns how many were not begun.

    Ctrl-C, SIGTERM and SIGHUP are passed on: all runs save and end, then KeyboardInterrupt is
    raised. A second Ctrl-C ends them at once; a second one of the others changes nothing.
    """
    todo = deque(waiting)
    ends: SimpleQueue[Ended] = SimpleQueue()
    running: dict[Path, _Process] = {}
    begun = 0
    # With less time than that from the start, the first ones stop by themselves, after an update.
    timely, time_is_up = job.deadline.left > TO_SAVE, False
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
                left = max(job.deadline.left - TO_SAVE, 0.0)
                try:
                    # By the hour: queues cannot wait for ever so many seconds.
                    end = ends.get(timeout=min(left, 3600.0) if timely and not time_is_up else None)
                except Empty:
                    time_is_up = job.deadline.left < TO_SAVE
                    for process in running.values() if time_is_up else ():
                        process.ask_to_stop()
                    continue
                del running[end.planned.folder]
                ended(end._replace(code=0) if time_is_up and end.code in ASKED else end)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_stop(running.values())) from None
        finally:
            _stop(running.values())
    return len(todo)


def label(planned: Planned) -> str:
    """A run in a few words."""
    return f"{planned.row} {planned.setting} seed {planned.spec.seed}"


class _Process:
    """A run's process, and threads that hear what it says, and when it ends."""

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
        self.last = ""
        self.ears = threading.Thread(target=self._hear, daemon=True)
        self.ears.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.strip():
                    self.last = line.strip()
                    if self.shown:
                        say(f"{label(self.planned)}: {line.rstrip()}")

    def _wait(self) -> None:
        try:
            # Not the end of its output: a process that it has started may hold that.
            self.process.wait()
            self.kill()
            self.ask_to_stop()
            self.ears.join(TO_READ)
        finally:
            self.end(Ended(self.planned, self.process.returncode, self.last))
            self.over.set()

    def kill(self) -> None:
        """The process, and those that it has started."""
        if not hasattr(os, "killpg"):
            self.process.kill()
            return
        # It is the first of a session, and so of a group; PermissionError: macOS, of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def environment(jobs: int) -> dict[str, str]:
    """That of a run which shares the machine: its part of the cores, unless the user says more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = str(max(1, (cores or 1) // jobs))
    return {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ}


def _stop(processes: Collection[_Process]) -> str:
    """Let all of them save and end; a Ctrl-C meanwhile ends them at once. Says how it went."""
    try:
        for process in processes:
            process.ask_to_stop()
        for process in processes:
            process.over.wait()
    except KeyboardInterrupt:
        for process in processes:
            if not process.over.is_set():
                process.kill()
        for process in processes:
            process.over.wait()
        return "stopped at once, without saving"
    lost = [p for p in processes if p.process.returncode not in ASKED]
    if lost:
        said = "; ".join(f"{label(p.planned)}: {p.last}" for p in lost)
        return f"stopped; {len(lost)} of {len(processes)} runs ended with an error ({said})"
    return "stopped, and all runs are saved"


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP are a Ctrl-C; a second wish is heard if both are Ctrl-Cs.

    Whoever ends a job may send SIGTERM to all its processes, and more than once.
    """
    heard: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        repeated = signum == signal.SIGINT and signum in heard
        heard.append(signum)
        if repeated or len(heard) == 1:
            raise KeyboardInterrupt

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        # What a shell has silenced, as in the background, stays so.
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
