"""Forward kernel of the `triton` backend: all steps of a sequence in one launch.

Each step has two phases, with a barrier of the whole grid after each. `select` takes one sequence
at a time: it finishes the state of the step before, Eqs. (20)-(21), scores and ranks, Eqs.
(13)-(16). `gates` takes a tile: BM sequences, and some units of one cell with all their gates, or
some of its W_q Q, Eqs. (1)-(6), (18), (19). What a cell does not take in is not even loaded.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, G = 4 or 5 gates (W_q Q is the fifth), BP = power of two ≥ P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton_common import grid_barrier, sigmoid, tanh
from riglstm.scan.triton_select import finish, select, vectors


@triton.jit
def _gates(
    t, j, u, r, B, c, XH, W, BIAS, PROP, BITS, GATES, C, LIST, COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, COMPACT: tl.constexpr, SAVE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Eqs. (1)-(6), (18), (19): BM sequences, and of cell j BN / 4 units or BN numbers of W_q Q."""
    U: tl.constexpr = BN // 4
    UNITS: tl.constexpr = (d + U - 1) // U
    TILES: tl.constexpr = UNITS + (G - 4) * ((d + BN - 1) // BN)
    D: tl.constexpr = (K + N) * P
    place = r * BM + tl.arange(0, BM)
    if COMPACT:
        there = place < tl.load(COUNT + t * N + j, cache_modifier=".cg")
        b = tl.load(LIST + j * B + place, mask=there, other=0, cache_modifier=".cg")
    else:
        there = place < B
        b = place
    row = tl.cast(t, tl.int64) * B + b
    bits = tl.load(BITS + row * N + j, mask=there, other=0, cache_modifier=".cg")
    on = bits != 0
    W += (j * TILES + u) * (BN * D)
    col = tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for m in tl.range(0, (D + BK - 1) // BK, num_stages=STAGES):
        k = m * BK + tl.arange(0, BK)
        take = ((bits[:, None] >> (k // P)[None, :]) & 1) != 0
        a = tl.load(
            XH + (row * D)[:, None] + k[None, :],
            mask=take & (k < D)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        w = tl.load(W + col[:, None] * D + k[None, :], mask=(k < D)[None, :], other=0.0)
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)

    kind = GATES.dtype.element_ty
    if u < UNITS:
        # Of a thread's columns, bits 0 and 3 differ: they number the gates, see `pack_kernel`.
        four = acc.reshape(BM, BN // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(BM, U, 2, 2)
        f_o, i_g = tl.split(four)
        f, o = tl.split(f_o)
        i, g = tl.split(i_g)
        unit = u * U + tl.arange(0, U)
        inside = unit < d
        use = on[:, None] & inside[None, :]
        at = b[:, None] * (N * d) + j * d + unit[None, :]
        c_old = tl.load(c + at, mask=use, other=0.0, cache_modifier=".cg")
        bias = BIAS + j * (4 * d) + unit
        f = sigmoid(f + tl.load(bias, mask=inside, other=0.0)[None, :])
        i = sigmoid(i + tl.load(bias + d, mask=inside, other=0.0)[None, :])
        o = sigmoid(o + tl.load(bias + 2 * d, mask=inside, other=0.0)[None, :])
        g = tanh(g + tl.load(bias + 3 * d, mask=inside, other=0.0)[None, :])
        c_new = f * c_old + i * g
        tl.store(c + at, c_new, mask=use)
        tl.store(PROP + at, o * tanh(c_new), mask=use)
        if SAVE:
            tl.store(C + row[:, None] * (N * d) + j * d + unit[None, :], c_old, mask=use)
            at = (row * N + j)[:, None] * (G * d) + unit[None, :]
            tl.store(GATES + at, f.to(kind), mask=use)
            tl.store(GATES + at + d, i.to(kind), mask=use)
            tl.store(GATES + at + 2 * d, o.to(kind), mask=use)
            tl.store(GATES + at + 3 * d, g.to(kind), mask=use)
    else:
        lane = (u - UNITS) * BN + col
        mask = on[:, None] & (lane < d)[None, :]
        out = b[:, None] * (N * d) + j * d + lane[None, :]
        tl.store(PROP + tl.cast(B * N * d, tl.int64) + out, acc, mask=mask)
        if SAVE:
            save = (row * N + j)[:, None] * (G * d) + 4 * d + lane[None, :]
            tl.store(GATES + save, acc.to(kind), mask=mask)


@triton.jit(do_not_specialize=["B", "t0", "t1"])
def forward_kernel(
    h0, c, X, XH, W, BIAS, UPDATE_BIAS, LIVE, RESET, Y, PROP, ACT, WOKE, BITS, GATES, C, A, LIST,
    COUNT, COUNTER, B, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
    SCALE: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    RB: tl.constexpr, STAGES: tl.constexpr, COMPACT: tl.constexpr, WIDE: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t0 to t1. PHASE is a sum: 1 select, 2 gates, 4 barriers, 8 finish the last step."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    TILES: tl.constexpr = N * ((4 * d + BN - 1) // BN + (G - 4) * ((d + BN - 1) // BN))
    SOFT: tl.constexpr = G == 5
    target = 0
    for t in tl.range(t0, t1, num_stages=1):
        if PHASE & 1:
            for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
                b = r * RB + tl.arange(0, RB)
                x = ()
                if (K_a < N) or (K_x < K):
                    now = X + tl.cast(t, tl.int64) * B * X_ROW
                    x = vectors(now, K, b, B, X_ROW, X_SLOT, N, d, BP)
                h = finish(
                    t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, SCALE, SOFT, SAVE
                )  # fmt: skip
                select(
                    t, b, B, h, x, h0, c, XH, Y, LIVE, RESET, ACT, WOKE, BITS, LIST, COUNT,
                    N, K, d, P, BP, K_a, K_x, K_h, COMPACT,
                )  # fmt: skip
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
        if PHASE & 2:
            for tile in tl.range(p, TILES * tl.cdiv(B, BM), programs, num_stages=1):
                j_u = tile % TILES
                r = tile // TILES
                wanted = r == 0
                if COMPACT:
                    count = tl.load(COUNT + t * N + j_u % N, cache_modifier=".cg")
                    wanted = r * BM < count
                if wanted:
                    _gates(
                        t, j_u % N, j_u // N, r, B, c, XH, W, BIAS, PROP, BITS, GATES, C, LIST,
                        COUNT, N, K, d, P, G, BM, BN, BK, STAGES, PRECISION, COMPACT, SAVE,
                        WIDE,
                    )  # fmt: skip
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
    if PHASE & 8:
        for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
            b = r * RB + tl.arange(0, RB)
            finish(t1, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, SCALE, SOFT, SAVE)
