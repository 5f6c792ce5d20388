"""One run of a table in a process of its own: `python -m riglstm.lab.tables.worker`.

The first line of stdin says which run. When stdin ends, the program that asked for it wants it to
stop, or is gone: the run saves and ends, so that none is left behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from riglstm.lab.tables.attempt import attempt
from riglstm.lab.tables.errors import FEWER_RUNS, in_words
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.run import say
from riglstm.lab.tables.spec import RunSpec
from riglstm.lab.train.stopping import SIGNALS, Deadline, Interrupted, OutOfTime

FAILED, STOPPED = 2, 130
"""Exit codes, as of the command: it cannot be done; it was asked to stop, as shells count it."""


@dataclass(frozen=True)
class Job:
    """What all runs of a table have in common."""

    data_dir: Path | None
    progress: bool
    again: str
    """The command that goes on."""
    deadline: Deadline
    jobs: int
    """How many run at a time."""
    argv: Sequence[str]
    """The command that was given, for the records of the runs."""


def written(planned: Planned, job: Job) -> str:
    """A run and its job as one line."""
    return json.dumps(
        {
            "planned": {
                **planned._asdict(),
                "spec": planned.spec.resolved(),
                "folder": str(planned.folder),
            },
            "job": {
                **vars(job),
                "data_dir": None if job.data_dir is None else str(job.data_dir),
                "deadline": job.deadline.at,
                "argv": list(job.argv),
            },
        }
    )


def read(line: str) -> tuple[Planned, Job]:
    """The inverse of `written`."""
    data: dict[str, dict[str, Any]] = json.loads(line)
    run, job = data["planned"], data["job"]
    planned = Planned(
        **{**run, "spec": RunSpec.from_json(run["spec"]), "folder": Path(run["folder"])}
    )
    data_dir = None if job["data_dir"] is None else Path(job["data_dir"])
    return planned, Job(**{**job, "data_dir": data_dir, "deadline": Deadline(job["deadline"])})


def main() -> int:
    """Make the run that stdin names; returns the exit code."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    planned, job = read(sys.stdin.readline())
    threading.Thread(target=_stop_at_the_end_of_stdin, daemon=True).start()
    sys.stdout = sys.stderr = _Lines()
    sys.argv = list(job.argv)
    try:
        attempt(planned, job.data_dir, job.progress, job.again, job.deadline, job.jobs)
    except Interrupted as stop:
        say(str(stop))
        return 0 if isinstance(stop, OutOfTime) else STOPPED
    except Exception as error:
        said = in_words(error, FEWER_RUNS)
        if said is None:
            raise
        say(said)
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


if __name__ == "__main__":
    sys.exit(main())
