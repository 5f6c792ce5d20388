"""Forward kernel of the `triton` backend: all steps of a sequence in one launch.

Each step has two phases, with a barrier of the whole grid after each. `select` takes one sequence
at a time: it finishes the state of the step before, Eqs. (20)-(21), scores and ranks, Eqs.
(13)-(16). `gates` takes a tile: BM sequences, and U units of one cell with all their gates,
Eqs. (1)-(6), (18), (19). What a cell does not take in is not even loaded.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, G = 4 or 5 gates (W_q Q is the fifth), BP = power of two ≥ P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton_common import (
    _FRESH,
    _SLOTS,
    grid_barrier,
    order,
    sigmoid,
    tanh,
    top,
)


@triton.jit
def _finish(
    t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A,
    N: tl.constexpr, d: tl.constexpr, BP: tl.constexpr,
    SCALE: tl.constexpr, SOFT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Eqs. (20)-(21): the state (RB, 8, BP) of sequences b before step t, also written to y."""
    n, e = tl.arange(0, _SLOTS)[None, :], tl.arange(0, BP)[None, None, :]
    inside = (b < B)[:, None, None] & (n < N)[:, :, None] & (e < d)
    at = (b * (N * d))[:, None, None] + (n * d)[:, :, None] + e
    size = tl.cast(B * N * d, tl.int64)
    old = tl.where(t < 2, h0, Y + (t - 2) * size)
    h = tl.load(old + at, mask=inside, other=0.0, cache_modifier=".cg")
    new = tl.load(PROP + at, mask=inside, other=0.0, cache_modifier=".cg")
    row = tl.cast(t - 1, tl.int64) * B + b
    began = b * 0 + t > 0
    act = tl.load(ACT + row, mask=(b < B) & began, other=0, cache_modifier=".cg")
    woke = ((act[:, None] >> n) & 1) != 0  # (RB, 8)
    h = tl.where((((act >> _FRESH) & 1) != 0)[:, None, None], 0.0, h)
    if SOFT:
        q = tl.load(PROP + size + at, mask=inside, other=0.0, cache_modifier=".cg")
        ahead = new - h
        bias = tl.load(UPDATE_BIAS + n, mask=n < N, other=0.0)
        a = sigmoid(SCALE * tl.sum(ahead * q, 2) + bias)
        if SAVE:
            tl.store(A + row[:, None] * N + n, a, mask=woke)
        new = h + a[:, :, None] * ahead
    h = tl.where(woke[:, :, None], new, h)
    tl.store(Y + (t - 1) * size + at, h, mask=inside & began[:, None, None])
    return h


@triton.jit
def _vectors(V, n_slots: tl.constexpr, b, B, ROW: tl.constexpr, SLOT: tl.constexpr,
             N: tl.constexpr, d: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """A tuple of n_slots vectors of each sequence, each once for every cell: (RB, 8, BP)."""
    n, e = tl.arange(0, _SLOTS)[None, :, None], tl.arange(0, BP)[None, None, :]
    at = tl.cast(b, tl.int64)[:, None, None] * ROW + n * 0 + e
    mask = (b < B)[:, None, None] & (n < N) & (e < d)
    vectors = ()
    for k in tl.static_range(n_slots):
        v = tl.load(V + at + k * SLOT, mask=mask, other=0.0)
        vectors = vectors + (v,)
    return vectors


@triton.jit
def _scores(h, vectors, stays, n_slots: tl.constexpr):
    """Eq. (13): h (RB, 8, BP) times each vector, as a tuple of (RB, 8)."""
    scores = ()
    for k in tl.static_range(n_slots):
        v = tl.where(stays[:, None, None], vectors[k].to(tl.float32), 0.0)
        scores = scores + (tl.sum(h * v, 2),)
    return scores


@triton.jit
def _select(
    t, b, B, h, x, h0, c, XH, Y, LIVE, RESET, ACT, BITS, LIST, COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Eqs. (13)-(16) for sequences b: who wakes, and a bit for every slot that a cell takes in."""
    n, e = tl.arange(0, _SLOTS)[None, :], tl.arange(0, BP)[None, None, :]
    there = b < B
    row = tl.cast(t, tl.int64) * B + b
    slot = (row * ((K + N) * P))[:, None, None] + ((K + n) * P)[:, :, None] + e
    mask = there[:, None, None] & (n < N)[:, :, None] & (e < P)
    tl.store(XH + slot, h.to(XH.dtype.element_ty), mask=mask)
    fresh = b * 0
    if RESET is not None:
        fresh = tl.load(RESET + row, mask=there, other=0).to(tl.int32)
        h = tl.where((fresh != 0)[:, None, None], 0.0, h)
        at = (b * (N * d))[:, None, None] + (n * d)[:, :, None] + e
        wiped = there[:, None, None] & (n < N)[:, :, None] & (e < d) & (fresh != 0)[:, None, None]
        tl.store(c + at, 0.0 * h, mask=wiped)
    stays = fresh == 0

    wide = tl.zeros_like(fresh)[:, None] + n * 0  # (RB, 8)
    act = wide + 1
    bits = wide + ((1 << K) - 1)
    peers = wide + ((1 << N) - 1)
    if (K_a < N) or (K_x < K):
        s = _scores(h, x, stays, K)
    if K_h < N - 1:
        # The states of all cells, which this program has just written, for every cell.
        tl.debug_barrier()
        now = tl.where(t < 1, h0, Y + tl.cast(t - 1, tl.int64) * (B * N * d))
        v = _vectors(now, N, b, B, N * d, d, N, d, BP)
    if K_a < N:
        total = s[0]
        for k in tl.static_range(1, K):
            total += s[k]
        key = tl.where(n < N, order(total), -0x80000000)
        one, other = key[:, :, None], key[:, None, :]
        i = tl.arange(0, _SLOTS)
        first = (i[:, None] > i[None, :])[None, :, :]
        ahead = (other > one) | ((other == one) & first)  # (RB, 8, 8): [.., i, j], j is ahead
        act = (tl.sum(ahead.to(tl.int32), 2) < K_a).to(tl.int32)
    if K_x < K:
        keys = (order(s[0]),)
        for k in tl.static_range(1, K):
            keys = keys + (order(s[k]),)
        bits = top(keys, K_x, K)
    if K_h < N - 1:
        r = _scores(h, v, stays, N)
        keys = (tl.where(n == 0, -0x80000000, order(r[0])),)
        for k in tl.static_range(1, N):
            keys = keys + (tl.where(n == k, -0x80000000, order(r[k])),)
        peers = top(keys, K_h, N) | (1 << n)
    peers = tl.where((fresh != 0)[:, None], 0, peers)

    if LIVE is not None:
        act = act * tl.load(LIVE + row, mask=there, other=0).to(tl.int32)[:, None]
    act = tl.where(there[:, None] & (n < N), act, 0)
    mask = there[:, None] & (n < N)
    tl.store(BITS + row[:, None] * N + n, tl.where(act != 0, bits | (peers << K), 0), mask=mask)
    tl.store(ACT + row, tl.sum(act << n, 1) | (fresh << _FRESH), mask=there)
    if COMPACT:
        place = tl.atomic_add(COUNT + t * N + n + wide, 1, mask=act != 0, sem="relaxed")
        tl.store(LIST + n * B + place, b[:, None] + wide, mask=act != 0)


@triton.jit
def _gates(
    t, j, u, r, B, c, XH, W, BIAS, PROP, BITS, GATES, C, LIST, COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, COMPACT: tl.constexpr, SAVE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Eqs. (1)-(6), (18), (19): BM sequences, U units of cell j; proposals h~ and W_q Q to PROP."""
    S: tl.constexpr = K + N
    TILES: tl.constexpr = (d + U - 1) // U
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
    start = row * (S * P)
    unit = u * U + tl.arange(0, U)
    inside = unit < d
    use = on[:, None] & inside[None, :]
    at = b[:, None] * (N * d) + j * d + unit[None, :]
    c_old = tl.load(c + at, mask=use, other=0.0, cache_modifier=".cg")
    W += (j * TILES + u) * (S * G * U * P)
    acc = tl.zeros((BM, 8 * U), tl.float32)
    CHUNKS: tl.constexpr = (P + BK - 1) // BK
    # Of a thread's columns, bits 0, 3 and 4 differ: as the number of the gate they keep all gates
    # of a unit in one thread.
    e, col = tl.arange(0, BK), tl.arange(0, 8 * U)
    gate = ((col >> 2) & 6) | (col & 1)
    line = gate * U + ((col >> 5) << 2 | (col >> 1) & 3)
    # Tiles start at different slots: all at one would crowd the few slices of L2 that hold it.
    for m in tl.range(0, S * CHUNKS, num_stages=STAGES):
        s = (m // CHUNKS + u * N + j) % S
        k = (m % CHUNKS) * BK + e
        take = ((bits >> s) & 1) != 0
        a = tl.load(
            XH + start[:, None] + (s * P + k)[None, :],
            mask=take[:, None] & (k < P)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        w = tl.load(
            W + s * (G * U * P) + line[:, None] * P + k[None, :],
            mask=(gate < G)[:, None] & (k < P)[None, :],
            other=0.0,
        )
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)

    acc = acc.reshape(BM, U // 4, 2, 2, 4, 2).permute(0, 1, 4, 2, 3, 5)  # (.., gate as 2, 2, 2)
    even, odd = tl.split(acc.reshape(BM, U, 2, 2, 2))
    f_q, o_ = tl.split(even)
    i_, g_ = tl.split(odd)
    f, q = tl.split(f_q)
    o, _ = tl.split(o_)
    i, _ = tl.split(i_)
    g, _ = tl.split(g_)
    bias = BIAS + j * (4 * d) + unit
    f = sigmoid(f + tl.load(bias, mask=inside, other=0.0)[None, :])
    i = sigmoid(i + tl.load(bias + d, mask=inside, other=0.0)[None, :])
    o = sigmoid(o + tl.load(bias + 2 * d, mask=inside, other=0.0)[None, :])
    g = tanh(g + tl.load(bias + 3 * d, mask=inside, other=0.0)[None, :])
    c_new = f * c_old + i * g
    tl.store(c + at, c_new, mask=use)
    tl.store(PROP + at, o * tanh(c_new), mask=use)
    if G == 5:
        tl.store(PROP + tl.cast(B * N * d, tl.int64) + at, q, mask=use)
    if SAVE:
        tl.store(C + row[:, None] * (N * d) + j * d + unit[None, :], c_old, mask=use)
        at = (row * N + j)[:, None] * (G * d) + unit[None, :]
        kind = GATES.dtype.element_ty
        tl.store(GATES + at, f.to(kind), mask=use)
        tl.store(GATES + at + d, i.to(kind), mask=use)
        tl.store(GATES + at + 2 * d, o.to(kind), mask=use)
        tl.store(GATES + at + 3 * d, g.to(kind), mask=use)
        if G == 5:
            tl.store(GATES + at + 4 * d, q.to(kind), mask=use)


@triton.jit(do_not_specialize=["B", "t0", "t1"])
def forward_kernel(
    h0, c, X, XH, W, BIAS, UPDATE_BIAS, LIVE, RESET, Y, PROP, ACT, BITS, GATES, C, A, LIST, COUNT,
    COUNTER, B, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
    SCALE: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, U: tl.constexpr,
    RB: tl.constexpr, STAGES: tl.constexpr, COMPACT: tl.constexpr, WIDE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t0 to t1. PHASE is a sum: 1 select, 2 gates, 4 barriers, 8 finish the last step."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    TILES: tl.constexpr = N * ((d + U - 1) // U)
    SOFT: tl.constexpr = G == 5
    target = 0
    for t in tl.range(t0, t1, num_stages=1):
        if PHASE & 1:
            for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
                b = r * RB + tl.arange(0, RB)
                x = ()
                if (K_a < N) or (K_x < K):
                    now = X + tl.cast(t, tl.int64) * B * X_ROW
                    x = _vectors(now, K, b, B, X_ROW, X_SLOT, N, d, BP)
                h = _finish(
                    t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, SCALE, SOFT, SAVE
                )  # fmt: skip
                _select(
                    t, b, B, h, x, h0, c, XH, Y, LIVE, RESET, ACT, BITS, LIST, COUNT,
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
                        COUNT, N, K, d, P, G, BM, BK, U, STAGES, PRECISION, COMPACT, SAVE,
                        WIDE,
                    )  # fmt: skip
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
    if PHASE & 8:
        for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
            b = r * RB + tl.arange(0, RB)
            _finish(t1, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, SCALE, SOFT, SAVE)
