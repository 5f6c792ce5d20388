"""The gradient of views, after each piece of the backward pass.

Shapes as in `plan.py`; R rows are pairs of step and sequence, in pieces of `per`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.scan.fused.gradients import Lines, Piece
from riglstm.scan.fused.launch import Launch, Place, nth, prepare
from riglstm.scan.fused.plan import PIECE, Sizes
from riglstm.scan.fused.tiles import stages
from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.views import (
    count_kernel,
    sort_kernel,
    starts_kernel,
    sums_kernel,
    views_kernel,
)
from riglstm.scan.kernels.weights import ROWS

COUNTED = 128
"""Rows that a program of those that count kinds takes."""
SORTED = 32
"""Rows that one of those that sort takes, a lane each; in the interpreter, where each program takes
as long, as many as are counted."""


class Views(NamedTuple):
    """The kernels."""

    counting: Launch
    starts: Launch
    group: int
    """Rows that are sorted together."""
    sorting: Launch
    product: Launch
    parts: int
    """Programs that sort what one counted."""
    rows: int
    """That a program of the product takes."""
    sums: Launch
    columns: int
    """That a program of the sums takes."""


def views_tiles(z: Sizes, device: torch.device) -> dict[str, Any]:
    """Tiles of the product, and rows that are sorted together."""
    BM, BP = 128, power_of_two(z.d)
    tile = {"BM": BM, "BK": PIECE, "BP": BP, "GROUP": ROWS, "num_warps": 8}
    return tile | {"STAGES": stages(device, 4, BM + BP, PIECE, z.back)}


def views_of(z: Sizes, device: torch.device, how: str) -> Views:
    """`how` is what `precision` says."""
    tile = views_tiles(z, device)
    block, part = {"N": z.N, "BR": COUNTED}, COUNTED if interpreted() else SORTED
    count = prepare(count_kernel, **block)
    sort = prepare(sort_kernel, **block, GROUP=tile["GROUP"], PART=part, num_warps=1)
    # A program has all counts of a group, 256 kinds at the most.
    starts = prepare(starts_kernel, **block, GROUP=tile["GROUP"], num_warps=8)
    product = prepare(
        views_kernel, N=z.N, K=z.K, d=z.d, L=z.L, PRECISION=how, WIDE=interpreted(), **tile
    )
    columns = 16
    sums = prepare(sums_kernel, WIDTH=z.K * z.d, BR=256, BC=columns)
    return Views(
        count, starts, tile["GROUP"], sort, product, COUNTED // part, tile["BM"], sums, columns
    )


def room(z: Sizes, R: int, per: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What `sort_views` writes: counts of kinds, and lists."""
    pieces = -(-R // per)
    counts = pieces, z.K, -(-per // COUNTED), 1 << z.N
    return [(torch.int32, counts), (torch.int32, (pieces, z.K, per))]


def sort_views(
    by: Views, bits: Tensor, made: Sequence[Tensor | Place], K: int, R: int, per: int
) -> None:
    """Sort the rows of all pieces: alone, a piece's would not fill a GPU for as long as it waits.

    `made` are the buffers of `room`.
    """
    counts, listed = made
    blocks, pieces = -(-per // COUNTED), -(-R // per)
    by.counting((blocks, K, pieces), (bits, counts, R, per))
    by.starts((-(-per // by.group), K, pieces), (counts, blocks))
    by.sorting((blocks * by.parts, K, pieces), (bits, counts, listed, R, per))


def add_views(
    by: Views,
    piece: Piece,
    packed: Lines,
    listed: Tensor | Place,
    i: int,
    per: int,
    dV: Tensor,
    sums: Tensor | None,
) -> None:
    """Write the gradient of the views of piece i to dV, and the sums of its tiles' rows."""
    (steps, B, *_), K = piece.D5.shape, dV.shape[2]
    R = steps * B
    mine = nth(listed, i, K * per)
    by.product((K, -(-R // by.rows)), (*piece, *packed, mine, dV, sums, R, per))


def sum_views(by: Views, sums: Tensor) -> Tensor:
    """The sum of all rows' gradients, from those of tiles."""
    tiles, width = sums.shape
    total = sums.new_empty(width)
    by.sums((-(-width // by.columns),), (sums, total, tiles))
    return total
