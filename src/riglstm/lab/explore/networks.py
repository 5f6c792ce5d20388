"""Networks that read digits, what they make of a picture, and ten digits to start from.

They are built from exported weights alone: no data set is opened. The picture goes through the
transformation of the task itself, so that the page shows what the tables test.

Shapes: T = side² steps, one sequence.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
PAGE = Path(__file__).parent / "page"
EXAMPLES = PAGE / "examples.json"
"""Digits that need no data set, each as the link to its drawing says it, after `picture=`."""
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


def example(name: str) -> Tensor:
    """One of the ten digits that the page offers, "0" to "9": (28, 28) uint8."""
    # As in a link of the page, a bit a pixel.
    packed = base64.urlsafe_b64decode(json.loads(EXAMPLES.read_bytes())[name] + "=")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8))
    return 255 * torch.from_numpy(bits).view(SIDE, SIDE)
