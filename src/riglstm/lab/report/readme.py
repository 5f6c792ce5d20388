"""Results as Markdown: short tables for README, and a page with all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from riglstm.lab.tables.render import markdown, plain
from riglstm.lab.tables.sheet import ENOUGH, Sheet, grid
from riglstm.lab.tables.summary import not_run
from riglstm.lab.tables.tables import TABLES

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
"""Around what is generated in README."""
NOTHING = (
    "No runs at the paper's sizes yet: `riglstm reproduce` makes them, `riglstm report` this table."
)
DOCS = "docs/experiments.md"
"""What describes the recipes."""
FOUND = {"tuned": "docs/recipes.md"}
"""Recipes that were looked for, and what tells how."""


def inserted(readme: Path, text: str) -> str:
    """README with the text between its two marks."""
    content = readme.read_text(encoding="utf-8")
    before, begin, rest = content.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} must have a line {BEGIN} and after it {END}, got not both")
    return f"{before}{begin}{text}{end}{after}"


def block(found: Sequence[Sheet]) -> str:
    """README's tables: a line for each model, a column for each test condition."""
    if not found:
        return f"{NOTHING}\n"
    tables = (
        markdown(replace(grid(sheet, brief=True), title=_title(sheet), notes=())) for sheet in found
    )
    said = (
        f"Mean ± standard deviation; fewer than {ENOUGH} runs are shown one by one. The best mean "
        "of a column is bold. Columns “paper” have the paper's figures. Checkpoints are chosen on "
        "validation data of the training condition. [All tables and figures](results/README.md) "
        f"come from `results/*.csv`. {recipes(found)}"
    )
    rest = _not_run(found)
    notes = [f"- {said}", *([f"- Not run yet: {rest}."] if rest else [])]
    return "\n".join((*tables, *notes, ""))


def _title(sheet: Sheet) -> str:
    """The table, what its models were trained on where that is one thing, and what it measures."""
    homes = set(sheet.trained_on.values())
    home = f", trained on {next(iter(homes))}" if len(homes) == 1 else ""
    less = "" if sheet.higher_is_better else ", less is better"
    return f"{sheet.title}{home}: {TABLES[sheet.name].measure}{less}"


def recipes(found: Sequence[Sheet], folder: str = "") -> str:
    """How the runs were trained; `folder`: the root of the repository, from the page."""
    names = dict.fromkeys(line.made["budget"] for sheet in found for line in sheet.lines)
    said = []
    for name in names:
        said.append(f"Recipe `{plain(name)}`: [{DOCS}]({folder}{DOCS}).")
        if name in FOUND:
            said.append(
                "It was chosen on validation data of all conditions, the shifted ones included "
                f"([how]({folder}{FOUND[name]}))."
            )
    return " ".join(said)


def _not_run(found: Sequence[Sheet]) -> str:
    """What has no run yet, of the tables that are shown and of all others."""
    parts = [f"{sheet.title} ({rest})" for sheet in found if (rest := not_run(sheet))]
    there = {sheet.name for sheet in found}
    parts += [table.title for name, table in TABLES.items() if name not in there]
    return "; ".join(parts)


def page(found: Sequence[Sheet], sources: Mapping[str, Mapping[str, str]]) -> str:
    """All tables and figures, as Markdown."""
    parts = [
        "# Results",
        "`riglstm report --results results` makes this page from the CSV files of this folder, "
        "which have one line for each figure of each run. Each table shows the recipe and "
        "precision of its newest run. `bench/` has measured speeds.",
        recipes(found, "../") if found else NOTHING,
    ]
    parts += [markdown(grid(sheet)).rstrip() for sheet in found]
    for name, said in sources.items():
        alt, title, caption = (plain(said[part]) for part in ("alt", "title", "caption"))
        parts.append(f"![{alt}](figures/{name})\n\n**{title}.** {caption}")
    return "\n\n".join(parts) + "\n"
