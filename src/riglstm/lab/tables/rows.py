"""CSV files of result rows: read, checked, and added to; a row is never changed."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.tables.recipes import AT_HOME, MEMORIES, SEARCHED, SHIFTED, TABLES
from riglstm.lab.tables.result import CHOSEN, FAILED, HEAD, LAST, TYPES, ResultRow, csv_text
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.train.config import Precision

MOST = 10**12
"""What a number of a result is below: all that are measured are."""
SHOWN = 20
"""Faults that a message lists."""


class RowError(ValueError):
    """Rows that are not as they must be; the message names the place of each."""

    def __init__(self, wrong: Sequence[str]) -> None:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        lines = "\n  ".join((*wrong[:SHOWN], *more))
        super().__init__(f"results that cannot be taken:\n  {lines}\nmend or remove these lines")


def append(path: Path, rows: Iterable[ResultRow]) -> None:
    """Add those rows that are not there yet, all of them or none.

    Raises RowError for a row that `read` would not take, or that contradicts the file.
    """
    given = {row: f"the new row of {row.run}" for row in rows}
    _check(given.items())

    def content(before: int) -> str:
        # An empty file is what a full disk, or a kill, leaves of the first write.
        there = dict.fromkeys(read(path) if before else (), str(path))
        new = {row: place for row, place in given.items() if row not in there}
        _check([*there.items(), *new.items()])
        return csv_text(new, head=not before)

    append_text(path, content)


def append_text(path: Path, content: Callable[[int], str]) -> None:
    """Add lines to a file, all of them or none, while no other program does.

    `content`: the lines, by the size of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        # Windows has no fcntl, and some network file systems have no locks: then there is none.
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        before = os.fstat(file.fileno()).st_size
        added = content(before).encode()
        if before and added and not path.read_bytes().endswith(b"\n"):
            added = b"\n" + added
        try:
            if file.write(added) != len(added):
                raise OSError(f"{path} could not be written in full; is the disk full?")
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, before)
            raise


def read_folder(folder: Path) -> list[ResultRow]:
    """The rows of all CSV files in a folder, in the order of their names."""
    return read(*sorted(folder.glob("*.csv")))


def read(*paths: Path) -> list[ResultRow]:
    """All rows of these files; raises RowError with every place that is not as it must be."""
    found = [line for path in paths for line in _lines(path)]
    _check(found)
    return [row for row, _ in found]


def _lines(path: Path) -> Iterator[tuple[ResultRow, str]]:
    """The rows of a file as they are, each with its place."""
    place = str(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines, place = csv.reader(file, strict=True), f"{path}, line 1"
            head = tuple(next(lines, ()))
            if head != HEAD:
                got = _short(",".join(head)) or "nothing"
                raise RowError([f"{place}: expected the columns {','.join(HEAD)}, got {got}"])
            for line in lines:
                place = f"{path}, line {lines.line_num}"
                if len(line) != len(HEAD):
                    raise RowError([f"{place}: expected {len(HEAD)} columns, got {len(line)}"])
                said = zip(HEAD, line, strict=True)
                yield ResultRow(**{name: _typed(name, text) for name, text in said}), place
    except (OSError, UnicodeError, csv.Error) as error:
        raise RowError([f"{place}: expected a CSV file of results, got {error}"]) from error


def _check(found: Iterable[tuple[ResultRow, str]]) -> None:
    """Raise RowError for rows that cannot be, or that have another figure than an earlier row."""
    first: dict[tuple[object, ...], tuple[ResultRow, str]] = {}
    wrong = []
    for row, place in found:
        wrong += [
            f"{place}, column {name}: expected {expected}, got {_short(repr(getattr(row, name)))}"
            for name, expected in faults(row)
        ]
        run = row.table, row.setting, row.model, row.recipe, row.seed
        known, before = first.setdefault((*run, row.metric, row.chosen_on), (row, place))
        if known.value != row.value:
            wrong.append(
                f"{place}, column value: expected {known.value}, which {before} has for the same "
                f"run and condition, got {row.value}"
            )
    if wrong:
        raise RowError(wrong)


def _typed(name: str, text: str) -> Any:
    """The column's value; the text itself where it is none, which `faults` finds."""
    try:
        return {"int": int, "float": float}.get(TYPES[name], str)(text)
    except ValueError:
        return text


def faults(row: ResultRow) -> Iterator[tuple[str, str]]:
    """Columns of a row that are not as they must be, and what was expected there."""
    for name, kind in TYPES.items():
        value, least = getattr(row, name), int(name == "jobs")
        if kind == "str":
            continue
        if type(value) is not int and (kind == "int" or not isinstance(value, float)):
            yield name, "a whole number" if kind == "int" else "a number"
        # Not so of NaN, either.
        elif not least <= value < MOST:
            yield name, f"a number from {least} to {MOST:.0e}"
    if row.precision not in get_args(Precision):
        yield "precision", _one_of(get_args(Precision))
    if row.table not in (*TABLES, MINIGRID):
        yield "table", _one_of((*TABLES, MINIGRID))
        return
    names = _names_on_minigrid(row) if row.table == MINIGRID else _names(row)
    if row.metric == FAILED:
        names["chosen_on"] = [""]
    for name, known in names.items():
        if getattr(row, name) not in known:
            yield name, _one_of(known)
    searched = row.budget == SEARCHED
    if searched != bool(row.trial):
        yield "trial", "the trial of a search" if searched else "nothing, as nothing was searched"
    rules = [AT_HOME, SHIFTED, f"{AT_HOME}, {SHIFTED}"] if searched else [""]
    if row.rule not in rules:
        yield "rule", "; ".join(rules) or "nothing, as nothing was searched"
    share = row.metric.startswith(("accuracy", "success"))
    if share and isinstance(row.value, float | int) and row.value > 1:
        yield "value", "a share from 0 to 1"


def _names(row: ResultRow) -> dict[str, list[str]]:
    """By column, what a row of its table may have there."""
    table = TABLES[row.table]
    recipes = table.recipes.values()
    homes = [setting.trained_on for recipe in recipes for setting in recipe.settings.values()]
    conditions = dict.fromkeys((*homes, *(c for recipe in recipes for c in recipe.conditions)))
    return {
        "budget": [*table.recipes, SEARCHED],
        "model": [key for recipe in recipes for key in recipe.rows],
        "setting": [key for recipe in recipes for key in recipe.settings],
        "metric": [FAILED, *(f"{table.metric.name}@{c}" for c in conditions)],
        "chosen_on": [f"{CHOSEN}{c}" for c in conditions],
    }


def _names_on_minigrid(row: ResultRow) -> dict[str, list[str]]:
    """The same of an agent's row."""
    levels = FAMILIES[row.setting].levels if row.setting in FAMILIES else ()
    names = ("success", "success_greedy", "steps")
    return {
        "budget": [""],
        "model": list(MEMORIES),
        "setting": list(FAMILIES),
        "metric": [FAILED, *(f"{name}@{level}" for name in names for level in levels)],
        "chosen_on": [LAST],
    }


def _one_of(known: Iterable[str]) -> str:
    return f"one of {', '.join(dict.fromkeys(known)) or 'nothing'}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
