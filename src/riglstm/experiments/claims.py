"""What is to be said of tables with their figures: recipes, gaps, and what has no run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from riglstm.experiments.entries import Budget, Recipe, Row
from riglstm.experiments.paper import value
from riglstm.experiments.plan import spec_of
from riglstm.experiments.render import number
from riglstm.experiments.sheet import Line, Sheet
from riglstm.experiments.spec import plain_options
from riglstm.experiments.tables import TABLES, Table
from riglstm.train.config import FREE, PRINTED, Precision

OURS = "riglstm"
"""The row that is compared with the paper's and with all others, cell by cell."""
BASELINE = "lstm"
"""The rival that is compared with the paper's: a stronger one makes a table harder to win."""
ABLATION = "ablation"
"""The table whose rows are variants of one model."""
DOCS = "docs/experiments.md"
"""What describes the recipes."""
FOUND = {"tuned": "docs/recipes.md"}
"""Recipes that were looked for, and what tells how."""
UNSAID = (*FREE, "precision", "checkpoint_every", "log_every")
"""Settings that leave the outcome as it is, and precision, which every run has in its own rows."""


def head(sheet: Sheet, setting: str) -> str:
    """A table, or one of its settings."""
    return sheet.title if sheet.settings is None else f"{sheet.title}, {setting}"


def named(table: Table, budget: str) -> tuple[Budget, Recipe] | None:
    """None: one that there was, and is no more."""
    return next((found for found in table.recipes.items() if found[0] == budget), None)


def link(budget: str, changed: str, folder: str = "") -> str:
    """A recipe by its name, and where it is described, `folder`: the root, from the page."""
    said = "; in brackets, what the recipe `paper` has" if changed else ""
    what = f"Recipe `{budget}` ([what it {'changes' if changed else 'is'}]({folder}{DOCS})){said}."
    if budget in FOUND:
        log = f"[how]({folder}{FOUND[budget]})"
        what += f" It was found on validation data of all conditions, shifted ones too ({log})."
    return what


def changes(sheet: Sheet, budget: str) -> str:
    """What the recipe has that `paper` has not, in all models and in those of the sheet.

    In brackets what `paper` has instead; of a model's own task and training, what the other models
    have; of those in one setting, what the model usually has. Empty where there is nothing, or
    where the recipe is no more.
    """
    recipes = TABLES[sheet.name].recipes
    known = named(TABLES[sheet.name], budget)
    if known is None:
        return ""
    recipe, paper = known[1], recipes["paper"]
    fit = asdict(recipe.fit)
    parts = _others({**fit, **recipe.task}, {**asdict(paper.fit), **paper.task})
    said = [f"All models: {', '.join(parts)}"] if parts else []
    alike: dict[str, dict[str, None]] = {}
    for line in sheet.lines:
        row = recipe.rows.get(line.row)
        if row is not None and line.made.get("budget") == budget:
            was = paper.rows.get(line.row)
            task = {} if was is None else was.task
            other = {name: now for name, now in row.task.items() if now != task.get(name)}
            own = [
                *_others(_built(row), {} if was is None else _built(was)),
                *_own(other, recipe.task, "others "),
                *_own(row.fit, fit, "others "),
            ]
            if own:
                alike.setdefault(", ".join(own), {})[line.label] = None
            usual = {**recipe.task, **fit, **row.task, **row.fit}
            here = _own(row.own_in(line.setting), usual, "usually ")
            if here:
                alike.setdefault(", ".join(here), {})[f"{line.label} in {line.setting}"] = None
    return "; ".join((*said, *(f"{', '.join(labels)}: {own}" for own, labels in alike.items())))


def otherwise(sheets: Iterable[Sheet], budget: str) -> list[str]:
    """A sentence on lines by a recipe of that name that is no more, where there are such."""
    found = []
    for sheet in sheets:
        known = named(TABLES[sheet.name], budget)
        for line in sheet.lines:
            if known is None or line.made.get("budget") != budget or not line.recipe:
                continue
            how, precision = known[1], cast(Precision, line.made["precision"])
            there = line.row in how.rows and line.setting in how.settings
            if not there or line.recipe != (
                spec_of(sheet.name, how, line.setting, line.row, precision).recipe()
            ):
                found.append(f"{head(sheet, line.setting)}, {line.label}")
    said = "Made by an older recipe of that name, so that this is not said of them"
    return [f"{said}: {'; '.join(found)}."] if found else []


def as_planned(sheet: Sheet) -> bool:
    """Whether every line has as many updates as its recipe has for it, which `changes` says."""
    for line in sheet.lines:
        known = named(TABLES[sheet.name], line.made["budget"])
        row = None if known is None else known[1].rows.get(line.row)
        if known is None or row is None:
            return False
        updates = replace(known[1].fit, **row.training(line.setting)).updates
        if line.made["updates"] != f"{updates:,}":
            return False
    return True


def _own(changed: Mapping[str, Any], usual: Mapping[str, Any], whose: str) -> list[str]:
    """Task or training of one model, or of it in one setting, with what is usual in brackets."""
    return _others(changed, {name: usual.get(name) for name in changed}, whose)


def _built(row: Row) -> dict[str, Any]:
    """Its options, less a soft update that is as printed: what is not, is said in numbers."""
    options = plain_options(row.model, row.hidden_size, row.options)
    said = {k: v for k, v in options.items() if k not in PRINTED or v != PRINTED[k]}
    return {"hidden_size": row.hidden_size, **said}


def _others(new: Mapping[str, Any], old: Mapping[str, Any], whose: str = "") -> list[str]:
    """Settings that are not the old ones, with these in brackets where they were not off."""
    said = []
    for name, now in new.items():
        was = old.get(name)
        if name not in UNSAID and now != was:
            text = f"{'weights averaged by' if name == 'average' else name} {_plain(now)}"
            off = was is None or was in (0, "none")
            said.append(text if off else f"{text} ({whose}{_plain(was)})")
    return said + [f"no {name}" for name in old if name not in new]


def _plain(setting: object) -> str:
    if isinstance(setting, float):
        return f"{setting:g}"
    return f"{setting:,}" if type(setting) is int else str(setting)


def not_run(sheet: Sheet) -> str:
    """Models and settings of the table's recipe that have no run in it; empty: all have."""
    if sheet.budget is None:
        return ""
    how = TABLES[sheet.name].recipes[sheet.budget]
    runs = {
        (line.setting, line.row) for line in sheet.lines if line.made.get("budget") == sheet.budget
    }
    settings, rows = {setting for setting, _ in runs}, {row for _, row in runs}
    labels = {key: how.rows[key].label for key in how.models}
    single = [
        f"{label} in {setting}"
        for setting in how.settings
        for key, label in labels.items()
        if setting in settings and key in rows and (setting, key) not in runs
    ]
    parts = (
        [label for key, label in labels.items() if key not in rows],
        [setting for setting in how.settings if setting not in settings],
        single,
    )
    return "; ".join(", ".join(part) for part in parts if part)


def compared(found: Sequence[Sheet]) -> list[str]:
    """Our model against the paper's and against its rivals, and our LSTM against the paper's.

    By the means that are printed: what looks equal is equal. What cannot be compared is not said.
    """
    ours, base = (
        [(sheet, line, _means(line), _printed(line)) for sheet, line in _lines(found, row)]
        for row in (OURS, BASELINE)
    )
    said = []
    if any(mean.keys() & printed.keys() for _, _, mean, printed in ours):
        worse = [_gaps(sheet, line, printed, mean) for sheet, line, mean, printed in ours]
        said.append(
            _sentence("RigLSTM is worse than the paper's in", worse)
            or "No figure of RigLSTM here is worse than the paper's."
        )
    said += better(found, "rival")
    above = [_gaps(sheet, line, mean, printed) for sheet, line, mean, printed in base]
    below = [_gaps(sheet, line, printed, mean) for sheet, line, mean, printed in base]
    said.append(_sentence("Our LSTM is better than the paper's in", above))
    said.append(_sentence("Our LSTM is worse than the paper's in", below))
    return [sentence for sentence in said if sentence]


def better(found: Sequence[Sheet], kind: str) -> list[str]:
    """Where another line than our model's is better than it, and by how much."""
    gaps, any_other = [], False
    for sheet, ours in _lines(found, OURS):
        mean = _means(ours)
        for line in sheet.lines:
            if line.setting == ours.setting and line.row != OURS:
                any_other |= bool(mean.keys() & _means(line).keys())
                gaps.append(_gaps(sheet, line, _means(line), mean, line.label))
    if not any_other:
        return []
    some = _sentence(f"A {kind} is better than RigLSTM in", gaps)
    return [some or f"No {kind} here is better than RigLSTM."]


def _lines(found: Sequence[Sheet], row: str) -> list[tuple[Sheet, Line]]:
    return [(sheet, line) for sheet in found for line in sheet.lines if line.row == row]


def _means(line: Line) -> dict[str, float]:
    return {c: cell.mean for c, cell in line.ours.items() if cell.values}


def _printed(line: Line) -> dict[str, float]:
    return {c: value(text) for c, text in line.paper.items()}


def _gaps(
    sheet: Sheet, line: Line, one: Mapping[str, float], other: Mapping[str, float], who: str = ""
) -> str:
    """Conditions in which the one is better; empty: none."""
    sign = 1 if sheet.higher_is_better else -1
    gaps = {c: sign * (round(one[c], 1) - round(other[c], 1)) for c in one if c in other}
    by = ", ".join(f"{c} by {number(gap)}" for c, gap in gaps.items() if round(gap, 1) > 0)
    return by and f"{head(sheet, line.setting)} ({who}{': ' if who else ''}{by})"


def _sentence(start: str, parts: Iterable[str]) -> str:
    """Empty where there are no parts."""
    some = [part for part in parts if part]
    return f"{start} {'; '.join(some)}." if some else ""
