"""The gradient of views, after each piece of the backward pass.

Shapes as in `plan.py`; R rows are pairs of step and sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.scan.fused.gradients import Lines, Piece
from riglstm.scan.fused.launch import Launch, Place, prepare
from riglstm.scan.fused.plan import PIECE, Sizes, stages
from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.views import count_kernel, sort_kernel, views_kernel
from riglstm.scan.kernels.weights import ROWS

SORTED = 128
"""Rows that a program of those that sort takes."""


class Views(NamedTuple):
    """The kernels."""

    counting: Launch
    sorting: Launch
    product: Launch
    rows: int
    """That a program of the product takes."""


def views_tiles(z: Sizes, device: torch.device) -> dict[str, Any]:
    """Tiles of the product, and rows that are sorted together."""
    BM, BP = 128, power_of_two(z.d)
    tile = {"BM": BM, "BK": PIECE, "BP": BP, "GROUP": ROWS, "num_warps": 8}
    return tile | {"STAGES": stages(device, 4, BM + BP, PIECE, z.back)}


def views_of(z: Sizes, device: torch.device, how: str) -> Views:
    """`how` is what `precision` says."""
    tile = views_tiles(z, device)
    count = prepare(count_kernel, N=z.N, BR=SORTED)
    sort = prepare(sort_kernel, N=z.N, GROUP=tile["GROUP"], BR=SORTED)
    product = prepare(
        views_kernel, N=z.N, K=z.K, d=z.d, L=z.L, PRECISION=how, WIDE=interpreted(), **tile
    )
    return Views(count, sort, product, tile["BM"])


def room(z: Sizes, R: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What `add_views` works in, for R rows."""
    counts = z.K, -(-R // SORTED), 1 << z.N
    return [(torch.int32, counts), (torch.int32, (z.K, R))]


def add_views(
    by: Views,
    piece: Piece,
    packed: Lines,
    bits: Tensor,
    made: Sequence[Tensor | Place],
    dV: Tensor,
    sums: Tensor | None,
) -> None:
    """Write the gradient of the piece's views to dV, and the sums of its tiles' rows.

    `made` are the buffers of `room`.
    """
    (steps, B, *_), K = piece.D5.shape, dV.shape[2]
    R, (counts, listed) = steps * B, made
    blocks = -(-R // SORTED)
    by.counting((blocks, K), (bits, counts, R))
    by.sorting((blocks, K), (bits, counts, listed, R))
    by.product((K, -(-R // by.rows)), (*piece, *packed, listed, dV, sums, R))
