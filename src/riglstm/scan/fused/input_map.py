"""The map from input to views by kernels of ours: what is found out once for its sizes.

Shapes as in `plan.py`; R = T · B rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.launch import Argument, Launch, Place, prepare
from riglstm.scan.fused.plan import Sizes, aligned
from riglstm.scan.fused.tiles import FEW, stages
from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.input_map import LINES, halve_kernel, map_kernel, round_kernel

MOST_FEATURES = 8192
"""With TF32 in halves the map to views is ours up to so many: one program holds a row of them."""


class Halving(NamedTuple):
    """What makes halves of the input, before the map."""

    run: Launch
    rows: int
    """That a program takes."""
    width: int
    """Numbers of a row of halves in memory."""


class Rounding(NamedTuple):
    """What rounds the input and W_in for cuBLAS."""

    run: Launch
    rows: int
    """That a program takes."""
    parts: int
    """Programs beside each other, of the same rows."""
    packing: int
    """Programs that take lines of W_in."""
    width: int
    """Numbers of a rounded row in memory, and lines of W_in."""


class Map(NamedTuple):
    """The map of D features to views, which writes them to XH."""

    run: Launch
    D: int
    rounding: Rounding | None
    """Where the input is rounded first, and cuBLAS multiplies: the rest is not used then."""
    rows: int
    """Of a tile."""
    columns: int
    """Tiles beside each other."""
    halving: Halving | None
    """With TF32 in halves."""


class Mapped(NamedTuple):
    """What the map works with; all but `lines` is for TF32 in halves."""

    lines: Tensor | Place
    """(D, K·P): W_in as `map_kernel` takes it."""
    sizes: Tensor | Place
    """(D,): the power of two at or below the largest number of a line."""
    x: Tensor | Place
    """(R, width): the input in halves."""
    x_size: Tensor | Place
    """(R,): what a row of it is to be multiplied by."""
    views: Tensor | Place
    """(R, K, P) float32, which scores read."""


def has_map(z: Sizes, D: int) -> bool:
    """Whether the map of D features to views is ours; else it is torch's."""
    # It counts the numbers of W_in in 32 bits.
    if not 0 < D * z.K * z.P < 2**31:
        return False
    return z.held == torch.bfloat16 or (z.held == torch.float16 and D <= MOST_FEATURES)


def rounded(z: Sizes, B: int, D: int, save: bool) -> int:
    """Numbers of a row of the input in memory, where it is rounded before its map; 0: it is not.

    That is in training with many sequences in bfloat16. cuBLAS can multiply it then, and so it can
    for the gradient of W_in, which had to round it anyway. In inference our map, which rounds on
    the way, is as quick, and the host launches it sooner; of few sequences it is the host's time
    that counts.
    """
    # A one behind the features, for the bias.
    width = aligned(D + 1, z.held)
    many = save and z.held == torch.bfloat16 and B > FEW
    return width if many and has_map(z, width) else 0


def map_tiles(held: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Tiles of the map to views: two fit on a multiprocessor, one stores while one multiplies."""
    tile = {"BM": 128, "BN": 128, "num_warps": 4}
    if held == torch.float16:
        return tile | {"BK": 64, "STAGES": stages(device, 3, 128 + 128, 64, held)}
    # In float32: 128 rows of x, and 128 columns of W_in, which has halves.
    return tile | {"BK": 32, "STAGES": stages(device, 4, 128 + 64, 32, torch.float32)}


def map_of(z: Sizes, B: int, D: int, device: torch.device, save: bool) -> Map:
    """The map of D features to views."""
    tile = map_tiles(z.held, device)
    halving = _halving(z, D) if z.held == torch.float16 else None
    run = prepare(
        map_kernel, D=D, X_ROW=D if halving is None else halving.width, K=z.K, S=z.S, d=z.d, P=z.P,
        WIDE=interpreted(), **tile,
    )  # fmt: skip
    rounding = _rounding(z, D, width) if (width := rounded(z, B, D, save)) else None
    return Map(run, D, rounding, tile["BM"], -(-z.K * z.P // tile["BN"]), halving)


def _rounding(z: Sizes, D: int, width: int) -> Rounding:
    BD = min(1024, power_of_two(width))
    BR = 8192 // BD
    run = prepare(
        round_kernel, D=D, X_ROW=width, K=z.K, d=z.d, P=z.P, BR=BR, BD=BD,
        BW=power_of_two(z.K * z.P),
    )  # fmt: skip
    return Rounding(run, BR, -(-width // BD), -(-width // LINES), width)


class Ahead(NamedTuple):
    """What a map by cuBLAS leaves, before all else of a call."""

    x: Tensor
    """(T·B, width): the input as it was multiplied."""
    XH: Tensor
    """(T, B, S, P): the views are written."""


def map_ahead(by: Rounding, x: Tensor, weights: Weights, z: Sizes) -> Ahead:
    """The map of x (T, B, D): rounded, and then multiplied by cuBLAS."""
    (T, B, _), W_in = x.shape, weights.W_in
    low = x.new_empty(T * B, by.width, dtype=z.held)
    lines = x.new_empty(by.width, z.K * z.P, dtype=z.held)
    programs = by.packing + by.parts * -(-T * B // by.rows)
    by.run((programs,), (x, W_in, weights.b_in, low, lines, T * B))
    XH = x.new_empty(T, B, z.S, z.P, dtype=z.held)
    torch.mm(low, lines, out=XH.view(T * B, z.S * z.P)[:, : z.K * z.P])
    return Ahead(low, XH)


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
    D = 0 if of is None or of.rounding is not None else of.D
    halving = None if of is None else of.halving
    halved, width = (0, 0) if halving is None else (R, halving.width)
    float32 = torch.float32
    return [
        *((z.held, (D, z.K * z.P)), (float32, (D if halved else 0,))),
        *((z.held, (halved, width)), (float32, (halved,)), (float32, (halved, z.K, z.P))),
    ]


def to_pack(of: Map | None, made: Mapped) -> tuple[Argument, Argument]:
    """What packing writes for the map: `Into`'s lines, and their sizes."""
    if of is None or of.rounding is not None:
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
