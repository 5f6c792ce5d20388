"""Tables from files of results alone: of each the newest recipe, over all its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from riglstm.experiments import rows
from riglstm.experiments.fill import duration, extent, words
from riglstm.experiments.paper import figure, value
from riglstm.experiments.recipes import Recipe
from riglstm.experiments.render import number
from riglstm.experiments.result import CHOSEN
from riglstm.experiments.rows import ResultRow
from riglstm.experiments.sheet import Cell, Line, Sheet, differing
from riglstm.experiments.tables import TABLES, Table

OURS = "riglstm"
"""The row that is compared with the paper's, cell by cell."""
ABLATION = "ablation"
"""The table whose rows are variants of one model."""


def read_all(folder: Path) -> list[ResultRow]:
    """The rows of all CSV files in a folder, in the order of their names."""
    return [row for path in sorted(folder.glob("*.csv")) for row in rows.read(path)]


def newest(found: Sequence[ResultRow]) -> list[ResultRow]:
    """Of each table the budget and precision of its last row, and in these, of each model in each
    setting, the recipe of its last row; none of quick sizes.

    A model without such rows in a setting keeps its own last recipe: the table says so.
    """
    full = [row for row in found if row.budget != "quick"]
    how = {row.table: _how(row) for row in full}
    last: dict[tuple[str, str, str], str] = {}
    # Those of the table's budget and precision after all others, each in their order.
    for row in sorted(full, key=lambda row: _how(row) == how[row.table]):
        last[row.table, row.setting, row.model] = row.recipe
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
    recipe = _recipe(table, found[-1].budget)
    homes = {
        setting: _home(setting, [row for row in found if row.setting == setting], recipe)
        for setting in _ordered(
            (row.setting for row in found), (s for r in table.recipes.values() for s in r.settings)
        )
    }
    order = [key for known in table.recipes.values() for key in known.rows]
    models = _ordered((row.model for row in found), order)
    tested = [_condition(row) for row in found if row.metric != rows.FAILED]
    if not tested and recipe is not None:
        tested = list(recipe.conditions)
    conditions = tuple(dict.fromkeys((*homes.values(), *tested)))
    lines = [
        _line(name, table, own, homes[setting], conditions)
        for setting in homes
        for model in models
        if (own := [row for row in found if (row.setting, row.model) == (setting, model)])
    ]
    several = len(homes) > 1 or (recipe is not None and len(recipe.settings) > 1)
    made = Sheet(
        name=name,
        title=table.title,
        settings=table.settings if several else None,
        conditions=conditions,
        trained_on=homes,
        lines=tuple(lines),
        best=table.best,
        higher_is_better=table.higher_is_better,
    )
    return replace(made, notes=_notes(table, found, _how(found[-1]), differing(made)))


def _line(
    name: str, table: Table, found: Sequence[ResultRow], home: str, conditions: Sequence[str]
) -> Line:
    setting, model, budget = found[-1].setting, found[-1].model, found[-1].budget
    recipe = _recipe(table, budget)
    known = None if recipe is None else recipe.rows.get(model)
    printed = {c: figure(name, setting, model, c) for c in conditions}
    figures = [row for row in found if row.metric != rows.FAILED]
    # One that has figures has been trained anew since.
    failed = len({row.run for row in found} - {row.run for row in figures})

    def cell(condition: str, chooser: str) -> Cell:
        values = {
            row.seed: table.scale * row.value
            for row in figures
            if (_condition(row), row.chosen_on) == (condition, f"{CHOSEN}{chooser}")
        }
        return Cell(tuple(values[seed] for seed in sorted(values)), failed)

    updates = sorted({row.updates for row in figures})
    return Line(
        *(setting, model),
        label=model if known is None else known.label,
        cells="–" if known is None else known.cells,
        ours={c: cell(c, home) for c in conditions},
        there={c: cell(c, c) for c in conditions},
        paper={c: text for c, text in printed.items() if text is not None},
        made={
            "budget": budget,
            "precision": found[-1].precision,
            "updates": extent(updates) if updates else "–",
        },
    )


def _notes(
    table: Table, found: Sequence[ResultRow], how: tuple[str, str], differ: Sequence[str]
) -> tuple[str, ...]:
    runs = {row.run: row for row in found}.values()
    updates = sorted({row.updates for row in runs})
    shared = max(row.jobs for row in runs)
    recipe = f"budget {how[0]}, in {how[1]}, as the last run of the table"
    if {"budget", "precision"}.intersection(differ):
        recipe += "; a model without runs of it is shown by its own last ones, as columns say"
    return (
        f"{table.measure[0].upper()}{table.measure[1:]}; mean ± standard deviation (runs), with "
        "n − 1. Checkpoints are chosen on validation data of the training condition; columns "
        "“chosen on it”: on validation data of the test condition, the rule of earlier papers.",
        f"{len(runs)} runs of {extent(updates)} updates; "
        f"{duration(sum(row.seconds for row in runs))} in all, up to {shared} at a time, "
        f"on {words(row.device for row in runs)}, in {words(row.precision for row in runs)}; "
        f"commit {words(row.commit or 'unknown' for row in runs)}.",
        f"Recipe: {recipe}.",
        *table.notes,
    )


def worse_than_paper(found: Sequence[Sheet]) -> list[str] | None:
    """Our model's cells whose mean is worse than the paper's, and by how much; None: it has none.

    As printed: what looks equal is equal.
    """
    said, compared = [], False
    for sheet in found:
        sign = 1 if sheet.higher_is_better else -1
        for line in sheet.lines:
            for condition, printed in line.paper.items() if line.row == OURS else ():
                cell = line.ours[condition]
                if cell.values:
                    compared = True
                    gap = sign * (round(value(printed), 1) - round(cell.mean, 1))
                    if round(gap, 1) > 0:
                        said.append(f"{head(sheet, line.setting)}, {condition}: by {number(gap)}")
    return list(dict.fromkeys(said)) if compared else None


def head(sheet: Sheet, setting: str) -> str:
    """A table, or one of its settings."""
    return sheet.title if sheet.settings is None else f"{sheet.title}, {setting}"


def _home(setting: str, found: Sequence[ResultRow], recipe: Recipe | None) -> str:
    """The condition of the training data: what chose the first figure, or the recipe's."""
    for row in found:
        if row.metric != rows.FAILED:
            return row.chosen_on.removeprefix(CHOSEN)
    known = None if recipe is None else recipe.settings.get(setting)
    return setting if known is None else known.trained_on


def _how(row: ResultRow) -> tuple[str, str]:
    return row.budget, row.precision


def _recipe(table: Table, budget: str) -> Recipe | None:
    """None: one that there was, and is no more."""
    return next((recipe for name, recipe in table.recipes.items() if name == budget), None)


def _condition(row: ResultRow) -> str:
    return row.metric.partition("@")[2]


def _ordered(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Names once each: those of a known order first."""
    there, known = dict.fromkeys(names), dict.fromkeys(order)
    return [*(name for name in known if name in there), *(n for n in there if n not in known)]
