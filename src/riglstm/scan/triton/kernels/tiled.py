"""Tiled forward kernel: all steps of a sequence in one launch, for any number of sequences.

Each step has two phases, with a barrier of the whole grid after each, or after the first alone,
where `select` polls for what it needs (`poll_vectors`). `select` takes RB sequences at a time: it
finishes the state of the step before, Eqs. (20)-(21), scores and ranks, Eqs. (13)-(16). `gates`
takes a tile: BM sequences, and some units of one cell with all their gates, or some of its W_q Q,
Eqs. (1)-(6), (18), (19). What a cell does not take in is not even loaded.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, G = 4 or 5 gates (W_q Q is the fifth), BP = power of two ≥ P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton.kernels.common import (
    _LINE,
    _PIECE,
    Memory,
    Sizes,
    awake_before,
    cell,
    column_unit,
    dealt,
    fetch,
    grid_barrier,
    load_four,
    quarters,
    wait,
)
from riglstm.scan.triton.kernels.pack import map_ahead, round_rows
from riglstm.scan.triton.kernels.select import finish, prefetch_views, rows_many, rows_phase


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
    b_f, b_i, b_o, b_g = load_four(at, d, inside)
    return b_f[None, :], b_i[None, :], b_o[None, :], b_g[None, :]


@triton.jit
def gates(
    t, j, u, place, count, b, bits, biases, w_unit, B, ENDS, m, z,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, COMPACT: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Eqs. (1)-(6), (18), (19): BM sequences, and of cell j BN / 4 units or BN numbers of W_q Q.

    The sequences and their bits are those of `rows_of`, where their place is below `count`. ENDS,
    where there is one, counts tiles that are about to end.
    """
    U: tl.constexpr = BN // 4
    UNITS: tl.constexpr = (z.d + U - 1) // U
    TILES: tl.constexpr = UNITS + (z.G - 4) * ((z.d + BN - 1) // BN)
    D: tl.constexpr = (z.K + z.N) * z.P
    there = place < count
    bits = tl.where(there, bits, 0)
    step = tl.cast(t, tl.int64) * B
    XH = m.XH + step * D
    W = m.W + (j * TILES + u) * (BN * D)
    col = tl.arange(0, BN)
    # What the end of the tile needs is asked for now; where it is W_q Q, no unit is inside.
    unit, inside = _units(u, z.d, BN)
    # Who is listed takes something in.
    on = there if COMPACT else bits != 0
    use = on[:, None] & inside[None, :]
    at = b[:, None] * (z.N * z.d) + (j * z.d + unit)[None, :]
    c_old = tl.load(m.c + at, mask=use, other=0.0)
    if m.X_UNIT is not None:
        x_unit = tl.load(m.X_UNIT + step + b, mask=there, other=1.0)[:, None]
    filled = column_unit(u, col, z.d, BN) < z.d
    acc = tl.zeros((BM, BN), tl.float32)
    PIECES: tl.constexpr = (z.P + BK - 1) // BK
    for i in tl.range(0, (D + BK - 1) // BK if FLAT else (z.K + z.N) * PIECES, num_stages=STAGES):
        if FLAT:
            # Bound by the product: no gap between slots.
            k = i * BK + tl.arange(0, BK)
            real = k < D
            take = ((bits[:, None] >> (k // z.P)[None, :]) & 1) != 0
        else:
            # Bound by latency: a piece lies within a slot, so what is taken in is known by row.
            e = (i % PIECES) * BK + tl.arange(0, BK)
            real = e < z.P
            k = (i // PIECES) * z.P + e
            take = (((bits >> (i // PIECES)) & 1) != 0)[:, None]
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
    if m.X_UNIT is not None:
        acc = acc * x_unit * w_unit

    f, i, o, g = quarters(acc, BM, BN)
    kept = m.GATES + (step * z.N + j) * (z.G * z.d)
    row = b[:, None] * (z.N * z.G * z.d)
    kind = m.GATES.dtype.element_ty
    if u < UNITS:
        b_f, b_i, b_o, b_g = biases
        COARSE: tl.constexpr = m.W.dtype.element_ty == tl.bfloat16
        f, i, o, g, c_new, h_new = cell(f + b_f, i + b_i, o + b_o, g + b_g, c_old, COARSE, True)
        tl.store(m.c + at, c_new, mask=use)
        tl.store(m.PROP + at, h_new, mask=use)
        if z.SAVE:
            tl.store(m.C + step * (z.N * z.d) + at, c_old, mask=use)
            kept_at = row + unit[None, :]
            tl.store(kept + kept_at, f.to(kind), mask=use)
            tl.store(kept + z.d + kept_at, i.to(kind), mask=use)
            tl.store(kept + 2 * z.d + kept_at, o.to(kind), mask=use)
            tl.store(kept + 3 * z.d + kept_at, g.to(kind), mask=use)
    else:
        four = (f, i, o, g)
        queries = m.PROP + (tl.cast(B, tl.int64) * (z.N * z.d) + j * z.d)
        for part in tl.static_range(4):
            number = (u - UNITS) * BN + part * U + tl.arange(0, U)
            mask = on[:, None] & (number < z.d)[None, :]
            q_at = b[:, None] * (z.N * z.d) + number[None, :]
            tl.store(queries + q_at, four[part], mask=mask)
            if z.SAVE:
                kept_at = row + (4 * z.d + number)[None, :]
                tl.store(kept + kept_at, four[part].to(kind), mask=mask)


@triton.jit(do_not_specialize=["B", "T", "t0", "t1"])
def tiled_kernel(
    h0, c, X, XH, X_UNIT, W, W_UNIT, BIAS, UPDATE_BIAS, MAY_WAKE, MAY_TAKE, RESET, Y, PROP, ACT,
    WOKE, BITS, GATES, C, A, LIST, COUNT, COUNTER, INPUT, IN_SIZE, W_IN, IN_BIAS, LOW, T, B, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
    SCALE: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    RB: tl.constexpr, STAGES: tl.constexpr, COMPACT: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, WARPS: tl.constexpr, D: tl.constexpr, IN_ROW: tl.constexpr,
    LOW_ROW: tl.constexpr, IN_BK: tl.constexpr, IN_STAGES: tl.constexpr, POLLING: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t0 to t1. PHASE is a sum: 1 select, 2 gates, 4 barriers, 8 finish the last step.

    MAY_WAKE (T, B) has a bit for each cell that may wake, and MAY_TAKE (T, B, N) one for each slot
    that a cell may take in; None: all. With INPUT, `gates` also maps it to views two steps ahead,
    up to step T: those of the first two are there. LOW is where it is rounded to before, if it is
    of another dtype than products are.
    """
    p, programs = tl.program_id(0), tl.num_programs(0)
    TILES: tl.constexpr = (4 * d + BN - 1) // BN + (G - 4) * ((d + BN - 1) // BN)
    PIECE: tl.constexpr = min(_PIECE, BP) if COMPACT else BP
    # A reset of c by `select` must not come before the c of the step before.
    POLL: tl.constexpr = POLLING and RESET is None
    m = Memory(
        h0, c, X, XH, X_UNIT, W, W_UNIT, BIAS, UPDATE_BIAS, MAY_WAKE, MAY_TAKE, RESET, Y, PROP, ACT,
        WOKE, BITS, GATES, C, A, LIST, COUNT, COUNTER,
    )  # fmt: skip
    z: tl.constexpr = Sizes(
        N, K, d, P, G, PIECE, K_a, K_x, K_h, SCALE, X_ROW, X_SLOT, G == 5, SAVE, RB, WARPS, POLL
    )
    first = p * RB + tl.arange(0, RB)
    act = awake_before(t0, first, B, ACT)
    tiles, target = N * TILES * tl.cdiv(B, BM), 0
    if (PHASE & 1) and LOW is not None:
        # The third step is mapped first. The two before it are only kept.
        for t in tl.range(0 if SAVE else 2, tl.where(t0 > 0, 0, 3), num_stages=1):
            round_rows(t, T, p, programs, 0, B, INPUT, LOW, D, IN_ROW, LOW_ROW, SAVE)
    for t in tl.range(t0, t1, num_stages=1):
        if (PHASE & 4) and INPUT is not None:
            after = tl.cast(tl.minimum(t + 3, t1 - 1), tl.int64) * B
            fetch(INPUT + after * IN_ROW, B * IN_ROW, p, programs)
        elif PHASE & 4:
            prefetch_views(t, t1, p, programs, B, m, z)
        # Who is done early with a step begins the next one's list while others read this one's.
        listed = LIST + (t & 1) * (2 * N * B)
        if PHASE & 1:
            if COMPACT:
                rows_many(t, p, programs, B, act, listed, m, z)
            else:
                rows_phase(t, p, programs, B, m, z)
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
        ends = None
        if (PHASE & 4) and POLL:
            ends = COUNTER + _LINE
            act = awake_before(t + 1, first, B, ACT)
        if PHASE & 2:
            busy = 0
            for tile in tl.range(p, tiles, programs, num_stages=1):
                j, r_u = tile % N, tile // N
                r, u = r_u // TILES, r_u % TILES
                place = dealt(r, B, BM) if INPUT is None else r * BM + tl.arange(0, BM)
                count = B
                if COMPACT:
                    count = tl.load(COUNT + t * N + j)
                b, bits = rows_of(t, j, place, B, listed, BITS, N, COMPACT)
                # No load passes a barrier: what does not depend on these is asked for after them.
                tl.debug_barrier()
                biases = biases_of(BIAS, j, u, d, BN)
                w_unit = None
                if W_UNIT is not None:
                    w_unit = tl.load(W_UNIT + (j * TILES + u) * BN + tl.arange(0, BN))
                    w_unit = w_unit[None, :]
                if (r if INPUT is None else r * BM) < count:
                    busy = 1
                    gates(
                        t, j, u, place, count, b, bits, biases, w_unit, B, ends, m, z, BM, BN, BK,
                        STAGES, PRECISION, COMPACT, FLAT, WIDE,
                    )  # fmt: skip
                elif ends is not None:
                    tl.atomic_add(ends, 1, sem="relaxed")
            if INPUT is not None:
                map_ahead(
                    t, T, p, programs, busy, B, INPUT, IN_SIZE, W_IN, IN_BIAS, XH, X_UNIT, X, LOW,
                    COUNT, D, IN_ROW, LOW_ROW, N, K, d, P, TILES, BM, BN, IN_BK, IN_STAGES, WIDE,
                    SAVE,
                )  # fmt: skip
        if (PHASE & 4) and POLL:
            # Who has nothing to do asks for one number, and not for all that is to come. It only
            # says when to begin with that.
            if busy == 0:
                wait(ends, (t - t0 + 1) * tiles)
        elif PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
    if PHASE & 8:
        for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
            b = r * RB + tl.arange(0, RB)
            finish(t1, b, B, m, z, awake_before(t1, b, B, ACT) if POLL else None)
