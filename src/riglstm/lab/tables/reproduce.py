"""A table from one call: plan, run what is not done, print what is there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from riglstm.lab.tables import complexity, pool, rows
from riglstm.lab.tables.attempt import attempt, fresh
from riglstm.lab.tables.build import rendered
from riglstm.lab.tables.entries import Budget
from riglstm.lab.tables.plan import Planned, plan, seeds_of
from riglstm.lab.tables.render import Rendered
from riglstm.lab.tables.run import say
from riglstm.lab.tables.tables import MEASURED, recipe, stem, table
from riglstm.lab.tables.worker import Job
from riglstm.lab.train.config import Precision
from riglstm.lab.train.deadline import NEVER, Deadline, Interrupted, OutOfTime


class Reproduced(NamedTuple):
    """A table that was asked for."""

    rendered: Rendered
    paths: tuple[Path, ...]
    """Where it was written: Markdown, and its rows as CSV."""
    failed: int = 0
    """Runs that were asked for and have no figure; the table says which, and why."""
    left: int = 0
    """Runs that were asked for and are not done: time was up, or another process makes them."""
    errors: tuple[str, ...] = ()
    """Of runs whose process ended with an error: which, and the last that it said."""


def reproduce(
    name: str,
    models: Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    budget: Budget = "quick",
    root: Path | str = "runs",
    out: Path | str = "out",
    data_dir: Path | None = None,
    *,
    settings: Sequence[str] | None = None,
    precision: Precision | None = None,
    device: str = "auto",
    jobs: int = 1,
    deadline: Deadline = NEVER,
    results: Path | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    again: str = "",
) -> Reproduced:
    """Run what is not done of a table, and write it to `out`, anew after every run.

    `models`, `seeds`, `settings`: what is trained, see `plan`; None for those of the recipe. The
    table has all rows that have a run, whoever made it, so that several programs with models of
    their own agree on it.
    A run that was stopped is gone on with. One that diverged stays failed, and is shown so; with
    `retry_failed` it is begun anew, and ends as before unless code or device have changed.
    `jobs`: runs at a time on the device, each in a process of its own. One that ends with an error
    leaves the others alone; with one job the error is raised here.
    `deadline`: all runs have stopped by then, saved, and those not begun yet are left.
    `results`: a CSV file that takes the figures of all runs, see `riglstm.lab.tables.rows`.
    `again`: the command that goes on, for whoever stops it.
    """
    file = stem(name, budget, precision)
    if name == MEASURED:
        measured = complexity.table(models, budget, device, say if progress else None)
        return Reproduced(measured, measured.write(Path(out), file))

    def look() -> list[Planned]:
        return plan(
            *(name, models, seeds, budget, root, device), settings=settings, precision=precision
        )

    def show() -> Rendered:
        return rendered(name, begun(name, seeds, budget, root, device, precision), budget)

    def write(errors: Sequence[str] = ()) -> Reproduced:
        shown = show()
        if results is not None:
            rows.append(results, shown.rows or ())
        states = [p.state for p in look()]
        return Reproduced(
            *(shown, shown.write(Path(out), file)),
            failed=states.count("failed"),
            left=states.count("new") + states.count("partial"),
            errors=tuple(errors),
        )

    # What is wrong with the files that take the figures is said before hours of training.
    show().check(Path(out), file)
    if results is not None and results.exists():
        rows.read(results)
    open_states = {"new", "partial", *(("failed",) if retry_failed else ())}
    waiting = [p for p in look() if p.state in open_states]
    # Runs that are fewer share the cores among themselves alone.
    at_a_time = max(1, min(jobs, len(waiting)))
    job = Job(data_dir, progress, again, deadline, at_a_time, tuple(sys.argv))
    make = _one_by_one if jobs == 1 else _side_by_side
    return write(make(waiting, job, write))


def _one_by_one(waiting: Sequence[Planned], job: Job, write: Callable[[], object]) -> Sequence[str]:
    for number, planned in enumerate(waiting, start=1):
        if number > 1 and job.deadline.left < pool.TO_BEGIN:
            break
        if job.progress:
            say(f"run {number} of {len(waiting)}: {planned.folder}")
        try:
            attempt(fresh(planned), job.data_dir, job.progress, job.again, job.deadline)
        except OutOfTime as stop:
            if job.progress:
                say(str(stop))
            break
        except Interrupted:
            raise
        except KeyboardInterrupt:
            # Between runs, or while one is loaded.
            said = f"stopped; what is done, or was saved, stays so{_go_on(job)}"
            raise KeyboardInterrupt(said) from None
        write()
    return ()


def _go_on(job: Job) -> str:
    return f"; go on with: {job.again}" if job.again else ""


def _side_by_side(
    waiting: Sequence[Planned], job: Job, write: Callable[[], object]
) -> Sequence[str]:
    errors = []

    def ended(end: pool.Ended) -> None:
        if end.code:
            errors.append(f"{end.planned.folder}: {end.last or f'exit code {end.code}'}")
            if job.progress:
                say(f"{pool.label(end.planned)}: ended with exit code {end.code}")
        write()

    # Here first: data is downloaded or made once, and what is wrong with it is said once.
    for task in {str(p.spec.task_options): p.spec.task_config() for p in waiting}.values():
        task.open(torch.device("cpu"), job.data_dir, say if job.progress else None).ready()
    try:
        # How to go on is said here, for all of them.
        pool.together(waiting, replace(job, again=""), ended)
    except KeyboardInterrupt as stop:
        write()
        raise KeyboardInterrupt(f"{stop}{_go_on(job)}") from None
    return errors


SEED = re.compile(r".*-seed(\d+)-[0-9a-f]{8}")


def begun(
    name: str,
    seeds: int | Sequence[int] | None,
    budget: Budget,
    root: Path | str,
    device: str,
    precision: Precision | None = None,
) -> list[Planned]:
    """The runs of all rows that have one, and those of other seeds than asked for."""
    how = recipe(name, budget)
    asked = seeds_of(how, seeds)
    there = (SEED.fullmatch(path.name) for path in Path(root).glob(f"{table(name).task}-*"))
    every = sorted({*asked, *(int(match[1]) for match in there if match)})
    found = plan(name, list(how.rows), every, budget, root, device, precision=precision)
    rows = {p.row for p in found if p.state != "new"}
    return [p for p in found if p.row in rows and (p.spec.seed in asked or p.state != "new")]
