"""The map from input to views by kernels of ours: what is found out once for its sizes.

Shapes as in `plan.py`; R = T · B rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.launch import Argument, Launch, Place, prepare
from riglstm.scan.fused.plan import MOST_FEATURES, Sizes, aligned, map_tiles
from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.input_map import halve_kernel, map_kernel


class Halving(NamedTuple):
    """What makes halves of the input, before the map."""

    run: Launch
    rows: int
    """That a program takes."""
    width: int
    """Numbers of a row of halves in memory."""


class Map(NamedTuple):
    """The map of D features to views, which writes them to XH."""

    run: Launch
    D: int
    rows: int
    """Of a tile."""
    columns: int
    """Tiles beside each other."""
    halving: Halving | None
    """With TF32 in halves."""


class Mapped(NamedTuple):
    """What the map works with; all but `lines` is for TF32 in halves."""

    lines: Tensor | Place
    """(D, K·P): W_in as the map takes it."""
    sizes: Tensor | Place
    """(D,): the power of two at or below the largest number of a line."""
    x: Tensor | Place
    """(R, width): the input in halves."""
    x_size: Tensor | Place
    """(R,): what a row of it is to be multiplied by."""
    views: Tensor | Place
    """(R, K, P) float32, which scores read."""


def map_of(z: Sizes, D: int, device: torch.device) -> Map:
    """The map of D features to views."""
    tile = map_tiles(z.held, device)
    halving = _halving(z, D) if z.held == torch.float16 else None
    run = prepare(
        map_kernel, D=D, X_ROW=D if halving is None else halving.width, K=z.K, S=z.S, d=z.d, P=z.P,
        WIDE=interpreted(), **tile,
    )  # fmt: skip
    return Map(run, D, tile["BM"], -(-z.K * z.P // tile["BN"]), halving)


def _halving(z: Sizes, D: int) -> Halving:
    width = aligned(D, z.held)
    BD, BH, BW = (power_of_two(n) for n in (width, z.N * z.d, z.K * z.d))
    # Of short rows a program holds several.
    rows = MOST_FEATURES // max(BD, BH)
    run = prepare(
        halve_kernel, D=D, X_ROW=width, BIASES=z.K * z.d, STATES=z.N * z.d, BR=rows, BD=BD, BW=BW,
        BH=BH,
    )  # fmt: skip
    return Halving(run, rows, width)


def mapped(z: Sizes, R: int, of: Map | None) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The buffers of `Mapped`."""
    D = 0 if of is None else of.D
    halving = None if of is None else of.halving
    halved, width = (0, 0) if halving is None else (R, halving.width)
    float32 = torch.float32
    return [
        *((z.held, (D, z.K * z.P)), (float32, (D if halved else 0,))),
        *((z.held, (halved, width)), (float32, (halved,)), (float32, (halved, z.K, z.P))),
    ]


def to_pack(of: Map | None, made: Mapped) -> tuple[Argument, Argument]:
    """What packing writes for the map: `Into`'s lines, and their sizes."""
    if of is None:
        return None, None
    return made.lines, None if of.halving is None else made.sizes


def to_views(
    of: Map,
    made: Mapped,
    x: Tensor,
    h: Argument,
    weights: Weights,
    XH: Tensor | Place,
    unit: Tensor | Place,
) -> Tensor | Place:
    """Write the views of x (T, B, D) to XH, and in halves each row's unit; where scores find them.

    h is the state that is given, if any.
    """
    T, B, _ = x.shape
    R, bias = T * B, weights.b_in
    grid = (of.columns * -(-R // of.rows),)
    if of.halving is None:
        of.run(grid, (x, None, made.lines, bias, XH, None, None, R))
        return XH
    rows = (x, made.sizes, bias, h, made.x, made.x_size, unit, B, R)
    of.halving.run((-(-R // of.halving.rows),), rows)
    of.run(grid, (made.x, made.x_size, made.lines, bias, XH, unit, made.views, R))
    return made.views
