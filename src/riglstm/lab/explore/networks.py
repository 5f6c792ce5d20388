"""Networks that read digits, what they make of a picture, and ten digits to start from.

They are built from exported weights alone: no data set is opened. The picture goes through the
transformation of the task itself, so that the page shows what the tables test.

Shapes: T = side² steps, one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from riglstm.lab.tables.recipes import TABLES
from riglstm.lab.tables.run import finished, load
from riglstm.lab.tasks.base import generator
from riglstm.lab.tasks.common import CPU, TokenNetwork
from riglstm.lab.tasks.images import CLASSES, MNIST, Size, positions
from riglstm.models.base import Trace
from riglstm.models.rig import Rig
from riglstm.plot import trace_content

SIDE = 28
"""Of the pictures that are drawn, as MNIST's."""
RADIUS = 1.25
"""Half the width of the pen, in pixels."""
SIDES = (14, 28)
"""From the size of training to that of the pictures themselves."""
MOST_NOISE = 0.5
"""Share of pixels that are turned over; at a half nothing is left of the picture."""

HALF = SIDE // 2
HIDDEN: dict[str, tuple[slice, slice]] = {
    "nothing": (slice(0), slice(0)),
    "the top": (slice(HALF), slice(None)),
    "the bottom": (slice(HALF, None), slice(None)),
    "the left": (slice(None), slice(HALF)),
    "the right": (slice(None), slice(HALF, None)),
    "the middle": (slice(HALF - 4, HALF + 4), slice(None)),
}
"""Rows and columns that are made black, by name."""


class Network(NamedTuple):
    """A trained network with the task that it was trained on."""

    name: str
    source: str
    """Where it comes from, in a sentence."""
    accuracy: dict[str, float]
    """Recorded test accuracy, by condition."""
    config: MNIST
    net: TokenNetwork


class Request(NamedTuple):
    """What is to be read."""

    pixels: Tensor
    """(28, 28) uint8, as MNIST's."""
    side: int
    """Of the picture as it is shown to the networks."""
    noise: float = 0.0
    """Share of the pixels that are turned over."""
    hide: str = "nothing"
    """A key of HIDDEN."""


def open_networks(paths: Sequence[Path]) -> list[Network]:
    """The networks in files or run folders, and all that read digits in folders of such files.

    RigLSTM comes first. Raises ValueError for a path that is no such thing.
    """
    found = []
    for path in paths:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        opened = [one for one in map(_open, files or [path]) if one is not None]
        if not opened and not files:
            raise ValueError(
                f"expected a run on mnist of a model that reads step by step, got {path}; "
                "name another"
            )
        found += opened
    return sorted(found, key=lambda one: not isinstance(one.net.core, Rig))


def _open(path: Path) -> Network | None:
    """A network; None if it reads no digits, or not one pixel after the other."""
    run = finished(path)
    config = run.spec.task_config()
    if run.spec.task != "mnist" or not isinstance(config, MNIST):
        return None
    spec, _, net = load(path, "cpu")
    if not isinstance(net, TokenNetwork) or not net.core.streaming:
        return None
    own = [row for row in run.rows if row["chosen_on"].endswith(f"@{run.trained_on}")]
    rows = TABLES["mnist"].recipes["paper"].rows
    return Network(
        rows[spec.name].label if spec.name in rows else spec.name,
        f"{path.name}: seed {spec.seed}, trained on {run.trained_on}",
        {row["condition"]: row["value"] for row in own},
        config,
        net,
    )


def disturbed(asked: Request) -> Tensor:
    """The picture with its noise and without what is hidden, (28, 28) uint8."""
    draws = torch.rand(SIDE, SIDE, generator=generator(CPU, 0))
    pixels = torch.where(draws < asked.noise, 255 - asked.pixels, asked.pixels)
    pixels[HIDDEN[asked.hide]] = 0
    return pixels


def tokens_of(network: Network, asked: Request) -> Tensor:
    """What the network is shown, (T, 1, 1): prepared and resized as the task does it."""
    prepared = network.config.prepare(disturbed(asked)).flatten()
    return prepared[positions(SIDE, Size(asked.side, asked.side))][:, None, None]


@torch.no_grad()
def read(network: Network, asked: Request) -> dict[str, Any]:
    """A trace as `riglstm.plot.save_trace` has it, with the probabilities after every step.

    Of models other than RigLSTM it has the probabilities alone.
    """
    shown = tokens_of(network, asked)
    net, x = network.net, network.net.embed(shown)
    traces: Any = net.core.trace(x) if isinstance(net.core, Rig) else [Trace(net.core(x)[0])]
    likely = net.readout(traces[-1].output).softmax(-1)
    picture = shown.view(1, asked.side, asked.side)
    return trace_content(
        traces, picture, probabilities=likely, classes=list(map(str, range(CLASSES)))
    )


Stroke: TypeAlias = list[tuple[float, float]]
"""A line through points of a picture, of the size and place of MNIST's digits."""


def arc(x: float, y: float, across: float, down: float, start: int, end: int) -> Stroke:
    """Points of an ellipse from one angle to another, in degrees: 0 is right, 90 is down."""
    count = abs(end - start) // 10
    angles = (math.radians(start + (end - start) * i / count) for i in range(count + 1))
    return [(x + across * math.cos(a), y + down * math.sin(a)) for a in angles]


STROKES: dict[str, list[Stroke]] = {
    "0": [arc(14, 14, 5.5, 8.5, -60, 300)],
    "1": [[(16, 5), (13.5, 14), (12, 23)]],
    "2": [[*arc(13.5, 9.5, 5, 4.5, 190, 390), (8, 22), (12, 21), (21, 22)]],
    "3": [[*arc(13, 9.2, 5, 4.2, 210, 450), *arc(13, 18, 6, 4.8, -90, 150)]],
    "4": [[(10, 5), (8, 14), (19, 14)], [(18.5, 6), (17, 14), (16, 23)]],
    "5": [[(20, 6), (11, 6), (10, 12.5), *arc(12.5, 17, 6, 5, -80, 140)]],
    "6": [[(15, 4.5), (11, 10), (9, 15), (9, 19), *arc(13.5, 19, 4.6, 3.8, 180, -180)]],
    "7": [[(7, 7), (20, 7), (17, 13), (13, 23)]],
    "8": [arc(14, 9, 4.5, 4, 90, 450), arc(14, 18, 5, 4.8, -90, 270)],
    "9": [arc(13.5, 10, 4.8, 4.5, 0, 360), [(18.3, 10), (17.5, 16), (15.5, 23)]],
}
"""Examples that need no data set."""


def drawn(strokes: list[Stroke]) -> Tensor:
    """The picture of strokes, (28, 28) uint8: 255 where the pen was, else 0."""
    y, x = torch.meshgrid(*[torch.arange(SIDE) + 0.5] * 2, indexing="ij")
    ink = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    for stroke in strokes:
        for (x0, y0), (x1, y1) in pairwise(stroke):
            dx, dy = x1 - x0, y1 - y0
            # The nearest point of the line, for every pixel.
            along = ((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy)
            along = along.clamp(0, 1)
            ink |= (x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2 <= RADIUS**2
    return 255 * ink.to(torch.uint8)
