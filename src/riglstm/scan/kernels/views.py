"""Kernel of the `triton` backend for the gradient of views.

Rows are pairs of step and sequence.

Shapes: N cells of size d, K views, L numbers of D5 in memory, R rows of a piece.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["BITS", "DV", "SUMS"])
def views_kernel(
    D5, D_UNIT, W, W_UNIT, BITS, DV, SUMS, R,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of one view: D5 of all cells that took it in times their weights for it.

    SUMS (tiles of rows, K·d), if it is asked for, gets the sum over a tile's rows.
    """
    k, r = tl.program_id(0), tl.program_id(1)
    row = tl.cast(r, tl.int64) * BM + tl.arange(0, BM)
    there = row < R
    takers = tl.zeros((BM,), tl.int32)
    for cell in tl.static_range(N):
        bits = tl.load(BITS + row * N + cell, mask=there, other=0)
        takers |= ((bits >> k) & 1) << cell
    unit = tl.arange(0, BP)
    CHUNKS: tl.constexpr = L // BK
    within = tl.arange(0, BK)[None, :]
    tl.static_assert(L % BK == 0)
    # Columns without a unit have the last one's weights, as in `spread`, and are not written.
    weight = W + ((k * d + tl.minimum(unit, d - 1))[:, None] * L + within)
    rows = D5 + ((row * (N * L))[:, None] + within)
    acc = tl.zeros((BM, BP), tl.float32)
    for i in tl.range(0, N * CHUNKS, num_stages=STAGES):
        j, first = i // CHUNKS, i % CHUNKS * BK
        use = (((takers >> j) & 1) != 0)[:, None]
        a = tl.load(rows + (j * L + first), mask=use, other=0.0)
        w = tl.load(weight + (j * ((K + N) * d * L) + first))
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
    if D_UNIT is not None:
        w_unit = tl.load(W_UNIT + k * d + unit, mask=unit < d, other=0.0)
        d_unit = tl.load(D_UNIT + row, mask=there, other=0.0)
        acc = acc * d_unit[:, None] * w_unit[None, :]
    if SUMS is not None:
        # Rows that are not there took nothing in.
        tl.store(SUMS + r * (K * d) + k * d + unit, tl.sum(acc, 0), mask=unit < d)
    at = (row * (K * d))[:, None] + (k * d + unit)[None, :]
    tl.store(DV + at, acc.to(DV.dtype.element_ty), mask=there[:, None] & (unit < d)[None, :])
