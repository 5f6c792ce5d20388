"""Roll-outs of bouncing balls: the truth, each model's frames, and all of them overlaid.

Shapes: F frames of H × W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from riglstm.lab.report.cells import Loaded
from riglstm.lab.report.style import TRUTH, Array, Picture, looks, png
from riglstm.lab.tasks.balls import BallsTask
from riglstm.plot.style import new_figure, picture_axes, styled

EPSILON = 1e-6
"""Probabilities are kept this far from 0 and 1, as in the score of the task."""

EDGE = 0.5
"""Where a predicted ball ends, for its outline."""
OUTLINES: tuple[Literal["solid", "dashed", "dotted"], ...] = ("solid", "dashed", "dotted")
"""Of the models in the overlay, in their order."""
OVERLAID = ("riglstm", "rim")
"""Models whose balls lie over the true ones, as in the paper."""


def frame_bce(truth: Array, predicted: Array) -> Array:
    """Binary cross-entropy of each frame in nats per pixel: (F, H, W) to (F,)."""
    p = predicted.astype(np.float64).clip(EPSILON, 1 - EPSILON)
    nats = -np.where(truth > 0.5, np.log(p), np.log1p(-p))
    return np.asarray(nats.mean(axis=(1, 2)))


def overlay(layers: Sequence[tuple[Array, str]]) -> Array:
    """Maps (H, W) of 0 to 1 as inks on white paper, (H, W, 3): where they meet, it is darker."""
    paper = np.ones((*layers[0][0].shape, 3))
    for ink, colour in layers:
        paper -= ink[..., None] * (1 - np.asarray(to_rgb(colour)))
    return paper.clip(0, 1)


@styled()
def draw(truth: Array, models: Mapping[str, Array], first_frame: int, inks: int = 2) -> Figure:
    """Rows: truth, every model, and the truth with the first `inks` of the models over it.

    `truth` and each model's probabilities are (F, H, W); frames are counted from 0.
    """
    F, look = len(truth), looks(list(models))
    mixed = list(models)[:inks]
    size = 0.95
    figure = new_figure(size * F + 1.1, (size + 0.22) * (len(models) + 2) + 0.35)
    grid = figure.add_gridspec(len(models) + 2, F, wspace=0.03, hspace=0.03)
    rows = [("truth", truth, TRUTH.colour)]
    rows += [(name, frames, look[name].colour) for name, frames in models.items()]
    for i, (name, frames, colour) in enumerate(rows):
        bce = None if i == 0 else frame_bce(truth, frames)
        for f in range(F):
            axes = picture_axes(figure.add_subplot(grid[i, f]))
            axes.imshow(overlay([(frames[f], colour)]), interpolation="nearest")
            if i == 0:
                axes.set_title(f"frame {first_frame + f}", fontsize=9.5)
            if bce is not None:
                axes.set_xlabel(f"{bce[f]:.3f}", fontsize=8.5, labelpad=2)
            if f == 0:
                axes.set_ylabel(name, fontsize=10)
    for f in range(F):
        axes = picture_axes(figure.add_subplot(grid[len(rows), f]))
        tints = [(0.15 * models[m][f], look[m].colour) for m in mixed]
        axes.imshow(overlay([(0.75 * truth[f], TRUTH.colour), *tints]), interpolation="nearest")
        for model, line in zip(mixed, OUTLINES, strict=False):
            if models[model][f].min() < EDGE < models[model][f].max():
                axes.contour(
                    models[model][f],
                    levels=[EDGE],
                    colors=[look[model].colour],
                    linestyles=line,
                    linewidths=1.3,
                )
        if f == 0:
            axes.set_ylabel("overlay", fontsize=10)
    return figure


def rollout_picture(runs: Sequence[Loaded], condition: str, sequence: int = 0) -> Picture:
    """One test sequence rolled out by every model, beside the truth."""
    order = sorted(
        runs, key=lambda run: OVERLAID.index(run.spec.name) if run.spec.name in OVERLAID else 9
    )
    # One task for all, as each would keep the sequences in memory.
    task = cast(BallsTask, order[0].task)
    rolled = {run.label: task.rollout(run.net, condition, "test", sequence) for run in order}
    models = {label: one.prediction.numpy() for label, one in rolled.items()}
    one = next(iter(rolled.values()))
    truth, first = one.truth.numpy(), len(one.seen)
    inks = max(1, sum(run.spec.name in OVERLAID for run in order))
    outlines = " and ".join(
        f"{label} ({line})" for label, line in zip(list(models)[:inks], OUTLINES, strict=False)
    )
    bce = {label: frame_bce(truth, frames) for label, frames in models.items()}
    return Picture(
        title=f"Balls, trained on {order[0].task.trained_on}, tested on {condition}",
        caption=(
            f"Test sequence {sequence}: the models get frames 0 to {first - 1} and then see their "
            f"own predictions. Under each frame, its BCE in nats per pixel. Last row: the truth in "
            f"pink, with the outlines (probability 0.5) of {outlines}. "
            + "; ".join(run.source for run in order)
            + "."
        ),
        alt="; ".join(
            f"{label}: BCE from {v[0]:.3f} in frame {first} to {v[-1]:.3f} in frame "
            f"{first + len(v) - 1}"
            for label, v in bce.items()
        ),
        png=png(draw(truth, models, first, inks)),
    )
