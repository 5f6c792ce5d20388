"""The drawing of a trace: cells over time, maps of what they took in, and how pictures look.

Colours are those that colour-blind readers tell apart. Figures are made object by object; nothing
touches pyplot's state.

Shapes: T steps, B sequences, N cells, K views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from riglstm.plot.reading import Input, Layer, correlation, largest, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID = "#1b1b1b", "#6a6a6a", "#dddddd"
PINK, GREEN, BLUE = "#CC79A7", "#009E73", "#0072B2"
SKY, ORANGE, VERMILION, GREY = "#56B4E9", "#E69F00", "#D55E00", "#7f7f7f"
"""The Okabe-Ito palette, but for its yellow, which is too pale for a line on white."""

RC: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "text.color": INK,
    # A name with two dollar signs is no formula.
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "white",
}
DPI = 144
KEPT = "share of the old state kept"
"""What the colour bar says."""


@contextmanager
def styled() -> Iterator[None]:
    """Apply the house's settings while a figure is made or written; also a decorator."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"riglstm.plot needs the package matplotlib, got: {error}; install it with: "
            "pip install matplotlib"
        ) from error
    with matplotlib.rc_context(RC):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, its parts kept apart by the layout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def picture_axes(axes: Axes) -> Axes:
    """Axes for an image: a thin frame, so that white is seen on white, and no ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(FAINT)
    axes.spines[:].set_linewidth(0.6)
    return axes


@styled()
def draw_over_time(
    part: Literal["active", "keep"],
    layers: Sequence[Layer],
    shown: Input | None,
    chosen: Sequence[int],
    said: Sequence[str],
) -> Figure:
    """A part of a trace over time, under the input or in the form of its picture."""
    for layer in layers:
        layer.part(part)
    if shown is not None and shown.size:
        return _draw_pictures(part, layers, shown, chosen, said)
    return _draw_rows(part, layers, shown, chosen, said)


def _options(part: str, values: Sequence[Any], picture: bool) -> dict[str, Any]:
    """For `imshow`: one scale for all layers, to 1 or to the largest share that was kept."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    colours: Any = "gray" if picture else ListedColormap(["#f2f2f2", GREEN])
    most = 1.0
    if part == "keep":
        colours = colormaps["viridis"].with_extremes(bad="#e3e3e3")
        most = max(float(one.filled(0.0).max(initial=0.0)) for one in values) or 1.0
    return {"vmin": 0.0, "vmax": most, "cmap": colours, "interpolation": "nearest"}


def _values(part: str, layer: Layer) -> Any:
    """(T, B, N), masked where there is nothing to show."""
    import numpy as np

    if part == "active":
        return layer.awake.numpy()
    kept = np.ma.masked_invalid(layer.part("keep").numpy())
    return np.ma.masked_where(~layer.awake.numpy(), kept)


def _words(part: str, layer: Layer, brightness: Tensor | None) -> list[list[str]]:
    """By sequence and cell, what stands beside it; the brightness of the input is (T, B)."""
    awake = layer.awake
    if part == "keep":
        means = (layer.part("keep").double() * awake).sum(0) / awake.sum(0)
        return [
            [f"keeps {m:.2f}" if a else "slept" for m, a in zip(*row, strict=True)]
            for row in zip(means.tolist(), awake.any(0).tolist(), strict=True)
        ]
    shares = awake.double().mean(0).tolist()
    said = [[f"awake {percent(share)}" for share in row] for row in shares]
    if brightness is None:
        return said
    r = correlation(awake, brightness).tolist()
    return [
        [f"{text}\nr = {number(one)}" for text, one in zip(*pair, strict=True)]
        for pair in zip(said, r, strict=True)
    ]


def _draw_pictures(
    part: str, layers: Sequence[Layer], shown: Input, chosen: Sequence[int], labels: Sequence[str]
) -> Figure:
    """A row a sequence: its picture, then every cell in the same form."""
    counts = [layer.awake.shape[2] for layer in layers]
    cells = [(i, j) for i, n in enumerate(counts) for j in range(n)]
    # A narrow empty column is before each layer.
    widths = [1.0, *(w for n in counts for w in (0.12, *[1.0] * n))]
    size = 1.25
    figure = new_figure(size * sum(widths) + 0.2, (size + 0.42) * len(chosen) + 0.4)
    grid = figure.add_gridspec(
        len(chosen), len(widths), width_ratios=widths, wspace=0.04, hspace=0.04
    )
    said = [_words(part, layer, shown.values.double().mean(2)) for layer in layers]
    values = [_values(part, layer) for layer in layers]
    options = _options(part, values, picture=True)
    for row, b in enumerate(chosen):
        axes = picture_axes(figure.add_subplot(grid[row, 0]))
        _draw_picture(axes, shown, b)
        axes.set_xlabel(labels[row], fontsize=9)
        if row == 0:
            axes.set_title("input")
        for column, (i, j) in enumerate(cells, start=2):
            axes = picture_axes(figure.add_subplot(grid[row, column + i]))
            drawn = axes.imshow(values[i][:, b, j].reshape(shown.size), **options)
            axes.set_xlabel(said[i][b][j], fontsize=9)
            if row == 0:
                axes.set_title(f"{layers[i].name} cell {j}".strip())
    if part == "keep":
        figure.colorbar(drawn, ax=figure.axes, shrink=0.6, pad=0.01, label=KEPT)
    return figure


def _draw_picture(axes: Axes, shown: Input, b: int) -> None:
    """In grey where there is one channel, in colour where there are three."""
    pixels = shown.values[:, b].unflatten(0, shown.size).numpy()
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _draw_rows(
    part: str,
    layers: Sequence[Layer],
    shown: Input | None,
    chosen: Sequence[int],
    labels: Sequence[str],
) -> Figure:
    """A block a sequence: its input over time, and under it a row for each cell of each layer."""
    counts = [layer.awake.shape[2] for layer in layers]
    heights = ([0.9] if shown is not None else []) + [0.24 * n + 0.1 for n in counts]
    figure = new_figure(8.0, (sum(heights) + 0.75) * len(chosen) + 0.3)
    blocks = figure.subfigures(len(chosen), 1, squeeze=False)[:, 0]
    said = [_words(part, layer, None) for layer in layers]
    values = [_values(part, layer) for layer in layers]
    options = {**_options(part, values, picture=False), "aspect": "auto"}
    for block, b, title in zip(blocks, chosen, labels, strict=True):
        all_axes = block.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        if shown is not None:
            _draw_input(all_axes[0], shown.values[:, b])
        for i, (axes, layer) in enumerate(zip(all_axes[-len(layers) :], layers, strict=True)):
            T = len(values[i])
            where = (0.5, T + 0.5, counts[i] - 0.5, -0.5)
            image = axes.imshow(values[i][:, b].T, extent=where, **options)
            cells = [f"{layer.name} cell {j}".strip() for j in range(counts[i])]
            axes.set_yticks(range(counts[i]), cells)
            axes.tick_params(length=0, axis="y")
            right = axes.secondary_yaxis("right")
            right.set_yticks(range(counts[i]), said[i][b])
            right.tick_params(length=0, labelcolor=FAINT)
            for line in range(1, counts[i]):
                axes.axhline(line - 0.5, color="white", linewidth=1.5)
            for spine in (*axes.spines.values(), *right.spines.values()):
                spine.set_visible(False)
            if part == "keep":
                label = "kept" if counts[i] < 8 else KEPT
                block.colorbar(image, ax=axes, pad=0.01, label=label)
        all_axes[0].set_title(title, loc="left")
        all_axes[-1].set_xlabel("step")
    return figure


def _draw_input(axes: Axes, values: Tensor) -> None:
    """The input (T, C) of a sequence: a line where it is one number, else a map."""
    T, C = values.shape
    if C == 1:
        axes.step(range(1, T + 1), values[:, 0].numpy(), where="mid", color=INK, linewidth=1.1)
        axes.spines[["top", "right"]].set_visible(False)
    else:
        x = values.double()
        limit = largest(x) or 1.0
        where = (0.5, T + 0.5, C - 0.5, -0.5)
        options: dict[str, Any] = {"vmin": -limit, "vmax": limit, "cmap": "RdBu_r"}
        axes.imshow(x.T.numpy(), extent=where, aspect="auto", interpolation="nearest", **options)
        axes.set_yticks([])
    axes.set_ylabel("input")


@styled()
def draw_choices(
    layers: Sequence[Layer],
    pictures: Input | None,
    chosen: Sequence[int],
    labels: Sequence[str],
    step: int | None,
    slots: Sequence[str] | None,
) -> Figure:
    """A row a sequence and layer: the picture, a map of the views, and one of the cells."""
    parts = ("views", "peers") if step is None else ("view_scores", "peer_scores")
    maps = [[layer.part(name) for name in parts] for layer in layers]
    N, K = max(m.shape[2] for m, _ in maps), max(m.shape[3] for m, _ in maps)
    unit, side = 0.46, 1.7
    widths = [*([side] if pictures is not None else []), unit * max(K, 2) + 1.5, unit * N + 1.5]
    rows = len(chosen) * len(layers)
    least = side if pictures is not None else 1.0
    figure = new_figure(sum(widths) + 0.3, (max(least, unit * N) + 0.75) * rows + 0.2)
    grid = figure.add_gridspec(rows, len(widths), width_ratios=widths, wspace=0.03, hspace=0.05)
    for row in range(rows):
        (place, i), b = divmod(row, len(layers)), chosen[row // len(layers)]
        awake = layers[i].awake[:, b]
        if pictures is not None:
            _draw_step(figure.add_subplot(grid[row, 0]), pictures, b, labels[place], step)
        left, right = (figure.add_subplot(grid[row, k]) for k in (-2, -1))
        for axes, values, name in ((left, maps[i][0], "views"), (right, maps[i][1], "peers")):
            if step is None:
                taken = values[:, b].double() * awake.unsqueeze(2)
                _draw_shares(axes, taken.sum(0) / awake.sum(0).unsqueeze(1), awake.any(0))
            else:
                frames: Tensor | None = getattr(layers[i].trace, name)
                if frames is not None:
                    frames = frames[step - 1, b].cpu() if frames.dtype == torch.bool else None
                _draw_scores(axes, values[step - 1, b], awake[step - 1], frames, name == "peers")
        if slots is not None:
            left.set_xticks(range(len(slots)), slots)
        left.set_ylabel(f"{layers[i].name} cell".strip())
        left.set_xlabel("view of the input")
        right.set_xlabel("cell listened to")
        if row == 0:
            left.set_title("input scores" if step else "views taken in, of the steps awake")
            right.set_title("hidden-state scores" if step else "cells listened to")
        if pictures is None and len(chosen) > 1:
            left.set_ylabel(f"{labels[place]}\n{left.get_ylabel()}")
    return figure


def _draw_step(axes: Axes, shown: Input, b: int, label: str, step: int | None) -> None:
    """The picture, with the pixel that the step reads."""
    from matplotlib.patches import Rectangle

    _draw_picture(picture_axes(axes), shown, b)
    if step is not None:
        line, column = divmod(step - 1, shown.size[1])
        axes.axhline(line, color=VERMILION, linewidth=0.8, alpha=0.6)
        axes.add_patch(
            Rectangle((column - 0.5, line - 0.5), 1, 1, fill=False, color=VERMILION, linewidth=2)
        )
        label = f"{label}\nstep {step}: line {line + 1},\npixel {column + 1}"
    axes.set_xlabel(label, fontsize=9)


def _draw_shares(axes: Axes, shares: Tensor, awake: Tensor) -> None:
    """One map of the shares (N, K) of the steps awake at which cells took something in."""
    _draw_map(axes, shares, (0.0, 1.0), "Greens", lambda share: f"{100 * share:.0f}", "{x:.0%}")
    _name_cells(axes, awake, "slept")


def _draw_scores(
    axes: Axes, scores: Tensor, awake: Tensor, chosen: Tensor | None, own: bool
) -> None:
    """One map with its values; framed is what awake cells took in, dotted a cell's `own` state."""
    from matplotlib.patches import Rectangle

    limit = largest(scores) or 1.0
    places = max(0, 1 - math.floor(math.log10(limit)))
    _draw_map(
        axes,
        scores.double(),
        (-limit, limit),
        "RdBu_r",
        # + 0.0: a rounded -0.0 would keep its sign.
        lambda score: f"{round(score, places) + 0.0:.{places}f}".replace("-", "−"),
    )
    _name_cells(axes, awake, "asleep")
    if chosen is None:
        return
    for j, k in (chosen & awake.unsqueeze(1)).nonzero().tolist():
        line = ":" if own and j == k else "-"
        colour = _ink(float(scores[j, k]), limit)
        place = (k - 0.44, j - 0.44)
        axes.add_patch(Rectangle(place, 0.88, 0.88, fill=False, color=colour, lw=1.6, ls=line))


def _draw_map(
    axes: Axes,
    values: Tensor,
    limits: tuple[float, float],
    colours: str,
    says: Callable[[float], str],
    form: str | None = None,
) -> None:
    """A map (N, K) with its numbers and a colour bar, whose ticks have the form."""
    low, high = limits
    shown = axes.imshow(values.numpy(), cmap=colours, vmin=low, vmax=high, aspect="equal")
    for j, row in enumerate(values.tolist()):
        for k, value in enumerate(row):
            text, colour = "" if math.isnan(value) else says(value), _ink(value, high)
            axes.text(k, j, text, ha="center", va="center", fontsize=7.5, color=colour)
    axes.set_xticks(range(values.shape[1]))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(shown, ax=axes, shrink=0.85, pad=0.02, format=form)
    bar.outline.set_visible(False)


def _ink(value: float, high: float) -> str:
    """What is read on the colour of a value."""
    return "white" if abs(value) > 0.6 * high else INK


def _name_cells(axes: Axes, awake: Tensor, word: str) -> None:
    """Those that sleep are faint, and named so."""
    axes.set_yticks(
        range(len(awake)), [f"{j}" if a else f"{j} {word}" for j, a in enumerate(awake)]
    )
    for label, is_awake in zip(axes.get_yticklabels(), awake, strict=True):
        label.set_color(INK if is_awake else FAINT)
        label.set_fontweight("bold" if is_awake else "normal")
