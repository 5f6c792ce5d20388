"""One run of a table, beside other programs that make the same table."""

from __future__ import annotations

import contextlib
from pathlib import Path

from riglstm.lab.tables.plan import FAILED, Planned, state
from riglstm.lab.tables.run import run, say
from riglstm.lab.train.folder import BusyError, RunFolder
from riglstm.lab.train.stopping import NEVER, Deadline, Diverged


def fresh(planned: Planned) -> Planned:
    """A failed run with its folder emptied: gone on with, it would diverge again, bit for bit.

    Others as they are.
    """
    if planned.state != "failed":
        return planned
    folder = RunFolder(planned.folder)
    with contextlib.suppress(BusyError), folder.held():
        if state(planned.spec, folder.path) == "failed":
            folder.empty()
    return planned._replace(state="new")


def attempt(
    planned: Planned,
    data_dir: Path | None,
    progress: bool,
    again: str,
    deadline: Deadline = NEVER,
    jobs: int = 1,
) -> None:
    """One run; if it diverges, its folder says so, and the others go on.

    One that another process trains, or has trained since it was planned, is passed over. Raises
    Interrupted, and OutOfTime where the `deadline` is near. `jobs`: runs that share the device.
    """
    folder = RunFolder(planned.folder)
    try:
        with folder.held():
            said = _attempt(planned, folder, data_dir, progress, again, deadline, jobs)
    except BusyError:
        said = "another process is training it; passed over"
    if said and progress:
        say(f"{planned.folder}: {said}")


def _attempt(
    planned: Planned,
    folder: RunFolder,
    data_dir: Path | None,
    progress: bool,
    again: str,
    deadline: Deadline,
    jobs: int,
) -> str | None:
    """What is to be said about the run, if anything."""
    now = state(planned.spec, folder.path)
    if now == "done":
        folder.tidy()
    if now in ("done", "failed") and now != planned.state:
        return f"it is {now} by now, by another process; passed over"
    (folder.path / FAILED).unlink(missing_ok=True)
    try:
        run(
            *(planned.spec, folder, data_dir),
            resume=now != "new",
            progress=progress,
            again=again,
            deadline=deadline,
            jobs=jobs,
        )
    except Diverged as error:
        return str(error)
    return None
