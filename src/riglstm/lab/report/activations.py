"""When each cell was awake: the paper's activation images, and what they lack, a figure for it.

Shapes: B images, N cells, s × s pixels, which are the T = s² steps in the order of lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from riglstm.lab.report.style import Array, new_figure, picture_axes, styled


class Layer(NamedTuple):
    """The cells of one layer of a model."""

    name: str
    """Empty where a model has one layer."""
    active: Array
    """(B, N, s, s) bool: the cell was awake at that pixel."""


class Images(NamedTuple):
    """Test images and what a model made of them."""

    pixels: Array
    """(B, s, s) of 0 to 1, or (B, s, s, 3)."""
    indices: Sequence[int]
    """In the test set."""
    labels: Sequence[str]
    read_as: Sequence[str]

    def take(self, rows: slice) -> Images:
        """Some of them."""
        return Images(self.pixels[rows], self.indices[rows], self.labels[rows], self.read_as[rows])


class Summary(NamedTuple):
    """Of one cell, over many images: mean and standard deviation."""

    awake: tuple[float, float]
    """Share of the steps."""
    correlation: tuple[float, float]
    """With the stroke; NaN where the cell never changed on any image."""


def share_awake(active: Array) -> Array:
    """The share of steps at which each cell was awake: (B, N, s, s) to (B, N)."""
    return np.asarray(active.mean(axis=(2, 3)))


def stroke_correlation(active: Array, pixels: Array) -> Array:
    """Pearson's r, over the pixels of an image, of being awake with brightness, (B, N).

    With binarised digits, +1 is a cell that wakes on the stroke and nowhere else, -1 one that wakes
    on the background alone. NaN where a cell was always or never awake, or the image is blank.
    """
    ink = pixels.mean(axis=3) if pixels.ndim == 4 else pixels
    a = active.astype(np.float64) - active.mean(axis=(2, 3), keepdims=True)
    p = (ink - ink.mean(axis=(1, 2), keepdims=True))[:, None]  # (B, 1, s, s)
    scale = np.sqrt((a * a).sum(axis=(2, 3)) * (p * p).sum(axis=(2, 3)))
    return np.where(scale > 0, (a * p).sum(axis=(2, 3)) / np.where(scale > 0, scale, 1), np.nan)


def summarise(active: Array, pixels: Array) -> list[Summary]:
    """Every cell of a layer over all the images given."""
    awake, r = share_awake(active), stroke_correlation(active, pixels)
    found = []
    for j in range(active.shape[1]):
        known = r[:, j][~np.isnan(r[:, j])]
        mean_sd = (float(known.mean()), float(known.std())) if len(known) else (np.nan, np.nan)
        found.append(Summary((float(awake[:, j].mean()), float(awake[:, j].std())), mean_sd))
    return found


@styled()
def draw(images: Images, layers: Sequence[Layer]) -> Figure:
    """A row for each image: the image, then every cell, white where it was awake."""
    rows, cells = len(images.pixels), [layer.active.shape[1] for layer in layers]
    # A narrow empty column sets layers apart.
    widths = [1.0, *(w for n in cells for w in (0.12, *[1.0] * n))]
    size = 1.25
    figure = new_figure(size * sum(widths) + 0.2, (size + 0.42) * rows + 0.4)
    grid = figure.add_gridspec(rows, len(widths), width_ratios=widths, wspace=0.04, hspace=0.04)
    for b in range(rows):
        axes = picture_axes(figure.add_subplot(grid[b, 0]))
        axes.imshow(images.pixels[b], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xlabel(
            f"“{images.labels[b]}”, read as “{images.read_as[b]}”\ntest no. {images.indices[b]}",
            fontsize=9,
        )
        if b == 0:
            axes.set_title("input")
        column = 1
        for layer in layers:
            column += 1
            awake = share_awake(layer.active)[b]
            r = stroke_correlation(layer.active, images.pixels)[b]
            for j, active in enumerate(layer.active[b]):
                axes = picture_axes(figure.add_subplot(grid[b, column]))
                axes.imshow(active, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axes.set_xlabel(f"awake {percent(awake[j])}\nr = {number(r[j])}", fontsize=9)
                if b == 0:
                    axes.set_title(f"{layer.name} cell {j}".strip())
                column += 1
    return figure


def percent(share: float) -> str:
    """A share without decimals; all and nothing are said of nothing less."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def number(r: float) -> str:
    """A correlation with its sign; a dash where there is none."""
    return "–" if np.isnan(r) else f"{r:+.2f}".replace("-", "−")
