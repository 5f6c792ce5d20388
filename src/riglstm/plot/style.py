"""How pictures look: colours that colour-blind readers tell apart, sizes, fonts.

Figures are made object by object; nothing touches pyplot's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
    for spine in axes.spines.values():
        spine.set_color(FAINT)
        spine.set_linewidth(0.6)
    return axes
