"""What each cell could choose from at one step: scores of the input's views and of the other cells.

Shapes: B images, N cells, K views, s × s pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from riglstm.lab.report.style import (
    FAINT,
    INK,
    VERMILION,
    Array,
    new_figure,
    picture_axes,
    styled,
)

if TYPE_CHECKING:
    from riglstm.lab.report.cells import Images

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Scores(NamedTuple):
    """One layer of a model at one step."""

    step: int
    """Counted from 1, as the paper does."""
    active: Array
    """(B, N) bool."""
    views: Array
    """(B, N, K)."""
    peers: Array
    """(B, N, N): [j, i] is cell j's score of cell i."""
    views_chosen: Array | None
    """(B, N, K) bool; None: the model weighs and does not choose."""
    peers_chosen: Array | None
    """(B, N, N) bool."""
    view_names: Sequence[str]


@styled()
def draw(images: Images, scores: Scores) -> Figure:
    """A row for each image: where the step is, N×K scores of the views, N×N of the cells."""
    rows, N, K = len(images.pixels), scores.views.shape[1], scores.views.shape[2]
    unit = 0.46
    widths = [1.7, unit * max(K, 2) + 1.5, unit * N + 1.5]
    figure = new_figure(sum(widths) + 0.3, (max(1.7, unit * N) + 0.75) * rows + 0.2)
    grid = figure.add_gridspec(rows, 3, width_ratios=widths, wspace=0.03, hspace=0.05)
    for b in range(rows):
        _draw_step(figure.add_subplot(grid[b, 0]), images, b, scores.step)
        left, right = (figure.add_subplot(grid[b, i]) for i in (1, 2))
        awake = scores.active[b]
        chosen = None if scores.views_chosen is None else scores.views_chosen[b]
        _draw_map(left, scores.views[b], awake, chosen, scores.view_names)
        chosen = None if scores.peers_chosen is None else scores.peers_chosen[b]
        _draw_map(right, scores.peers[b], awake, chosen, [str(i) for i in range(N)], own=True)
        left.set_ylabel("cell")
        left.set_xlabel("view of the input")
        right.set_xlabel("cell listened to")
        if b == 0:
            left.set_title("input scores")
            right.set_title("hidden-state scores")
    return figure


def _draw_step(axes: Axes, images: Images, b: int, step: int) -> None:
    """The image, with the pixel that the step reads."""
    picture_axes(axes).imshow(
        images.pixels[b], cmap="gray", vmin=0, vmax=1, interpolation="nearest"
    )
    line, column = divmod(step - 1, images.pixels.shape[2])
    axes.axhline(line, color=VERMILION, linewidth=0.8, alpha=0.6)
    axes.add_patch(
        Rectangle((column - 0.5, line - 0.5), 1, 1, fill=False, color=VERMILION, linewidth=2)
    )
    axes.set_xlabel(
        f"“{images.labels[b]}”, test no. {images.indices[b]}\n"
        f"step {step}: line {line + 1},\npixel {column + 1}",
        fontsize=9,
    )


def _draw_map(
    axes: Axes,
    scores: Array,
    awake: Array,
    chosen: Array | None,
    columns: Sequence[str],
    own: bool = False,
) -> None:
    """One map with its values; framed is what awake cells took in, dotted a cell's `own` state."""
    power = _power(scores)
    scaled = scores / 10.0**power
    limit = float(np.abs(scaled).max()) or 1.0
    shown = axes.imshow(scaled, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="equal")
    places = max(0, 1 - int(np.floor(np.log10(limit))))
    for (j, k), value in np.ndenumerate(scaled):
        colour = "white" if abs(value) > 0.6 * limit else INK
        # + 0.0: a rounded -0.0 would keep its sign.
        text = f"{round(float(value), places) + 0.0:.{places}f}".replace("-", "−")
        axes.text(k, j, text, ha="center", va="center", fontsize=7.5, color=colour)
        if chosen is not None and awake[j] and chosen[j, k]:
            line = ":" if own and j == k else "-"
            corner, side = (k - 0.44, j - 0.44), 0.88
            axes.add_patch(
                Rectangle(corner, side, side, fill=False, color=colour, lw=1.6, linestyle=line)
            )
    axes.set_xticks(range(scores.shape[1]), columns)
    axes.set_yticks(
        range(len(awake)), [f"{j}" if a else f"{j} asleep" for j, a in enumerate(awake)]
    )
    for label, is_awake in zip(axes.get_yticklabels(), awake, strict=True):
        label.set_color(INK if is_awake else FAINT)
        label.set_fontweight("bold" if is_awake else "normal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(shown, ax=axes, shrink=0.85, pad=0.02)
    bar.outline.set_visible(False)
    if power:
        bar.ax.set_title(f"×10{str(power).translate(RAISED)}", fontsize=9, loc="left")


def _power(scores: Array) -> int:
    """The power of ten to take out of scores, so that four signs are enough for each."""
    largest = float(np.abs(scores).max())
    power = int(np.floor(np.log10(largest))) if largest > 0 else 0
    return power if not -1 <= power <= 2 else 0
