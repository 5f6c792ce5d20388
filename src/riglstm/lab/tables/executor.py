"""How many runs are made: the seam between what is to be run and the machines that run it.

An executor is given runs and tells of the end of each. Two engines are here: `InProcess` makes one
run after another, `Processes` several at a time, each in a process of its own. A third one, for
several machines, is `riglstm.lab.tables.on_ray`: what makes a run can be pickled, and leaves all in
the run's folder. `progress.txt` beside the folders says how far all are.

This file is also what such a process runs: `python -m riglstm.lab.tables.executor FOLDER`. Its
stdin begins with a pickle, of what makes the run and of the command that was given. When stdin
ends, the program that asked for the run wants it to stop, or is gone: the run saves and ends, so
that none is left behind.
"""

from __future__ import annotations

import contextlib
import dis
import io
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import NoReturn, Protocol, TypeAlias, TypeVar

import torch

from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.run import Make, attempt
from riglstm.lab.train.config import cores
from riglstm.lab.train.folder import RunFolder, atomic_write
from riglstm.lab.train.progress import say
from riglstm.lab.train.stopping import (
    NEVER,
    SIGNALS,
    Deadline,
    Interrupted,
    OutOfTime,
    StopNow,
    StopRequest,
    go_on,
)

FAILED, STOPPED = 2, 130
"""Exit codes, as of the command: it cannot be done; it was asked to stop, as shells count it."""
WORKER = ("-m", "riglstm.lab.tables.executor")
"""What Python runs in a run's process; the folder follows, for whoever lists processes."""

TO_BEGIN = 60.0
"""Seconds that have to be left for another run to be begun: loading and compiling take some."""
TO_SAVE = 15.0
"""Seconds before the deadline at which runs are asked to stop that have not done so themselves."""
POLL = 0.5
"""Seconds between two looks at signals and the clock."""

PROGRESS_FILE = "progress.txt"
"""In the folder of the runs."""
STATES = ("done", "running", "waiting", "failed")
ASKED = (0, STOPPED, -signal.SIGTERM)
"""Exit codes of a run that was asked to stop; the last one's, before it could listen."""


End: TypeAlias = tuple[Planned, str]
"""A run that is over, and its error in a line; empty where it is done, failed or out of time, as
its folder says."""
Ended: TypeAlias = Callable[[Planned, str], None]
T = TypeVar("T")


class Executor(Protocol):
    """Something that makes runs."""

    def run(self, runs: Sequence[Planned], make: Make, ended: Ended) -> None:
        """Make runs; `ended` hears of each in this thread, and none is left behind.

        `make` can be pickled, and stops, with the run saved, at the executor's deadline.
        Ctrl-C, SIGTERM and SIGHUP let all runs save and end, a second Ctrl-C ends them at once;
        both raise KeyboardInterrupt, which says how it went. At the deadline all have stopped,
        saved, and those that were not begun are left.
        """


def make_runs(
    waiting: Sequence[Planned],
    make: Make,
    executor: Executor,
    ended: Callable[[Planned], object],
    again: str = "",
) -> list[str]:
    """Make planned runs; `ended` hears of each. Returns their errors, a line each.

    `again`: the command that goes on, for whoever stops it. How far all are stands in a file beside
    their folders, written anew after each.
    """
    errors: list[str] = []

    def tell() -> None:
        # Nothing depends on the file, so that a full disk costs the view alone.
        if waiting:
            path = waiting[0].folder.parent / PROGRESS_FILE
            with contextlib.suppress(OSError), atomic_write(path) as file:
                file.write("\n".join((*overview(waiting), "")).encode())

    def heard(run: Planned, error: str) -> None:
        if error:
            errors.append(f"{run.label}, in {run.folder}: {error}")
        ended(run)
        tell()
        if len(waiting) > 1:
            say(overview(waiting)[0])

    tell()
    try:
        executor.run(waiting, make, heard)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(go_on(str(stop), again)) from None
    finally:
        tell()
    return errors


@dataclass(frozen=True)
class InProcess:
    """One run after another, here: with a progress bar, and without loading torch for each.

    An error of a run is raised.
    """

    deadline: Deadline = NEVER

    def run(self, runs: Sequence[Planned], make: Make, ended: Ended) -> None:
        """Make runs."""
        for number, run in enumerate(runs, start=1):
            # The first one is begun in any case: each call gets further.
            if number > 1 and self.deadline.left < TO_BEGIN:
                break
            say(f"run {number} of {len(runs)}: {run.folder}")
            try:
                attempt(run, make)
            except OutOfTime as stop:
                say(str(stop))
                break
            except KeyboardInterrupt as stop:
                # It has no words where it came between runs, or while one was loaded.
                said = str(stop) or "stopped; what is done, or was saved, stays so"
                raise KeyboardInterrupt(said) from None
            ended(run, "")


@dataclass(frozen=True)
class Processes:
    """Several runs at a time on this machine, each in a process of its own.

    A process that dies costs its own run alone. It is asked to stop by closing its stdin, as the
    top of this file says.
    """

    at_a_time: int
    deadline: Deadline = NEVER

    def run(self, runs: Sequence[Planned], make: Make, ended: Ended) -> None:
        """Make runs."""
        running: list[RunProcess] = []
        closing = threading.Event()

        def begin(number: int, run: Planned) -> End | None:
            # The first ones are begun in any case: each call gets further.
            tight = number >= self.at_a_time and self.deadline.left < TO_BEGIN
            if tight or closing.is_set():
                return None
            process = RunProcess(run, make, environment(self.at_a_time))
            running.append(process)
            if closing.is_set():
                process.ask_to_stop()
            error = process.hear()
            running.remove(process)
            return run, error

        def close(at_once: bool) -> None:
            closing.set()
            for process in list(running):
                process.kill() if at_once else process.ask_to_stop()

        with ThreadPoolExecutor(self.at_a_time) as threads:
            left = {threads.submit(begin, number, run) for number, run in enumerate(runs)}
            attend(left, Future.result, close, ended, self.deadline)


def attend(
    left: set[Future[T]],
    read: Callable[[Future[T]], End | None],
    close: Callable[[bool], None],
    ended: Ended,
    deadline: Deadline,
) -> None:
    """Tell of the end of runs that are made elsewhere, and ask them to stop when it is time.

    `left`: one for each run; `read`: what became of it, None where it was not begun. `close`: asks
    all runs to save and end, or with True ends them at once, and lets no other begin.
    """
    # With less time than that from the start, the first ones stop by themselves.
    late = deadline.at - TO_SAVE if deadline.left > TO_SAVE else math.inf
    lost: list[str] = []
    closed = False
    with StopRequest(speaks=True) as request:
        try:
            try:
                while left:
                    over, _ = wait(left, POLL, FIRST_COMPLETED)
                    left -= over
                    if not closed and (request.made or time.time() > late):
                        closed = True
                        close(False)
                    for run, error in filter(None, map(read, over)):
                        lost += [f"{run.label}: {error}"] if error and request.made else []
                        ended(run, error)
            except Exception:
                # What `ended` raises ends all runs, and costs none: each is asked to save once, as
                # on Ray a second time means “at once”.
                if not closed:
                    close(False)
                wait(left)
                raise
        except StopNow:
            close(True)
            raise KeyboardInterrupt("stopped at once, without saving") from None
    if lost:
        said = "; ".join(lost)
        raise KeyboardInterrupt(f"stopped; {len(lost)} runs ended with an error ({said})")
    if request.made:
        raise KeyboardInterrupt("stopped, and all runs are saved")


class RunProcess:
    """A run's process."""

    def __init__(self, run: Planned, make: Make, environment: Mapping[str, str]) -> None:
        job = pickle.dumps((partial(attempt, run, make), sys.argv))
        self.label = run.label
        self.asked = False
        """Whether it was asked to stop."""
        self.process = subprocess.Popen(
            (sys.executable, *WORKER, str(run.folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # A terminal's Ctrl-C is for the parent: heard twice, it would mean “at once”.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(job)
            self.process.stdin.flush()

    def hear(self) -> str:
        """Print its lines until its end; its error, empty where it did as it was asked."""
        assert self.process.stdout is not None
        threading.Thread(target=self._bury, daemon=True).start()
        last = ""
        with self.process.stdout as lines:
            for line in lines:
                words = line.decode("utf-8", "replace").rstrip()
                if words:
                    last = words.strip()
                    say(f"{self.label}: {words}")
        code = self.process.wait()
        well = code == 0 or (self.asked and code in ASKED)
        self.ask_to_stop()
        return "" if well else last or f"exit code {code}"

    def _bury(self) -> None:
        """Once it is dead, end what it has started, and what holds its output."""
        self.process.wait()
        self.kill()

    def kill(self) -> None:
        """The process, and those that it has started."""
        if not hasattr(os, "killpg"):
            self.process.kill()
            return
        # It is the first of a session, and so of a group; PermissionError: macOS, of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask_to_stop(self) -> None:
        """It saves, and ends."""
        self.asked = True
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def environment(jobs: int) -> dict[str, str]:
    """That of a run which shares the machine: its part of the cores, unless the user says more."""
    threads = str(max(1, cores() // jobs))
    return {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ}


# What went wrong, in one line for users; what is a bug of ours has none.

NO_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
"""What torch says where a tensor is too large for a CPU's memory."""
LESS_MEMORY = (
    "a smaller model or batch needs less (--hidden-size, --batch-size), or fewer runs at a time "
    "(--jobs)"
)


def in_words(error: Exception) -> str | None:
    """The line; None: a bug, whose traceback is to be shown."""
    said, refused = str(error), isinstance(error, ValueError | RuntimeError)
    # On a CPU torch has no class of its own for that.
    no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if no_memory or (refused and any(words in said for words in NO_MEMORY)):
        return f"out of memory ({next(iter(said.splitlines()), 'MemoryError')}); {LESS_MEMORY}"
    return said if isinstance(error, OSError) or (refused and _is_ours(error)) else None


def _is_ours(error: BaseException) -> bool:
    """True if a `raise` of ours made it, with a message for users.

    What C code raises has the frame of ours that called it, but no `raise` there.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    raiser = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    operation = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return raiser == "riglstm" and operation == dis.opmap["RAISE_VARARGS"]


# The process of one run.


def main() -> int:
    """Make the run that stdin names; returns the exit code."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    make, sys.argv = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_stop_at_the_end_of_stdin, daemon=True).start()
    sys.stdout = sys.stderr = _Lines()
    try:
        make()
    except Interrupted as stop:
        print(stop)
        return 0 if isinstance(stop, OutOfTime) else STOPPED
    except Exception as error:
        said = in_words(error)
        if said is None:
            raise
        print(said)
        return FAILED
    return 0


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """While the run does not train: there is nothing to save, or all is saved."""
    sys.exit(STOPPED)


class _Lines(io.TextIOBase):
    """What the run says, to whoever hears it: if nobody is left, it has to save all the same."""

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, text.encode())
        return len(text)


def _stop_at_the_end_of_stdin() -> None:
    # Not by sys.stdin, whose lock this thread would still hold when the process ends.
    while os.read(0, 1):
        pass
    signal.raise_signal(signal.SIGTERM)


def overview(runs: Sequence[Planned]) -> list[str]:
    """How many runs are done, running, waiting and failed; then a line for each, by its folder.

    One that was stopped waits.
    """
    states = []
    for run in runs:
        state: str = run.state
        if state in ("new", "partial"):
            state = "running" if RunFolder(run.folder).lock.exists() else "waiting"
        states.append(state)
    counts = ", ".join(f"{states.count(name)} {name}" for name in STATES)
    lines = [f"{state:<8} {run.label}" for state, run in zip(states, runs, strict=True)]
    return [f"{len(runs)} runs: {counts}", "", *lines]


if __name__ == "__main__":
    sys.exit(main())
