"""What follows the loop of the backward pass: the gradient of weights.

Shapes as in `plan.py`; R rows are pairs of step and sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.launch import Launch, Place, prepare
from riglstm.scan.fused.plan import Saved, Sizes
from riglstm.scan.kernels.common import power_of_two
from riglstm.scan.kernels.products import inputs_kernel

PRODUCT_ROWS = 4096
"""Rows of one product for the gradient of weights: what the cells took in is written out for it."""


class Lines(NamedTuple):
    """The weights as the backward pass reads them."""

    W: Tensor | Place
    """(N, S·d, L), W_q as the fifth gate."""
    unit: Tensor | Place | None
    """(S·d): what one stands for in them; None: one."""


class Piece(NamedTuple):
    """D5 of some steps."""

    D5: Tensor
    """(steps, B, N, L)."""
    unit: Tensor | None
    """(steps, B): what one stands for in it; None: one."""


def width(z: Sizes) -> tuple[int, int]:
    """Numbers of H in memory, and which of them is a one, for the biases; if none is, -1.

    A product in halves has room for it beside a slot, or behind the last; in bfloat16 it is always
    there. For one in float32, the sum over D5 is exact, and that over rounded numbers is not.
    """
    if z.back.itemsize == 4:
        return z.S * z.P, -1
    beside = z.d < z.P and z.back == torch.float16
    return (z.S * z.P, z.d) if beside else (z.S * z.P + 8, z.S * z.P)


def inputs_of(z: Sizes) -> Launch:
    """The kernel that writes out what cells took in, for cuBLAS."""
    wide, one = width(z)
    return prepare(
        inputs_kernel, N=z.N, S=z.S, P=z.P, BS=power_of_two(z.S), BP=power_of_two(z.P), WIDTH=wide,
        ONE=one,
    )  # fmt: skip


class Total:
    """The gradient of weights as the products give it, and that of biases where it is not in it."""

    def __init__(self, dW: Tensor, z: Sizes, inputs: Launch, one_piece: bool) -> None:
        self.z, self.inputs, self.one_piece = z, inputs, one_piece
        self.dW = dW
        """(N, what H has, L), zero but for a single piece in units."""
        self.top: Tensor | None = None
        """What one stands for in dW; None: one."""
        self.db: Tensor | None = None
        """(N, L)."""

    def add(self, piece: Piece, saved: Saved, t0: int) -> None:
        """Add Hᵀ D5 of the piece from t0 on to dW, and the sum of D5 to db unless it is in dW."""
        z, (wide, one), B = self.z, width(self.z), piece.D5.shape[1]
        D, first = piece.D5.view(-1, z.N, z.L), t0 * B
        x_unit, total, top = None, self.dW, None
        if z.held == torch.float16:
            x_unit = rows_from(saved.unit, t0, piece.D5.shape[0])
            if piece.unit is not None:
                top = (x_unit * piece.unit).amax()
                total = self.dW if self.one_piece else torch.empty_like(self.dW)
        for r in range(0, D.shape[0], PRODUCT_ROWS):
            part = rows_from(D, r, PRODUCT_ROWS)
            R = part.shape[0]
            H = D.new_empty(z.N, R, wide)
            V, bits = first_row(saved.XH, first + r), first_row(saved.bits, first + r)
            units = (None if u is None else first_row(u, r) for u in (x_unit, piece.unit))
            self.inputs((R,), (V, *units, top, bits, H, R))
            # (N, what H has, R), (N, R, L)
            _add_product(total, H.mT, part.transpose(0, 1), fresh=top is not None and r == 0)
        if self.one_piece:
            self.top = top
        elif top is not None:
            self.dW.addcmul_(total, top)
        if one < 0:
            db = D.sum(0)
            self.db = db if self.db is None else self.db + db

    def split(self, weights: Weights, run: Launch, lines: int) -> tuple[Tensor | None, ...]:
        """The gradients of W, b and W_q; a program of the kernel takes so many lines."""
        z, W, W_q = self.z, weights.W, weights.W_q
        dW, db, dW_q = W.new_empty(W.shape), None, None
        if W_q is not None:
            dW_q = W.new_empty(z.N, (z.S - 1) * z.d, z.d)  # of each cell
        if weights.b is not None and self.db is None:
            db = W.new_empty(weights.b.shape)
        grid = (-(-z.S * z.d // lines), z.N)
        run(grid, (self.dW, self.top, dW, dW_q, db))
        if weights.b is not None and self.db is not None:
            db = self.db[:, : 4 * z.d].clone()
        if W_q is not None and dW_q is not None and W_q.dim() == 2:
            dW_q = dW_q.sum(0)
        return dW, db, dW_q


def rows_from(rows: Tensor, first: int, most: int | None = None) -> Tensor:
    """Rows from `first` on, so many at most; all of them are taken as they are."""
    if first == 0 and (most is None or rows.shape[0] <= most):
        return rows
    return rows[first:] if most is None else rows[first : first + most]


def first_row(steps: Tensor, first: int) -> Tensor:
    """(steps, B, ...), where a kernel is to find its first row."""
    return steps.flatten(0, 1)[first:] if first else steps


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in this dtype; of halves in float32 without a copy."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


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
