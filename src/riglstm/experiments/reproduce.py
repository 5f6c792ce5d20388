"""A table from one call: plan, run what is not done, print what is there."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from riglstm.experiments import complexity, rows
from riglstm.experiments.fill import result_rows, sheet
from riglstm.experiments.plan import FAILED, Planned, plan, state
from riglstm.experiments.recipes import Budget
from riglstm.experiments.render import Rendered, render
from riglstm.experiments.run import run, say
from riglstm.experiments.sheet import RECORD, grid, records
from riglstm.experiments.tables import MEASURED, recipe, stem
from riglstm.train.folder import RunFolder
from riglstm.train.lock import BusyError


class Reproduced(NamedTuple):
    """A table that was asked for."""

    rendered: Rendered
    paths: tuple[Path, ...]
    """Where it was written: Markdown, CSV, LaTeX."""
    failed: int = 0
    """Runs that were asked for and have no figure; the table says which, and why."""


def reproduce(
    name: str,
    models: Sequence[str] | None = None,
    seeds: int | None = None,
    budget: Budget = "quick",
    root: Path | str = "runs",
    out: Path | str = "out",
    data_dir: Path | None = None,
    *,
    device: str = "auto",
    results: Path | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    again: str = "",
) -> Reproduced:
    """Run what is not done of a table, and write it to `out`, anew after every run.

    `models`, `seeds`: what is trained; None for those of the recipe. The table has all rows that
    have a run, whoever made it, so that several programs with models of their own agree on it.
    A run that was stopped is gone on with. One that diverged stays failed, and is shown so; with
    `retry_failed` it is begun anew, and ends as before unless code or device have changed.
    `results`: a CSV file that takes the figures of all runs, see `riglstm.experiments.rows`.
    `again`: the command that goes on, for whoever stops it.
    """
    file = stem(name, budget)
    if name == MEASURED:
        measured = complexity.table(models, budget, device, say if progress else None)
        return Reproduced(measured, measured.write(Path(out), file))

    def look() -> list[Planned]:
        return plan(name, models, seeds, budget, root, device)

    def write() -> Reproduced:
        planned = begun(name, seeds, budget, root, device)
        filled = sheet(name, planned, budget)
        rendered = render(grid(filled), RECORD, records(filled))
        if results is not None:
            rows.append(results, result_rows(name, planned, budget))
        failed = sum(p.state == "failed" for p in look())
        return Reproduced(rendered, rendered.write(Path(out), file), failed)

    open_states = {"new", "partial", *(("failed",) if retry_failed else ())}
    waiting = [p for p in look() if p.state in open_states]
    for number, planned in enumerate(waiting, start=1):
        if progress:
            say(f"run {number} of {len(waiting)}: {planned.folder}")
        if planned.state == "failed":
            planned = anew(planned)
        attempt(planned, data_dir, progress, again)
        write()
    return write()


def begun(
    name: str, seeds: int | None, budget: Budget, root: Path | str, device: str
) -> list[Planned]:
    """The runs of all rows that have one, and those of more seeds than asked for."""
    how = recipe(name, budget)

    def first(count: int) -> list[Planned]:
        return plan(name, list(how.rows), count, budget, root, device)

    count = how.seeds if seeds is None else seeds
    found = first(count)
    while more := [p for p in first(count + 1) if p.spec.seed == count and p.state != "new"]:
        found += more
        count += 1
    rows = {p.row for p in found if p.state != "new"}
    return [p for p in found if p.row in rows]


def anew(planned: Planned) -> Planned:
    """A failed run with its folder emptied; gone on with, it would diverge again, bit for bit."""
    folder = RunFolder(planned.folder)
    with contextlib.suppress(BusyError), folder.held():
        if state(planned.spec, folder.path) == "failed":
            # Checkpoints come first: nothing goes on from them, should this be stopped.
            for path in sorted(folder.path.iterdir()):
                if path.is_dir():
                    shutil.rmtree(path)
                elif path != folder.lock:
                    path.unlink()
    return planned._replace(state="new")


def attempt(planned: Planned, data_dir: Path | None, progress: bool, again: str) -> None:
    """One run; if it diverges, its folder says so, and the others go on.

    One that another process trains, or has trained since it was planned, is passed over.
    """
    folder = RunFolder(planned.folder)
    try:
        with folder.held():
            said = _attempt(planned, folder, data_dir, progress, again)
    except BusyError:
        said = "another process is training it; passed over"
    if said and progress:
        say(f"{planned.folder}: {said}")


def _attempt(
    planned: Planned, folder: RunFolder, data_dir: Path | None, progress: bool, again: str
) -> str | None:
    """What is to be said about the run, if anything."""
    from riglstm.train.supervised import Diverged

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
        )
    except Diverged as error:
        return str(error)
    return None
