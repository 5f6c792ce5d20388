"""Kernels of the backward pass: the steps of a piece of the sequence in one launch, and the rest.

`backward_kernel` has two phases a step, each followed by a barrier of the grid. `grads` takes RB
sequences at a time: it adds up the gradient of its state and goes back through Eqs. (21), (18) to
(1), which gives D5, the gradients of the gates' arguments and of W_q Q. `spread` takes a tile: BM
sequences of one cell j and BN of the N·d units, and multiplies D5 of cell j with its weights for
states. What each cell j gives is written apart and added in the order of cells, so runs are
repeatable.

The other kernels give the gradient of views, lay weights out for the backward pass, and make their
gradient from what cells took in. Weights are laid out in lines: a line is what one number of H
gives to all gates of a cell.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, G = 4 or 5 gates, L ≥ G·d
numbers of D5, or of a line, in memory, P ≥ d numbers of a slot, BP = power of two ≥ d or P, BS ≥ S.
BL lines of BG, or BG and BQ, columns are taken at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton.kernels.common import (
    _FRESH,
    dealt,
    fetch,
    grid_barrier,
    lines_of,
    load_four,
    quarter_of,
    quarters,
    store_four,
    tanh,
    unit_of,
)


@triton.jit
def spread(
    t, j, u, place, listed, count, B, first, W, W_UNIT, D5, D_UNIT, PART, BITS,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    COMPACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What cell j's gates ask of BN units of the state; which of them it heard, `grads` minds."""
    b, on = listed, place < count
    unit = u * BN + tl.arange(0, BN)
    # A list is read once more for the rows that a thread writes: of a quarter of the columns, these
    # are four times fewer, and those that it has read already. Units would have to be read for
    # columns in that order, which takes longer.
    QUARTERS: tl.constexpr = COMPACT and D_UNIT is None
    if QUARTERS:
        quarter, lane = quarter_of(tl.arange(0, BN))
        unit = u * BN + quarter * (BN // 4) + lane
    if not COMPACT:
        row = tl.cast(t, tl.int64) * B + b
        on = tl.load(BITS + row * N + j, mask=b < B, other=0) != 0
    start = tl.cast(t - first, tl.int64) * B + b
    if D_UNIT is not None:
        d_unit = tl.load(D_UNIT + start, mask=on, other=0.0)
        w_unit = tl.load(W_UNIT + K * d + unit, mask=unit < N * d, other=0.0)
    within = tl.arange(0, BK)[None, :]
    begun = D5 + ((start * (N * L) + j * L)[:, None] + within)
    # Columns without a unit have the last one's weights, and are not written: a mask would take
    # longer, and without either the last cell's would be read from behind W.
    line = j * (K + N) * d + K * d + tl.minimum(unit, N * d - 1)
    weight = W + (line[:, None] * L + within)
    tl.static_assert(L % BK == 0)
    acc = tl.zeros((BM, BN), tl.float32)
    for m in tl.range(0, L // BK, num_stages=STAGES):
        a = tl.load(begun + m * BK, mask=on[:, None], other=0.0, cache_modifier=".cg")
        w = tl.load(weight + m * BK)
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
    if D_UNIT is not None:
        acc = acc * d_unit[:, None] * w_unit[None, :]
    four = (acc,)
    if QUARTERS:
        four = quarters(acc, BM, BN)
    PART += j * (N * d)
    WIDTH: tl.constexpr = BN // len(four)
    for part in tl.static_range(len(four)):
        to = u * BN + part * WIDTH + tl.arange(0, WIDTH)
        at = (b * (N * N * d))[:, None] + to[None, :]
        asked = four[part].to(PART.dtype.element_ty)
        tl.store(PART + at, asked, mask=on[:, None] & (to < N * d)[None, :])


@triton.jit
def _slots_of(t, b, B, T, BITS, N: tl.constexpr):
    """The bits (RB) of each cell of sequences b in step t; none after the last."""
    row = tl.cast(t, tl.int64) * B + b
    there = (b < B) & (b * 0 + t < T)
    bits = ()
    for j in tl.static_range(N):
        bits += (tl.load(BITS + row * N + j, mask=there, other=0),)
    return bits


@triton.jit
def _part(j, b, B, bits, every, PART, N: tl.constexpr, K: tl.constexpr, d: tl.constexpr,
          BP: tl.constexpr):  # fmt: skip
    """What cell j gave to the gradient (RB, lines, BP) of the states that it heard.

    Of its bits (RB) those of `every` (RB) count, which the load thus waits for.
    """
    n, e = tl.arange(0, lines_of(N))[None, :], tl.arange(0, BP)[None, None, :]
    inside = (b < B)[:, None, None] & (n < N)[:, :, None] & (e < d)
    heard = (((bits & every)[:, None] >> (K + n)) & 1) != 0
    part = PART + ((b * N + j) * (N * d))[:, None, None] + (n * d)[:, :, None] + _in_fours(e)
    use = inside & heard[:, :, None]
    return tl.load(part, mask=use, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _in_fours(e):
    """The same as e, but the compiler sees four in a row.

    Of numbers of two bytes it would take eight at once, in a layout of their own, and go through
    shared memory to that of the others.
    """
    return e // 4 * 4 + e % 4


@triton.jit
def _grads(
    t, b, B, T, first, DY, DH, DC, PART, h0, Y, ACT, BITS, GATES, C, A, D5, D_UNIT, DZ, LIST,
    COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, SCALE: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Back through Eqs. (21), (18) to (1) for sequences b; with D_UNIT, D5 in a row's own unit.

    D5 of a cell that slept is zero.
    """
    n, e = tl.arange(0, lines_of(N))[None, :], tl.arange(0, BP)[None, None, :]
    inside = (b < B)[:, None, None] & (n < N)[:, :, None] & (e < d)
    at = (n * d)[:, :, None] + e
    here = (b * (N * d))[:, None, None] + at
    row = tl.cast(t, tl.int64) * B + b
    now = (row * (N * d))[:, None, None] + at
    bits = _slots_of(t + 1, b, B, T, BITS, N)
    dh = tl.load(DH + here, mask=inside, other=0.0)
    dy = tl.load(DY + now, mask=inside, other=0.0)
    dc = tl.load(DC + here, mask=inside, other=0.0)
    if G == 5:
        there = (b < B)[:, None] & (n < N)
        a = tl.load(A + row[:, None] * N + n, mask=there, other=0.0)
    # No load passes a barrier, and all that follows needs the one behind it: so no load waits for
    # another that it does not need.
    tl.debug_barrier()
    act = tl.load(ACT + row, mask=b < B, other=0)
    use = inside & (((act[:, None] >> n) & 1) != 0)[:, :, None]
    fours = _in_fours(e)
    saved = GATES + (row * (N * G * d))[:, None, None] + (n * (G * d))[:, :, None] + fours
    f, i, o, g = load_four(saved, d, use)
    c_old = tl.load(C + now, mask=use, other=0.0)
    if G == 5:
        q = tl.load(saved + 4 * d, mask=use, other=0.0).to(tl.float32)
        old = tl.where(t == 0, h0, Y + tl.cast(t - 1, tl.int64) * (B * N * d))
        h = tl.load(old + here, mask=use, other=0.0)
    every = tl.where(act < 0, 0, -1)
    # Where there are not the registers for all parts, each is loaded where it is added.
    AHEAD: tl.constexpr = N * b.shape[0] * lines_of(N) * BP <= 1 << 15
    parts = ()
    if AHEAD:
        for j in tl.static_range(N):
            parts += (_part(j, b, B, bits[j], every, PART, N, K, d, BP),)
    woke = ((act[:, None] >> n) & 1) != 0  # (RB, lines)
    if COMPACT:
        free = tl.atomic_add(COUNT + t * N + n + 0 * act[:, None], 1, mask=woke, sem="relaxed")
    tl.debug_barrier()
    act = tl.load(ACT + row, mask=b < B, other=0)
    woke = ((act[:, None] >> n) & 1) != 0
    awake = woke[:, :, None]
    stays = (((act >> _FRESH) & 1) == 0)[:, None, None]
    if COMPACT:
        tl.store(LIST + n * B + free, b[:, None] + 0 * n, mask=woke)
    tanh_c = tanh(tl.where(awake, f * c_old + i * g, 0.0))
    dh = tl.where((act < 0)[:, None, None], 0.0, dh)  # never, but the compiler does not know
    for j in tl.static_range(N):
        dh += parts[j] if AHEAD else _part(j, b, B, bits[j], every, PART, N, K, d, BP)
    dh += dy

    place = tl.cast(t - first, tl.int64) * B + b
    out = D5 + (place * (N * L))[:, None, None] + (n * L)[:, :, None] + fours
    d_new = tl.where(awake, dh, 0.0)
    if G == 5:
        a = tl.where(woke, a, 0.0)
        ahead = o * tanh_c - tl.where(stays, h, 0.0)
        dz = tl.sum(d_new * ahead, 2) * a * (1 - a)
        tl.store(DZ + row[:, None] * N + n, dz, mask=there)
        dz *= SCALE
        d_q = dz[:, :, None] * ahead
        d_new = d_new * a[:, :, None] + dz[:, :, None] * q
    dc_new = tl.where(awake, dc, 0.0) + d_new * o * (1 - tanh_c * tanh_c)
    d_f, d_i = dc_new * c_old * f * (1 - f), dc_new * g * i * (1 - i)
    d_o, d_g = d_new * tanh_c * o * (1 - o), dc_new * i * (1 - g * g)
    if D_UNIT is not None:
        largest = tl.maximum(
            tl.maximum(tl.abs(d_f), tl.abs(d_i)), tl.maximum(tl.abs(d_o), tl.abs(d_g))
        )
        if G == 5:
            largest = tl.maximum(largest, tl.abs(d_q))
        unit = unit_of(tl.max(tl.max(largest, 2), 1))  # (RB)
        tl.store(D_UNIT + place, unit, mask=b < B)
        size = (1.0 / tl.where(unit == 0, 1.0, unit))[:, None, None]
        d_f, d_i, d_o, d_g = d_f * size, d_i * size, d_o * size, d_g * size
        if G == 5:
            d_q *= size
    store_four(out, d, d_f, d_i, d_o, d_g, inside)
    if G == 5:
        tl.store(out + 4 * d, d_q.to(D5.dtype.element_ty), mask=inside)
    d_old = 0.0 * d_new
    if G == 5:
        d_old = dh - d_new
    d_old = tl.where(awake, d_old, dh)
    dc_old = tl.where(awake, dc_new * f, dc)
    tl.store(DH + here, tl.where(stays, d_old, 0.0), mask=inside)
    tl.store(DC + here, tl.where(stays, dc_old, 0.0), mask=inside)


@triton.jit(do_not_specialize=["B", "T", "first", "t0", "t1"])
def backward_kernel(
    DY, DH, DC, PART, h0, Y, ACT, BITS, GATES, C, A, W, W_UNIT, D5, D_UNIT, DZ, LIST, COUNT,
    COUNTER, B, T, first, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, RB: tl.constexpr, STAGES: tl.constexpr,
    COMPACT: tl.constexpr, WIDE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t1 - 1 down to t0. PHASE is a sum: 1 grads, 2 spread, 4 barriers, 8 the start's."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    TILES: tl.constexpr = (N * d + BN - 1) // BN
    target = 0
    for back in tl.range(0, t1 - t0, num_stages=1):
        t = t1 - 1 - back
        if PHASE & 4:
            rows = tl.cast(tl.maximum(t - 1, 0), tl.int64) * B
            before = rows * (N * d)
            fetch(GATES + before * G, B * (N * d) * G, p, programs)
            fetch(C + before, B * (N * d), p, programs)
            fetch(DY + before, B * (N * d), p, programs)
            fetch(ACT + rows, B, p, programs)
            fetch(BITS + rows * N, B * N, p, programs)
            if G == 5:
                older = tl.cast(tl.maximum(t - 2, 0), tl.int64) * B
                fetch(Y + older * (N * d), B * (N * d), p, programs)
        if PHASE & 8:
            for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
                b = r * RB + tl.arange(0, RB)
                n, e = tl.arange(0, lines_of(N))[None, :, None], tl.arange(0, BP)[None, None, :]
                inside = (b < B)[:, None, None] & (n < N) & (e < d)
                at = DH + (b * (N * d))[:, None, None] + n * d + e
                dh = tl.load(at, mask=inside, other=0.0)
                bits = _slots_of(t, b, B, T, BITS, N)
                for j in tl.static_range(N):
                    dh += _part(j, b, B, bits[j], -1, PART, N, K, d, BP)
                tl.store(at, dh, mask=inside)
        if PHASE & 1:
            for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
                b = r * RB + tl.arange(0, RB)
                _grads(
                    t, b, B, T, first, DY, DH, DC, PART, h0, Y, ACT, BITS, GATES, C, A, D5, D_UNIT,
                    DZ, LIST, COUNT, N, K, d, L, BP, G, SCALE, COMPACT,
                )  # fmt: skip
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
        if PHASE & 2:
            for tile in tl.range(p, N * TILES * tl.cdiv(B, BM), programs, num_stages=1):
                j, r_u = tile % N, tile // N
                r, u = r_u // TILES, r_u % TILES
                place = dealt(r, B, BM)
                count, listed = B, place
                if COMPACT:
                    # Beyond the count there is anything in the list: so neither waits.
                    listed = tl.load(LIST + j * B + place, mask=place < B, other=0)
                    count = tl.load(COUNT + t * N + j)
                if r < count:
                    spread(
                        t, j, u, place, listed, count, B, first, W, W_UNIT, D5, D_UNIT, PART, BITS,
                        N, K, d, L, BM, BN, BK, STAGES, PRECISION, COMPACT, WIDE,
                    )  # fmt: skip
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["BITS", "DV", "SUMS"])
def views_kernel(
    D5, D_UNIT, W, W_UNIT, BITS, DV, SUMS, R,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of BP numbers of a view: D5 of all who took it in times their weights for it.

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
    if d > BP:
        unit += tl.program_id(2) * BP
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


_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _clear(start, many):
    """Set `many` numbers to zero, shared among all programs."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    for first in tl.range(p * _AT_ONCE, many, programs * _AT_ONCE, num_stages=1):
        at = first + tl.arange(0, _AT_ONCE)
        tl.store(start + at, 0, mask=at < many)


@triton.jit
def _clear_ends(start, rows, L: tl.constexpr, PAD: tl.constexpr):
    """Set the last PAD of L numbers of each row to zero, likewise."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    for first in tl.range(p * _AT_ONCE, rows * PAD, programs * _AT_ONCE, num_stages=1):
        i = first + tl.arange(0, _AT_ONCE)
        at = (i // PAD).to(tl.int64) * L + (L - PAD) + i % PAD
        tl.store(start + at, 0.0, mask=i < rows * PAD)


@triton.jit(do_not_specialize=["R", "Z"])
def lines_kernel(
    W, W_Q, OUT, W_UNIT, D5, ZERO, R, Z,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, G: tl.constexpr,
    BL: tl.constexpr, BG: tl.constexpr, BQ: tl.constexpr, PER_CELL: tl.constexpr,
):  # fmt: skip
    """What each of BL numbers of H gives to the gates of each cell, to OUT (N, S·d, L).

    W_q is the fifth gate. In the backward pass sums run over gates, and for views over cells, so
    that with W_UNIT (S·d) the lines of all cells have one unit.

    On the way, what the next kernels want to be zero is set to zero: Z numbers from ZERO on, and
    what R rows of D5 are rounded up by.
    """
    S: tl.constexpr = K + N
    _clear(ZERO, Z)
    # Lines are written to their end.
    tl.static_assert(L <= BG if G == 4 else 4 * d <= BG and L - 4 * d <= BQ)
    PAD: tl.constexpr = L - G * d
    if PAD > 0:
        _clear_ends(D5, R, L, PAD)
    line = tl.program_id(0) * BL + tl.arange(0, BL)[:, None]
    there = line < S * d
    s, k = line // d, line % d
    m, q = tl.arange(0, BG)[None, :], tl.arange(0, BQ)[None, :]
    gates, queries = (), ()
    largest = tl.zeros((BL, BG), tl.float32)
    largest_q = tl.zeros((BL, BQ), tl.float32)
    for j in tl.static_range(N):
        at = W + (j * (S * d) + line) * (4 * d) + m
        w = tl.load(at, mask=there & (m < 4 * d), other=0.0)
        gates += (w,)
        largest = tl.maximum(largest, tl.abs(w))
        if G == 5:
            slot = (j * (S - 1) if PER_CELL else 0) + s - tl.where(s > K + j, 1, 0)
            mask = there & (q < d) & (s != K + j)
            w = tl.load(W_Q + (slot * d + k) * d + q, mask=mask, other=0.0)
            queries += (w,)
            largest_q = tl.maximum(largest_q, tl.abs(w))
    unit = tl.full((BL, 1), 1.0, tl.float32)
    if W_UNIT is not None:
        unit = unit_of(tl.maximum(tl.max(largest, 1), tl.max(largest_q, 1)))[:, None]
        unit = tl.where(unit == 0, 1.0, unit)
        tl.store(W_UNIT + line, unit, mask=there)
    kind = OUT.dtype.element_ty
    for j in tl.static_range(N):
        out = OUT + (j * (S * d) + line) * L
        mask = there & (m < (4 * d if G == 5 else L))
        tl.store(out + m, (gates[j] / unit).to(kind), mask=mask)
        if G == 5:
            end = (queries[j] / unit).to(kind)
            tl.store(out + 4 * d + q, end, mask=there & (q < L - 4 * d))


@triton.jit
def split_kernel(
    DW, TOP, OUT, OUT_Q, OUT_B,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, L: tl.constexpr,
    G: tl.constexpr, WIDTH: tl.constexpr, ONE: tl.constexpr, BL: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """The gradients of W, of each cell's W_q, and of biases, from that of lines, (N, WIDTH, L).

    That of biases, if it is asked for, is line ONE. With TOP, all is in units of it.
    """
    S: tl.constexpr = K + N
    j = tl.program_id(1)
    line = tl.program_id(0) * BL + tl.arange(0, BL)[:, None]
    there = line < S * d
    s, k = line // d, line % d
    m = tl.arange(0, BG)[None, :]
    start = DW + j * (WIDTH * L) + m
    w = tl.load(start + (s * P + k) * L, mask=there & (m < G * d), other=0.0)
    top = 1.0
    if TOP is not None:
        top = tl.load(TOP)
    w *= top
    tl.store(OUT + (j * (S * d) + line) * (4 * d) + m, w, mask=there & (m < 4 * d))
    if G == 5:
        slot = j * (S - 1) + s - tl.where(s > K + j, 1, 0)
        use = there & (m >= 4 * d) & (m < 5 * d) & (s != K + j)
        tl.store(OUT_Q + (slot * d + k) * d + m - 4 * d, w, mask=use)
    if OUT_B is not None:
        use = (line == 0) & (m < 4 * d)
        b = tl.load(start + ONE * L + 0 * line, mask=use, other=0.0)
        tl.store(OUT_B + j * (4 * d) + m + 0 * line, b * top, mask=use)


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["BITS", "X_UNIT", "D_UNIT"])
def inputs_kernel(
    XH, X_UNIT, D_UNIT, TOP, BITS, H, R,
    N: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
    WIDTH: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Eq. (17) for one row: what each cell took in, H (N, R, WIDTH), zero where it did not.

    Column ONE, if not negative, holds ones: their product with D5 is the gradient of the biases.

    With D_UNIT, what H is multiplied with are halves in a unit for each row. The sum runs over
    rows, so that unit and the row's own go to H, which is in one unit for all rows: TOP, the
    largest of these products.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    s, e = tl.arange(0, BS)[:, None], tl.arange(0, BP)[None, :]
    inside = (s < S) & (e < P)
    at = s * P + e
    kind = H.dtype.element_ty
    v = tl.load(XH + row * (S * P) + at, mask=inside, other=0.0)
    one = 1.0
    if D_UNIT is not None:
        top = tl.load(TOP)
        one = tl.load(D_UNIT + row) / tl.where(top == 0, 1.0, top)
        v = v.to(tl.float32) * (tl.load(X_UNIT + row) * one)
    elif X_UNIT is not None:
        v = v.to(tl.float32) * tl.load(X_UNIT + row)
    v = v.to(kind)
    IN_PAD: tl.constexpr = (ONE >= 0) & (ONE < P)
    if IN_PAD:
        v = tl.where((s == 0) & (e == ONE), (one + 0.0 * e).to(kind), v)
    for j in tl.static_range(N):
        bits = tl.load(BITS + row * N + j)
        took = ((bits >> s) & 1) != 0
        if IN_PAD:
            took |= (s == 0) & (e == ONE)
        out = H + (j * R + row) * WIDTH
        tl.store(out + at, tl.where(took, v, 0.0), mask=inside)
        if ONE >= P:
            rest = tl.arange(0, 8)
            tl.store(out + S * P + rest, tl.where(rest == 0, one, 0.0).to(kind))
