"""Results of runs as text: one run by both rules of choosing weights, or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from riglstm.lab.cli import text
from riglstm.lab.tables.result import CHOSEN

Results: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By the model's name, what `riglstm.lab.tables.run` gives."""

PERCENT = ("accuracy",)
"""Metrics that are shares; all others are printed as they are."""


def table(result: Mapping[str, Any], title: str) -> str:
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
    return text.table(title, heads, lines)


def honest(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows whose weights were chosen on validation data of the training condition."""
    rows = result["rows"]
    return [row for row in rows if row["chosen_on"] == rows[0]["chosen_on"]]


RULES = """\
In brackets: the updates after which the weights were taken. The left column is the honest rule:
they were chosen on validation data like the training data. The right one is the rule of earlier
papers: chosen for each condition anew, on validation data of that condition."""


def show(row: Mapping[str, Any]) -> str:
    """A figure as it is printed."""
    value = float(row["value"])
    return f"{value:.1%}" if row["metric"] in PERCENT else f"{value:.4f}"


def side_by_side(found: Results, title: str) -> str:
    """Runs with the same conditions, by the honest rule."""
    lines = [
        [name, f"{result['parameters']}", f"{result['seconds']:.0f}"]
        + [show(row) for row in honest(result)]
        for name, result in found.items()
    ]
    return text.table(title, ["", "parameters", "seconds", *_places(found)], lines)


def plot(found: Results, floor: float = 0.0) -> str:
    """A metric that is a share, against the condition; `floor` is where the axis begins."""
    curves = {name: [row["value"] for row in honest(result)] for name, result in found.items()}
    return text.plot(curves, _places(found), floor)


def reproduced(table: str, paths: Sequence[Path], failed: int) -> str:
    """A table of runs as it is now, and where; `failed`: runs that diverged."""
    words = f"\n{table}\nwritten: {', '.join(map(str, paths))}"
    if failed:
        words += (
            f"\n{failed} failed; --retry-failed trains them anew, which helps after a change of "
            "code or device"
        )
    return words


def _places(found: Results) -> list[str]:
    return [row["condition"] for row in honest(next(iter(found.values())))]


def page(folders: Sequence[Path], out: Path) -> str:
    """Draw runs into a folder; says where, or what is needed to draw them."""
    try:
        from riglstm.lab.report import report
    except ModuleNotFoundError as error:
        return f"The page needs {error.name}: pip install 'riglstm[train]', and the command again."
    drawn = report(folders, out / "report.html", figures=out / "figures")
    curve = next((out / "figures").glob("*shift*.png"))
    return f"the curve: {curve}\nthe page: {drawn}"
