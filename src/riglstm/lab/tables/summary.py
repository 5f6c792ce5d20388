"""Tables from files of results alone: of each the newest recipe, over all its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from riglstm.lab.tables import rows
from riglstm.lab.tables.entries import Budget, Recipe
from riglstm.lab.tables.fill import RULES, duration, extent, words
from riglstm.lab.tables.paper import figure
from riglstm.lab.tables.result import CHOSEN
from riglstm.lab.tables.rows import ResultRow
from riglstm.lab.tables.sheet import Cell, Line, Sheet, differing
from riglstm.lab.tables.tables import TABLES, Table


def read_all(folder: Path) -> list[ResultRow]:
    """The rows of all CSV files in a folder, in the order of their names."""
    return rows.read(*sorted(folder.glob("*.csv")))


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
    known = _named(table, found[-1].budget)
    budget, recipe = known or (None, None)
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
        budget=budget,
        best=table.best,
        higher_is_better=table.higher_is_better,
    )
    seeds = [] if recipe is None else list(range(recipe.seeds))
    return replace(made, notes=_notes(made, found, _how(found[-1]), seeds))


def _line(
    name: str, table: Table, found: Sequence[ResultRow], home: str, conditions: Sequence[str]
) -> Line:
    setting, model, budget = found[-1].setting, found[-1].model, found[-1].budget
    recipe = _named(table, budget)
    known = None if recipe is None else recipe[1].rows.get(model)
    printed = {c: figure(name, setting, model, c) for c in conditions}
    tested = [row for row in found if row.metric != rows.FAILED]
    # One that has figures has been trained anew since.
    failed = len({row.run for row in found} - {row.run for row in tested})

    def cell(condition: str, chooser: str) -> Cell:
        values = {
            row.seed: table.scale * row.value
            for row in tested
            if (_condition(row), row.chosen_on) == (condition, f"{CHOSEN}{chooser}")
        }
        return Cell(tuple(values[seed] for seed in sorted(values)), failed)

    updates = sorted({row.updates for row in tested})
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
    sheet: Sheet, found: Sequence[ResultRow], how: tuple[str, str], planned: Sequence[int]
) -> tuple[str, ...]:
    table = TABLES[sheet.name]
    runs = {row.run: row for row in found}.values()
    updates = sorted({row.updates for row in runs})
    # A run that was gone on with may have several.
    commits = [c for row in runs for c in (row.commit or "unknown").split(", then ")]
    mixed = {"budget", "precision"}.intersection(differing(sheet))
    other = " A model without such runs is shown by its own newest ones, as its columns say."
    rest = not_run(sheet)
    return (
        f"{table.measure[0].upper()}{table.measure[1:]}. {RULES}",
        f"{len(runs)} runs of {extent(updates)} updates took "
        f"{duration(sum(row.seconds for row in runs))} in all, up to "
        f"{max(row.jobs for row in runs)} of them at a time, on "
        f"{words(row.device for row in runs)} in {words(row.precision for row in runs)}. "
        f"Commits: {words(commit[:7] for commit in commits)}.",
        f"The table shows the recipe and precision of its newest run: {how[0]}, {how[1]}."
        f"{other if mixed else ''}",
        _seeds(sheet, found, planned),
        *([f"Not run yet: {rest}."] if rest else []),
        *table.notes,
    )


def _seeds(sheet: Sheet, found: Sequence[ResultRow], planned: Sequence[int]) -> str:
    """Those of the recipe, and of each line that has others."""
    done = {row.run for row in found if row.metric != rows.FAILED}
    usual = ", ".join(map(str, planned))
    said = [f"Seeds: {usual}"] if usual else ["Seeds"]
    for line in sheet.lines:
        own = {
            row.seed: row.run in done
            for row in found
            if (row.setting, row.model) == (line.setting, line.row)
        }
        seeds = ", ".join(f"{seed}{'' if own[seed] else ' (failed)'}" for seed in sorted(own))
        name = line.label if sheet.settings is None else f"{line.setting} {line.label}"
        said += [f"{name}: {seeds}"] if seeds != usual else []
    return f"{'; '.join(said)}."


def not_run(sheet: Sheet) -> str:
    """Models and settings of the table's recipe that have no run in it; empty: all have."""
    if sheet.budget is None:
        return ""
    how = TABLES[sheet.name].recipes[sheet.budget]
    runs = {
        (line.setting, line.row) for line in sheet.lines if line.made.get("budget") == sheet.budget
    }
    settings, models = {setting for setting, _ in runs}, {row for _, row in runs}
    labels = {key: how.rows[key].label for key in how.models}
    single = [
        f"{label} in {setting}"
        for setting in how.settings
        for key, label in labels.items()
        if setting in settings and key in models and (setting, key) not in runs
    ]
    parts = (
        [label for key, label in labels.items() if key not in models],
        [setting for setting in how.settings if setting not in settings],
        single,
    )
    return "; ".join(", ".join(part) for part in parts if part)


def _named(table: Table, budget: str) -> tuple[Budget, Recipe] | None:
    """None: one that there was, and is no more."""
    return next((found for found in table.recipes.items() if found[0] == budget), None)


def _home(setting: str, found: Sequence[ResultRow], recipe: Recipe | None) -> str:
    """The condition of the training data: what chose the first figure, or the recipe's."""
    for row in found:
        if row.metric != rows.FAILED:
            return row.chosen_on.removeprefix(CHOSEN)
    known = None if recipe is None else recipe.settings.get(setting)
    return setting if known is None else known.trained_on


def _how(row: ResultRow) -> tuple[str, str]:
    return row.budget, row.precision


def _condition(row: ResultRow) -> str:
    return row.metric.partition("@")[2]


def _ordered(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Names once each: those of a known order first."""
    there, known = dict.fromkeys(names), dict.fromkeys(order)
    return [*(name for name in known if name in there), *(n for n in there if n not in known)]
