"""How the report's pictures look: a colour, marker and line for each model, and the way to PNG.

What they share with pictures of one's own traces is in `riglstm.plot.style`.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from riglstm.plot.style import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, VERMILION, styled

Array: TypeAlias = NDArray[Any]
Line: TypeAlias = Literal["-", "--", ":", "-."]
LINES: tuple[Line, ...] = ("-", "--", ":", "-.")


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


def png(figure: Figure) -> bytes:
    """The figure as a PNG file, the same bytes for the same figure."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def fold(label: str) -> str:
    """A label in lines that leave room for the figure beside it."""
    return textwrap.fill(label, 30)


def plot_axes(axes: Axes) -> Axes:
    """Axes for lines: two sides, and a faint grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes
