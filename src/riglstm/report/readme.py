"""Results as Markdown: a table for README, and a page with all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from riglstm.experiments.claims import (
    ABLATION,
    OURS,
    as_planned,
    better,
    changes,
    compared,
    head,
    link,
    not_run,
    otherwise,
)
from riglstm.experiments.fill import words
from riglstm.experiments.paper import value
from riglstm.experiments.render import markdown, number
from riglstm.experiments.sheet import Cell, Line, Sheet, differing, grid
from riglstm.experiments.summary import figures
from riglstm.experiments.tables import TABLES

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
"""Around what is generated in README."""
NOTHING = (
    "No runs at the paper's sizes yet: `riglstm reproduce` makes them, `riglstm report` this table."
)


def inserted(readme: Path, text: str) -> str:
    """README with the text between its two marks."""
    content = readme.read_text(encoding="utf-8")
    before, begin, rest = content.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} must have a line {BEGIN} and after it {END}, got not both")
    return f"{before}{begin}{text}{end}{after}"


def block(found: Sequence[Sheet]) -> str:
    """README's table: a line for each training condition, a column for each model."""
    tables = [sheet for sheet in found if sheet.name != ABLATION]
    if not tables:
        return f"{NOTHING}\n"
    labels = {line.row: line.label for sheet in tables for line in sheet.lines}
    columns = sorted(labels, key=lambda row: row != OURS)
    lines = [
        f"| trained on → tested on | {' | '.join(labels[row] for row in columns)} |",
        f"|---{'|---' * len(columns)}|",
    ]
    for sheet in tables:
        for setting, home in sheet.trained_on.items():
            shifted = _shifted(sheet, home)
            own = {line.row: line for line in sheet.lines if line.setting == setting}
            cells = [_cell(own.get(row), home, shifted) for row in columns]
            start = f"{head(sheet, setting)}: {home} → {', '.join(shifted)}"
            lines.append(f"| {' | '.join((start, *cells))} |")
    # Few lines: README is short, and a line here is an item of a list.
    items = [
        "Mean ± standard deviation (runs), or of fewer than three runs their values; *below it the "
        f"paper's figures*. {_measures(tables)}. Checkpoints are chosen on validation data of the "
        "training condition, for all models. [All tables and figures](results/README.md) come from "
        "`results/*.csv`.",
        " ".join((*_recipes(tables), *(said for sheet in tables for said in _made(sheet)))),
        " ".join((*_means(tables), *_rest(found))),
        *(_ablation(sheet) for sheet in found if sheet.name == ABLATION),
    ]
    return "\n".join((*lines, "", *(f"- {item}" for item in items if item), ""))


def _shifted(sheet: Sheet, home: str) -> list[str]:
    return [c for c in sheet.conditions if c != home]


def _recipes(tables: Sequence[Sheet]) -> list[str]:
    """Each recipe by its name, and what it changes in the tables that have it."""
    said = []
    for budget in dict.fromkeys(line.made["budget"] for sheet in tables for line in sheet.lines):
        lines = [(s, line) for s in tables for line in s.lines if line.made["budget"] == budget]
        parts = {sheet.title: changes(sheet, budget) for sheet, _ in lines}
        changed = [f"**{title}.** {part}." for title, part in parts.items() if part]
        precision = words(line.made["precision"] for _, line in lines)
        said += [link(budget, "".join(changed)), f"Precision: {precision}.", *changed]
        said += otherwise(tables, budget)
    return said


def _means(tables: Sequence[Sheet]) -> list[str]:
    """Who is better than whom, and by which figures."""
    said = compared(tables)
    return ["Compared by means:", *said] if said else []


def _rest(found: Sequence[Sheet]) -> list[str]:
    """What has no run yet, of the tables that are shown and of all others."""
    parts = [f"{sheet.title} ({rest})" for sheet in found if (rest := not_run(sheet))]
    there = {sheet.name for sheet in found}
    parts += [table.title for name, table in TABLES.items() if name not in there]
    return [f"Not run yet: {'; '.join(parts)}."] if parts else []


def _ablation(sheet: Sheet) -> str:
    """The whole model, then its variants."""
    lines = sorted(sheet.lines, key=lambda line: line.row != OURS)
    rows = (
        f"{line.label} {_figures(line, home, shifted)} *{_paper(line, home, shifted)}*"
        for line in lines
        for home in [sheet.trained_on[line.setting]]
        for shifted in [_shifted(sheet, home)]
    )
    home = next(iter(sheet.trained_on.values()))
    start = f"{sheet.title} ({home} → {', '.join(_shifted(sheet, home))})"
    return " ".join((f"{start}: {'; '.join(rows)}.", *better([sheet], "variant")))


def _measures(tables: Sequence[Sheet]) -> str:
    """What the figures of each table are."""
    by_measure: dict[str, list[str]] = {}
    for sheet in tables:
        better = "" if sheet.higher_is_better else ", less is better"
        measure = TABLES[sheet.name].measure
        by_measure.setdefault(f"{measure}{better}", []).append(sheet.title)
    return "; ".join(f"{', '.join(titles)}: {name}" for name, titles in by_measure.items())


def _made(sheet: Sheet) -> list[str]:
    """How each line was made, where lines differ in that."""
    names = [name for name in differing(sheet) if name != "updates" or not as_planned(sheet)]
    if not names:
        return []
    lines = (
        f"{head(sheet, line.setting)}, {line.label}: "
        + ", ".join(f"{name} {line.made[name]}" for name in names)
        for line in sheet.lines
    )
    return [f"Not all runs were made alike: {'; '.join(lines)}."]


def _cell(line: Line | None, home: str, shifted: Sequence[str]) -> str:
    if line is None:
        return "–"
    return f"{_figures(line, home, shifted)}<br>*{_paper(line, home, shifted)}*"


def _figures(line: Line, home: str, shifted: Sequence[str]) -> str:
    """Where it was trained, an arrow, and the other conditions."""
    cells = {c: line.ours.get(c, Cell()) for c in (home, *shifted)}
    shown = _arrow({c: figures(cell) for c, cell in cells.items()}, home, shifted)
    count = str(max(len(cell.values) for cell in cells.values()))
    failed = max(cell.failed for cell in cells.values())
    return f"{shown} ({count}; {failed} failed)" if failed else f"{shown} ({count})"


def _paper(line: Line, home: str, shifted: Sequence[str]) -> str:
    return _arrow({c: number(value(text)) for c, text in line.paper.items()}, home, shifted)


def _arrow(said: Mapping[str, str], home: str, shifted: Sequence[str]) -> str:
    return f"{said.get(home, '–')} → {' / '.join(said.get(c, '–') for c in shifted)}"


def page(found: Sequence[Sheet], sources: Mapping[str, Mapping[str, str]]) -> str:
    """All tables and figures, as Markdown."""
    parts = [
        "# Results",
        "Generated by `riglstm report --results results` from the CSV files of this folder, which "
        "have one line for each figure of each run. Of each table the budget and precision of its "
        "last line count. `bench/` has measured speeds.",
    ]
    if not found:
        parts.append(NOTHING)
    parts += [" ".join(_means([sheet for sheet in found if sheet.name != ABLATION]))]
    parts += [markdown(grid(sheet)).rstrip() for sheet in found]
    for name, said in sources.items():
        alt = said["alt"].replace("[", "(").replace("]", ")")
        parts.append(f"![{alt}](figures/{name})\n\n**{said['title']}.** {said['caption']}")
    return "\n\n".join(part for part in parts if part) + "\n"
