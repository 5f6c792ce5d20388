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
    N: tl.constexpr, d: tl.constexpr, BP: tl.constexpr, RB: tl.constexpr,
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
    act = tl.load(ACT + row, mask=(b < B) & (t > 0), other=0, cache_modifier=".cg")
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
    tl.store(Y + (t - 1) * size + at, h, mask=inside & (t > 0))
    return h


@triton.jit
def _scores(
    h, V, n_slots: tl.constexpr, b, B, ROW: tl.constexpr, SLOT: tl.constexpr, d: tl.constexpr,
    BP: tl.constexpr, stays,
):  # fmt: skip
    """Eq. (13): h (RB, 8, BP) times each of a sequence's vectors, as a tuple of (RB, 8)."""
    e = tl.arange(0, BP)[None, :]
    at = tl.cast(b, tl.int64)[:, None] * ROW + e
    mask = (stays & (b < B))[:, None] & (e < d)
    scores = ()
    for k in tl.static_range(n_slots):
        v = tl.load(V + at + k * SLOT, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        scores = scores + (tl.sum(h * v[:, None, :], 2),)
    return scores


@triton.jit
def _select(
    t, b, B, h, h0, c, X, XH, Y, LIVE, RESET, ACT, BITS, LIST, COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr, X_ROW: tl.constexpr,
    X_SLOT: tl.constexpr, COMPACT: tl.constexpr,
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
    views = wide + ((1 << K) - 1)
    if (K_a < N) or (K_x < K):
        s = _scores(h, X + tl.cast(t, tl.int64) * B * X_ROW, K, b, B, X_ROW, X_SLOT, d, BP, stays)
        total = s[0]
        keys = (order(s[0]),)
        for k in tl.static_range(1, K):
            total += s[k]
            keys = keys + (order(s[k]),)
        if K_a < N:
            key = tl.where(n < N, order(total), -0x80000000)
            one, other = key[:, :, None], key[:, None, :]
            i = tl.arange(0, _SLOTS)
            first = (i[:, None] > i[None, :])[None, :, :]
            ahead = (other > one) | ((other == one) & first)  # (RB, 8, 8): [.., i, j], j is ahead
            act = (tl.sum(ahead.to(tl.int32), 2) < K_a).to(tl.int32)
        if K_x < K:
            views = top(keys, K_x, K)
    peers = wide + ((1 << N) - 1)
    if K_h < N - 1:
        tl.debug_barrier()
        now = tl.where(t < 1, h0, Y + tl.cast(t - 1, tl.int64) * (B * N * d))
        r = _scores(h, now, N, b, B, N * d, d, d, BP, stays)
        keys = (tl.where(n == 0, -0x80000000, order(r[0])),)
        for k in tl.static_range(1, N):
            keys = keys + (tl.where(n == k, -0x80000000, order(r[k])),)
        peers = top(keys, K_h, N) | (1 << n)
    peers = tl.where((fresh != 0)[:, None], 0, peers)

    if LIVE is not None:
        act = act * tl.load(LIVE + row, mask=there, other=0).to(tl.int32)[:, None]
    act = tl.where(there[:, None] & (n < N), act, 0)
    mask = there[:, None] & (n < N)
    tl.store(BITS + row[:, None] * N + n, tl.where(act != 0, views | (peers << K), 0), mask=mask)
    tl.store(ACT + row, tl.sum(act << n, 1) | (fresh << _FRESH), mask=there)
    if COMPACT:
        place = tl.atomic_add(COUNT + t * N + n + wide, 1, mask=act != 0, sem="relaxed")
        tl.store(LIST + n * B + place, b[:, None] + wide, mask=act != 0)


@triton.jit
def _gate(acc, gate: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, U: tl.constexpr,
          BU: tl.constexpr):  # fmt: skip
    """Columns [gate·U, gate·U + U) of acc (BM, BN), as (BM, BU)."""
    at = tl.minimum(gate * U + tl.arange(0, BU), BN - 1)
    return tl.gather(acc, tl.broadcast_to(at[None, :], (BM, BU)), 1)


@triton.jit
def _gates(
    t, j, u, r, B, c, XH, W, BIAS, PROP, BITS, GATES, C, LIST, COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, U: tl.constexpr, BU: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, COMPACT: tl.constexpr, SAVE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Eqs. (1)-(6), (18), (19): BM sequences, U units of cell j; proposals h~ and W_q Q to PROP."""
    S: tl.constexpr = K + N
    CHUNKS: tl.constexpr = (P + BK - 1) // BK
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
    lane = tl.arange(0, BU)
    unit = u * U + lane
    inside = (lane < U) & (unit < d)
    use = on[:, None] & inside[None, :]
    at = b[:, None] * (N * d) + j * d + unit[None, :]
    c_old = tl.load(c + at, mask=use, other=0.0, cache_modifier=".cg")
    e, col = tl.arange(0, BK), tl.arange(0, BN)
    W += (j * TILES + u) * (S * G * U * P)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, S * CHUNKS, num_stages=STAGES):
        s = i // CHUNKS
        k = (i % CHUNKS) * BK + e
        take = ((bits >> s) & 1) != 0
        a = tl.load(
            XH + start[:, None] + (s * P + k)[None, :],
            mask=take[:, None] & (k < P)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        w = tl.load(
            W + s * (G * U * P) + col[:, None] * P + k[None, :],
            mask=(col < G * U)[:, None] & (k < P)[None, :],
            other=0.0,
        )
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)

    bias = BIAS + j * (4 * d) + unit
    f = sigmoid(_gate(acc, 0, BM, BN, U, BU) + tl.load(bias, mask=inside)[None, :])
    i_ = sigmoid(_gate(acc, 1, BM, BN, U, BU) + tl.load(bias + d, mask=inside)[None, :])
    o = sigmoid(_gate(acc, 2, BM, BN, U, BU) + tl.load(bias + 2 * d, mask=inside)[None, :])
    g = tanh(_gate(acc, 3, BM, BN, U, BU) + tl.load(bias + 3 * d, mask=inside)[None, :])
    c_new = f * c_old + i_ * g
    tl.store(c + at, c_new, mask=use)
    tl.store(PROP + at, o * tanh(c_new), mask=use)
    if G == 5:
        q = _gate(acc, 4, BM, BN, U, BU)
        tl.store(PROP + tl.cast(B * N * d, tl.int64) + at, q, mask=use)
    if SAVE:
        tl.store(C + row[:, None] * (N * d) + j * d + unit[None, :], c_old, mask=use)
        at = (row * N + j)[:, None] * (G * d) + unit[None, :]
        kind = GATES.dtype.element_ty
        tl.store(GATES + at, f.to(kind), mask=use)
        tl.store(GATES + at + d, i_.to(kind), mask=use)
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
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    U: tl.constexpr, BU: tl.constexpr, RB: tl.constexpr,
    STAGES: tl.constexpr, COMPACT: tl.constexpr, WIDE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t0 to t1. PHASE is a sum: 1 select, 2 gates, 4 barriers, 8 only finish step t1 - 1."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    TILES: tl.constexpr = N * ((d + U - 1) // U)
    SOFT: tl.constexpr = G == 5
    target = 0
    for t in tl.range(t0, t1, num_stages=1):
        if PHASE & 9:
            for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
                b = r * RB + tl.arange(0, RB)
                h = _finish(
                    t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, RB, SCALE, SOFT, SAVE
                )  # fmt: skip
                if PHASE & 1:
                    _select(
                        t, b, B, h, h0, c, X, XH, Y, LIVE, RESET, ACT, BITS, LIST, COUNT,
                        N, K, d, P, BP, K_a, K_x, K_h, X_ROW, X_SLOT, COMPACT,
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
                        t, j_u % N, j_u // N, r, B, c, XH, W, BIAS, PROP, BITS, GATES, C,
                        LIST, COUNT, N, K, d, P, G, BM, BN, BK, U, BU, STAGES, PRECISION,
                        COMPACT, SAVE, WIDE,
                    )  # fmt: skip
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
