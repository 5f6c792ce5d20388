"""How pictures look: colours that colour-blind readers tell apart, sizes, and the way to PNG.

Figures are made object by object; nothing here or in its neighbours touches pyplot's state.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Line: TypeAlias = Literal["-", "--", ":", "-."]
LINES: tuple[Line, ...] = ("-", "--", ":", "-.")

INK, FAINT, GRID = "#1b1b1b", "#6a6a6a", "#dddddd"

PINK, GREEN, BLUE = "#CC79A7", "#009E73", "#0072B2"
SKY, ORANGE, VERMILION, GREY = "#56B4E9", "#E69F00", "#D55E00", "#7f7f7f"
"""The Okabe-Ito palette, but for its yellow, which is too pale for a line on white."""


class Look(NamedTuple):
    """The colour, marker and line of a model in every figure."""

    colour: str
    marker: str
    line: Line = "-"


LOOKS: dict[str, Look] = {
    "riglstm": Look(GREEN, "o"),
    "rim": Look(BLUE, "s"),
    "lstm": Look(INK, "^"),
    "gridlstm": Look(GREY, "v"),
    "brim": Look(SKY, "D"),
    "rmc": Look(ORANGE, "P"),
    "entnet": Look(VERMILION, "X"),
    "transformer": Look(PINK, "*"),
}
"""Green for RigLSTM and blue for RIM, as in the paper's figure of the balls."""

TRUTH = Look(PINK, "o")

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


class Picture(NamedTuple):
    """A figure that is ready for a page."""

    title: str
    caption: str
    alt: str
    """What is to be seen, for who cannot see it."""
    png: bytes
    """The file."""
    kind: Literal["png", "gif"] = "png"
    """Its format."""


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """A look for each label: the model's own, then others of the palette for what has none.

    A label is a model's name, or a longer one that starts with it (`riglstm lr=0.001`): the first
    of a name gets the model's own look, the next ones dashes and another colour.
    """
    spare = [own._replace(line=line) for line in LINES[1:] for own in LOOKS.values()]
    given: dict[str, Look] = {}
    for label in labels:
        own = LOOKS.get(label.split(" ")[0].lower())
        free = [look for look in spare if look not in given.values()]
        given[label] = own if own is not None and own not in given.values() else (free or spare)[0]
    return given


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, its parts kept apart by the layout."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def styled() -> Iterator[None]:
    """Apply the house's settings while a figure is made or written; also a decorator."""
    with matplotlib.rc_context(RC):
        yield


def png(figure: Figure) -> bytes:
    """The figure as a PNG file, the same bytes for the same figure."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def fold(label: str) -> str:
    """A label in lines that leave room for the figure beside it."""
    return textwrap.fill(label, 30)


def picture_axes(axes: Axes) -> Axes:
    """Axes for an image: a thin frame, so that white is seen on white, and no ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(FAINT)
        spine.set_linewidth(0.6)
    return axes


def plot_axes(axes: Axes) -> Axes:
    """Axes for lines: two sides, and a faint grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes
