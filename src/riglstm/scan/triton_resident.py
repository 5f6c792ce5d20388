"""Forward kernel of the `triton` backend for few sequences: weights stay in registers.

As in `triton_forward.py` a step has two phases, `select` and `gates`. Here a program has at most
one tile of `gates`, all sequences by BN columns of one cell, and it keeps that tile for the whole
sequence: its weights for states and its c never leave the registers.

Each warp owns a slot. The product of a tile is one of eight slots at once, a third dimension of
`tl.dot`, whose warps lie along the slots: what a warp multiplies is loaded by its own lanes, 16
bytes each, to the very registers that the tensor core reads, without shared memory and without
waiting for another warp. For that, numbers of a slot are multiplied in another order than they lie
in memory, the same for both factors (`_rows`, `_columns`). Only the sum over slots goes through
shared memory, once.

What a cell takes in is known after `select`; the views themselves are known before. So a program
that has selected says so, multiplies all views while others still select, and waits only then: what
was not taken in is put to zero in the product.

Shapes: B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in memory,
G = 4 or 5 gates (W_q Q is the fifth), BM ≥ B rows and BN = 32 columns of a tile, 8 units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton_common import _SLOTS, arrive, grid_barrier, sigmoid, tanh, wait
from riglstm.scan.triton_select import ahead, finish, rows_phase


@triton.jit
def _fragments(V, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr,
               LINES: tl.constexpr, CACHE: tl.constexpr):  # fmt: skip
    """A piece, 32 or at the end 16 numbers, of eight slots of LINES lines, as lanes hold them.

    The dimensions are: 4 lanes of a line, 8 lines, slots, LINES / 8, and what a lane holds. The
    compiler lays threads along the one that is contiguous, the last, and then from the first on.
    """
    E: tl.constexpr = 8 if piece * 32 + 16 < P else 4
    q = tl.arange(0, 4)[:, None, None, None, None]
    n = tl.arange(0, 8)[None, :, None, None, None]
    s = tl.arange(0, _SLOTS)[None, None, :, None, None]
    r = tl.arange(0, LINES // 8)[None, None, None, :, None]
    e = tl.arange(0, E)[None, None, None, None, :]
    # Two sums, and the second of constants: a thread has one address for all that it loads.
    at = V + (n * ROW + s * P + q * E)
    mask = take[:, :, :, :, None] & (piece * 32 + q * E + e < P)
    v = tl.load(at + (r * (8 * ROW) + piece * 32 + e), mask=mask, other=0.0, cache_modifier=CACHE)
    return v.reshape(4, 8, _SLOTS, LINES // 8, E // 4, 2, 2)


@triton.jit
def _rows(V, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr, BM: tl.constexpr):
    """A piece of what BM rows have in eight slots, (8, BM, 16 or 32)."""
    v = _fragments(V, take, ROW, P, piece, BM, ".cg")
    return v.permute(2, 3, 1, 4, 5, 0, 6).reshape(_SLOTS, BM, v.shape[4] * 16)


@triton.jit
def _columns(V, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr, BN: tl.constexpr):
    """The weights of BN columns for it, (8, 16 or 32, BN)."""
    w = _fragments(V, take, ROW, P, piece, BN, "")
    return w.permute(2, 4, 5, 0, 6, 3, 1).reshape(_SLOTS, w.shape[4] * 16, BN)


@triton.jit
def _product(
    acc, V, take, W, real, held, ROW: tl.constexpr, P: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """acc (8, BM, BN) and the product of each slot; the weights are `held`, or loaded from W."""
    PIECES: tl.constexpr = (P + 31) // 32
    rows = (_rows(V, take, ROW, P, 0, BM),)
    columns = held
    if held is None:
        columns = (_columns(W, real, ROW, P, 0, BN),)
    for i in tl.static_range(PIECES):
        # One piece ahead: more would not have room in registers.
        if i + 1 < PIECES:
            rows += (_rows(V, take, ROW, P, i + 1, BM),)
            if held is None:
                columns += (_columns(W, real, ROW, P, i + 1, BN),)
        a, w = rows[i], columns[i]
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _sum_slots(acc, BM: tl.constexpr):
    """acc (8, BM, 32) summed over slots, in a fixed order: four gates (BM, 8)."""
    x = acc.reshape(2, 2, 2, BM, 2, 2, 8).permute(3, 6, 4, 5, 0, 1, 2)
    for _ in tl.static_range(3):
        even, odd = tl.split(x)
        x = even + odd
    f_o, i_g = tl.split(x)
    f, o = tl.split(f_o)
    i, g = tl.split(i_g)
    return f, i, o, g


@triton.jit(do_not_specialize=["B", "t0", "t1"])
def resident_kernel(
    h0, c, X, XH, X_UNIT, W, W_UNIT, BIAS, UPDATE_BIAS, SYMBOLS, TABLE, LIVE, RESET, Y, PROP, ACT,
    WOKE, BITS, GATES, C, A, LIST, COUNT, COUNTER, B, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
    SCALE: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RB: tl.constexpr,
    LINES: tl.constexpr, WIDE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t0 to t1. PHASE is a sum: 1 select, 2 gates, 4 barriers, 8 finish the last step."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    U: tl.constexpr = BN // 4
    UNITS: tl.constexpr = (d + U - 1) // U
    TILES: tl.constexpr = N * (UNITS + (G - 4) * ((d + BN - 1) // BN))
    SOFT: tl.constexpr = G == 5
    D: tl.constexpr = (K + N) * P
    # The first programs select: of the others, each has a tile before one of these has.
    tile = programs - 1 - p
    j, u = tile % N, tile // N
    # Without a tile a program has no rows, slots and units: it loads and stores nothing.
    rows = tl.where(tile < TILES, B, 0)
    slots = tl.where(tile < TILES, N, 0)
    units = tl.where(u < UNITS, d, 0)

    q = tl.arange(0, 4)[:, None, None, None]
    n = tl.arange(0, 8)[None, :, None, None]
    s = tl.arange(0, _SLOTS)[None, None, :, None]
    r = tl.arange(0, BM // 8)[None, None, None, :]
    row = r * 8 + n
    b = tl.arange(0, BM)[:, None]
    unit = u * U + tl.arange(0, U)[None, :]
    there = b < rows
    inside = there & (unit < units)
    if PHASE & 2:
        W += tl.cast(j * (TILES // N) + u, tl.int64) * (BN * D)
        every = q + n + tl.arange(0, BN // 8)[None, None, None, :] >= 0
        for_states = ()
        for piece in tl.static_range((P + 31) // 32):
            for_states += (_columns(W + K * P, every & (s < slots), D, P, piece, BN),)
        at = b * (N * d) + j * d + unit
        c_now = tl.load(c + at, mask=inside, other=0.0)
        bias = BIAS + j * (4 * d) + unit
        known = unit < units
        b_f = tl.load(bias, mask=known, other=0.0)
        b_i = tl.load(bias + d, mask=known, other=0.0)
        b_o = tl.load(bias + 2 * d, mask=known, other=0.0)
        b_g = tl.load(bias + 3 * d, mask=known, other=0.0)
        if X_UNIT is not None:
            size = W_UNIT + (j * (TILES // N) + u) * BN + tl.arange(0, U)[None, :]
            known = tl.arange(0, U)[None, :] < slots * U
            u_f = tl.load(size, mask=known, other=1.0)
            u_i = tl.load(size + U, mask=known, other=1.0)
            u_o = tl.load(size + 2 * U, mask=known, other=1.0)
            u_g = tl.load(size + 3 * U, mask=known, other=1.0)
    target = 0
    for t in tl.range(t0, t1, num_stages=1):
        step = tl.cast(t, tl.int64) * B
        if PHASE & 4:
            ahead(t, t1, p, programs, X, XH, B, N, K, P, K_a, K_x, X_ROW)
        if PHASE & 1:
            rows_phase(
                t, p, programs, h0, None, X, XH, X_UNIT, UPDATE_BIAS, None, LIVE, RESET, Y, PROP,
                ACT, WOKE, BITS, A, LIST, COUNT, B, N, K, d, P, BP, K_a, K_x, K_h, SCALE, X_ROW,
                X_SLOT, SOFT, SAVE, RB, LINES, False,
            )  # fmt: skip
        if PHASE & 4:
            target += programs
            arrive(COUNTER)
        if PHASE & 2:
            use = (row < rows) & (s < K) & (q >= 0)
            acc = tl.zeros((_SLOTS, BM, BN), tl.float32)
            real = every & (s < K) & (s < slots * _SLOTS)
            if X_UNIT is not None:
                x_unit = tl.load(X_UNIT + step + b, mask=there, other=1.0)
            acc = _product(acc, XH + step * D, use, W, real, None, D, P, BM, BN, PRECISION, WIDE)
        if PHASE & 4:
            wait(COUNTER, target)
        if PHASE & 2:
            kind = GATES.dtype.element_ty
            use = (row < rows) & (s >= 0) & (q >= 0)
            at_bits = BITS + step * N + j + (n * N + 0 * (s + q))
            bits = tl.load(at_bits + r * (8 * N), mask=use, other=0)
            # All of a thread's rows in one number, so that it asks for them all before it waits.
            both = ((bits >> s) & 1) | ((bits >> (K - 1 + s)) & 2)
            both = tl.sum(both << (2 * r), 3)[:, :, :, None]
            on = tl.load(BITS + (step + b) * N + j, mask=there, other=0) != 0
            use = inside & on
            if RESET is not None:
                fresh = tl.load(RESET + step + b, mask=there, other=0)
                c_now = tl.where(fresh != 0, 0.0, c_now)
            took = (((both >> (2 * r)) & 1) != 0).permute(2, 3, 1, 0)[:, :, :, None, :, None]
            acc = acc.reshape(_SLOTS, BM // 8, 8, BN // 8, 4, 2)
            acc = tl.where(took, acc, 0.0).reshape(_SLOTS, BM, BN)
            took = ((both >> (2 * r + 1)) & 1) != 0
            acc = _product(
                acc, XH + step * D + K * P, took, W, None, for_states, D, P, BM, BN, PRECISION,
                WIDE,
            )  # fmt: skip
            f, i, o, g = _sum_slots(acc, BM)
            if X_UNIT is not None:
                f, i, o, g = f * x_unit * u_f, i * x_unit * u_i, o * x_unit * u_o, g * x_unit * u_g
            kept = GATES + step * (N * G * d) + b * (N * G * d) + j * (G * d)
            if u < UNITS:
                if SAVE:
                    tl.store(C + step * (N * d) + at, c_now, mask=use)
                f, i, o, g = sigmoid(f + b_f), sigmoid(i + b_i), sigmoid(o + b_o), tanh(g + b_g)
                c_new = f * c_now + i * g
                c_now = tl.where(use, c_new, c_now)
                tl.store(PROP + at, o * tanh(c_new), mask=use)
                if SAVE:
                    tl.store(kept + unit, f.to(kind), mask=use)
                    tl.store(kept + d + unit, i.to(kind), mask=use)
                    tl.store(kept + 2 * d + unit, o.to(kind), mask=use)
                    tl.store(kept + 3 * d + unit, g.to(kind), mask=use)
            elif SOFT:
                four = (f, i, o, g)
                for m in tl.static_range(4):
                    lane = (u - UNITS) * BN + m * U + tl.arange(0, U)[None, :]
                    use = on & (lane < d)
                    out = tl.cast(B, tl.int64) * (N * d) + b * (N * d) + j * d + lane
                    tl.store(PROP + out, four[m], mask=use)
                    if SAVE:
                        tl.store(kept + 4 * d + lane, four[m].to(kind), mask=use)
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
    if PHASE & 2:
        tl.store(c + at, c_now, mask=inside)
    if PHASE & 8:
        for r_b in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
            b_r = r_b * RB + tl.arange(0, RB)
            finish(t1, b_r, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, LINES, SCALE, SOFT, SAVE)
