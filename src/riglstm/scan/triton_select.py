"""The row-wise half of a step in the forward kernel: Eqs. (20)-(21) of the step before, (13)-(16).

A tile has RB sequences, 8 lines for their cells and BP columns for a cell's numbers. Scores are
summed one pair of vectors at a time, all in the same order, so that equal vectors get equal scores
to the last bit (P4); they stay in registers, a tuple of (RB, 8), and are ranked there.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, BP = power of two ≥ P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton_common import _FRESH, _SLOTS, order, sigmoid, top


@triton.jit
def finish(
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
def vectors(V, n_slots: tl.constexpr, b, B, ROW: tl.constexpr, SLOT: tl.constexpr,
             N: tl.constexpr, d: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """A tuple of n_slots vectors of each sequence, each once for every cell: (RB, 8, BP)."""
    n, e = tl.arange(0, _SLOTS)[None, :, None], tl.arange(0, BP)[None, None, :]
    at = tl.cast(b, tl.int64)[:, None, None] * ROW + n * 0 + e
    mask = (b < B)[:, None, None] & (n < N) & (e < d)
    vectors = ()
    for k in tl.static_range(n_slots):
        v = tl.load(V + at + k * SLOT, mask=mask, other=0.0)
        vectors += (v,)
    return vectors


@triton.jit
def _scores(h, vectors, stays, n_slots: tl.constexpr):
    """Eq. (13): h (RB, 8, BP) times each vector, as a tuple of (RB, 8)."""
    scores = ()
    for k in tl.static_range(n_slots):
        v = tl.where(stays[:, None, None], vectors[k].to(tl.float32), 0.0)
        scores += (tl.sum(h * v, 2),)
    return scores


@triton.jit
def select(
    t, b, B, h, x, h0, c, XH, Y, LIVE, RESET, ACT, WOKE, BITS, LIST, COUNT,
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
        v = vectors(now, N, b, B, N * d, d, N, d, BP)
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
            keys += (order(s[k]),)
        bits = top(keys, K_x, K)
    if K_h < N - 1:
        r = _scores(h, v, stays, N)
        keys = (tl.where(n == 0, -0x80000000, order(r[0])),)
        for k in tl.static_range(1, N):
            keys += (tl.where(n == k, -0x80000000, order(r[k])),)
        peers = top(keys, K_h, N) | (1 << n)
    peers = tl.where((fresh != 0)[:, None], 0, peers)

    if LIVE is not None:
        act = act * tl.load(LIVE + row, mask=there, other=0).to(tl.int32)[:, None]
    act = tl.where(there[:, None] & (n < N), act, 0)
    mask = there[:, None] & (n < N)
    tl.store(BITS + row[:, None] * N + n, tl.where(act != 0, bits | (peers << K), 0), mask=mask)
    tl.store(WOKE + row[:, None] * N + n, act != 0, mask=mask)
    tl.store(ACT + row, tl.sum(act << n, 1) | (fresh << _FRESH), mask=there)
    if COMPACT:
        place = tl.atomic_add(COUNT + t * N + n + wide, 1, mask=act != 0, sem="relaxed")
        tl.store(LIST + n * B + place, b[:, None] + wide, mask=act != 0)
