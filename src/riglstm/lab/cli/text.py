"""What verbs print: tables, a run's result by both rules of choosing weights, a small plot."""

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
HEIGHT = 11
"""Lines of a plot: one for every ten percent."""


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under a title: the first to the left, the others to the right.

    A row of one cell is a heading among the others.
    """
    full = [row for row in (header, *rows) if len(row) > 1]
    widths = [max(len(cell) for cell in column) for column in zip(*full, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *others = row
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False)]
        return "  ".join([first.ljust(widths[0]), *cells]).rstrip()

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


def plot(curves: Mapping[str, Sequence[float]], places: Sequence[str], floor: float = 0.0) -> str:
    """Shares from `floor` to 1 at each place, a letter for each curve, `*` where several meet."""
    marks = {name: chr(ord("A") + i) for i, name in enumerate(curves)}
    step = max(8, *(len(place) + 2 for place in places))
    lines = [[" "] * (step * len(places)) for _ in range(HEIGHT)]
    for name, shares in curves.items():
        for i, share in enumerate(shares):
            height = (max(share, floor) - floor) / (1 - floor)
            row, column = round((1 - height) * (HEIGHT - 1)), i * step + step // 2
            lines[row][column] = marks[name] if lines[row][column] == " " else "*"
    body = []
    for row, cells in enumerate(lines):
        level = 1 - row / (HEIGHT - 1) * (1 - floor)
        label = f"{level:4.0%}" if row % 5 == 0 else "    "
        body.append(f"{label} │{''.join(cells)}".rstrip())
    axis = "     └" + "─" * (step * len(places))
    below = "      " + "".join(place.center(step) for place in places)
    legend = "      " + ", ".join(f"{mark} {name}" for name, mark in marks.items())
    return "\n".join([*body, axis, below.rstrip(), f"{legend}, * several"])
