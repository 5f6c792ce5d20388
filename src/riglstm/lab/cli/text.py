"""What verbs print: a run's result, by both rules of choosing weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from riglstm.lab.tables.agents import METRICS
from riglstm.lab.tables.result import CHOSEN, LAST
from riglstm.lab.tables.table import TextTable, markdown

RULES = """\
In brackets: the updates after which the weights were taken. The left column is the honest rule:
they were chosen on validation data like the training data. The right one is the rule of earlier
papers: chosen for each condition anew, on validation data of that condition."""


def result_table(result: Mapping[str, Any], title: str) -> str:
    """The test figures of one run, in Markdown, with the legend of the two rules."""
    if not result["rows"]:
        return f"{title}: not tested"
    if result["rows"][0]["chosen_on"] == LAST:
        return _success_table(result, title)
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["condition"], {})[row["chosen_on"]] = row
    home, lines = result["rows"][0]["chosen_on"], []
    for condition, rows in found.items():
        there = rows.get(f"{CHOSEN}{condition}")
        cells = [f"{show(row)} ({row['step']})" if row else "–" for row in (rows[home], there)]
        lines.append([condition, *cells])
    metric = result["rows"][0]["metric"]
    heads = (f"test {metric}", f"chosen on {home}", "chosen on its own validation")
    return f"{markdown(TextTable(title, heads, lines, lead=1))}\n{RULES}"


def _success_table(result: Mapping[str, Any], title: str) -> str:
    """How often an agent solves each level."""
    lines: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["metric"] in METRICS:
            lines.setdefault(row["condition"], [row["condition"]]).append(f"{row['value']:.0%}")
    heads = ("episodes solved", *(f"actions {how}" for how in METRICS.values()))
    return markdown(TextTable(title, heads, list(lines.values()), lead=1)).rstrip()


def show(row: Mapping[str, Any]) -> str:
    """A figure as it is printed: a share in percent, another metric as it is."""
    return f"{float(row['value']):{'.1%' if row['metric'] == 'accuracy' else '.4f'}}"
