"""What verbs print: tables, and a run's result by both rules of choosing weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from riglstm.lab.tables.result import CHOSEN

PERCENT = ("accuracy",)
"""Metrics that are shares; all others are printed as they are."""
RULES = """\
In brackets: the updates after which the weights were taken. The left column is the honest rule:
they were chosen on validation data like the training data. The right one is the rule of earlier
papers: chosen for each condition anew, on validation data of that condition."""
"""The legend of `result_table`."""


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under a title: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([title, line(header), rule, *map(line, rows)])


def result_table(result: Mapping[str, Any], title: str) -> str:
    """The test figures of one run."""
    if not result["rows"]:
        return f"{title}: not tested"
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
    return table(title, heads, lines)


def honest(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows whose weights were chosen on validation data of the training condition."""
    rows = result["rows"]
    return [row for row in rows if row["chosen_on"] == rows[0]["chosen_on"]]


def show(row: Mapping[str, Any]) -> str:
    """A figure as it is printed."""
    value = float(row["value"])
    return f"{value:.1%}" if row["metric"] in PERCENT else f"{value:.4f}"
