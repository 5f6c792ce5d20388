"""From result rows to tables, the one way for run folders and for files of results, and to text.

`Table` keeps the values of all runs, so that figures are drawn from it, too. `text_table` lays one
out; `markdown` prints that for files and the screen, and `lab/report/page.py` as HTML.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from riglstm.lab.tables.paper import PAPER
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.recipes import (
    AT_HOME,
    SEARCHED,
    SHIFTED,
    TABLES,
    Budget,
    Recipe,
    recipe,
)
from riglstm.lab.tables.result import (
    CHOSEN,
    FAILED,
    Record,
    ResultRow,
    read_planned,
    rows_of,
)

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

    `brief`: means by the first rule alone, with runs in one column, and what is missing.
    """
    lines, heads = table.lines, list[str]()
    best_of = max if table.higher_is_better else min
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
        if not (brief and name in ("trial", "updates")):
            add(name, [line.made.get(name, "–") for line in lines])
    if brief:
        # Of the condition that has most.
        most = (max(x.ours.values(), key=lambda c: len(c.values), default=Cell()) for x in lines)
        add("runs", [cell.runs() for cell in most])
    lead = len(heads)
    homes = set(table.trained_on.values())
    for c in table.conditions:
        ours = [line.ours.get(c, Cell()) for line in lines]
        head = f"{c} (trained)" if homes == {c} else c
        means = [number(cell.mean) if cell.values else "–" for cell in ours]
        add(head, means if brief else [cell.text() for cell in ours], ours)
        if table.best and not brief:
            made = [() if cell.exact else cell.values for cell in ours]
            add(f"{c}, best run", [number(best_of(runs)) if runs else "–" for runs in made])
        if any(c in line.paper for line in lines) and not brief:
            add(f"{c}, paper", [line.paper.get(c, "–") for line in lines])
    by_other_rule = any(cell != Cell() for line in lines for cell in line.there.values())
    for c in table.conditions if by_other_rule and not brief else ():
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


def _there(line: Line, condition: str) -> str:
    """The cell by the other rule; results may have been recorded by one rule alone."""
    if not line.there:
        return "–"
    cell = line.there.get(condition, Cell())
    known = cell.values or cell.failed or cell.missing
    # Of a search that rule may have another recipe, which was not run.
    none = "not run" if "trial" in line.made else "no figure"
    return none if line.ours[condition].values and not known else cell.text()


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


SPREAD = (
    f"Mean ± standard deviation (with n − 1); fewer than {ENOUGH} runs are shown one by one, and "
    "the best mean is bold."
)
RULES = (
    f"{SPREAD} Checkpoints are chosen on validation data of the training condition. “Best "
    "checkpoint at” a test condition means chosen on validation data of that condition, the rule "
    "of earlier papers."
)
"""What is said with every table of runs."""
SIZES = " at quick sizes, not the paper's"
QUICK = (
    "Small models, little data, few updates: this shows that the path from data to table works. "
    "The paper's figures are not comparable and left out; the budget “paper” sets them beside ours."
)


def line(
    rows: Sequence[ResultRow],
    conditions: Sequence[str],
    chosen_on: str,
    scale: float,
    missing: int = 0,
    *,
    both: bool = True,
    **named: Any,
) -> Line:
    """One model in one setting from its rows; `named`: the other fields of `Line`.

    `chosen_on`: what rows say that were chosen in the training condition; `both`: rows may have
    been chosen in each condition itself, too. `missing`: runs that are not done. A recipe that
    was searched counts where the checkpoint is chosen by the same rule as the recipe.
    """

    def cell(condition: str, chooser: str, rule: str) -> Cell:
        own = [row for row in rows if rule in row.rules]
        own = [row for row in own if row.recipe == own[-1].recipe]
        tested = sorted((row for row in own if row.metric != FAILED), key=lambda row: row.seed)
        found = {
            row.run: scale * row.value
            for row in tested
            if (row.condition, row.chosen_on) == (condition, chooser)
        }
        # One that has figures has been trained anew since.
        failed = len({row.run for row in own} - {row.run for row in tested})
        return Cell(tuple(found.values()), failed, missing)

    return Line(
        **named,
        ours={c: cell(c, chosen_on, AT_HOME) for c in conditions},
        there={c: cell(c, f"{CHOSEN}{c}", SHIFTED) for c in conditions} if both else {},
    )


def yardsticks(
    runs: Iterable[Record], conditions: Sequence[str], setting: str, scale: float
) -> list[Line]:
    """Figures that need no model; they are the same in every run of a setting."""
    said = (run.result["yardsticks"] for run in runs if "yardsticks" in run.result)
    found: Mapping[str, Mapping[str, float]] = next(said, {})
    names = dict.fromkeys(name for values in found.values() for name in values)
    return [
        Line(
            *(setting, f"no model: {name}"),
            ours={c: Cell((scale * found[c][name],), exact=True) for c in conditions if c in found},
        )
        for name in names
    ]


def newest(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows that tables show: no quick sizes, and of each table its last budget and precision.

    In these, of each model in each setting the recipe of its last row counts; of a search, the last
    by each rule. A model without such rows in a setting keeps its own last recipe, and the table
    says so. What was searched and what was not are never in one table.
    """
    full = [row for row in rows if row.budget != "quick"]
    how = {_kind(row): (row.budget, row.precision) for row in full}
    # Those of the table's budget and precision after all others, each in their order.
    ordered = sorted(full, key=lambda row: (row.budget, row.precision) == how[_kind(row)])
    last = {(*_kind(r), r.setting, r.model, rule): r.recipe for r in ordered for rule in r.rules}
    return [
        row
        for row in full
        if any(last[*_kind(row), row.setting, row.model, rule] == row.recipe for rule in row.rules)
    ]


def _kind(row: ResultRow) -> tuple[str, bool]:
    return row.table, row.budget == SEARCHED


def tables(rows: Sequence[ResultRow]) -> list[Table]:
    """Tables of the newest rows, in the paper's order; what was searched before what was not."""
    kept = newest(rows)
    return [
        paper_table(name, own, own[-1].budget)
        for name in TABLES
        for searched in (True, False)
        if (own := [row for row in kept if _kind(row) == (name, searched)])
    ]


def paper_table(
    name: str,
    rows: Sequence[ResultRow],
    budget: str,
    waiting: Mapping[tuple[str, str], int] | None = None,
    runs: Mapping[str, Sequence[Record]] | None = None,
    said: Sequence[str] = (),
) -> Table:
    """One of the paper's tables from the rows of its runs.

    `waiting`: by setting and model, how many runs are not done; `runs`: by setting, those that may
    have figures without a model; `said`: notes.
    """
    what, waiting, quick = TABLES[name], waiting or {}, budget == "quick"
    how, recipes = _sizes(name, budget), list(what.recipes.values())
    known = {s: v.trained_on for r in (*recipes, how) for s, v in r.settings.items()}
    there = {(row.setting, row.model) for row in rows} | set(waiting)
    homes = {s: home for s, home in known.items() if s in {setting for setting, _ in there}}
    conditions = tuple(dict.fromkeys((*homes.values(), *how.conditions)))
    lines: list[Line] = []
    for setting, home in homes.items():
        for model in dict.fromkeys(model for r in recipes for model in r.rows):
            if (setting, model) not in there:
                continue
            own = [row for row in rows if (row.setting, row.model) == (setting, model)]
            made = _made(own)
            row = _sizes(name, made.get("budget", budget)).rows.get(model)
            printed = {} if quick else PAPER[name].get((setting, model), {})
            one = line(
                *(own, conditions, f"{CHOSEN}{home}", what.metric.scale),
                waiting.get((setting, model), 0),
                setting=setting,
                label=model if row is None else row.label,
                # How many cells are awake may be searched, too: the trial says it.
                cells="–" if row is None or "trial" in made else row.cells,
                paper={c: printed[c] for c in conditions if c in printed},
                made=made,
            )
            lines.append(one)
        lines += yardsticks((runs or {}).get(setting, ()), conditions, setting, what.metric.scale)
    begun = {(row.setting, row.model) for row in rows if row.budget == budget} | set(waiting)
    only = f", trained on {conditions[0]}" if len(set(homes.values())) == 1 else ""
    found = f", {what.found}" if budget == SEARCHED else ""
    table = Table(
        name=name,
        title=f"{what.title}{SIZES if quick else ''}{only}{found}",
        measure=what.measure,
        conditions=conditions,
        trained_on=homes,
        lines=tuple(lines),
        missing=_not_run(how, begun),
        settings=what.settings if len({*homes, *how.settings}) > 1 else None,
        best=what.best,
        higher_is_better=what.metric.higher_is_better,
    )
    more = (what.notes_of[budget],) if budget in what.notes_of else ()
    notes = (*said, *_run_notes(table, rows), *((QUICK,) if quick else (*what.notes, *more)))
    return replace(table, notes=notes)


def _sizes(name: str, budget: str) -> Recipe:
    """What a table's models and data are in a budget; a search has the paper's, and controls."""
    if budget != SEARCHED:
        return recipe(name, budget)  # type: ignore[arg-type]
    paper = TABLES[name].recipes["paper"]
    tuned = TABLES[name].recipes.get("tuned", paper)
    models = tuple(dict.fromkeys((*paper.models, *tuned.models)))
    return replace(paper, models=models, rows={**tuned.rows, **paper.rows})


def _made(rows: Sequence[ResultRow]) -> dict[str, str]:
    """How the runs of a line were made; empty: there are none."""
    if not rows:
        return {}
    updates = sorted({row.updates for row in rows if row.metric != FAILED})
    made = {"budget": rows[-1].budget, "precision": rows[-1].precision}
    if rows[-1].trial:
        trials = {rule: r.trial for r in rows for rule in r.rules}
        one = len({*trials.values()}) == 1
        made["trial"] = (
            rows[-1].trial if one else ", ".join(f"{t} ({r})" for r, t in trials.items())
        )
    return {**made, "updates": extent(updates)} if updates else made


def _run_notes(table: Table, rows: Sequence[ResultRow]) -> list[str]:
    """What the runs cost, where they ran, and which seeds the lines have."""
    runs = {row.run: row for row in rows}.values()
    if not runs:
        return []
    # A run that was gone on with may have several.
    commits = [c for row in runs for c in (row.commit or "unknown").split(", then ")]
    mixed = {"budget", "precision"}.intersection(table.differing())
    other = " A model without such runs is shown by its own newest ones, as its columns say."
    updates = sorted({row.updates for row in runs})
    seeds: dict[str, set[int]] = {}
    for row in rows:
        label = row.model if table.settings is None else f"{row.setting} {row.model}"
        seeds.setdefault(label, set()).add(row.seed)
    labels: dict[str, list[str]] = {}
    for label, own in seeds.items():
        labels.setdefault(", ".join(map(str, sorted(own))), []).append(label)
    by_seeds = (f"{own} ({', '.join(of)})" for own, of in labels.items())
    return [
        f"Recipe {rows[-1].budget} in {rows[-1].precision}: {len(runs)} runs of {extent(updates)} "
        f"updates took {duration(sum(row.seconds for row in runs))} in all, up to "
        f"{max(row.jobs for row in runs)} of them at a time, on "
        f"{words(row.device or 'unknown' for row in runs)}. "
        f"Commits: {words(commit[:7] for commit in commits)}.{other if mixed else ''}",
        f"Seeds: {'; '.join(by_seeds)}.",
    ]


def _not_run(how: Recipe, runs: set[tuple[str, str]]) -> str:
    """Models and settings of a recipe that have no run in it; empty: all have."""
    settings, models = {setting for setting, _ in runs}, {row for _, row in runs}
    labels = {key: how.rows[key].label for key in how.models}
    parts = (
        [label for key, label in labels.items() if key not in models],
        [setting for setting in how.settings if setting not in settings],
        [
            f"{label} in {setting}"
            for setting in how.settings
            for key, label in labels.items()
            if setting in settings and key in models and (setting, key) not in runs
        ],
    )
    return "; ".join(", ".join(part) for part in parts if part)


def table_of_runs(
    name: str,
    planned: Sequence[Planned],
    budget: Budget,
    records: Mapping[Path, Record] | None = None,
) -> tuple[Table, list[ResultRow]]:
    """A table from the folders of its runs, and its rows; `records`: the folders, if read."""
    how, found, failed = recipe(name, budget), list[ResultRow](), list[str]()
    waiting: Counter[tuple[str, str]] = Counter()
    runs: dict[str, list[Record]] = {}
    for p in planned:
        if p.state not in ("done", "failed"):
            waiting[p.setting, p.row] += 1
            continue
        run = read_planned(p) if records is None else records[p.folder]
        if records is None and run.result:
            check_figures(run.result, how, p.setting, p.folder)
        if run.reason:
            # What follows is advice, and where things lie on the machine of the run.
            reason, *_ = run.reason.partition(";")
            failed.append(f"Failed: {p.label}: {reason} ({p.folder.name}).")
        runs.setdefault(p.setting, []).append(run)
        # On a page, folders of several parents may have one name.
        said = p.folder.name if records is None else str(p.folder)
        named = {"table": name, "model": p.row, "budget": budget, "setting": p.setting}
        found += rows_of(run, **named, run=said)
    return paper_table(name, found, budget, waiting, runs, (RULES, *failed)), found


def check_figures(result: Mapping[str, Any], how: Recipe, setting: str, folder: Path) -> None:
    """Raise ValueError for a result that lacks a figure of its row of a table."""
    home = how.settings[setting].trained_on
    found = {(row["condition"], row["chosen_on"]) for row in result["rows"]}
    homes = (known.trained_on for known in how.settings.values())
    for condition in dict.fromkeys((*homes, *how.conditions)):
        for chooser in (home, condition):
            if (condition, f"{CHOSEN}{chooser}") not in found:
                raise ValueError(
                    f"the result of {folder} must have a figure for {condition}, chosen on "
                    f"{chooser}, got none; delete the folder, and run it anew"
                )


def extent(numbers: Sequence[int]) -> str:
    """The range of sorted numbers, for a note."""
    low, high = numbers[0], numbers[-1]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def duration(seconds: float) -> str:
    """Seconds or hours, for a note."""
    return f"{seconds:.0f} s" if seconds < 3600 else f"{number(seconds / 3600)} h"


def words(names: Iterable[str]) -> str:
    """Each name once, for a note."""
    return ", ".join(sorted(set(names)))
