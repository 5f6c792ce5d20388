"""Forward kernel of the `triton` backend: all steps of a sequence in one launch.

Each step has two phases, with a barrier of the whole grid after each, or after the first alone,
where `select` waits for what it needs by itself (`told.py`). `select` takes RB sequences at a time:
it finishes the state of the step before, Eqs. (20)-(21), scores and ranks, Eqs. (13)-(16). `gates`
takes a tile: BM sequences, and some units of one cell with all their gates, or some of its W_q Q,
Eqs. (1)-(6), (18), (19).

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, G = 4 or 5 gates (W_q Q is the fifth), BP = power of two ≥ P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.ahead import map_ahead, round_rows
from riglstm.scan.kernels.columns import dealt
from riglstm.scan.kernels.common import _LINE, fetch, grid_barrier, wait
from riglstm.scan.kernels.gates import biases_of, gates, rows_of
from riglstm.scan.kernels.many import rows_many
from riglstm.scan.kernels.pieces import _PIECE
from riglstm.scan.kernels.rows import ask_ahead, rows_phase
from riglstm.scan.kernels.select import finish
from riglstm.scan.kernels.told import awake_before


@triton.jit(do_not_specialize=["B", "T", "t0", "t1"])
def forward_kernel(
    h0, c, X, XH, X_UNIT, W, W_UNIT, BIAS, UPDATE_BIAS, LIVE, RESET, Y, PROP, ACT, WOKE, BITS,
    GATES, C, A, LIST, COUNT, COUNTER, INPUT, IN_SIZE, W_IN, IN_BIAS, LOW, T, B, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
    SCALE: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    RB: tl.constexpr, STAGES: tl.constexpr, COMPACT: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, WARPS: tl.constexpr, D: tl.constexpr, IN_ROW: tl.constexpr,
    LOW_ROW: tl.constexpr, IN_BK: tl.constexpr, IN_STAGES: tl.constexpr, TOLD: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t0 to t1. PHASE is a sum: 1 select, 2 gates, 4 barriers, 8 finish the last step.

    With INPUT, `gates` also maps it to views two steps ahead, up to step T: those of the first two
    are there. LOW is where it is rounded to before, if it is of another dtype than products are.
    """
    p, programs = tl.program_id(0), tl.num_programs(0)
    TILES: tl.constexpr = (4 * d + BN - 1) // BN + (G - 4) * ((d + BN - 1) // BN)
    SOFT: tl.constexpr = G == 5
    PIECE: tl.constexpr = min(_PIECE, BP) if COMPACT else BP
    # A reset of c by `select` must not come before the c of the step before.
    POLL: tl.constexpr = TOLD and RESET is None
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
            ask_ahead(t, t1, p, programs, X, XH, B, N, K, P, K_a, K_x, X_ROW)
        # Who is done early with a step begins the next one's list while others read this one's.
        listed = LIST + (t & 1) * (2 * N * B)
        if PHASE & 1:
            if COMPACT:
                rows_many(
                    t, p, programs, h0, c, X, XH, X_UNIT, UPDATE_BIAS, LIVE, RESET, Y, PROP, ACT,
                    WOKE, BITS, A, listed, COUNT, B, N, K, d, P, PIECE, K_a, K_x, K_h, SCALE, X_ROW,
                    X_SLOT, SOFT, SAVE, RB, WARPS, POLL, act,
                )  # fmt: skip
            else:
                rows_phase(
                    t, p, programs, h0, c, X, XH, X_UNIT, UPDATE_BIAS, LIVE, RESET, Y, PROP, ACT,
                    WOKE, BITS, A, B, N, K, d, P, BP, K_a, K_x, K_h, SCALE, X_ROW, X_SLOT, SOFT,
                    SAVE, RB,
                )  # fmt: skip
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
                        t, j, u, place, count, b, bits, biases, w_unit, B, c, XH, X_UNIT, W,
                        PROP, GATES, C, ends, N, K, d, P, G, BM, BN, BK, STAGES, PRECISION, COMPACT,
                        FLAT, SAVE, WIDE,
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
            if POLL:
                act = awake_before(t1, b, B, ACT)
                finish(
                    t1, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, PIECE, SCALE, SOFT, SAVE, act
                )
            else:
                finish(t1, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, PIECE, SCALE, SOFT, SAVE)
