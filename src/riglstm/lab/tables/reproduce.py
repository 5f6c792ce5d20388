"""A table from one call: run what is not done of a plan, show what is there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from riglstm.lab.tables import agents, rows
from riglstm.lab.tables.executor import Executor, InProcess, Processes, make_runs
from riglstm.lab.tables.plan import Planned, plan
from riglstm.lab.tables.recipes import TABLES, Budget, recipe
from riglstm.lab.tables.result import ResultRow
from riglstm.lab.tables.run import Make, open_data, run
from riglstm.lab.tables.table import markdown, table_of_runs, text_table
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.train.stopping import NEVER, Deadline


class Rendered(NamedTuple):
    """A table for readers, and its rows for programs."""

    markdown: str
    rows: Sequence[ResultRow]


class Reproduced(NamedTuple):
    """A table that was asked for."""

    rendered: Rendered
    failed: int = 0
    """Runs that were asked for and have no figure; the table says which, and why."""
    left: int = 0
    """Runs that were asked for and are not done: time was up, or another process makes them."""
    errors: tuple[str, ...] = ()
    """Of runs whose process ended with an error: which, and the last that it said."""


def reproduce(
    name: str,
    asked: Sequence[Planned],
    budget: Budget,
    root: Path,
    data_dir: Path | None = None,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    deadline: Deadline = NEVER,
    results: Path | None = None,
    again: str = "",
) -> Reproduced:
    """Run what is not done of a plan; the table of all that is there.

    `asked`: what `plan` gives, of agents `agents.plan`, whose `name` is MINIGRID and whose table
    has these runs alone. Another table has all rows that have a run in `root`, whoever made it,
    so that several programs with models of their own agree on it.
    A run that was stopped is gone on with. One that diverged stays failed, and is shown so.
    `jobs`: runs at a time on the device, each in a process of its own. One that ends with an error
    leaves the others alone; with one job the error is raised here.
    `executor`: what makes the runs, in place of this machine.
    `deadline`: all runs have stopped by then, saved, and those not begun yet are left.
    `results`: a CSV file that takes the figures of all runs, of each when it ends; see
    `riglstm.lab.tables.rows`.
    `again`: the command that goes on, for whoever stops it.
    """

    def record(runs: Sequence[Planned]) -> Rendered:
        """The table of these runs; their figures go to the results."""
        if name == MINIGRID:
            text, found = agents.text(runs)
        else:
            table, found = table_of_runs(name, runs, budget)
            text = markdown(text_table(table))
        if results is not None:
            rows.append(results, found)
        return Rendered(text, found)

    waiting = unfinished(asked)
    # Runs that are fewer share the cores among themselves alone.
    jobs = max(1, min(jobs, len(waiting)))
    if jobs > 1 or executor is not None:
        open_data(waiting, data_dir)
    make = partial(run, data_dir=data_dir, deadline=deadline, jobs=jobs)
    if executor is None:
        executor = InProcess(deadline) if jobs == 1 else Processes(jobs, deadline)
    return complete(
        asked,
        make,
        lambda: record(asked if name == MINIGRID else begun(name, asked, budget, root)),
        executor,
        again,
        lambda run: record([run]),
    )


def unfinished(asked: Sequence[Planned]) -> list[Planned]:
    """The runs that are to be made."""
    return [p for p in asked if p.state in ("new", "partial")]


def complete(
    asked: Sequence[Planned],
    make: Make,
    render: Callable[[], Rendered],
    executor: Executor,
    again: str = "",
    ended: Callable[[Planned], object] = lambda run: None,
) -> Reproduced:
    """Make the runs that are not done, `ended` hears of each; a stop prints the table so far."""
    # What is wrong with the files is said before hours of training.
    render()
    try:
        errors = make_runs(unfinished(asked), make, executor, ended, again)
    except BaseException:
        # What ended the runs is what is told.
        with contextlib.suppress(OSError, ValueError):
            print(f"\n{render().markdown}", flush=True)
        raise
    states = [p.state for p in asked]
    return Reproduced(
        render(),
        failed=states.count("failed"),
        left=states.count("new") + states.count("partial"),
        errors=tuple(errors),
    )


FOLDER = re.compile(r".+-seed(\d+)-[0-9a-f]{8}")


def begun(name: str, asked: Sequence[Planned], budget: Budget, root: Path) -> list[Planned]:
    """The runs of all rows that have one, and those of other seeds than asked for."""
    seeds, fit = {p.spec.seed for p in asked}, asked[0].spec.fit
    names = (path.name for path in root.glob(f"{TABLES[name].task}-*"))
    there = filter(None, map(FOLDER.fullmatch, names))
    every = sorted({*seeds, *(int(found[1]) for found in there)})
    models = list(recipe(name, budget).rows)
    found = plan(name, models, every, budget, root, fit.device, precision=fit.precision)
    with_runs = {p.row for p in found if p.state != "new"}
    return [p for p in found if p.row in with_runs and (p.spec.seed in seeds or p.state != "new")]
