"""What follows the loop of the backward pass: the gradients of views and of weights.

Shapes as in `triton_plan.py`; R rows are pairs of step and sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.triton_common import interpreted, power_of_two
from riglstm.scan.triton_launch import launch
from riglstm.scan.triton_plan import Saved, Sizes, precision, views_tiles
from riglstm.scan.triton_products import inputs_kernel, lines_kernel, views_kernel

PRODUCT_ROWS = 4096
"""Rows of one product for the gradient of weights: what the cells took in is written out for it."""


class Lines(NamedTuple):
    """The weights as the backward pass reads them."""

    W: Tensor
    """(N, S·d, L), W_q as the fifth gate."""
    unit: Tensor | None
    """(S·d): what one stands for in them; None: one."""


class Piece(NamedTuple):
    """D5 of some steps."""

    D5: Tensor
    """(steps, B, N, L)."""
    unit: Tensor | None
    """(steps, B): what one stands for in it; None: one."""


def lines(weights: Weights, z: Sizes) -> Lines:
    """All weights of the gates; of halves in units."""
    W, W_q = weights.W, weights.W_q
    out = W.new_empty(z.N, z.S * z.d, z.L, dtype=z.back)
    unit = W.new_empty(z.S * z.d) if z.back == torch.float16 else None
    BL = 8 if interpreted() else 1  # there, each program takes as long
    launch(
        lines_kernel, (-(-z.S * z.d // BL),), (W, W if W_q is None else W_q, out, unit), N=z.N,
        K=z.K, d=z.d, L=z.L, G=z.G, BL=BL, BG=power_of_two(4 * z.d),
        BQ=power_of_two(max(1, z.L - 4 * z.d)), PER_CELL=W_q is not None and W_q.dim() == 3,
    )  # fmt: skip
    return Lines(out, unit)


def views_gradient(piece: Piece, bits: Tensor, weights: Lines, dV: Tensor, z: Sizes) -> None:
    """Write the gradient of the views of one piece of the sequence."""
    steps, B, _, _ = piece.D5.shape
    R, tile = steps * B, views_tiles(z, dV.device)
    arguments = (piece.D5, piece.unit, weights.W, weights.unit, bits, dV, R)
    launch(
        views_kernel, (z.K, -(-R // tile["BM"])), arguments, N=z.N, K=z.K, d=z.d, L=z.L,
        PRECISION=precision(z.dtype), WIDE=interpreted(), **tile,
    )  # fmt: skip


def _width(z: Sizes) -> tuple[int, int]:
    """Numbers of H in memory, and which of them is a one, for the biases; if none is, -1.

    A product in halves has room for it beside a slot, or behind the last. For one in float32, the
    sum over D5 is exact, and that over rounded numbers is not.
    """
    if z.back.itemsize == 4:
        return z.S * z.P, -1
    return (z.S * z.P, z.d) if z.d < z.P else (z.S * z.P + 8, z.S * z.P)


def empty_gradient(like: Tensor, z: Sizes) -> Tensor:
    """dW (N, what H has, L), zero."""
    return like.new_zeros(z.N, _width(z)[0], z.L)


def add_weights_gradient(
    piece: Piece, saved: Saved, t0: int, t1: int, dW: Tensor, db: Tensor, z: Sizes
) -> None:
    """Add Hᵀ D5 of steps t0 to t1 to dW, and the sum of D5 to db (N, L) unless it is part of dW."""
    D, (width, one) = piece.D5.flatten(0, 1), _width(z)
    V, bits = saved.XH[t0:t1].flatten(0, 1), saved.bits[t0:t1].flatten(0, 1)
    x_unit = saved.unit[t0:t1].flatten() if z.held == torch.float16 else None
    d_unit = None if piece.unit is None else piece.unit.flatten()
    total, top = dW, None
    if x_unit is not None and d_unit is not None:
        total, top = torch.empty_like(dW), (x_unit * d_unit).amax()
    for r in range(0, D.shape[0], PRODUCT_ROWS):
        now = slice(r, r + PRODUCT_ROWS)
        R = D[now].shape[0]
        H = D.new_empty(z.N, R, width)
        units = (None if u is None else u[now] for u in (x_unit, d_unit))
        launch(
            inputs_kernel, (R,), (V[now], *units, top, bits[now], H, R), N=z.N, S=z.S, P=z.P,
            BS=power_of_two(z.S), BP=power_of_two(z.P), WIDTH=width, ONE=one,
        )  # fmt: skip
        # (N, what H has, R), (N, R, L)
        _add_product(total, H.mT, D[now].transpose(0, 1), fresh=total is not dW and r == 0)
    if top is not None:
        dW.addcmul_(total, top)
    if one < 0:
        db += D.sum(0)


def _add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Add a b, in float32, to `total`; a fresh one is as good as zero."""
    if a.dtype != total.dtype and not a.is_cuda:
        # Only GPUs multiply halves to float32.
        a, b = a.to(total.dtype), b.to(total.dtype)
    if a.dtype == total.dtype:
        torch.baddbmm(total, a, b, beta=0 if fresh else 1, out=total)
    elif fresh:
        torch.bmm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.baddbmm(total, a, b, out_dtype=total.dtype, out=total)


def cut(dW: Tensor, db: Tensor, z: Sizes) -> tuple[Tensor, Tensor]:
    """dW (N, S·d, G·d) and db (N, G·d), without what memory is rounded up by."""
    one, G = _width(z)[1], z.G * z.d
    whole = dW[:, : z.S * z.P].unflatten(1, (z.S, z.P))
    return whole[:, :, : z.d, :G].flatten(1, 2), (db if one < 0 else dW[:, one])[:, :G]
