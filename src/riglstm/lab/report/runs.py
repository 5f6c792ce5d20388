"""Run folders for a page: found, read, and put into groups of one table and one figure each.

A paper's table is recognised by its runs' configurations, wherever their folders lie; other runs
are grouped by task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from riglstm.lab.tables.plan import Planned, plan
from riglstm.lab.tables.recipes import TABLES, Budget, recipe
from riglstm.lab.tables.result import CHOSEN, Record, read_record, rows_of
from riglstm.lab.tables.table import RULES, Table, line, table_of_runs, yardsticks
from riglstm.models import MODELS

LEARNING = ("batch_size", "dropout", "input_size", "loss_on", "conditions")
"""Options of tasks that change how a model learns, or where it is tested, and not the data."""
UNSAID = ("seed", "conditions", "evaluate_every", "checkpoint_every", "log_every")
"""Options by which runs of one line of a table may differ."""


def find(paths: Sequence[Path | str]) -> list[Path]:
    """All run folders in the folders given, or these themselves; each once."""
    found: dict[Path, None] = {}
    for given in map(Path, paths):
        if not given.is_dir():
            raise ValueError(
                f"{given} must be the folder of a run, or a folder of such folders, got "
                f"{'a file' if given.exists() else 'nothing of that name'}"
            )
        found |= dict.fromkeys(sorted(path.parent for path in given.rglob("config.json")))
    if not found:
        raise ValueError(
            "expected runs, which are folders with a config.json, got none in "
            f"{', '.join(map(str, paths)) or 'no folder at all'}; train one with "
            "`riglstm train` or `riglstm reproduce` first"
        )
    return list(found)


def read(paths: Sequence[Path | str]) -> tuple[list[Record], list[str]]:
    """All runs in the folders given, and a line on each that cannot be read."""
    found, unread = list[Record](), list[str]()
    for path in find(paths):
        try:
            found.append(read_record(path))
        except ValueError as error:
            unread.append(f"{path} cannot be read: {error}")
    if not found:
        raise ValueError(f"expected runs, got none that can be read: {'; '.join(unread)}")
    return found, unread


def without_copies(runs: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Every run once, and a line on each copy: one run counted twice would narrow the spread.

    Of copies the first that is done stays, or the first of all where none is.
    """
    kept: dict[str, Record] = {}
    for run in sorted(runs, key=lambda run: run.state != "done"):
        kept.setdefault(run.spec.digest(), run)
    first = [kept[run.spec.digest()] for run in runs]
    said = [
        f"{run.path}: left out, the same run as {one.path} (configuration and seed)"
        for run, one in zip(runs, first, strict=True)
        if run is not one
    ]
    return [run for run, one in zip(runs, first, strict=True) if run is one], said


@dataclass(frozen=True)
class Group:
    """A table with its figures, and the runs that they are from."""

    table: Table
    scale: float
    """Factor from the recorded figure to the printed one."""
    runs: Mapping[tuple[str, str], Sequence[Record]]
    """By setting and label, as in the table's lines."""


def group(records: Sequence[Record]) -> list[Group]:
    """All groups; each run is in one at least, unless it has measured nothing yet."""
    by_path = {record.path: record for record in records}
    groups, shown = list[Group](), set[Path]()
    for name, budget, runs in _tables(records):
        # Tables share some runs.
        if shown.issuperset(run.folder for run in runs):
            continue
        own: dict[tuple[str, str], list[Record]] = {}
        for run in runs:
            shown.add(run.folder)
            key = run.setting, recipe(name, budget).rows[run.row].label
            own.setdefault(key, []).append(by_path[run.folder])
        table, _ = table_of_runs(name, runs, budget, by_path)
        groups.append(Group(table, TABLES[name].metric.scale, own))
    rest: dict[str, list[Record]] = {}
    for record in records:
        if record.path not in shown and record.trained_on is not None:
            rest.setdefault(json.dumps(_data(record), sort_keys=True), []).append(record)
    names = _headings([_data(runs[0]) for runs in rest.values()])
    return [*groups, *map(_by_task, names, rest.values())]


def _tables(records: Sequence[Record]) -> list[tuple[str, Budget, list[Planned]]]:
    """The runs that each table has here in each of its recipes; those with most come first."""
    by_recipe: dict[str, list[Record]] = {}
    for record in records:
        by_recipe.setdefault(record.spec.recipe(), []).append(record)
    precisions = dict.fromkeys(record.spec.fit.precision for record in records)
    found = []
    for name, what in TABLES.items():
        for budget, precision in product(what.recipes, precisions):
            rows = list(recipe(name, budget).rows)
            runs = [
                Planned(record.spec, record.path, planned.setting, planned.row)
                for planned in plan(name, rows, 1, budget, precision=precision)
                for record in by_recipe.get(planned.spec.recipe(), [])
            ]
            found.append((name, budget, runs))
    return sorted(found, key=lambda table: -len(table[2]))


def _data(record: Record) -> dict[str, Any]:
    """What runs have to have in common for their figures to be compared."""
    options = record.spec.resolved()["task_options"]
    known = {"task": record.spec.task, "metric": record.metric}
    return known | {k: v for k, v in options.items() if k not in LEARNING}


def _headings(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The task of each, and in brackets the data in which those of that task differ."""
    titles = {table.task: table.title for table in reversed(TABLES.values())}
    said = []
    for one, own in zip(found, differing(found, "task"), strict=True):
        words = [
            f"{name.replace('_', ' ')} {f'{value:,}' if type(value) is int else value}"
            for name, value in own.items()
        ]
        title = titles.get(one["task"], one["task"])
        said.append(f"{title} ({', '.join(words)})" if words else title)
    return said


def differing(found: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Of each what is not the same in all that are of its kind."""
    return [
        {
            name: value
            for name, value in one.items()
            if any(other.get(name) != value for other in found if other[kind] == one[kind])
        }
        for one in found
    ]


METRICS = {
    "accuracy": ("test accuracy in %", True, 100.0),
    "bce": ("100 × BCE in nats per pixel and frame", False, 100.0),
}
"""How metrics of tasks are printed, whether more is better, their factor.

Another task's is printed as it is, and its results say whether more is better."""


def _by_task(title: str, runs: Sequence[Record]) -> Group:
    """Runs that are in no table of the paper: each configuration is a line, its seeds together."""
    runs = sorted(runs, key=lambda r: (list(MODELS).index(r.spec.model), r.spec.seed))
    trained_on, metric = str(runs[0].trained_on), str(runs[0].metric)
    higher = all(r.result.get("higher_is_better", True) for r in runs)
    measure, higher_is_better, scale = METRICS.get(metric, (f"test {metric}", higher, 1.0))
    tested = [row["condition"] for record in runs for row in record.rows]
    validated = (c for record in runs for c in record.validated)
    conditions = tuple(dict.fromkeys((trained_on, *tested, *validated)))
    by_label: dict[tuple[str, str], list[Record]] = {}
    for name, record in zip(label([r.spec.identity() for r in runs]), runs, strict=True):
        by_label.setdefault((trained_on, name), []).append(record)
    place = {"table": runs[0].spec.task, "budget": "", "setting": trained_on}
    lines = [
        line(
            [
                row
                for record in own
                for row in rows_of(record, **place, model=name, run=str(record.path))
            ],
            *(conditions, f"{CHOSEN}{trained_on}", scale),
            missing=sum(record.state == "partial" for record in own),
            setting=trained_on,
            label=name,
        )
        for (_, name), own in by_label.items()
    ]
    table = Table(
        name=runs[0].spec.task,
        title=f"{title}, trained on {trained_on}",
        measure=measure,
        conditions=conditions,
        trained_on={trained_on: trained_on},
        lines=(*lines, *yardsticks(runs, conditions, trained_on, scale)),
        notes=(RULES,),
        higher_is_better=higher_is_better,
    )
    return Group(table, scale, by_label)


def label(identities: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each: its model, and the options in which those of that model differ."""
    flat = [_flat(identity) for identity in identities]
    return [
        " ".join([one["model"], *(f"{n}={v}" for n, v in own.items() if v is not None)])
        for one, own in zip(flat, differing(flat, "model"), strict=True)
    ]


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """All options under one name each, but for what does not set lines apart."""
    flat: dict[str, Any] = {}
    for name, value in identity.items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    if flat.get("soft_update") is False:
        # It has nothing to act on, and is 1 in all such runs.
        flat.pop("update_scale", None)
    return {name: value for name, value in flat.items() if name not in UNSAID}
