"""Kernels of the `triton` backend around the large products after the loop.

The first two work on a piece of R = steps · B rows, and put in the masks of the forward pass.

Shapes: N cells of size d, K views, S = K + N slots, P numbers a slot in memory, G = 4 or 5 gates,
L ≥ G·d numbers of D5 in memory, BS and BP: powers of two that hold S, and d or P.
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
def inputs_kernel(
    XH, BITS, H, R,
    N: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Eq. (17) for one row: what each cell took in, H (N, R, S·P), zero where it did not."""
    row = tl.cast(tl.program_id(0), tl.int64)
    s, e = tl.arange(0, BS)[:, None], tl.arange(0, BP)[None, :]
    inside = (s < S) & (e < P)
    at = s * P + e
    v = tl.load(XH + row * (S * P) + at, mask=inside, other=0.0)
    for j in tl.static_range(N):
        bits = tl.load(BITS + row * N + j)
        took = ((bits >> s) & 1) != 0
        tl.store(H + (j * R + row) * (S * P) + at, tl.where(took, v, 0.0), mask=inside)


@triton.jit
def pack_kernel(
    W, W_Q, OUT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
    G: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PER_CELL: tl.constexpr,
    TILED: tl.constexpr,
):  # fmt: skip
    """One slot of W (N, S·d, 4·d) and W_q for BN columns of a tile.

    TILED: to (N, tiles, BN, S·P), as the forward kernel reads it: BN / 4 units with four gates
    each, in an order that gives all gates of a unit to one thread, or BN columns of W_q. Else to
    (N, S·d, L), W_q as the fifth gate.
    """
    S: tl.constexpr = K + N
    UNITS: tl.constexpr = (4 * d + BN - 1) // BN
    TILES: tl.constexpr = UNITS + (G - 4) * ((d + BN - 1) // BN)
    j, u, s = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    k, col = tl.arange(0, BP)[None, :], tl.arange(0, BN)[:, None]
    gate = ((col >> 2) & 2) | (col & 1)
    unit = u * (BN // 4) + ((col >> 4) << 2 | (col >> 1) & 3)
    if u >= UNITS:
        gate = 4 + 0 * col
        unit = (u - UNITS) * BN + col
        slot = (j * (S - 1) if PER_CELL else 0) + s - tl.where(s > K + j, 1, 0)
        mask = (k < d) & (unit < d) & (s + 0 * k != K + j)
        w = tl.load(W_Q + (slot * d + k) * d + unit, mask=mask, other=0.0)
    else:
        at = ((j * S + s) * d + k) * (4 * d) + gate * d + unit
        w = tl.load(W + at, mask=(k < d) & (unit < d), other=0.0)
    w = w.to(OUT.dtype.element_ty)
    if TILED:
        at = ((j * TILES + u) * BN + col) * (S * P) + s * P + k
        tl.store(OUT + at, w, mask=(k < P) & (col < BN))
    else:
        at = ((j * S + s) * d + k) * L + gate * d + unit
        tl.store(OUT + at, w, mask=(k < d) & (unit < d))
