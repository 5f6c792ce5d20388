"""Balls that models see rolling on: the truth, each model's frames, and all of them as inks.

Shapes: F frames of H × W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from riglstm.lab.report.style import (
    TRUTH,
    Array,
    looks,
    new_figure,
    overlay,
    picture_axes,
    styled,
)

EPSILON = 1e-6
"""Probabilities are kept this far from 0 and 1, as in the score of the task."""

EDGE = 0.5
"""Where a predicted ball ends, for its outline."""
OUTLINES: tuple[Literal["solid", "dashed", "dotted"], ...] = ("solid", "dashed", "dotted")
"""Of the models in the overlay, in their order."""


def frame_bce(truth: Array, predicted: Array) -> Array:
    """Binary cross-entropy of each frame in nats per pixel: (F, H, W) to (F,)."""
    p = predicted.astype(np.float64).clip(EPSILON, 1 - EPSILON)
    nats = -np.where(truth > 0.5, np.log(p), np.log1p(-p))
    return np.asarray(nats.mean(axis=(1, 2)))


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
