"""A table with its figures: mean and spread over seeds, by two rules of choice, and the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from riglstm.lab.tables.entries import Budget
from riglstm.lab.tables.render import Grid, number
from riglstm.lab.tables.result import CHOSEN
from riglstm.lab.tables.tables import stem
from riglstm.lab.train.config import Precision

ENOUGH = 3
"""Runs from which on a mean and a spread say more than the runs themselves."""


@dataclass(frozen=True)
class Cell:
    """Figures of one model in one condition, one for each seed, in the table's units."""

    values: tuple[float, ...] = ()
    failed: int = 0
    """Runs that have no figure and will get none."""
    missing: int = 0
    """Runs that are not done."""
    exact: bool = False
    """One figure that no run has made, and that has no spread."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """With n - 1; None where there is one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def figures(self) -> str:
        """Mean ± sd, or of few runs their values in the order of seeds; a dash where none is."""
        if len(self.values) < ENOUGH or self.sd is None:
            return ", ".join(map(number, self.values)) or "–"
        return f"{number(self.mean)} ± {number(self.sd)}"

    def runs(self, unit: str = "") -> str:
        """How many runs there are, and how many more have no figure."""
        count = len(self.values)
        said = [f"{count}{unit and f' {unit}' + 's' * (count != 1)}"]
        said += [f"{self.failed} failed"] if self.failed else []
        said += [f"{self.missing} to run"] if self.missing else []
        return ", ".join(said)

    def text(self) -> str:
        """Figures and the number of runs: 96.0 ± 5.3 (3 runs)."""
        if self.exact:
            return number(self.mean)
        if not self.values:
            return self.runs().removeprefix("0, ") if self.failed or self.missing else "not run"
        return f"{self.figures()} ({self.runs('run')})"


@dataclass(frozen=True)
class Line:
    """One model in one setting."""

    setting: str
    row: str
    label: str
    cells: str
    """(N, K_a)."""
    ours: Mapping[str, Cell]
    """By condition: the checkpoint is chosen on validation data of the training condition."""
    there: Mapping[str, Cell] = field(default_factory=dict)
    """By condition: it is chosen for each anew, on validation data of that condition."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """By condition, as printed."""
    width: int | None = None
    """The model's hidden size; None: there is no model, or lines differ in other ways, too."""
    updates: int | None = None
    """At most, where training may end sooner."""
    made: Mapping[str, str] = field(default_factory=dict)
    """By the head of a column, how its runs were made: shown where lines of a table differ."""


@dataclass(frozen=True)
class Sheet:
    """A table with its figures."""

    name: str
    title: str
    settings: str | None
    """Head of the settings' column; None: there is one setting, and the title says which."""
    conditions: tuple[str, ...]
    trained_on: Mapping[str, str]
    """By setting, the condition of the training data."""
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    budget: Budget | None = None
    """None: it is none of the paper's tables."""
    precision: Precision | None = None
    """Of all its runs; None: as the recipe says, or not the same in all."""
    best: bool = False
    """Show the best run, too."""
    higher_is_better: bool = True

    def best_of(self, cell: Cell) -> float:
        """The best run's figure."""
        return max(cell.values) if self.higher_is_better else min(cell.values)

    def head(self, setting: str) -> str:
        """The table, or one of its settings."""
        return self.title if self.settings is None else f"{self.title}, {setting}"


class Column(NamedTuple):
    """A head, and what stands below it."""

    head: str
    text: Callable[[Line], str]
    cell: Callable[[Line], Cell] | None = None
    """What lines are compared by; None: they are not."""


def grid(sheet: Sheet, brief: bool = False) -> Grid:
    """As it is printed; `brief`: our figures and the paper's alone, with runs in one column."""
    lead = [Column("model", lambda line: line.label)]
    if sheet.settings is not None:
        lead.insert(0, Column(sheet.settings, lambda line: line.setting))
    if not brief and any(line.cells != "–" for line in sheet.lines):
        lead.append(Column("(N, K_a)", lambda line: line.cells))
    made = [name for name in differing(sheet) if not (brief and name == "updates")]
    lead += [Column(name, lambda line, n=name: line.made.get(n, "–")) for name in made]  # type: ignore[misc]
    if brief:
        lead.append(Column("runs", _runs))
    every = list(lead)
    for condition in sheet.conditions:
        every += _columns(sheet, condition, brief)
    return Grid(
        name=stem(sheet.name, sheet.budget, sheet.precision),
        title=sheet.title,
        heads=[column.head for column in every],
        lines=[[column.text(line) for column in every] for line in sheet.lines],
        lead=len(lead),
        notes=sheet.notes,
        best=frozenset(
            (row, i)
            for i, column in enumerate(every)
            if column.cell is not None
            for row in _best(sheet, [column.cell(line) for line in sheet.lines])
        ),
    )


def _runs(line: Line) -> str:
    """Of the condition that has most."""
    return max(line.ours.values(), key=lambda cell: len(cell.values), default=Cell()).runs()


def _best(sheet: Sheet, cells: Sequence[Cell]) -> Iterator[int]:
    """Lines whose mean, as it is printed, is the best of several in their setting."""
    for setting in sheet.trained_on:
        means = {
            i: round(cell.mean, 1)
            for i, (line, cell) in enumerate(zip(sheet.lines, cells, strict=True))
            if line.setting == setting and cell.values and not cell.exact
        }
        if len(means) > 1:
            best = (max if sheet.higher_is_better else min)(means.values())
            yield from (i for i, mean in means.items() if mean == best)


def differing(sheet: Sheet) -> list[str]:
    """What of `Line.made` is not the same in all lines."""
    names = dict.fromkeys(name for line in sheet.lines for name in line.made)
    return [name for name in names if len({line.made.get(name) for line in sheet.lines}) > 1]


def _columns(sheet: Sheet, condition: str, brief: bool) -> list[Column]:
    """Of one condition: ours, the paper's, and ours by the other rule."""
    always = set(sheet.trained_on.values()) == {condition}
    head = f"{condition} (trained)" if always else condition

    def ours(line: Line) -> Cell:
        return line.ours.get(condition, Cell())

    def there(line: Line) -> Cell:
        return line.there.get(condition, Cell())

    def best(line: Line) -> str:
        cell = ours(line)
        return number(sheet.best_of(cell)) if cell.values and not cell.exact else "–"

    def chosen_there(line: Line) -> str:
        if not line.there:
            return "–"
        cell = there(line)
        known = cell.values or cell.failed or cell.missing
        return "not kept" if ours(line).values and not known else cell.text()

    found = [Column(head, lambda line: ours(line).figures() if brief else ours(line).text(), ours)]
    if sheet.best and not brief:
        found.append(Column(f"{condition}, best run", best))
    if any(condition in line.paper for line in sheet.lines):
        found.append(Column(f"{condition}, paper", lambda line: line.paper.get(condition, "–")))
    # Where all are trained on it, both rules choose the same.
    if not (always or brief) and any(line.there for line in sheet.lines):
        found.append(Column(f"{condition}, best checkpoint at {condition}", chosen_there, there))
    return found


RECORD = (
    *("table", "budget", "setting", "model", "width", "updates", "condition", "chosen_on"),
    *("mean", "sd", "n", "best", "failed", "missing", "paper"),
)
"""Fields of `records`."""


def records(sheet: Sheet) -> list[list[object]]:
    """One line for each figure, for programs; None is a field that is left empty.

    Figures that need no model were not chosen, and have no runs.
    """
    found: list[list[object]] = []
    for line in sheet.lines:
        trained_on = sheet.trained_on[line.setting]
        model = [sheet.budget, line.setting, line.row, line.width, line.updates]
        for condition in sheet.conditions:
            rules = {trained_on: line.ours}
            if condition != trained_on and line.there:
                rules[condition] = line.there
            for chosen_on, cells in rules.items():
                cell = cells.get(condition, Cell())
                paper = line.paper.get(condition)
                chooser: str | None = f"{CHOSEN}{chosen_on}"
                figures: list[object] = [None, None, 0, None, cell.failed, cell.missing]
                if cell.exact:
                    chooser, figures = None, [cell.mean, *[None] * 5]
                elif cell.values:
                    figures[:4] = cell.mean, cell.sd, len(cell.values), sheet.best_of(cell)
                found.append([sheet.name, *model, condition, chooser, *figures, paper])
    return found
