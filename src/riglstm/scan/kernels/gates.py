"""The tile-wise half of a step in the forward kernel, Eqs. (1)-(6), (18), (19).

A tile is BM sequences, and some units of one cell with all their gates, or some of its W_q Q. What
a cell does not take in is not even loaded.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, G = 4 or 5 gates (W_q Q is the fifth).
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.cell import cell
from riglstm.scan.kernels.columns import column_unit, quarters


@triton.jit
def rows_of(t, j, place, B, LIST, BITS, N: tl.constexpr, COMPACT: tl.constexpr):
    """Sequences at these places, and a bit for each slot that cell j takes in for them.

    With a list they are those listed; beyond its end, it holds anything.
    """
    if COMPACT:
        pairs = LIST.to(tl.pointer_type(tl.int64))
        entry = tl.load(pairs + j * B + place, mask=place < B, other=0)
        return entry.to(tl.int32), (entry >> 32).to(tl.int32)
    else:
        at = (tl.cast(t, tl.int64) * B + place) * N + j
        return place, tl.load(BITS + at, mask=place < B, other=0)


@triton.jit
def _units(u, d: tl.constexpr, BN: tl.constexpr):
    """The units of tile u, and whether they are any: none, where it is of W_q Q."""
    U: tl.constexpr = BN // 4
    UNITS: tl.constexpr = (d + U - 1) // U
    PER: tl.constexpr = (d + 4 * UNITS - 1) // (4 * UNITS) * 4
    lane = tl.arange(0, U)
    unit = u * PER + lane
    return unit, (lane < PER) & (unit < d)


@triton.jit
def biases_of(BIAS, j, u, d: tl.constexpr, BN: tl.constexpr):
    """What is added to f, i, o and g of tile u of cell j, (1, BN / 4) each."""
    unit, inside = _units(u, d, BN)
    at = BIAS + j * (4 * d) + unit
    b_f = tl.load(at, mask=inside, other=0.0)[None, :]
    b_i = tl.load(at + d, mask=inside, other=0.0)[None, :]
    b_o = tl.load(at + 2 * d, mask=inside, other=0.0)[None, :]
    b_g = tl.load(at + 3 * d, mask=inside, other=0.0)[None, :]
    return b_f, b_i, b_o, b_g


@triton.jit
def gates(
    t, j, u, place, count, b, bits, biases, w_unit, B, c, XH, X_UNIT, W, PROP, GATES, C, ENDS,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, COMPACT: tl.constexpr, FLAT: tl.constexpr, SAVE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Eqs. (1)-(6), (18), (19): BM sequences, and of cell j BN / 4 units or BN numbers of W_q Q.

    The sequences and their bits are those of `rows_of`, where their place is below `count`. ENDS,
    where there is one, counts tiles that are about to end.
    """
    U: tl.constexpr = BN // 4
    UNITS: tl.constexpr = (d + U - 1) // U
    TILES: tl.constexpr = UNITS + (G - 4) * ((d + BN - 1) // BN)
    D: tl.constexpr = (K + N) * P
    there = place < count
    bits = tl.where(there, bits, 0)
    step = tl.cast(t, tl.int64) * B
    XH += step * D
    W += (j * TILES + u) * (BN * D)
    col = tl.arange(0, BN)
    # What the end of the tile needs is asked for now; where it is W_q Q, no unit is inside.
    unit, inside = _units(u, d, BN)
    # Who is listed takes something in.
    on = there if COMPACT else bits != 0
    use = on[:, None] & inside[None, :]
    at = b[:, None] * (N * d) + (j * d + unit)[None, :]
    c_old = tl.load(c + at, mask=use, other=0.0)
    if X_UNIT is not None:
        x_unit = tl.load(X_UNIT + step + b, mask=there, other=1.0)[:, None]
    filled = column_unit(u, col, d, BN) < d
    acc = tl.zeros((BM, BN), tl.float32)
    PIECES: tl.constexpr = (P + BK - 1) // BK
    for m in tl.range(0, (D + BK - 1) // BK if FLAT else (K + N) * PIECES, num_stages=STAGES):
        if FLAT:
            # Bound by the product: no gap between slots.
            k = m * BK + tl.arange(0, BK)
            real = k < D
            take = ((bits[:, None] >> (k // P)[None, :]) & 1) != 0
        else:
            # Bound by latency: a piece lies within a slot, so what is taken in is known by row.
            e = (m % PIECES) * BK + tl.arange(0, BK)
            real = e < P
            k = (m // PIECES) * P + e
            take = (((bits >> (m // PIECES)) & 1) != 0)[:, None]
        a = tl.load(
            XH + (b * D)[:, None] + k[None, :],
            mask=take & real[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        mask = filled[:, None] & real[None, :]
        w = tl.load(W + col[:, None] * D + k[None, :], mask=mask, other=0.0)
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
    if ENDS is not None:
        tl.atomic_add(ENDS, 1, sem="relaxed")
    if X_UNIT is not None:
        acc = acc * x_unit * w_unit

    f, i, o, g = quarters(acc, BM, BN)
    kept = GATES + (step * N + j) * (G * d)
    row = b[:, None] * (N * G * d)
    kind = GATES.dtype.element_ty
    if u < UNITS:
        b_f, b_i, b_o, b_g = biases
        COARSE: tl.constexpr = W.dtype.element_ty == tl.bfloat16
        f, i, o, g, c_new, h_new = cell(f + b_f, i + b_i, o + b_o, g + b_g, c_old, COARSE, True)
        tl.store(c + at, c_new, mask=use)
        tl.store(PROP + at, h_new, mask=use)
        if SAVE:
            tl.store(C + step * (N * d) + at, c_old, mask=use)
            kept_at = row + unit[None, :]
            tl.store(kept + kept_at, f.to(kind), mask=use)
            tl.store(kept + d + kept_at, i.to(kind), mask=use)
            tl.store(kept + 2 * d + kept_at, o.to(kind), mask=use)
            tl.store(kept + 3 * d + kept_at, g.to(kind), mask=use)
    else:
        four = (f, i, o, g)
        PROP += tl.cast(B, tl.int64) * (N * d) + j * d
        for part in tl.static_range(4):
            number = (u - UNITS) * BN + part * U + tl.arange(0, U)
            mask = on[:, None] & (number < d)[None, :]
            q_at = b[:, None] * (N * d) + number[None, :]
            tl.store(PROP + q_at, four[part], mask=mask)
            if SAVE:
                kept_at = row + (4 * d + number)[None, :]
                tl.store(kept + kept_at, four[part].to(kind), mask=mask)
