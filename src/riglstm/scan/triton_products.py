"""Gradients of views and weights in the `triton` backend: large products after the loop.

Both take D5 of a piece of R = steps · B rows and leave out, while loading, what the masks of the
forward pass left out.

Shapes: N cells of size d, K views, S = K + N slots, P numbers a slot in memory, G = 4 or 5 gates,
L ≥ G·d numbers of D5 in memory, BP = power of two ≥ P.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["BITS", "DV"])
def views_kernel(
    D5, W, BITS, DV, R,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of one view: D5 of all cells that took it in times their weights for it."""
    k, r = tl.program_id(0), tl.program_id(1)
    row = tl.cast(r, tl.int64) * BM + tl.arange(0, BM)
    there = row < R
    unit = tl.arange(0, BP)
    CHUNKS: tl.constexpr = (L + BK - 1) // BK
    acc = tl.zeros((BM, BP), tl.float32)
    for i in tl.range(0, N * CHUNKS, num_stages=STAGES):
        j = i // CHUNKS
        m = (i % CHUNKS) * BK + tl.arange(0, BK)
        bits = tl.load(BITS + row * N + j, mask=there, other=0)
        use = ((bits >> k) & 1) != 0
        a = tl.load(
            D5 + (row * (N * L) + j * L)[:, None] + m[None, :],
            mask=use[:, None] & (m < L)[None, :],
            other=0.0,
        )
        at = ((j * (K + N) + k) * d + unit)[:, None] * L + m[None, :]
        w = tl.load(W + at, mask=(unit < d)[:, None] & (m < L)[None, :], other=0.0)
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
    at = (row * (K * d))[:, None] + (k * d + unit)[None, :]
    tl.store(DV + at, acc.to(DV.dtype.element_ty), mask=there[:, None] & (unit < d)[None, :])


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["BITS"])
def weights_kernel(
    D5, XH, BITS, DW, R,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add Hᵀ D5 of one slot and one cell to DW (N, S·d, L)."""
    s, j, u = tl.program_id(1), tl.program_id(2), tl.program_id(0)
    e, m = tl.arange(0, BP), u * BN + tl.arange(0, BN)
    acc = tl.zeros((BP, BN), tl.float32)
    for r in tl.range(0, R, BK, num_stages=STAGES):
        row = tl.cast(r, tl.int64) + tl.arange(0, BK)
        there = row < R
        bits = tl.load(BITS + row * N + j, mask=there, other=0)
        use = ((bits >> s) & 1) != 0
        h = tl.load(
            XH + (row * ((K + N) * P) + s * P)[:, None] + e[None, :],
            mask=use[:, None] & (e < P)[None, :],
            other=0.0,
        )
        g = tl.load(
            D5 + (row * (N * L) + j * L)[:, None] + m[None, :],
            mask=use[:, None] & (m < L)[None, :],
            other=0.0,
        )
        if WIDE:
            h, g = h.to(tl.float32), g.to(tl.float32)
        acc = tl.dot(h.T, g, acc, input_precision=PRECISION)
    at = ((j * (K + N) + s) * d + e)[:, None] * L + m[None, :]
    mask = (e < d)[:, None] & (m < L)[None, :]
    tl.store(DW + at, tl.load(DW + at, mask=mask, other=0.0) + acc, mask=mask)
