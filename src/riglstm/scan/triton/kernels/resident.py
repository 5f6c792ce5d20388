"""Resident forward kernel, for few sequences: weights stay in registers.

As in `tiled.py` a step has two phases, `select` and `gates`. Here a program has at most
one tile of `gates`, all sequences by BN columns of one cell, and it keeps that tile for the whole
sequence: its weights for states and its c never leave the registers.

Each warp multiplies a slot of its own: the product of a tile is one of eight slots at once, a third
dimension of `tl.dot`, along which the compiler lays the warps. What a warp multiplies is loaded by
its own lanes, 16 bytes each, to the very registers that the tensor core reads, without shared
memory. For that, the numbers of a slot are multiplied in another order than they lie in memory, the
same for both factors (`_rows`, `_columns`). The sum over slots goes through shared memory.

What a cell takes in is known after `select`; the views themselves are known before. So all views
are multiplied while others still select: what was not taken in is put to zero in the product, as a
warp has a slot and a lane its rows.

Where there are multiprocessors enough (APART), a program selects or it multiplies. Those that
multiply never wait for each other: they go on to the views of the next step. So all that a step
takes is the way there and back, `select`, and the states' part of `gates`. Else those that select
multiply, too, one after the other, and weights for views are kept as well.

Shapes: B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in memory,
G = 4 or 5 gates (W_q Q is the fifth), BM ≥ B rows and BN = 32 columns of a tile, 8 units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton.kernels.common import (
    _INTERPRETED,
    _LINE,
    _SLOTS,
    Memory,
    Sizes,
    arrive,
    awake_before,
    cell,
    load_four,
    store_four,
    wait,
    wait_each,
)
from riglstm.scan.triton.kernels.select import finish, prefetch_views, rows_phase, rows_step


@triton.jit
def slot_and_line():
    """The slot and the line of eight that are a lane's, of all 256 lanes (8 warps): four are alike.

    A tensor of the 64 pairs alone has fewer numbers than there are threads. The compiler takes it
    that loading such is cheap, and repeats it for each layout of a product.
    """
    lane = tl.arange(0, 32 * _SLOTS)
    return lane // 32, lane // 4 % 8


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
    block = tl.arange(0, BLOCKS)[:, None, None, None]
    wanted = ((take.reshape(1, 8 * _SLOTS, 4, 1) >> block) & 1) != 0
    wanted = tl.broadcast_to(wanted, (BLOCKS, 8 * _SLOTS, 4, BK // 4)).reshape(x.shape[0], BK)
    # Else it is taken to differ from number to number, and each is loaded by itself.
    tl.static_assert(P % 8 == 0)
    mask = tl.max_constancy(wanted & (piece * 32 + e < P), [1, BK // 4])
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
def weights_of(W, take, ROW: tl.constexpr, P: tl.constexpr, BN: tl.constexpr):
    """All pieces of the weights for eight slots."""
    out = ()
    for piece in tl.static_range((P + 31) // 32):
        out += (_columns(W, take, ROW, P, piece, BN),)
    return out


@triton.jit
def product(
    acc, V, take, weights,
    ROW: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """acc (8, BM, BN) and the product of each slot of V with its weights.

    PREFETCH pieces are loaded before the one that is multiplied.
    """
    PIECES: tl.constexpr = (P + 31) // 32
    rows = (_rows(V, take, ROW, P, 0, BM),)
    for i in tl.static_range(1, PREFETCH):
        if i < PIECES:
            rows += (_rows(V, take, ROW, P, i, BM),)
    for i in tl.static_range(PIECES):
        if i + PREFETCH < PIECES:
            rows += (_rows(V, take, ROW, P, i + PREFETCH, BM),)
        a, w = rows[i], weights[i]
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def taken(BITS, rows, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr):
    """Whether a lane's slot is taken in: bit r for the view of its row of block r, 8 + r the state.

    All in one number, so that all of them are asked for before the first is waited for.
    """
    slot, line = slot_and_line()
    both = tl.zeros_like(line)
    for r in tl.static_range(BM // 8):
        bits = tl.load(BITS + line * N + r * (8 * N), mask=line + r * 8 < rows, other=0)
        both |= (((bits >> slot) & 1) | (((bits >> (K + slot)) & 1) << 8)) << r
    if WIDE:
        return both
    return _opaque(both)


@triton.jit
def masked(acc, take, BM: tl.constexpr, BN: tl.constexpr):
    """acc (8, BM, BN), and zero in rows whose bit in `take` (256,) is not set."""
    block = tl.arange(0, BM // 8)[None, :, None, None, None, None]
    bit = (take.reshape(_SLOTS, 1, 8, 1, 4, 1) >> block) & 1
    lanes = acc.reshape(_SLOTS, BM // 8, 8, BN // 8, 4, 2)
    return tl.where(bit != 0, lanes, 0.0).reshape(_SLOTS, BM, BN)


@triton.jit
def sum_slots(acc, BM: tl.constexpr):
    """acc (8, BM, 32) summed over slots, in a fixed order: four gates (BM, 8)."""
    x = acc.reshape(2, 2, 2, BM, 2, 2, 8).permute(3, 6, 4, 5, 0, 1, 2)
    for _ in tl.static_range(3):
        even, odd = tl.split(x)
        x = even + odd
    f_o, i_g = tl.split(x)
    f, o = tl.split(f_o)
    i, g = tl.split(i_g)
    return f, i, o, g


_ALL = tl.constexpr(4)
"""Pieces of 32 numbers that d up to 128 has."""


@triton.jit
def _anew(V):
    """A buffer of ours; the compiler learns only at each step where it begins.

    Else it would work out addresses before the first step, or load weights for views then, and
    spill what it keeps. What the caller gives may begin anywhere, and ours at a multiple of 16.
    """
    if _INTERPRETED:
        return V
    at = V.to(tl.int64, bitcast=True)
    at = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [at], tl.int64, False, 1)
    return tl.multiple_of(at.to(V.dtype, bitcast=True), 16)


@triton.jit
def _views(
    step, rows, weights, XH, z,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What all views bring to a tile."""
    slot, line = slot_and_line()
    here = tl.zeros_like(line)
    for r in tl.static_range(BM // 8):
        here |= tl.where((slot < z.K) & (line + r * 8 < rows), 1 << r, 0)
    D: tl.constexpr = (z.K + z.N) * z.P
    acc = tl.zeros((_SLOTS, BM, BN), tl.float32)
    return product(acc, XH + step * D, here, weights, D, z.P, BM, PRECISION, WIDE, 1)


@triton.jit
def _gates(
    acc, c_now, x_unit, step, B, j, u, weights, PROP, ENDS, m, z,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """The rest of a tile's step, when it is known what cells take in: c. ENDS as in `gates`."""
    U: tl.constexpr = BN // 4
    UNITS: tl.constexpr = (z.d + U - 1) // U
    FOLDED: tl.constexpr = z.G == 5 and z.d > (TILES - UNITS) * BN
    D: tl.constexpr = (z.K + z.N) * z.P
    rows, units = tl.where(u < TILES, B, 0), tl.where(u < UNITS, z.d, 0)
    b, lane = tl.arange(0, BM)[:, None], tl.arange(0, U)[None, :]
    unit, there = u * U + lane, b < rows
    take = taken(m.BITS + step * z.N + j, rows, z.N, z.K, BM, WIDE)
    on = tl.load(m.BITS + (step + b) * z.N + j, mask=there, other=0) != 0
    if m.RESET is not None:
        fresh = tl.load(m.RESET + step + b, mask=there, other=0)
        c_now = tl.where(fresh != 0, 0.0, c_now)
    acc = masked(acc, take, BM, BN)
    states = m.XH + step * D + z.K * z.P
    acc = product(acc, states, take >> 8, weights, D, z.P, BM, PRECISION, WIDE, PREFETCH)
    if ENDS is not None:
        tl.atomic_add(ENDS, 1, sem="relaxed")
    b_f, b_i, b_o, b_g = load_four(m.BIAS + j * (4 * z.d) + unit, z.d, unit < units)
    if x_unit is not None:
        w_unit = m.W_UNIT + (j * TILES + u) * BN + lane
        u_f, u_i, u_o, u_g = load_four(w_unit, U, lane < tl.where(u < TILES, U, 0))
    f, i, o, g = sum_slots(acc, BM)
    if x_unit is not None:
        f, i, o, g = f * x_unit * u_f, i * x_unit * u_i, o * x_unit * u_o, g * x_unit * u_g
    kind = m.GATES.dtype.element_ty
    kept = m.GATES + (step * z.N + b * z.N + j) * (z.G * z.d)
    at = b * (z.N * z.d) + j * z.d
    queries = PROP + tl.cast(B, tl.int64) * (z.N * z.d)
    if u < UNITS:
        if FOLDED:
            # The last of W_q Q, beside the last units.
            at_q = (TILES - UNITS) * BN + lane - z.d % U
            use = on & (unit >= z.d) & (at_q < z.d)
            tl.store(queries + (at + at_q), f, mask=use)
            if z.SAVE:
                tl.store(kept + 4 * z.d + at_q, f.to(kind), mask=use)
        use = on & (unit < units)
        COARSE: tl.constexpr = weights[0].dtype == tl.bfloat16
        f, i, o, g, c_new, h_new = cell(f + b_f, i + b_i, o + b_o, g + b_g, c_now, COARSE, False)
        tl.store(PROP + (at + unit), h_new, mask=use)
        if z.SAVE:
            tl.store(m.C + step * (z.N * z.d) + (at + unit), c_now, mask=use)
            store_four(kept + unit, z.d, f, i, o, g, use)
        c_now = tl.where(use, c_new, c_now)
    elif z.G == 5:
        four = (f, i, o, g)
        for part in tl.static_range(4):
            at_q = (u - UNITS) * BN + part * U + lane
            use = on & (at_q < z.d)
            tl.store(queries + (at + at_q), four[part], mask=use)
            if z.SAVE:
                tl.store(kept + 4 * z.d + at_q, four[part].to(kind), mask=use)
    return c_now


@triton.jit(do_not_specialize=["B", "t0", "t1"])
def resident_kernel(
    h0, c, X, XH, X_UNIT, W, W_UNIT, BIAS, UPDATE_BIAS, MAY_WAKE, MAY_TAKE, RESET, Y, PROP, ACT,
    WOKE, BITS, GATES, C, A, LIST, COUNT, COUNTER, B, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
    SCALE: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RB: tl.constexpr,
    TILES: tl.constexpr, APART: tl.constexpr, POLLING: tl.constexpr, WIDE: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t0 to t1. PHASE is a sum: 1 select, 2 gates, 4 barriers, 8 finish the last step.

    The arguments are those of `tiled_kernel`; of lists it makes no use. APART is of
    all phases together, and has a second counter a line of memory behind COUNTER, zero as well:
    of tiles that are done or, if POLLING, about to be.
    """
    # `taken` has a byte for the rows of a line, and `sum_slots` four gates of eight units.
    tl.static_assert(BM <= 64)
    tl.static_assert(BN == 32)
    p, programs = tl.program_id(0), tl.num_programs(0)
    U: tl.constexpr = BN // 4
    D: tl.constexpr = (K + N) * P
    # No c: `_gates` has it in registers, and resets it.
    m = Memory(
        h0, None, X, XH, X_UNIT, W, W_UNIT, BIAS, UPDATE_BIAS, MAY_WAKE, MAY_TAKE, RESET, Y, PROP,
        ACT, WOKE, BITS, GATES, C, A, LIST, COUNT, COUNTER,
    )  # fmt: skip
    z: tl.constexpr = Sizes(
        N, K, d, P, G, BP, K_a, K_x, K_h, SCALE, X_ROW, X_SLOT, G == 5, SAVE, RB, None, POLLING
    )
    # All at once; in the interpreter a step at a time, and then what is left.
    tl.static_assert(not APART or PHASE == 15 or PHASE == 7 or PHASE == 8)
    # The first programs select; tiles are for the last: apart none does both, else few.
    selecting = programs - N * TILES if APART else programs
    tile = programs - 1 - p
    j, u = tile % N, tile // N
    # Without a tile a program has no rows and no blocks of columns: it loads and stores nothing.
    rows = tl.where(u < TILES, B, 0)
    blocks = tl.where(u < TILES, (1 << (BN // 8)) - 1, 0)
    b, unit = tl.arange(0, BM)[:, None], u * U + tl.arange(0, U)[None, :]
    inside = (b < rows) & (unit < d)
    at = b * (N * d) + j * d + unit
    slot, _ = slot_and_line()
    for_views = tl.where(slot < K, blocks, 0)
    W += tl.cast(j * TILES + u, tl.int64) * (BN * D)
    # Apart, those that select are waited for by one counter, and those that multiply by another.
    SELECTED, MULTIPLIED = COUNTER, COUNTER + _LINE
    if APART and p < selecting:
        prefetch_views(t0, t1, p, selecting, B, m, z)
        for t in tl.range(t0, t1, num_stages=1):
            first = p * RB + tl.arange(0, RB)
            rows_step(t, first, B, m, z, MULTIPLIED, (t - t0) * (N * TILES))
            arrive(SELECTED)
            prefetch_views(t + 1, t1, p, selecting, B, m, z)
        wait(MULTIPLIED, (t1 - t0) * (N * TILES))
    elif APART:
        weights = weights_of(W + K * P, tl.where(slot < N, blocks, 0), D, P, BN)
        c_now = tl.load(c + at, mask=inside, other=0.0)
        ends = MULTIPLIED if POLLING and not _INTERPRETED else None
        for t in tl.range(t0, t1, num_stages=1):
            step = tl.cast(t, tl.int64) * B
            # There is time for these, and then registers for all states at once.
            of_views = weights_of(_anew(W), for_views, D, P, BN)
            acc = _views(step, rows, of_views, XH, z, BM, BN, PRECISION, WIDE)
            x_unit = None
            if X_UNIT is not None:
                x_unit = tl.load(X_UNIT + step + b, mask=b < rows, other=1.0)
            wait(SELECTED, (t - t0 + 1) * selecting)
            c_now = _gates(
                acc, c_now, x_unit, step, B, j, u, weights, _anew(PROP), ends, m, z, PRECISION, BM,
                BN, TILES, WIDE, _ALL,
            )  # fmt: skip
            if not POLLING:
                arrive(MULTIPLIED)
        tl.store(c + at, c_now, mask=inside)
    else:
        if PHASE & 2:
            weights = weights_of(W + K * P, tl.where(slot < N, blocks, 0), D, P, BN)
            of_views = weights_of(W, for_views, D, P, BN)
            c_now = tl.load(c + at, mask=inside, other=0.0)
        if PHASE & 4:
            prefetch_views(t0, t1, p, programs, B, m, z)
        target = 0
        for t in tl.range(t0, t1, num_stages=1):
            step = tl.cast(t, tl.int64) * B
            if PHASE & 1:
                now = Memory(
                    h0, None, X, _anew(XH), X_UNIT, W, W_UNIT, BIAS, UPDATE_BIAS, MAY_WAKE,
                    MAY_TAKE, RESET, _anew(Y), _anew(PROP), _anew(ACT), _anew(WOKE), _anew(BITS),
                    GATES, C, _anew(A), LIST, COUNT, COUNTER,
                )  # fmt: skip
                rows_phase(t, p, programs, B, now, z)
            if PHASE & 4:
                target += programs
                arrive(COUNTER)
            if PHASE & 2:
                acc = _views(step, rows, of_views, XH, z, BM, BN, PRECISION, WIDE)
                x_unit = None
                if X_UNIT is not None:
                    x_unit = tl.load(X_UNIT + step + b, mask=b < rows, other=1.0)
            if PHASE & 4:
                wait_each(COUNTER, target)
            if PHASE & 2:
                # One piece ahead: for more there is no room in registers.
                c_now = _gates(
                    acc, c_now, x_unit, step, B, j, u, weights, PROP, None, m, z, PRECISION, BM, BN,
                    TILES, WIDE, 1,
                )  # fmt: skip
            if PHASE & 4:
                target += programs
                arrive(COUNTER)
                prefetch_views(t + 1, t1, p, programs, B, m, z)
                wait_each(COUNTER, target)
        if PHASE & 2:
            tl.store(c + at, c_now, mask=inside)
    if PHASE & 8:
        # Apart, there is one that selects for each RB sequences: here the others find none.
        for r in tl.range(p, tl.cdiv(B, RB), selecting, num_stages=1):
            b_r = r * RB + tl.arange(0, RB)
            finish(t1, b_r, B, m, z, awake_before(t1, b_r, B, ACT) if POLLING else None)
