"""MiniGrid for readers: RigLSTM's success beside RIM's, and training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.report.curves import LOOKS, Picture, draw_training, plot_axes, png
from riglstm.lab.tables import agents
from riglstm.lab.tables.result import Record, ResultRow, Series
from riglstm.lab.tables.table import TextTable, newest, text_table
from riglstm.lab.train.folder import differences
from riglstm.plot.draw import FAINT, GRID, new_figure, styled

OURS, THEIRS = "riglstm", "rim"

Bar = tuple[str, str, float, float]
"""Family, level, mean difference in points, its standard deviation."""


def results(runs: Sequence[Record], missing: list[str]) -> list[str | TextTable | Picture]:
    """Tables, a note and pictures of agents; adds to `missing` the runs that none of them show."""
    runs = sorted(runs, key=lambda run: str(run.run.get("started", "")))
    rows = [row for run in runs for row in agents.rows(run, str(run.path))]
    shown = newest(rows)
    counted = {row.run for row in shown}
    left = dict.fromkeys(row.run for row in rows if row.run not in counted)
    missing += [f"{run}: left out, a later run of its memory was trained otherwise" for run in left]
    missing += unequal_training([run for run in runs if str(run.path) in counted])
    bars = relative(shown)
    pictures = [*([relative_picture(bars)] if bars else []), *_training(runs)]
    return [*map(text_table, agents.tables(shown)), agents.NOTE, *pictures]


def relative(rows: Sequence[ResultRow]) -> list[Bar]:
    """The points of success by which RigLSTM is above RIM, on every level where both have runs.

    The spread is that of the difference of two independent runs: √(sd² + sd²).
    """
    rates: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.metric.startswith("success@"):
            place = row.setting, row.model, row.condition
            rates.setdefault(place, []).append(100 * row.value)
    bars: list[Bar] = []
    for key, of in FAMILIES.items():
        for name in of.levels:
            ours, theirs = (rates.get((key, model, name), []) for model in (OURS, THEIRS))
            if ours and theirs:
                spread = sum(np.var(v, ddof=1) for v in (ours, theirs) if len(v) > 1) ** 0.5
                mean = float(np.mean(ours) - np.mean(theirs))
                bars.append((of.title, name, mean, float(spread)))
    return bars


def unequal_training(runs: Sequence[Record]) -> list[str]:
    """A line on each family on which RigLSTM and RIM were trained with other options."""
    found: dict[str, dict[str, Record]] = {}
    for run in runs:
        found.setdefault(run.spec.task_options["family"], {}).setdefault(run.spec.name, run)
    said = []
    for family, of in found.items():
        if OURS in of and THEIRS in of:
            theirs, ours = (of[name].spec.identity()["fit"] for name in (THEIRS, OURS))
            if words := differences(theirs, ours, "fit"):
                said.append(
                    f"MiniGrid, {FAMILIES[family].title}: RIM (there) and RigLSTM (here) were "
                    f"trained otherwise: {'; '.join(words)}"
                )
    return said


@styled()
def draw_relative(bars: Sequence[Bar]) -> Figure:
    """A bar for each level, families set apart."""
    of, levels, means, spreads = zip(*bars, strict=True)
    families = list(dict.fromkeys(of))
    at = [i + 0.7 * families.index(name) for i, name in enumerate(of)]
    figure = new_figure(7.0, 0.2 * at[-1] + 1.3)
    axes = plot_axes(figure.add_subplot(), "x")
    axes.barh(
        *(at, means),
        xerr=spreads,
        color=[LOOKS[OURS if mean >= 0 else THEIRS].colour for mean in means],
        ecolor=FAINT,
        error_kw={"elinewidth": 1.1, "capsize": 2.5},
    )
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_yticks(at, [f"{name} {level}" for name, level in zip(of, levels, strict=True)])
    axes.set_ylim(at[-1] + 0.85, -0.85)
    axes.set_xlabel("RigLSTM − RIM in points of success")
    for name in families[::2]:
        own = [y for y, family in zip(at, of, strict=True) if family == name]
        axes.axhspan(own[0] - 0.85, own[-1] + 0.85, color=GRID, alpha=0.35, zorder=0, linewidth=0)
    return figure


def relative_picture(bars: Sequence[Bar]) -> Picture:
    """The paper's figure of MiniGrid."""
    return Picture(
        title="MiniGrid: RigLSTM's success relative to RIM's",
        caption=(
            "Differences of mean success rates with drawn actions, in points, by family and level, "
            "the trained level first in each. Whiskers: one standard deviation of the difference "
            "between two runs, one of each. Green: RigLSTM is ahead; blue: RIM is."
        ),
        png=png(draw_relative(bars)),
    )


def _training(runs: Sequence[Record]) -> Iterator[Picture]:
    """Success in training, by frame, of each family in which an episode has ended."""
    found: dict[str, dict[str, list[Series]]] = {}
    for run in runs:
        if "success" in run.metrics:
            own = found.setdefault(run.spec.task_options["family"], {})
            own.setdefault(agents.label(run.spec.name), []).append(run.metrics["success"])
    for family, series in found.items():
        title, home = FAMILIES[family].title, next(iter(FAMILIES[family].levels))
        figure = draw_training({f"{title} {home}: success": series})
        figure.axes[0].set_xlabel("frame")
        yield Picture(
            title=f"MiniGrid, {title}: success while training",
            caption="Share of the last 100 episodes that were solved, by frames acted in.",
            png=png(figure),
        )
