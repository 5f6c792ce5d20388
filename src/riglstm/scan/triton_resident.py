"""Forward kernel of the `triton` backend for few sequences: weights stay in registers.

As in `triton_forward.py` a step has two phases, `select` and `gates`. Here a program has at most
one tile of `gates`, all sequences by BN columns of one cell, and it keeps that tile for the whole
sequence: its weights and its c never leave the registers.

Each warp owns a slot. The product of a tile is one of eight slots at once, a third dimension of
`tl.dot`, along which the compiler lays the warps. What a warp multiplies is loaded by its own
lanes, 16 bytes each, to the very registers that the tensor core reads: no shared memory, and no
waiting for another warp. For that, the numbers of a slot are multiplied in another order than they
lie in memory, the same for both factors (`_rows`, `_columns`). Only the sum over slots goes through
shared memory.

What a cell takes in is known after `select`; the views themselves are known before. So a program
that has selected says so, multiplies all views while others still select, and only then waits: what
was not taken in is put to zero in the product, as a warp has a slot and a lane its rows.

Shapes: B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in memory,
G = 4 or 5 gates (W_q Q is the fifth), BM ≥ B rows and BN = 32 columns of a tile, 8 units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton_common import _SLOTS, arrive, sigmoid, tanh, wait
from riglstm.scan.triton_select import ahead, finish, rows_phase


@triton.jit
def _line():
    """The slot and the line of eight that are a lane's: tensors of the 64 pairs, slots slowest."""
    pair = tl.arange(0, 8 * _SLOTS)
    return pair // 8, pair % 8


@triton.jit
def _opaque(x):
    """x itself; the compiler may not take apart what it was put together from."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)


@triton.jit
def _piece(V, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr,
           BLOCKS: tl.constexpr, CACHE: tl.constexpr):  # fmt: skip
    """32 numbers, or 16 at the end, of BLOCKS times eight lines of eight slots, as lanes hold them.

    Bit r of `take` says whether a lane's line of block r is wanted.

    Threads lie along what is contiguous first, and then along x: four lanes have a line, a warp has
    eight lines of a slot, all warps all slots, and blocks are left for the registers.
    """
    BK: tl.constexpr = 32 if piece * 32 + 16 < P else 16
    x = tl.arange(0, BLOCKS * 8 * _SLOTS)[:, None]
    e = tl.max_contiguous(tl.arange(0, BK), BK // 4)[None, :]
    block = tl.arange(0, BLOCKS)[:, None]
    wanted = (((take[None, :] >> block) & 1) != 0).reshape(BLOCKS * 8 * _SLOTS)
    mask = wanted[:, None] & (piece * 32 + e < P)
    # Two sums, and the second of constants: a lane has one address for all that it loads.
    at = V + (x % 8 * ROW + x // 8 % _SLOTS * P + e)
    at += x // (8 * _SLOTS) * (8 * ROW) + piece * 32
    v = tl.load(at, mask=mask, other=0.0, cache_modifier=CACHE)
    return v.reshape(BLOCKS, _SLOTS, 8, 4, BK // 16, 2, 2)


@triton.jit
def _rows(V, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr, BM: tl.constexpr):
    """A piece of what BM rows have in eight slots, (8, BM, 32 or 16)."""
    v = _piece(V, take, ROW, P, piece, BM // 8, ".cg")
    return v.permute(1, 0, 2, 4, 5, 3, 6).reshape(_SLOTS, BM, v.shape[4] * 16)


@triton.jit
def _columns(W, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr, BN: tl.constexpr):
    """The weights of BN columns for it, (8, 32 or 16, BN)."""
    w = _piece(W, take, ROW, P, piece, BN // 8, "")
    return w.permute(1, 4, 5, 3, 6, 0, 2).reshape(_SLOTS, w.shape[4] * 16, BN)


@triton.jit
def _weights(W, take, ROW: tl.constexpr, P: tl.constexpr, BN: tl.constexpr):
    """All pieces of the weights for eight slots."""
    out = ()
    for piece in tl.static_range((P + 31) // 32):
        out += (_columns(W, take, ROW, P, piece, BN),)
    return out


@triton.jit
def _product(
    acc, V, take, weights, W, W_take,
    ROW: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """acc (8, BM, BN) and the product of each slot; without `weights`, they are loaded from W."""
    PIECES: tl.constexpr = (P + 31) // 32
    rows = (_rows(V, take, ROW, P, 0, BM),)
    columns = weights
    if weights is None:
        columns = (_columns(W, W_take, ROW, P, 0, BN),)
    for i in tl.static_range(PIECES):
        # One piece ahead: for more there is no room in registers.
        if i + 1 < PIECES:
            rows += (_rows(V, take, ROW, P, i + 1, BM),)
            if weights is None:
                columns += (_columns(W, W_take, ROW, P, i + 1, BN),)
        a, w = rows[i], columns[i]
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _taken(BITS, rows, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr):
    """Whether a lane's slot is taken in: bit r for the view of its row of block r, 8 + r the state.

    All in one number, so that all of them are asked for before the first is waited for.
    """
    slot, line = _line()
    both = tl.zeros_like(line)
    for r in tl.static_range(BM // 8):
        bits = tl.load(BITS + line * N + r * (8 * N), mask=line + r * 8 < rows, other=0)
        both |= (((bits >> slot) & 1) | (((bits >> (K + slot)) & 1) << 8)) << r
    if WIDE:
        return both
    return _opaque(both)


@triton.jit
def _masked(acc, take, BM: tl.constexpr, BN: tl.constexpr):
    """acc (8, BM, BN), and zero in rows whose bit in `take` (64,) is not set."""
    block = tl.arange(0, BM // 8)[None, :, None, None, None, None]
    bit = (take.reshape(_SLOTS, 1, 8, 1, 1, 1) >> block) & 1
    lanes = acc.reshape(_SLOTS, BM // 8, 8, BN // 8, 4, 2)
    return tl.where(bit != 0, lanes, 0.0).reshape(_SLOTS, BM, BN)


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


@triton.jit
def _four(V, step: tl.constexpr, known):
    """What the four gates of a tile's units have each, (1, 8)."""
    f = tl.load(V, mask=known, other=0.0)
    i = tl.load(V + step, mask=known, other=0.0)
    o = tl.load(V + 2 * step, mask=known, other=0.0)
    g = tl.load(V + 3 * step, mask=known, other=0.0)
    return f, i, o, g


@triton.jit(do_not_specialize=["B", "t0", "t1"])
def resident_kernel(
    h0, c, X, XH, X_UNIT, W, W_UNIT, BIAS, UPDATE_BIAS, SYMBOLS, TABLE, LIVE, RESET, Y, PROP, ACT,
    WOKE, BITS, GATES, C, A, LIST, COUNT, COUNTER, B, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
    SCALE: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RB: tl.constexpr,
    LINES: tl.constexpr, HELD: tl.constexpr, WIDE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t0 to t1. PHASE is a sum: 1 select, 2 gates, 4 barriers, 8 finish the last step.

    HELD: the weights for views stay in registers, too, and are not loaded at every step.
    """
    p, programs = tl.program_id(0), tl.num_programs(0)
    U: tl.constexpr = BN // 4
    UNITS: tl.constexpr = (d + U - 1) // U
    TILES: tl.constexpr = UNITS + (G - 4) * ((d + BN - 1) // BN)
    SOFT: tl.constexpr = G == 5
    D: tl.constexpr = (K + N) * P
    # The first programs select; tiles are for the last, so that as few as can be do both.
    tile = programs - 1 - p
    j, u = tile % N, tile // N
    # Without a tile a program has no rows, columns and units: it loads and stores nothing.
    rows = tl.where(u < TILES, B, 0)
    columns = tl.where(u < TILES, (1 << (BN // 8)) - 1, 0)
    units = tl.where(u < UNITS, d, 0)

    b = tl.arange(0, BM)[:, None]
    lane = tl.arange(0, U)[None, :]
    unit = u * U + lane
    there = b < rows
    inside = there & (unit < units)
    at = b * (N * d) + j * d + unit
    if PHASE & 2:
        slot, line = _line()
        has_view = tl.where(slot < K, 255, 0)
        rows_there = tl.zeros_like(line)
        for r in tl.static_range(BM // 8):
            rows_there |= tl.where(line + r * 8 < rows, 1 << r, 0)
        W += tl.cast(j * TILES + u, tl.int64) * (BN * D)
        for_states = _weights(W + K * P, tl.where(slot < N, columns, 0), D, P, BN)
        for_views = None
        if HELD:
            for_views = _weights(W, has_view & columns, D, P, BN)
        c_now = tl.load(c + at, mask=inside, other=0.0)
    if PHASE & 4:
        ahead(t0, t1, p, programs, X, XH, B, N, K, P, K_a, K_x, X_ROW)
    target = 0
    for t in tl.range(t0, t1, num_stages=1):
        step = tl.cast(t, tl.int64) * B
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
            acc = tl.zeros((_SLOTS, BM, BN), tl.float32)
            acc = _product(
                acc, XH + step * D, has_view & rows_there, for_views, W, has_view & columns, D, P,
                BM, BN, PRECISION, WIDE,
            )  # fmt: skip
            if X_UNIT is not None:
                x_unit = tl.load(X_UNIT + step + b, mask=there, other=1.0)
        if PHASE & 4:
            wait(COUNTER, target)
        if PHASE & 2:
            take = _taken(BITS + step * N + j, rows, N, K, BM, WIDE)
            on = tl.load(BITS + (step + b) * N + j, mask=there, other=0) != 0
            if RESET is not None:
                fresh = tl.load(RESET + step + b, mask=there, other=0)
                c_now = tl.where(fresh != 0, 0.0, c_now)
            acc = _product(
                _masked(acc, take, BM, BN), XH + step * D + K * P, take >> 8, for_states, None,
                None, D, P, BM, BN, PRECISION, WIDE,
            )  # fmt: skip
            b_f, b_i, b_o, b_g = _four(BIAS + j * (4 * d) + unit, d, unit < units)
            if X_UNIT is not None:
                w_unit = W_UNIT + (j * TILES + u) * BN + lane
                u_f, u_i, u_o, u_g = _four(w_unit, U, lane < columns)
            f, i, o, g = _sum_slots(acc, BM)
            if X_UNIT is not None:
                f, i, o, g = f * x_unit * u_f, i * x_unit * u_i, o * x_unit * u_o, g * x_unit * u_g
            kind = GATES.dtype.element_ty
            kept = GATES + (step * N + b * N + j) * (G * d)
            if u < UNITS:
                use = inside & on
                f, i, o, g = sigmoid(f + b_f), sigmoid(i + b_i), sigmoid(o + b_o), tanh(g + b_g)
                c_new = f * c_now + i * g
                tl.store(PROP + at, o * tanh(c_new), mask=use)
                if SAVE:
                    tl.store(C + step * (N * d) + at, c_now, mask=use)
                    tl.store(kept + unit, f.to(kind), mask=use)
                    tl.store(kept + d + unit, i.to(kind), mask=use)
                    tl.store(kept + 2 * d + unit, o.to(kind), mask=use)
                    tl.store(kept + 3 * d + unit, g.to(kind), mask=use)
                c_now = tl.where(use, c_new, c_now)
            elif SOFT:
                four = (f, i, o, g)
                for m in tl.static_range(4):
                    at_q = (u - UNITS) * BN + m * U + lane
                    use = on & (at_q < d)
                    out = tl.cast(B, tl.int64) * (N * d) + (b * (N * d) + j * d + at_q)
                    tl.store(PROP + out, four[m], mask=use)
                    if SAVE:
                        tl.store(kept + 4 * d + at_q, four[m].to(kind), mask=use)
        if PHASE & 4:
            target += programs
            arrive(COUNTER)
            ahead(t + 1, t1, p, programs, X, XH, B, N, K, P, K_a, K_x, X_ROW)
            wait(COUNTER, target)
    if PHASE & 2:
        tl.store(c + at, c_now, mask=inside)
    if PHASE & 8:
        for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
            b_r = r * RB + tl.arange(0, RB)
            finish(t1, b_r, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, LINES, SCALE, SOFT, SAVE)
