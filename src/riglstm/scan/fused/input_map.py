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
from riglstm.scan.kernels.input_map import halve_kernel, map_kernel

MOST_FEATURES = 8192
"""With TF32 in halves the map to views is ours up to so many: one program holds a row of them."""


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
    """What the map works with; all but `lines` and x is for TF32 in halves."""

    lines: Tensor | Place
    """(D, K·P): W_in as `map_kernel` takes it."""
    sizes: Tensor | Place
    """(D,): the power of two at or below the largest number of a line."""
    x: Tensor | Place
    """(R, width): the input in halves. In bfloat16 what the forward kernel rounds of it before it
    maps it, (2 B, width): of two steps."""
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


def inside(z: Sizes, B: int, D: int) -> bool:
    """Whether the forward kernel maps D features itself, two steps ahead.

    Of many sequences some of its programs have nothing to multiply meanwhile; but a sum must not
    take them longer than that of the gates takes the others, and what they round takes time, too.
    """
    return B > FEW and has_map(z, D) and 3 * D <= 2 * z.S * z.P


def rounded(z: Sizes, B: int, D: int, kind: torch.dtype, save: bool) -> int:
    """Numbers of a row of the rounded input that is kept for the backward pass; 0: it is not.

    That is in training in bfloat16, where the forward kernel rounds the input, of another kind,
    anyway: the gradient of W_in would else have to do that.
    """
    kept = save and z.held == torch.bfloat16 != kind and inside(z, B, D)
    return aligned(D, z.held) if kept else 0


def map_tiles(held: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Tiles of the map to views: two fit on a multiprocessor, one stores while one multiplies."""
    if held == torch.float16:
        BK, many = _halves(held, 128 + 128, device)
    else:
        # In float32: 128 rows of x, and 128 columns of W_in, which has halves.
        BK, many = 32, stages(device, 4, 128 + 64, 32, torch.float32)
    return {"BM": 128, "BN": 128, "num_warps": 4, "BK": BK, "STAGES": many}


def _halves(held: torch.dtype, rows: int, device: torch.device) -> tuple[int, int]:
    """Of so many rows and columns in halves, numbers at a time, and pieces on their way."""
    return 64, stages(device, 3, rows, 64, held)


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


def mapped(z: Sizes, T: int, B: int, of: Map | None) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The buffers of `Mapped`."""
    D = 0 if of is None else of.D
    halved = T * B if of and of.halving else 0
    rows = halved or (2 * B if of and inside(z, B, D) else 0)
    float32 = torch.float32
    return [
        *((z.held, (D, z.K * z.P)), (float32, (D if halved else 0,))),
        *((z.held, (rows, aligned(D, z.held))), (float32, (halved,))),
        (float32, (halved, z.K, z.P)),
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
    first: int,
) -> Tensor | Place:
    """Write the views of x (T, B, D) to XH, of the `first` rows; where scores find them.

    In halves, also each row's unit, and halves of x: of all rows. h is the state that is given, if
    any.
    """
    T, B, _ = x.shape
    R, bias = T * B, weights.b_in
    grid = (of.columns * -(-first // of.rows),)
    if of.halving is None:
        of.run(grid, (x, None, made.lines, bias, XH, None, None, first))
        return XH
    rows = (x, made.sizes, bias, h, made.x, made.x_size, unit, B, R)
    of.halving.run((-(-R // of.halving.rows),), rows)
    of.run(grid, (made.x, made.x_size, made.lines, bias, XH, unit, made.views, first))
    return made.views


def inner_map(
    of: Map | None, z: Sizes, tile: dict[str, Any], device: torch.device
) -> dict[str, int]:
    """What the forward kernel is compiled with for the map; without one, nothing that counts."""
    if of is None:
        return dict.fromkeys(("D", "IN_ROW", "LOW_ROW", "IN_BK", "IN_STAGES"), 0)
    D, row = of.D, of.D if of.halving is None else of.halving.width
    BK, many = _halves(z.held, tile["BM"] + tile["BN"], device)
    sizes = {"D": D, "IN_ROW": row, "LOW_ROW": aligned(D, z.held)}
    return sizes | {"IN_BK": BK, "IN_STAGES": many}


def to_map(
    of: Map, made: Mapped, x: Tensor, weights: Weights, kept: Tensor | None
) -> tuple[Argument, ...]:
    """What the forward kernel maps: the input, its sizes, W_in, the bias, and where it is rounded.

    That is where it is `kept`, if it is. Halves are rounded already.
    """
    if of.halving is not None:
        return made.x, made.x_size, made.lines, weights.b_in, None
    if x.dtype == made.lines.dtype:
        return x, None, made.lines, weights.b_in, None
    return x, None, made.lines, weights.b_in, made.x if kept is None else kept
