"""Figures of many runs: the metric against the shift, and training as it went."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from riglstm.lab.report.style import (
    FAINT,
    GRID,
    LINES,
    Look,
    fold,
    looks,
    new_figure,
    plot_axes,
    styled,
)
from riglstm.lab.tables.read_run import Series
from riglstm.lab.tables.render import ENOUGH

HOLLOW: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 9,
    "markerfacecolor": "none",
}
"""How the paper's figures are drawn."""


class Axis(NamedTuple):
    """What is measured, as it is printed."""

    name: str
    """With its unit: `test accuracy in %`."""
    higher_is_better: bool


def is_scale(conditions: Sequence[str]) -> bool:
    """Whether conditions are steps of one scale (`P=100`, `P=200`) and not kinds of things.

    They are where they differ in nothing but their numbers, of which some rise and none falls.
    """
    forms = {re.sub(r"\d+", "#", condition) for condition in conditions}
    numbers = [[int(n) for n in re.findall(r"\d+", condition)] for condition in conditions]
    rise = (
        a != b and all(low <= high for low, high in zip(a, b, strict=True))
        for a, b in pairwise(numbers)
    )
    return len(forms) == 1 and all(numbers) and all(rise)


@styled()
def draw_shift(
    conditions: Sequence[str],
    trained_on: str,
    models: Mapping[str, Mapping[str, Sequence[float]]],
    axis: Axis,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    yardsticks: Mapping[str, Mapping[str, float]] | None = None,
) -> Figure:
    """Each model's mean and standard deviation over seeds, by condition.

    `models`: label to condition to a value for each seed; `paper`: label to condition to the
    paper's figure, drawn hollow; `yardsticks`: the same for what needs no model, drawn as bars.
    """
    look, paper, joined = looks(list(models)), paper or {}, is_scale(conditions)
    figure = new_figure(max(6.4, 1.7 * len(conditions) + 2.6), 4.4)
    axes = plot_axes(figure.add_subplot())
    dodge = min(0.05 if joined else 0.08, 0.5 / len(models))
    for i, (label, values) in enumerate(models.items()):
        shift = dodge * (i - (len(models) - 1) / 2)
        _draw_model(axes, conditions, values, look[label], shift, joined, label)
        _draw_hollow(axes, conditions, paper.get(label, {}), look[label], shift, label)
    handles: list[Any] = list(axes.containers)
    for (label, at), line in zip((yardsticks or {}).items(), cycle(LINES)):
        bars = [(x, at[c]) for x, c in enumerate(conditions) if c in at]
        handles.append(
            axes.hlines(
                [y for _, y in bars],
                [x - 0.42 for x, _ in bars],
                [x + 0.42 for x, _ in bars],
                colors=FAINT,
                linestyles=line,
                linewidth=1.2,
                label=fold(label),
            )
        )
    if paper:
        handles.append(Line2D([], [], **HOLLOW, markeredgecolor=FAINT, label="hollow: the paper"))
    axes.set_xlim(-0.5, len(conditions) - 0.5)
    axes.set_xticks(range(len(conditions)), conditions)
    if trained_on in conditions:
        x = list(conditions).index(trained_on)
        axes.axvspan(x - 0.5, x + 0.5, color=GRID, alpha=0.45, zorder=0, linewidth=0)
        axes.text(
            *(x, 1.01, "trained here"),
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            color=FAINT,
            fontsize=9.5,
        )
    axes.set_xlabel("test condition")
    axes.set_ylabel(axis.name + ("" if axis.higher_is_better else "\n(lower is better)"))
    figure.legend(handles=handles, loc="outside right center")
    return figure


def _draw_hollow(
    axes: Axes,
    conditions: Sequence[str],
    printed: Mapping[str, float],
    look: Look,
    shift: float,
    label: str,
) -> None:
    """The paper's figures of one model."""
    points = [(x + shift, printed[c]) for x, c in enumerate(conditions) if c in printed]
    if points:
        axes.plot(
            *zip(*points, strict=True),
            **{**HOLLOW, "marker": look.marker},
            markeredgecolor=look.colour,
            markeredgewidth=1.3,
            label=f"_{label}, paper",
        )


def _draw_model(
    axes: Axes,
    conditions: Sequence[str],
    values: Mapping[str, Sequence[float]],
    look: Look,
    shift: float,
    joined: bool,
    label: str,
) -> None:
    """One model: a mark at each mean, a dot for each seed, bars of one standard deviation.

    Two runs have no bars: their dots say as much.
    """
    measured = [(x + shift, np.asarray(values[c])) for x, c in enumerate(conditions) if c in values]
    x = [at for at, _ in measured]
    means = [v.mean() for _, v in measured]
    spreads = [v.std(ddof=1) if len(v) >= ENOUGH else 0.0 for _, v in measured]
    counts = sorted({len(v) for _, v in measured})
    n = "–".join(str(c) for c in ([counts[0], counts[-1]] if len(counts) > 1 else counts))
    axes.errorbar(
        *(x, means),
        yerr=spreads if any(spreads) else None,
        color=look.colour,
        marker=look.marker,
        linestyle=look.line if joined else "none",
        markersize=6,
        capsize=3,
        elinewidth=1.2,
        label=fold(f"{label} (n = {n})"),
    )
    for at, v in measured:
        if len(v) > 1:
            axes.plot([at] * len(v), v, ".", color=look.colour, markersize=4, alpha=0.5)


@styled()
def draw_training(
    panels: Mapping[str, Mapping[str, Sequence[Series]]], units: Mapping[str, str] | None = None
) -> Figure:
    """A panel for each quantity by update: thin lines are runs, thick ones their means.

    `panels`: the quantity's name to label to its runs; `units`: what stands beside its axis.
    """
    labels = list(dict.fromkeys(label for runs in panels.values() for label in runs))
    look = looks(labels)
    across = 2 if len(panels) == 4 else min(3, len(panels))
    down = -(-len(panels) // across)
    figure = new_figure(4.2 * across + 0.2, 3.3 * down + 0.5)
    for i, (name, runs) in enumerate(panels.items()):
        axes = plot_axes(figure.add_subplot(down, across, i + 1))
        for label, series in runs.items():
            alone = len(series) == 1
            for one in series:
                axes.plot(
                    *one,
                    color=look[label].colour,
                    linestyle=look[label].line,
                    linewidth=1.6 if alone else 0.8,
                    alpha=1.0 if alone else 0.45,
                )
            if not alone:
                axes.plot(
                    *mean(series),
                    color=look[label].colour,
                    linestyle=look[label].line,
                    linewidth=2.4,
                )
        axes.set_title(name)
        axes.set_xlabel("update")
        axes.set_ylabel((units or {}).get(name, ""))
        lines = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
        ends = [(v[v > 0].min(), v[v > 0].max()) for v in lines if (v > 0).any()]
        if "loss" in name and ends and max(e[1] for e in ends) > 20 * min(e[0] for e in ends):
            axes.set_yscale("log")
            # The usual one writes formulas, which are not set as such here.
            axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
    handles = [
        Line2D(
            [],
            [],
            color=look[label].colour,
            linestyle=look[label].line,
            linewidth=2.4,
            label=fold(label),
        )
        for label in labels
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(2 + across, len(handles)))
    return figure


def mean(series: Sequence[Series]) -> Series:
    """The mean of runs, at the updates that all of them have."""
    steps = series[0].steps
    for one in series[1:]:
        steps = np.intersect1d(steps, one.steps)
    rows = [one.values[np.isin(one.steps, steps)] for one in series]
    return Series(steps, np.mean(rows, axis=0))
