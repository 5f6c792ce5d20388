"""What follows the loop of the backward pass: the gradient of weights.

Shapes as in `plan.py`; R rows are pairs of step and sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.launch import Launch, Place, nth, prepare
from riglstm.scan.fused.plan import Saved, Sizes
from riglstm.scan.fused.tiles import chip, stages
from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.products import inputs_kernel
from riglstm.scan.kernels.weights import ROWS, awake_kernel, weights_kernel

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


class InLists(NamedTuple):
    """The product in kernels of ours."""

    awake: Launch
    """The lists of rows in which each cell was awake."""
    rows: int
    """That a program of it takes."""
    weights: Launch
    """The product over them."""
    tiles: int


class Products(NamedTuple):
    """How the gradient of weights is computed."""

    inputs: Launch
    """What cells took in, written out for cuBLAS."""
    in_lists: InLists | None
    """None: by cuBLAS."""


def products(z: Sizes, B: int, device: torch.device) -> Products:
    """Ours in bfloat16, where its tiles are enough for the GPU.

    cuBLAS is the quicker one for a product, but it multiplies the rows of sleeping cells, too, and
    what cells took in must be written out for it.
    """
    wide, one = width(z)
    inputs = prepare(
        inputs_kernel, N=z.N, S=z.S, P=z.P, BS=power_of_two(z.S), BP=power_of_two(z.P), WIDTH=wide,
        ONE=one,
    )  # fmt: skip
    tile, rows = product_tile(), 64 if interpreted() else 1024
    tiles = z.N * -(-wide // tile["BM"]) * (z.L // tile["BN"])
    if (
        z.back != torch.bfloat16
        or B > ROWS
        or not (interpreted() or _worth(z, tile, tiles, device))
    ):
        return Products(inputs, None)
    awake = prepare(awake_kernel, N=z.N, S=z.S, BR=rows)
    weights = prepare(weights_kernel, N=z.N, S=z.S, P=z.P, L=z.L, **tile, WIDE=interpreted())
    return Products(inputs, InLists(awake, rows, weights, tiles))


def _worth(z: Sizes, tile: dict[str, Any], tiles: int, device: torch.device) -> bool:
    """Whether there is a tile for half of the multiprocessors, and it is one that was measured.

    Narrower tiles were not, at sizes that need them, and gain less: Triton 3.6 has their products
    wait for each other. Nor were fewer than four pieces, which fit on a chip smaller than Hopper's.
    """
    pieces = stages(device, 4, tile["BM"] + tile["BN"], tile["BK"], z.back)
    return z.L % tile["BN"] == 0 and pieces == 4 and 2 * tiles >= chip(device)[0]


def product_tile() -> dict[str, Any]:
    """The tile of `weights_kernel`."""
    if interpreted():
        return {"BM": 64, "BN": 64, "BK": 32, "STAGES": 1}
    # A load that waits for another one is half as many stages ahead: four.
    return {"BM": 128, "BN": 256, "BK": 64, "STAGES": 8, "num_warps": 8}


class Total:
    """The gradient of weights as the products give it, and that of biases where it is not in it."""

    def __init__(
        self, dW: Tensor, z: Sizes, by: Products, room: Sequence[Tensor | Place], one_piece: bool
    ) -> None:
        self.z, self.by, self.one_piece = z, by, one_piece
        self.room = room
        """For kernels of ours: lists and counts of each piece's cells, and a one and zeros."""
        self.dW = dW
        """(N, what H has, L), zero but for a single piece in units."""
        self.top: Tensor | None = None
        """What one stands for in dW; None: one."""
        self.db: Tensor | None = None
        """(N, L)."""

    def begin(self, saved: Saved, per: int) -> None:
        """List who was awake in the rows of all pieces, `per` rows each; before any is added."""
        if (ours := self.by.in_lists) is not None:
            (listed, count, _), R = self.room, saved.act.numel()
            grid = (-(-per // ours.rows), self.z.N, -(-R // per))
            ours.awake(grid, (saved.act, saved.bits, listed, count, R, per))

    def add(self, piece: Piece, saved: Saved, i: int, t0: int) -> None:
        """Add Hᵀ D5 of piece i, from t0 on, to dW, and the sum of D5 to db unless it is in dW."""
        z, (wide, one), B = self.z, width(self.z), piece.D5.shape[1]
        D, first = piece.D5.view(-1, z.N, z.L), t0 * B
        if (ours := self.by.in_lists) is not None:
            listed, count, ones = self.room
            mine = nth(listed, i, z.N * ROWS), nth(count, i, z.N)
            ours.weights((ours.tiles,), (first_row(saved.XH, first), ones, D, *mine, self.dW))
            return
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
            self.by.inputs((R,), (V, *units, top, bits, H, R))
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
