"""Networks that read digits, and what they make of a picture, pixel by pixel.

They are built from exported weights alone: no data set is opened. The picture goes through the
transformation of the task itself, so that the page shows what the tables test.

Shapes: T = side² steps, one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.lab.explore.digits import SIDE
from riglstm.lab.tables.run import finished, load
from riglstm.lab.tasks.base import generator
from riglstm.lab.tasks.common import CPU, TokenNetwork
from riglstm.lab.tasks.images import CLASSES, MNIST, Size, positions
from riglstm.models.base import Trace
from riglstm.models.rig import Rig
from riglstm.plot import trace_content

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
    seed: int = 0
    """Of the noise."""
    hide: str = "nothing"
    """A key of HIDDEN."""


def open_networks(paths: Sequence[Path]) -> list[Network]:
    """The networks in files or run folders, and all that read digits in folders of such files.

    RigLSTM comes first. Raises ValueError for a path that is no such thing.
    """
    found = []
    for path in paths:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        if files:
            found += [one for one in map(_open, files) if one is not None]
            continue
        one = _open(path)
        if one is None:
            raise ValueError(
                f"expected a run on mnist of a model that reads step by step, got {path}; "
                "name another"
            )
        found.append(one)
    return sorted(found, key=lambda one: one.name != "riglstm")


def _open(path: Path) -> Network | None:
    """A network; None if it reads no digits, or not one pixel after the other."""
    run = finished(path)
    config = run.spec.task_config()
    if run.spec.task != "mnist" or not isinstance(config, MNIST):
        return None
    spec, _, net = load(path, "cpu")
    if not isinstance(net, TokenNetwork) or not net.core.streaming:
        return None
    own = [row for row in run.result["rows"] if row["chosen_on"].endswith(f"@{run.home}")]
    return Network(
        spec.name,
        f"{path.name}: seed {spec.seed}, trained on {run.home}",
        {row["condition"]: row["value"] for row in own},
        config,
        net,
    )


def disturbed(asked: Request) -> Tensor:
    """The picture with its noise and without what is hidden, (28, 28) uint8."""
    draws = torch.rand(SIDE, SIDE, generator=generator(CPU, asked.seed))
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
    if isinstance(net.core, Rig):
        traces: Any = net.core.trace(x)
    else:
        traces = [Trace(net.core(x)[0])]
    likely = net.readout(traces[-1].output).softmax(-1)
    picture = shown.view(1, asked.side, asked.side)
    return trace_content(
        traces, picture, probabilities=likely, classes=list(map(str, range(CLASSES)))
    )
