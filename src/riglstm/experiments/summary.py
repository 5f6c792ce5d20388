"""Tables from files of results alone: of each the newest recipe, over all its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from riglstm.experiments import rows
from riglstm.experiments.claims import changes, link, named, not_run, otherwise
from riglstm.experiments.entries import Recipe
from riglstm.experiments.fill import duration, extent, words
from riglstm.experiments.paper import figure
from riglstm.experiments.render import number
from riglstm.experiments.result import CHOSEN
from riglstm.experiments.rows import ResultRow
from riglstm.experiments.sheet import ENOUGH, Cell, Line, Sheet, differing
from riglstm.experiments.tables import TABLES, Table


class Shown(Cell):
    """A cell that shows its runs where they are few."""

    def text(self) -> str:
        """With the number of runs."""
        if not self.values:
            return super().text()
        failed = f"; {self.failed} failed" if self.failed else ""
        return f"{figures(self)} ({len(self.values)}{failed})"


def figures(cell: Cell) -> str:
    """Mean ± sd, or of few runs their values, in the order of seeds; a dash where there is none."""
    if len(cell.values) < ENOUGH or cell.sd is None:
        return ", ".join(map(number, cell.values)) or "–"
    return f"{number(cell.mean)} ± {number(cell.sd)}"


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
    known = named(table, found[-1].budget)
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
    recipe = named(table, budget)
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
        return Shown(tuple(values[seed] for seed in sorted(values)), failed)

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
        recipe=found[-1].recipe,
    )


def _notes(
    sheet: Sheet, found: Sequence[ResultRow], how: tuple[str, str], planned: Sequence[int]
) -> tuple[str, ...]:
    table = TABLES[sheet.name]
    runs = {row.run: row for row in found}.values()
    updates = sorted({row.updates for row in runs})
    shared = max(row.jobs for row in runs)
    mixed = {"budget", "precision"}.intersection(differing(sheet))
    other = "; a model without runs of it is shown by its own last ones, as columns say"
    rest = not_run(sheet)
    return (
        f"{table.measure[0].upper()}{table.measure[1:]}; mean ± standard deviation (runs), with "
        f"n − 1, or of fewer than {ENOUGH} runs their values. Checkpoints are chosen on validation "
        "data of the training condition; columns “chosen on it”: on validation data of the test "
        "condition, the rule of earlier papers.",
        f"{len(runs)} runs of {extent(updates)} updates; "
        f"{duration(sum(row.seconds for row in runs))} in all, each by its own clock, up to "
        f"{shared} at a time by one command, on {words(row.device for row in runs)}, "
        f"in {words(row.precision for row in runs)}; "
        f"commit {words(row.commit or 'unknown' for row in runs)}.",
        f"Budget {how[0]}, in {how[1]}, as the last run of the table{other if mixed else ''}.",
        *(_recipe(sheet, budget) for budget in _budgets(sheet)),
        _seeds(sheet, found, planned),
        *([f"Not run yet: {rest}."] if rest else []),
        *table.notes,
    )


def _budgets(sheet: Sheet) -> list[str]:
    return list(dict.fromkeys(line.made["budget"] for line in sheet.lines))


def _recipe(sheet: Sheet, budget: str) -> str:
    """For a page in a folder of the repository."""
    changed = changes(sheet, budget)
    said = [f"{changed}."] if changed else []
    return " ".join((link(budget, changed, "../"), *said, *otherwise([sheet], budget)))


def _seeds(sheet: Sheet, found: Sequence[ResultRow], planned: Sequence[int]) -> str:
    """Of the runs of each line, and those of the recipe where one is missing."""
    done = {row.run for row in found if row.metric != rows.FAILED}
    by_line: dict[str, str] = {}
    missing = False
    for line in sheet.lines:
        own = {
            row.seed: row.run in done
            for row in found
            if (row.setting, row.model) == (line.setting, line.row)
        }
        missing |= not own.keys() >= set(planned)
        name = line.label if sheet.settings is None else f"{line.setting} {line.label}"
        by_line[name] = ", ".join(f"{s}{'' if own[s] else ' (failed)'}" for s in sorted(own))
    alike = len(set(by_line.values())) == 1
    said = (
        f"{next(iter(by_line.values()))} of each row"
        if alike
        else "; ".join(f"{name} {seeds}" for name, seeds in by_line.items())
    )
    plan = f"; the recipe plans {', '.join(map(str, planned))}" if missing else ""
    return f"Seeds: {said}{plan}."


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
