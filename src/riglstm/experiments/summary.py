"""Tables from files of results alone: of each model the newest recipe, over all its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from riglstm.experiments import rows
from riglstm.experiments.fill import duration, extent, words
from riglstm.experiments.paper import figure, value
from riglstm.experiments.render import number
from riglstm.experiments.result import CHOSEN
from riglstm.experiments.rows import ResultRow
from riglstm.experiments.sheet import Cell, Line, Sheet
from riglstm.experiments.tables import TABLES, Table

OURS = "riglstm"
"""The row that is compared with the paper's, cell by cell."""
ABLATION = "ablation"
"""The table whose rows are variants of one model."""


def read_all(folder: Path) -> list[ResultRow]:
    """The rows of all CSV files in a folder, in the order of their names."""
    return [row for path in sorted(folder.glob("*.csv")) for row in rows.read(path)]


def newest(found: Sequence[ResultRow]) -> list[ResultRow]:
    """Of each model in each setting the runs of its last row's recipe; none of quick sizes."""
    full = [row for row in found if row.budget != "quick"]
    last = {(row.table, row.setting, row.model): row.recipe for row in full}
    return [row for row in full if last[row.table, row.setting, row.model] == row.recipe]


def sheets(found: Sequence[ResultRow]) -> list[Sheet]:
    """A sheet for each table that has rows."""
    kept = newest(found)
    return [
        _sheet(name, table, own)
        for name, table in TABLES.items()
        if (own := [row for row in kept if row.table == name])
    ]


def _sheet(name: str, table: Table, found: Sequence[ResultRow]) -> Sheet:
    homes = {
        setting: _home([row for row in found if row.setting == setting])
        for setting in _ordered(
            (row.setting for row in found), (s for r in table.recipes.values() for s in r.settings)
        )
    }
    order = [key for recipe in table.recipes.values() for key in recipe.rows]
    models = _ordered((row.model for row in found), order)
    conditions = dict.fromkeys((*homes.values(), *(_condition(row) for row in found)))
    lines = [
        _line(name, table, own, homes[setting], tuple(conditions))
        for setting in homes
        for model in models
        if (own := [row for row in found if (row.setting, row.model) == (setting, model)])
    ]
    return Sheet(
        name=name,
        title=table.title,
        settings=table.settings if len(homes) > 1 else None,
        conditions=tuple(conditions),
        trained_on=homes,
        lines=tuple(lines),
        notes=_notes(table, found),
        best=table.best,
        higher_is_better=table.higher_is_better,
    )


def _line(
    name: str, table: Table, found: Sequence[ResultRow], home: str, conditions: Sequence[str]
) -> Line:
    setting, model = found[0].setting, found[0].model
    known = [recipe.rows[model] for recipe in table.recipes.values() if model in recipe.rows]
    printed = {c: figure(name, setting, model, c) for c in conditions}

    def cell(condition: str, chooser: str) -> Cell:
        values = {
            row.seed: table.scale * row.value
            for row in found
            if (_condition(row), row.chosen_on) == (condition, f"{CHOSEN}{chooser}")
        }
        return Cell(tuple(values[seed] for seed in sorted(values)))

    return Line(
        *(setting, model),
        label=known[-1].label if known else model,
        cells=known[-1].cells if known else "–",
        ours={c: cell(c, home) for c in conditions},
        there={c: cell(c, c) for c in conditions},
        paper={c: text for c, text in printed.items() if text is not None},
    )


def _notes(table: Table, found: Sequence[ResultRow]) -> tuple[str, ...]:
    runs = {row.run: row for row in found}.values()
    updates = sorted({row.updates for row in runs})
    shared = max(row.jobs for row in runs)
    return (
        f"{table.measure[0].upper()}{table.measure[1:]}; mean ± standard deviation (runs), with "
        "n − 1. Checkpoints are chosen on validation data of the training condition; columns "
        "“chosen on it”: on validation data of the test condition, the rule of earlier papers.",
        f"{len(runs)} runs of {extent(updates)} updates; "
        f"{duration(sum(row.seconds for row in runs))} in all, up to {shared} at a time, "
        f"on {words(row.device for row in runs)}, in {words(row.precision for row in runs)}; "
        f"commit {words(row.commit or 'unknown' for row in runs)}.",
        *table.notes,
    )


def below_paper(found: Sequence[Sheet]) -> list[str]:
    """Our model's cells whose mean is worse than the paper's, and by how much."""
    said = []
    for sheet in found:
        for line in sheet.lines:
            for condition, printed in line.paper.items() if line.row == OURS else ():
                cell = line.ours[condition]
                if cell.values:
                    sign = 1 if sheet.higher_is_better else -1
                    # As printed: what looks equal is equal.
                    gap = round(sign * (value(printed) - cell.mean), 1)
                    if gap > 0:
                        said.append(f"{head(sheet, line.setting)}, {condition}: by {number(gap)}")
    return list(dict.fromkeys(said))


def head(sheet: Sheet, setting: str) -> str:
    """A table, or one of its settings."""
    return sheet.title if sheet.settings is None else f"{sheet.title}, {setting}"


def _home(found: Sequence[ResultRow]) -> str:
    """The condition of the training data: what chose the first figure."""
    return found[0].chosen_on.removeprefix(CHOSEN)


def _condition(row: ResultRow) -> str:
    return row.metric.partition("@")[2]


def _ordered(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Names once each: those of a known order first."""
    there, known = dict.fromkeys(names), dict.fromkeys(order)
    return [*(name for name in known if name in there), *(n for n in there if n not in known)]
