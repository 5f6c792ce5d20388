"""From the folders of a table's runs to its sheet: the figures, and what must be said with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from riglstm.lab.tables.entries import Budget, Recipe
from riglstm.lab.tables.paper import figure
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.read_run import read_record
from riglstm.lab.tables.render import number
from riglstm.lab.tables.result import CHOSEN, RunError, read_cost
from riglstm.lab.tables.rows import FAILED, ResultRow
from riglstm.lab.tables.run import most_jobs, sessions
from riglstm.lab.tables.sheet import ENOUGH, Cell, Line, Sheet
from riglstm.lab.tables.tables import Table, recipe, table
from riglstm.lab.train.folder import RunFolder

RULES = (
    f"Mean ± standard deviation (with n − 1); fewer than {ENOUGH} runs are shown one by one, and "
    "the best mean is bold. Checkpoints are chosen on validation data of the training condition. "
    "“Best checkpoint at” a test condition means chosen on validation data of that condition, the "
    "rule of earlier papers."
)
"""What is said with every table of runs."""


class Read(NamedTuple):
    """A planned run, and what its folder says."""

    planned: Planned
    result: Mapping[str, Any] | None
    """None: it has none, or none yet."""
    reason: str = ""
    """Why it failed."""


def read(planned: Planned) -> Read:
    """The result of a run, or why it has none."""
    if planned.state in ("done", "failed"):
        record = read_record(planned.folder, curves=False)
        return Read(planned, record.result, record.reason)
    return Read(planned, None)


def sheet(
    name: str, planned: Sequence[Planned], budget: Budget, runs: Sequence[Read] | None = None
) -> Sheet:
    """A table with the figures that are there; `runs`: the planned ones, where they are read."""
    what, how = table(name), recipe(name, budget)
    runs = [read(p) for p in planned] if runs is None else runs
    trained_on = {key: setting.trained_on for key, setting in how.settings.items()}
    conditions = tuple(dict.fromkeys((*trained_on.values(), *how.conditions)))
    lines = []
    for setting in how.settings:
        for key in how.rows:
            group = [r for r in runs if (r.planned.setting, r.planned.row) == (setting, key)]
            if group:
                lines.append(_line(name, budget, setting, key, group, conditions))
        lines += _yardsticks(what, setting, runs)
    absent = [row.label for key, row in how.rows.items() if key not in {p.row for p in planned}]
    size = sizes(how, planned)
    only = next(iter(trained_on.values())) if len(trained_on) == 1 else None
    title = what.title if only is None else f"{what.title}, trained on {only}"
    if budget == "quick":
        title = f"{what.title} at quick sizes, not the paper's: {size}"
    return Sheet(
        name=name,
        title=title,
        settings=None if only else what.settings,
        conditions=conditions,
        trained_on=trained_on,
        lines=tuple(lines),
        notes=tuple(_notes(what, size, budget, runs, absent)),
        budget=budget,
        precision=planned[0].spec.fit.precision if planned else None,
        best=what.best,
        higher_is_better=what.higher_is_better,
    )


def result_rows(name: str, planned: Sequence[Planned], budget: Budget) -> list[ResultRow]:
    """All figures of the runs that are done, and a row of each that failed, for a file."""
    return [row for run in map(read, planned) for row in _result_rows(name, run, budget)]


def _result_rows(name: str, run: Read, budget: Budget) -> list[ResultRow]:
    planned, folder = run.planned, RunFolder(run.planned.folder)
    if run.result is not None:
        figures = [
            (f"{row['metric']}@{row['condition']}", row["value"], row["chosen_on"])
            for row in run.result["rows"]
        ]
        said: Mapping[str, Any] = run.result
    elif planned.state == "failed":
        figures = [(FAILED, 1.0, "")]
        said = {
            **read_cost(folder),
            **{key: sessions(folder, key) for key in ("device", "commit")},
            "jobs": most_jobs(folder),
        }
    else:
        return []
    return [
        ResultRow(
            table=name,
            model=planned.row,
            seed=planned.spec.seed,
            metric=metric,
            value=value,
            chosen_on=chosen_on,
            updates=said["updates"],
            seconds=said["seconds"],
            device=said.get("device") or "",
            commit=said.get("commit") or "",
            budget=budget,
            setting=planned.setting,
            precision=planned.spec.fit.precision,
            jobs=said.get("jobs", 1),
            recipe=planned.spec.recipe(),
            run=planned.folder.name,
        )
        for metric, value, chosen_on in figures
    ]


def sizes(how: Recipe, planned: Iterable[Planned]) -> str:
    """What a recipe trains in some of its runs, in figures."""
    planned = list(planned)
    widths = sorted({how.rows[p.row].hidden_size for p in planned})
    said = [f"width {' and '.join(map(str, widths))}"]
    said += [f"{key}={value}" for key, value in how.task.items() if key != "input_size"]
    fit = how.fit
    said += [f"{fit.updates:,} updates", f"lr={fit.lr:g}"]
    more = (
        (fit.warmup, f"a warm-up of {fit.warmup}"),
        (fit.decay != "none", f"a {fit.decay} decay"),
        (fit.flood, f"a flood of {fit.flood:g}"),
        (fit.average, f"weights averaged by {fit.average}"),
    )
    said += [text for on, text in more if on]
    own: dict[str, None] = {}
    for p in planned:
        row = how.rows[p.row]
        everywhere, here = {**row.task, **row.fit}, row.own_in(p.setting)
        for where, changed in (("", everywhere), (f" in {p.setting}", here)):
            figures = ", ".join(f"{k}={v}" for k, v in changed.items() if k != "input_size")
            if figures:
                own[f"; {row.label}{where}: {figures}"] = None
    return ", ".join(said) + "".join(own)


def _line(
    name: str,
    budget: Budget,
    setting: str,
    key: str,
    group: Sequence[Read],
    conditions: Sequence[str],
) -> Line:
    how, scale = recipe(name, budget), table(name).scale
    home, row = how.settings[setting].trained_on, how.rows[key]
    printed = {c: figure(name, setting, key, c) for c in conditions} if budget != "quick" else {}
    return Line(
        setting=setting,
        row=key,
        label=row.label,
        cells=row.cells,
        width=row.hidden_size,
        updates=group[0].planned.spec.fit.updates,
        ours={c: _cell(group, c, home, scale) for c in conditions},
        there={c: _cell(group, c, c, scale) for c in conditions},
        paper={c: text for c, text in printed.items() if text is not None},
    )


def _cell(group: Sequence[Read], condition: str, chooser: str, scale: float) -> Cell:
    values = [
        scale * figure_of(run.result, condition, chooser, run.planned.folder)
        for run in group
        if run.result is not None
    ]
    failed = sum(run.planned.state == "failed" for run in group)
    return Cell(tuple(values), failed, len(group) - len(values) - failed)


def figure_of(result: Mapping[str, Any], condition: str, chooser: str, folder: Path) -> float:
    """A run's figure in a condition; raises RunError where it has none, or two."""
    found: list[float] = [
        row["value"]
        for row in result["rows"]
        if (row["condition"], row["chosen_on"]) == (condition, f"{CHOSEN}{chooser}")
    ]
    if len(found) != 1:
        raise RunError(
            f"the result of {folder} must have one figure for {condition}, "
            f"chosen on {chooser}, got {len(found)}; delete the folder, and run it anew"
        )
    return found[0]


def check_figures(result: Mapping[str, Any], how: Recipe, setting: str, folder: Path) -> None:
    """Raise RunError for a result that lacks a figure of its row of a table."""
    home = how.settings[setting].trained_on
    homes = (known.trained_on for known in how.settings.values())
    for condition in dict.fromkeys((*homes, *how.conditions)):
        for chooser in (home, condition):
            figure_of(result, condition, chooser, folder)


def _yardsticks(what: Table, setting: str, runs: Sequence[Read]) -> list[Line]:
    """Figures that need no model; they are the same in every run of a setting."""
    for run in runs:
        if run.planned.setting == setting and run.result and "yardsticks" in run.result:
            by_condition: dict[str, dict[str, float]] = run.result["yardsticks"]
            names = dict.fromkeys(name for found in by_condition.values() for name in found)
            return [
                Line(
                    *(setting, name, f"no model: {name}", "–"),
                    ours={
                        c: Cell((what.scale * found[name],), exact=True)
                        for c, found in by_condition.items()
                    },
                )
                for name in names
            ]
    return []


def _notes(
    what: Table, size: str, budget: Budget, runs: Sequence[Read], absent: Sequence[str]
) -> list[str]:
    done = [(run, run.result) for run in runs if run.result is not None]
    notes = [
        f"{what.measure[0].upper()}{what.measure[1:]}. {RULES}",
    ]
    if done:
        updates = sorted({result["updates"] for _, result in done})
        seeds = sorted({run.planned.spec.seed for run, _ in done})
        seconds = sum(result["seconds"] for _, result in done)
        notes.append(
            f"Seeds {words(map(str, seeds))}; {extent(updates)} updates; "
            f"{duration(seconds)} in all on {_places(done, 'device')}, "
            f"in {words({run.planned.spec.fit.precision for run, _ in done})}; "
            f"commit {_places(done, 'commit')}."
        )
    for run in runs:
        if run.reason:
            # What follows is advice, and where things lie on the machine of the run.
            reason, *_ = run.reason.partition(";")
            where = f"{run.planned.row}, {run.planned.setting}, seed {run.planned.spec.seed}"
            notes.append(f"Failed: {where}: {reason} ({run.planned.folder.name}).")
    if absent:
        notes.append(f"Rows without a run, left out: {', '.join(absent)}.")
    if budget == "quick":
        notes.append(
            "Small models, little data, few updates: this shows that the path from data to table "
            "works. The paper's figures are not comparable and left out; the budget “paper” sets "
            "them beside ours."
        )
    else:
        notes += [f"Recipe: {size}.", *what.notes]
    return notes


def _places(done: Sequence[tuple[Read, Mapping[str, Any]]], name: str) -> str:
    return words({result.get(name) or "unknown" for _, result in done})


def extent(numbers: Sequence[int]) -> str:
    """Of sorted numbers, for a note."""
    low, high = numbers[0], numbers[-1]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def duration(seconds: float) -> str:
    """For a note."""
    return f"{seconds:.0f} s" if seconds < 3600 else f"{number(seconds / 3600)} h"


def words(names: Iterable[str]) -> str:
    """Each once, for a note."""
    return ", ".join(sorted(set(names)))
