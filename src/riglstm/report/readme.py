"""Results as Markdown: a table for README, and a page with all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from riglstm.experiments.paper import value
from riglstm.experiments.render import markdown, number
from riglstm.experiments.sheet import Cell, Line, Sheet, differing, grid
from riglstm.experiments.summary import ABLATION, OURS, head, worse_than_paper
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
            shifted = [c for c in sheet.conditions if c != home]
            own = {line.row: line for line in sheet.lines if line.setting == setting}
            cells = [_summary(own.get(row), shifted) for row in columns]
            start = f"{head(sheet, setting)}: {home} → {', '.join(shifted)}"
            lines.append(f"| {' | '.join((start, *cells))} |")
    text = [
        "Mean ± standard deviation (runs), and below it what the paper prints.",
        f"{_measures(tables)}.",
        "Checkpoints are chosen on validation data of the training condition, for all models.",
        *_compared(tables),
        *(said for sheet in tables for said in _made(sheet)),
        "[All tables and figures](results/README.md) come from `results/*.csv`.",
    ]
    for sheet in found:
        if sheet.name == ABLATION:
            variants = [line for line in sheet.lines if line.row != OURS]
            shifted = [c for c in sheet.conditions if c not in sheet.trained_on.values()]
            rows = "; ".join(f"{v.label} {_figures(v, shifted)}" for v in variants)
            text.append(f"{sheet.title} ({', '.join(shifted)}): {rows}.")
    return "\n".join((*lines, "", *text, ""))


def _measures(tables: Sequence[Sheet]) -> str:
    """What the figures of each table are."""
    by_measure: dict[str, list[str]] = {}
    for sheet in tables:
        better = "" if sheet.higher_is_better else ", less is better"
        measure = TABLES[sheet.name].measure
        by_measure.setdefault(f"{measure}{better}", []).append(sheet.title)
    return "; ".join(f"{', '.join(titles)}: {name}" for name, titles in by_measure.items())


def _compared(tables: Sequence[Sheet]) -> list[str]:
    """Where our model is worse than the paper's; nothing where there is nothing to compare."""
    worse = worse_than_paper(tables)
    if worse is None:
        return []
    if not worse:
        return ["No figure of RigLSTM here is worse than the paper's."]
    return [f"RigLSTM is worse than the paper's in {'; '.join(worse)}."]


def _made(sheet: Sheet) -> list[str]:
    """How each line was made, where lines differ in that."""
    names = differing(sheet)
    if not names:
        return []
    lines = (
        f"{head(sheet, line.setting)}, {line.label}: "
        + ", ".join(f"{name} {line.made[name]}" for name in names)
        for line in sheet.lines
    )
    return [f"Not all runs were made alike: {'; '.join(lines)}."]


def _summary(line: Line | None, conditions: Sequence[str]) -> str:
    if line is None:
        return "–"
    paper = " / ".join(_rounded(line.paper[c]) if c in line.paper else "–" for c in conditions)
    return f"{_figures(line, conditions)}<br>*{paper}*"


def _figures(line: Line, conditions: Sequence[str]) -> str:
    cells = [line.ours.get(c, Cell()) for c in conditions]
    shown = " / ".join(_mean(cell) for cell in cells)
    count = str(max((len(cell.values) for cell in cells), default=0))
    failed = max((cell.failed for cell in cells), default=0)
    return f"{shown} ({count}; {failed} failed)" if failed else f"{shown} ({count})"


def _mean(cell: Cell) -> str:
    if not cell.values:
        return "–"
    return number(cell.mean) if cell.sd is None else f"{number(cell.mean)} ± {number(cell.sd)}"


def _rounded(printed: str) -> str:
    return number(value(printed))


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
    parts += [markdown(grid(sheet)).rstrip() for sheet in found]
    for name, said in sources.items():
        alt = said["alt"].replace("[", "(").replace("]", ")")
        parts.append(f"![{alt}](figures/{name})\n\n**{said['title']}.** {said['caption']}")
    return "\n\n".join(parts) + "\n"
