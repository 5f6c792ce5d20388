"""The input side of the `triton` backend for few symbols: once for each, not once for each step.

Shapes: V symbols, N cells of size d, K views, S = K + N slots, G = 4 or 5 gates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import product_dtype
from riglstm.scan.fused.plan import Sizes, sizes
from riglstm.scan.fused.tiles import FEW, columns, forward_tiles
from riglstm.scan.kernels.common import ROOM
from riglstm.selection import Selection


class Symbols(NamedTuple):
    """A sequence of symbols, and what each of them brings."""

    ids: Tensor
    """(T, B) int32."""
    table: Tensor
    """(V, D): the vector that a symbol stands for."""


def fits(B: int, d: int, sel: Selection, W: Tensor, soft_update: bool) -> bool:
    """Whether all that symbols bring to a tile has room beside its product; else it is spilled.

    Of more than FEW sequences it has not: a thread has more of a tile there.
    """
    z = sizes(d, sel, soft_update, product_dtype(W.device, W.dtype))
    tile = forward_tiles(z, B, W.device)
    return bool(B <= FEW and sel.K * tile["BM"] * tile["BN"] <= ROOM)


def views_of(table: Tensor, weights: Weights, z: Sizes) -> Tensor:
    """The views of every symbol, (V, K·d), as a product of that precision gives them."""
    assert weights.W_in is not None
    W, x = weights.W_in.to(z.dtype), table.to(z.dtype)
    return x @ W if weights.b_in is None else torch.addmm(weights.b_in.to(z.dtype), x, W)


def gates_of(views: Tensor, weights: Weights, z: Sizes, BN: int) -> Tensor:
    """What each view of each symbol adds to the gates of each cell, (V, N, K, tiles · BN).

    Columns are in the order of the forward kernel's tiles, see `pack_kernel`.
    """
    N, K, d = z.N, z.K, z.d
    x = views.view(-1, K, d).transpose(0, 1).float()  # (K, V, d)

    def product(W: Tensor) -> Tensor:
        """W (cells, K, d, n) to (V, cells, K, n)."""
        cells, _, _, n = W.shape
        flat = W.to(z.dtype).float().permute(1, 2, 0, 3).reshape(K, d, cells * n)
        return torch.bmm(x, flat).view(K, -1, cells, n).permute(1, 2, 0, 3)

    parts = [product(weights.W.view(N, -1, d, 4 * d)[:, :K])]
    if weights.W_q is not None:
        # Only slots of states come after a cell's own: those of views are the first.
        shared = product(weights.W_q.view(-1, K + N - 1, d, d)[:, :K])
        parts.append(shared.expand(-1, N, -1, -1))
    return torch.cat(parts, dim=3)[..., _order(d, z.G, BN, views.device)]


def _order(d: int, G: int, BN: int, device: torch.device) -> Tensor:
    """The gate and unit of each column of a cell's tiles, as an index of G·d; beyond d, any."""
    z = Sizes(1, 1, d, d, G * d, G, *(torch.float32,) * 3)
    u, col = torch.arange(columns(z, BN), device=device)[:, None], torch.arange(BN, device=device)
    units = -(-4 * d // BN)
    gate, lane = (col >> 2) & 2 | col & 1, col >> 4 << 2 | (col >> 1) & 3
    unit = (u * (-(-d // (4 * units)) * 4) + lane).where(
        u < units, (u - units) * BN + gate * (BN // 4) + lane
    )
    return (gate.where(u < units, 4) * d + unit.clamp(max=d - 1)).flatten()
