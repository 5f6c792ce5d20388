"""A table: figures by model and condition, laid out as text, and printed as Markdown.

`Table` keeps the values of all runs, so that figures are drawn from it, too. `text_table` lays one
out; `markdown` prints that for files and the screen, and `lab/report/page.py` as HTML.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from riglstm.lab.tables.rows import ResultRow, csv_text
from riglstm.lab.train.folder import atomic_write

ENOUGH = 3
"""Runs from which on a mean and a spread say more than the runs themselves."""


@dataclass(frozen=True)
class Cell:
    """Figures of one model in one condition, one for each run, in the table's units."""

    values: tuple[float, ...] = ()
    failed: int = 0
    """Runs that have no figure and will get none."""
    missing: int = 0
    """Runs that are not done."""
    exact: bool = False
    """One figure that no run has made, and that has no spread."""

    @property
    def mean(self) -> float:
        """The mean over runs."""
        return statistics.fmean(self.values)

    def figures(self) -> str:
        """Mean ± sd (with n - 1), or the values of few runs; a dash where there is none."""
        if len(self.values) < ENOUGH:
            return ", ".join(map(number, self.values)) or "–"
        return f"{number(self.mean)} ± {number(statistics.stdev(self.values))}"

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
    """The model's name in result rows."""
    label: str
    """Its name for readers."""
    ours: Mapping[str, Cell]
    """By condition: the checkpoint is chosen on validation data of the training condition."""
    there: Mapping[str, Cell] = field(default_factory=dict)
    """By condition: it is chosen for each anew, on validation data of that condition."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """By condition, as printed."""
    cells: str = "–"
    """(N, K_a)."""
    made: Mapping[str, str] = field(default_factory=dict)
    """By the head of a column, how its runs were made: shown where lines of a table differ."""


@dataclass(frozen=True)
class Table:
    """A table with its figures."""

    name: str
    title: str
    measure: str
    """What a figure is, with its unit: `test accuracy in %`."""
    conditions: tuple[str, ...]
    trained_on: Mapping[str, str]
    """By setting, the condition of the training data."""
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    missing: str = ""
    """Models and settings that have no run."""
    settings: str | None = None
    """Head of the settings' column; None: there is one setting."""
    best: bool = False
    """Show the best run, too."""
    higher_is_better: bool = True

    def best_of(self, cell: Cell) -> float:
        """The best run's figure."""
        return max(cell.values) if self.higher_is_better else min(cell.values)

    def differing(self) -> list[str]:
        """Names in `Line.made` whose values are not the same in all lines."""
        names = dict.fromkeys(name for line in self.lines for name in line.made)
        made = [line.made for line in self.lines]
        return [n for n in names if len({values[n] for values in made if n in values}) > 1]


@dataclass(frozen=True)
class TextTable:
    """A table whose cells are ready to be printed, as plain text."""

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    lead: int
    """Columns before the figures, set to the left."""
    notes: Sequence[str] = ()
    best: frozenset[tuple[int, int]] = frozenset()
    """Line and column of the cells in bold."""


def text_table(table: Table, brief: bool = False) -> TextTable:
    """Models as lines, conditions as columns; the figures by the other rule stand to the right.

    `brief`: means alone and the paper's figures, with runs in one column, and what is missing.
    """
    lines, heads = table.lines, list[str]()
    columns: list[list[str]] = []
    best: set[tuple[int, int]] = set()

    def add(head: str, cells: list[str], compared: Sequence[Cell] = ()) -> None:
        best.update((row, len(heads)) for row in _best(table, compared))
        heads.append(head)
        columns.append(cells)

    if table.settings is not None:
        add(table.settings, [line.setting for line in lines])
    add("model", [line.label for line in lines])
    if not brief and any(line.cells != "–" for line in lines):
        add("(N, K_a)", [line.cells for line in lines])
    for name in table.differing():
        if not (brief and name == "updates"):
            add(name, [line.made.get(name, "–") for line in lines])
    if brief:
        add("runs", [_runs(line) for line in lines])
    lead = len(heads)
    homes = set(table.trained_on.values())
    for c in table.conditions:
        ours = [line.ours.get(c, Cell()) for line in lines]
        head = f"{c} (trained)" if homes == {c} else c
        add(head, [_mean(cell) if brief else cell.text() for cell in ours], ours)
        if table.best and not brief:
            known = [cell.values and not cell.exact for cell in ours]
            runs = zip(ours, known, strict=True)
            add(f"{c}, best run", [number(table.best_of(r)) if k else "–" for r, k in runs])
        if any(c in line.paper for line in lines):
            add("paper" if brief else f"{c}, paper", [line.paper.get(c, "–") for line in lines])
    for c in table.conditions if any(line.there for line in lines) and not brief else ():
        # Where all are trained on it, both rules choose the same.
        if homes != {c}:
            there = [line.there.get(c, Cell()) for line in lines]
            add(f"{c}, best checkpoint at {c}", [_there(line, c) for line in lines], there)
    less = "" if table.higher_is_better else ", less is better"
    notes = [f"Not run yet: {table.missing}."] if table.missing else []
    return TextTable(
        title=f"{table.title}: {table.measure}{less}",
        heads=heads,
        lines=[list(cells) for cells in zip(*columns, strict=True)],
        lead=lead,
        notes=notes if brief else [*table.notes, *notes],
        best=frozenset(best),
    )


def _best(table: Table, cells: Sequence[Cell]) -> Iterator[int]:
    """Lines whose mean, as it is printed, is the best of several in their setting."""
    for setting in table.trained_on if cells else ():
        means = {
            i: round(cell.mean, 1)
            for i, (line, cell) in enumerate(zip(table.lines, cells, strict=True))
            if line.setting == setting and cell.values and not cell.exact
        }
        if len(means) > 1:
            best = (max if table.higher_is_better else min)(means.values())
            yield from (i for i, mean in means.items() if mean == best)


def _runs(line: Line) -> str:
    """Of the condition that has most."""
    return max(line.ours.values(), key=lambda cell: len(cell.values), default=Cell()).runs()


def _mean(cell: Cell) -> str:
    return number(cell.mean) if cell.values else "–"


def _there(line: Line, condition: str) -> str:
    """The cell by the other rule; results may have been recorded by one rule alone."""
    if not line.there:
        return "–"
    cell = line.there.get(condition, Cell())
    known = cell.values or cell.failed or cell.missing
    return "not kept" if line.ours[condition].values and not known else cell.text()


def number(x: float) -> str:
    """One digit after the point, thousands set apart."""
    return f"{x:,.1f}"


def markdown(table: TextTable) -> str:
    """The title above the table, and its notes below."""
    heads = [plain(cell) for cell in table.heads]
    lines = [
        [f"**{plain(c)}**" if (i, j) in table.best else plain(c) for j, c in enumerate(cells)]
        for i, cells in enumerate(table.lines)
    ]
    # Columns of one width each, as the text is read in a terminal, too.
    widths = [max(3, *map(len, column)) for column in zip(heads, *lines, strict=True)]
    sides = "<" * table.lead + ">" * (len(heads) - table.lead)
    rule = [
        "-" * width if side == "<" else "-" * (width - 1) + ":"
        for width, side in zip(widths, sides, strict=True)
    ]
    body = [
        " | ".join(f"{c:{s}{w}}" for c, s, w in zip(cells, sides, widths, strict=True))
        for cells in (heads, rule, *lines)
    ]
    parts = [f"**{plain(table.title)}**", "\n".join(f"| {line} |" for line in body)]
    parts += [bullets(table.notes)] if table.notes else []
    return "\n\n".join(parts) + "\n"


def bullets(notes: Sequence[str]) -> str:
    """Plain text as a list in Markdown."""
    return "\n".join(f"- {plain(note)}" for note in notes)


def plain(said: str) -> str:
    """Text as Markdown prints it: no markup, no cell and no line ends in it."""
    # An underscore inside a word is none of Markdown's.
    marks = r"[\\|<>*\[\]$~]|(?<![^\W_])_|_(?![^\W_])|^[#+-](?=\s)"
    return re.sub(marks, r"\\\g<0>", " ".join(said.split()))


@dataclass(frozen=True)
class Rendered:
    """A table for readers, and its rows for programs."""

    markdown: str
    rows: Sequence[ResultRow] | None = None
    """None: it is not made from rows."""

    def write(self, folder: Path, name: str) -> tuple[Path, ...]:
        """Files `name`.md and .csv, each whole or not at all; as `check`."""
        self.check(folder, name)
        for path, content in self._files(folder, name).items():
            with atomic_write(path) as file:
                file.write(content.encode())
        return tuple(self._files(folder, name))

    def check(self, folder: Path, name: str) -> None:
        """Raise ValueError where a file of these names is another's: it begins otherwise."""
        for path, content in self._files(folder, name).items():
            # The rest of a title has sizes, which may change.
            start = content.partition("\n")[0][:12]
            if path.exists() and not path.read_bytes().startswith(start.encode()):
                raise ValueError(
                    f"{path} must be a new file, or this table's, which begins with {start!r}, "
                    "got another; move it away, or give another folder"
                )

    def _files(self, folder: Path, name: str) -> dict[Path, str]:
        files = {folder / f"{name}.md": self.markdown}
        if self.rows is not None:
            files[folder / f"{name}.csv"] = csv_text(self.rows)
        return files
