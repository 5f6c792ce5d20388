"""A table from one call: run what is not done of a plan, write what is there."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from riglstm.lab.tables import agents, rows
from riglstm.lab.tables.executor import Executor, InProcess, Processes, make_runs
from riglstm.lab.tables.plan import Planned, plan
from riglstm.lab.tables.recipes import TABLES, Budget, recipe, stem
from riglstm.lab.tables.result import ResultRow, csv_text
from riglstm.lab.tables.run import Make, open_data, run
from riglstm.lab.tables.table import markdown, table_of_runs, text_table
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.train.folder import atomic_write
from riglstm.lab.train.stopping import NEVER, Deadline

SELDOM = 10.0
"""So many times as long as it took to write a table, it is not written again."""


@dataclass(frozen=True)
class Rendered:
    """A table for readers, and its rows for programs."""

    markdown: str
    rows: Sequence[ResultRow] | None = None
    """None: it is not made from rows."""

    def write(self, folder: Path, name: str) -> tuple[Path, ...]:
        """Files `name`.md and .csv, each whole or not at all.

        Raises ValueError where such a file is another's: it begins otherwise.
        """
        files = {folder / f"{name}.md": self.markdown}
        if self.rows is not None:
            files[folder / f"{name}.csv"] = csv_text(self.rows)
        for path, content in files.items():
            # The rest of a title has sizes, which may change.
            start = content.partition("\n")[0][:12]
            if path.exists() and not path.read_bytes().startswith(start.encode()):
                raise ValueError(
                    f"{path} must be a new file, or this table's, which begins with {start!r}, "
                    "got another; move it away, or give another folder"
                )
        for path, content in files.items():
            with atomic_write(path) as file:
                file.write(content.encode())
        return tuple(files)


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
    asked: Sequence[Planned],
    budget: Budget,
    root: Path,
    out: Path,
    data_dir: Path | None = None,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    deadline: Deadline = NEVER,
    results: Path | None = None,
    again: str = "",
) -> Reproduced:
    """Run what is not done of a plan, and write its table to `out`, anew after every run.

    `asked`: what `plan` gives, of agents `agents.plan`, whose `name` is MINIGRID and whose table
    has these runs alone. Another table has all rows that have a run in `root`, whoever made it,
    so that several programs with models of their own agree on it.
    A run that was stopped is gone on with. One that diverged stays failed, and is shown so.
    `jobs`: runs at a time on the device, each in a process of its own. One that ends with an error
    leaves the others alone; with one job the error is raised here.
    `executor`: what makes the runs, in place of this machine.
    `deadline`: all runs have stopped by then, saved, and those not begun yet are left.
    `results`: a CSV file that takes the figures of all runs, see `riglstm.lab.tables.rows`.
    `again`: the command that goes on, for whoever stops it.
    """

    def render() -> Rendered:
        if name == MINIGRID:
            text, found = agents.text(asked)
        else:
            table, found = table_of_runs(name, begun(name, asked, budget, root), budget)
            text = markdown(text_table(table))
        if results is not None:
            rows.append(results, found)
        return Rendered(text, found)

    file = name if name == MINIGRID else stem(name, budget, asked[0].spec.fit.precision)
    waiting = unfinished(asked)
    # Runs that are fewer share the cores among themselves alone.
    jobs = max(1, min(jobs, len(waiting)))
    if jobs > 1 or executor is not None:
        open_data(waiting, data_dir)
    make = partial(run, data_dir=data_dir, deadline=deadline, jobs=jobs)
    if executor is None:
        executor = InProcess(deadline) if jobs == 1 else Processes(jobs, deadline)
    return complete(asked, make, render, out, file, executor, again)


def unfinished(asked: Sequence[Planned]) -> list[Planned]:
    """The runs that are to be made."""
    return [p for p in asked if p.state in ("new", "partial")]


def complete(
    asked: Sequence[Planned],
    make: Make,
    render: Callable[[], Rendered],
    out: Path,
    file: str,
    executor: Executor,
    again: str = "",
) -> Reproduced:
    """Make the runs that are not done, and write the table anew after each, where it is cheap."""
    # What is wrong with the files that take the figures is said before hours of training.
    render().write(out, file)
    rested = 0.0

    def ended(_: Planned) -> None:
        # All rows are made anew from all folders: of a thousand runs, that takes seconds. What is
        # put off here is written at the end, or by the next command.
        nonlocal rested
        began = time.monotonic()
        if began >= rested:
            render().write(out, file)
            now = time.monotonic()
            rested = now + SELDOM * (now - began)

    try:
        errors = make_runs(unfinished(asked), make, executor, ended, again)
    except BaseException:
        # What ended the runs is what is told.
        with contextlib.suppress(OSError, ValueError):
            render().write(out, file)
        raise
    rendered = render()
    paths = rendered.write(out, file)
    states = [p.state for p in asked]
    return Reproduced(
        rendered,
        paths,
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
