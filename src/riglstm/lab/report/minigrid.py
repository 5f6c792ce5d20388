"""MiniGrid for readers: RigLSTM's success beside RIM's, and training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.table import GridRun, comparable, label, tables
from riglstm.lab.report.curves import LOOKS, Picture, draw_training, plot_axes, png
from riglstm.lab.tables.result import Series
from riglstm.lab.tables.table import Table
from riglstm.lab.train.folder import differences
from riglstm.plot.draw import FAINT, GRID, new_figure, styled

OURS, THEIRS = "riglstm", "rim"

Bar = tuple[str, str, float, float]
"""Family, level, mean difference in points, its standard deviation."""


def results(
    runs: Sequence[GridRun], missing: list[str]
) -> tuple[list[Table], list[str], list[Picture]]:
    """Tables, notes and pictures of runs on MiniGrid; adds to `missing` what they lack."""
    done, left = comparable([run for run in runs if run.state == "done"])
    missing += left
    missing += [
        f"{run.path}: a run on MiniGrid that failed: {run.reason}"
        if run.state == "failed"
        else f"{run.path}: a run on MiniGrid that is not finished; go on with --resume"
        for run in runs
        if run.state != "done"
    ]
    missing += unequal_training(done)
    bars = relative(done)
    pictures = [*([relative_picture(bars)] if bars else []), *_training(done)]
    return *(tables(done) if done else ([], [])), pictures


def relative(done: Sequence[GridRun]) -> list[Bar]:
    """The points of success by which RigLSTM is above RIM, on every level where both have runs.

    The runs of a model are those of one training; see `comparable`. The spread is that of the
    difference of two independent runs: √(sd² + sd²).
    """
    rates: dict[tuple[str, str, str], list[float]] = {}
    for run in done:
        for row in run.rows:
            if row["metric"] == "success":
                place = run.spec.family, run.spec.name, row["condition"]
                rates.setdefault(place, []).append(100 * row["value"])
    bars: list[Bar] = []
    for key, of in FAMILIES.items():
        for name in of.levels:
            ours, theirs = (rates.get((key, model, name), []) for model in (OURS, THEIRS))
            if ours and theirs:
                spread = sum(np.var(v, ddof=1) for v in (ours, theirs) if len(v) > 1) ** 0.5
                mean = float(np.mean(ours) - np.mean(theirs))
                bars.append((of.title, name, mean, float(spread)))
    return bars


def unequal_training(done: Sequence[GridRun]) -> list[str]:
    """A line on each family on which RigLSTM and RIM were trained with other options."""
    found: dict[str, dict[str, GridRun]] = {}
    for run in done:
        found.setdefault(run.spec.family, {}).setdefault(run.spec.name, run)
    said = []
    for family, runs in found.items():
        if OURS in runs and THEIRS in runs:
            theirs, ours = (runs[name].spec.training()["fit"] for name in (THEIRS, OURS))
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


def _training(done: Sequence[GridRun]) -> Iterator[Picture]:
    """Success in training, by frame, of each family in which an episode has ended."""
    runs: dict[str, dict[str, list[Series]]] = {run.spec.family: {} for run in done}
    for run in done:
        if "success" in run.metrics:
            own = runs[run.spec.family].setdefault(label(run.spec.name), [])
            own.append(run.metrics["success"])
    for family, found in runs.items():
        if found:
            title, home = FAMILIES[family].title, next(iter(FAMILIES[family].levels))
            figure = draw_training({f"{title} {home}: success": found})
            figure.axes[0].set_xlabel("frame")
            yield Picture(
                title=f"MiniGrid, {title}: success while training",
                caption="Share of the last 100 episodes that were solved, by frames acted in.",
                png=png(figure),
            )
