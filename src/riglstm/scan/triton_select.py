"""The row-wise half of a step in the forward kernel: Eqs. (20)-(21) of the step before, (13)-(16).

A tile is (LINES, RB, BP): RB sequences, and a vector of BP numbers for each. Its lines are cells
where every cell has something else, and copies where all cells need the same vector. LINES is the
number of warps over RB, so that a vector lies in one warp and no sum waits for another warp. Scores
are summed one pair of vectors at a time, all in the same order, so that equal vectors get equal
scores to the last bit (P4).

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, BP = power of two ≥ P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton_cell import sigmoid
from riglstm.scan.triton_common import _FRESH, fetch, order, top


@triton.jit
def vectors(V, n: tl.constexpr, r, there, ROW: tl.constexpr, SLOT: tl.constexpr, d: tl.constexpr,
            BP: tl.constexpr, LINES: tl.constexpr):  # fmt: skip
    """A tuple of n vectors (LINES, RB, BP) of each row r, the lines all the same."""
    line, e = tl.arange(0, LINES)[:, None, None], tl.arange(0, BP)[None, None, :]
    at = tl.cast(r, tl.int64)[None, :, None] * ROW + 0 * line + e
    mask = there[None, :, None] & (e < d) & (line >= 0)
    out = ()
    for k in tl.static_range(n):
        out += (tl.load(V + at + k * SLOT, mask=mask, other=0.0),)
    return out


@triton.jit
def finish(
    t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A,
    N: tl.constexpr, d: tl.constexpr, BP: tl.constexpr, LINES: tl.constexpr,
    SCALE: tl.constexpr, SOFT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Eqs. (20)-(21): a tuple of the cells' states before step t, also written to y."""
    size = tl.cast(B, tl.int64) * (N * d)
    old = vectors(tl.where(t < 2, h0, Y + (t - 2) * size), N, b, b < B, N * d, d, d, BP, LINES)
    new = vectors(PROP, N, b, b < B, N * d, d, d, BP, LINES)
    if SOFT:
        q = vectors(PROP + size, N, b, b < B, N * d, d, d, BP, LINES)
    row = tl.cast(t - 1, tl.int64) * B + b
    began = (b < B) & (b * 0 + t > 0)
    bias = ()
    if SOFT and UPDATE_BIAS is not None:
        for k in tl.static_range(N):
            bias += (tl.load(UPDATE_BIAS + k),)
    # No load passes a barrier, and all that follows needs the one behind it: so every vector is
    # under way before the first sum waits for its own.
    tl.debug_barrier()
    act = tl.load(ACT + row, mask=began, other=0)[None, :]
    stays = (((act >> _FRESH) & 1) == 0)[:, :, None]
    line = tl.arange(0, LINES)[:, None]
    states = ()
    shares = ()
    for k in tl.static_range(N):
        h, h_new = tl.where(stays, old[k], 0.0), new[k]
        woke = ((act >> k) & 1) != 0
        if SOFT:
            ahead = h_new - h
            logit = SCALE * tl.sum(ahead * q[k], 2)
            if UPDATE_BIAS is not None:
                logit += bias[k]
            a = sigmoid(logit)
            shares += (a,)
            h_new = h + a[:, :, None] * ahead
        states += (tl.where(woke[:, :, None], h_new, h),)
    if SOFT and SAVE:
        # A line each, and one store: each store goes through shared memory.
        for first in tl.static_range(0, N, LINES):
            n = first + line
            a = shares[first]
            for k in tl.static_range(first + 1, min(first + LINES, N)):
                a = tl.where(line == k - first, shares[k], a)
            tl.store(A + row[None, :] * N + n, a, mask=(((act >> n) & 1) != 0) & (n < N))
    write(states, Y + (t - 1) * size, N * d, d, d, b, began, N, BP, LINES)
    return states


@triton.jit
def lines(states, first: tl.constexpr, N: tl.constexpr, LINES: tl.constexpr):
    """States (LINES, RB, BP) of cells `first` and on, each in a line of its own."""
    line = tl.arange(0, LINES)[:, None, None]
    h = states[first]
    for k in tl.static_range(first + 1, min(first + LINES, N)):
        h = tl.where(line == k - first, states[k], h)
    return h


@triton.jit
def write(states, OUT, ROW: tl.constexpr, SLOT: tl.constexpr, P: tl.constexpr, b, mask,
          N: tl.constexpr, BP: tl.constexpr, LINES: tl.constexpr):  # fmt: skip
    """The states of all cells, P numbers each."""
    line, e = tl.arange(0, LINES)[:, None, None], tl.arange(0, BP)[None, None, :]
    at = tl.cast(b, tl.int64)[None, :, None] * ROW + e
    for first in tl.static_range(0, N, LINES):
        n = first + line
        h = lines(states, first, N, LINES).to(OUT.dtype.element_ty)
        tl.store(OUT + at + n * SLOT, h, mask=mask[None, :, None] & (n < N) & (e < P))


@triton.jit
def select(
    t, b, B, states, x, c, XH, X_UNIT, LIVE, RESET, ACT, WOKE, BITS,
    N: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, d: tl.constexpr, P: tl.constexpr,
    BP: tl.constexpr, LINES: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr,
    K_h: tl.constexpr,
):  # fmt: skip
    """Eqs. (13)-(16) for sequences b: who wakes, and a bit for every slot that a cell takes in.

    XH holds the slots from FIRST on: 0, or K where the views are those of symbols. Without c, a
    reset of it is left to `gates`.
    """
    line = tl.arange(0, LINES)[:, None]
    there = b < B
    row = tl.cast(t, tl.int64) * B + b
    HELD: tl.constexpr = K + N - FIRST
    step = tl.cast(t, tl.int64) * B * (HELD * P)
    held = states
    if X_UNIT is not None:
        per = 1.0 / tl.load(X_UNIT + row, mask=there, other=1.0)[None, :, None]
        held = ()
        for k in tl.static_range(N):
            held += (states[k] * per,)
    write(held, XH + step + (K - FIRST) * P, HELD * P, P, P, b, there, N, BP, LINES)
    fresh = b * 0
    if RESET is not None:
        fresh = tl.load(RESET + row, mask=there, other=0).to(tl.int32)
        stays = (fresh == 0)[None, :, None]
        kept = ()
        for k in tl.static_range(N):
            kept += (tl.where(stays, states[k], 0.0),)
        states = kept
        if c is not None:
            # Where a state begins anew, what was just kept is zero, as c is to be.
            write(states, c, N * d, d, d, b, there & (fresh != 0), N, BP, LINES)
    fresh = fresh[None, :]
    wide = 0 * fresh + 0 * line  # (LINES, RB)

    awake = wide + ((1 << N) - 1)
    if K_a < N:
        whole = x[0].to(tl.float32)
        for k in tl.static_range(1, K):
            whole += x[k].to(tl.float32)
        keys = ()
        for k in tl.static_range(N):
            keys += (order(tl.sum(states[k] * whole, 2)),)
        awake = top(keys, K_a, N)
    if LIVE is not None:
        awake *= tl.load(LIVE + row, mask=there, other=0).to(tl.int32)[None, :]
    awake = tl.where(there[None, :], awake, 0)
    tl.store(ACT + row[None, :] + wide, awake | (fresh << _FRESH), mask=there[None, :] & (line < 1))

    for first in tl.static_range(0, N, LINES):
        n = first + line
        h = lines(states, first, N, LINES)
        bits = wide + ((1 << K) - 1)
        peers = wide + ((1 << N) - 1)
        if K_x < K:
            keys = ()
            for k in tl.static_range(K):
                keys += (order(tl.sum(h * x[k].to(tl.float32), 2)),)
            bits = top(keys, K_x, K)
        if K_h < N - 1:
            keys = ()
            for k in tl.static_range(N):
                keys += (tl.where(n == k, -0x80000000, order(tl.sum(h * states[k], 2))),)
            peers = top(keys, K_h, N) | (1 << n)
        peers = tl.where(fresh != 0, 0, peers)
        act = tl.where(n < N, (awake >> n) & 1, 0) != 0
        mask = there[None, :] & (n < N)
        at = row[None, :] * N + n
        tl.store(BITS + at, tl.where(act, bits | (peers << K), 0), mask=mask)
        tl.store(WOKE + at, act, mask=mask)


@triton.jit
def ask_ahead(
    t, t1, p, programs, X, XH, B,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr,
    X_ROW: tl.constexpr,
):  # fmt: skip
    """Ask for the views of the step after t."""
    after = tl.cast(tl.minimum(t + 1, t1 - 1), tl.int64) * B
    fetch(XH + after * ((K + N) * P), B * ((K + N) * P), p, programs)
    if X_ROW != (K + N) * P and (K_a < N or K_x < K):
        fetch(X + after * X_ROW, B * X_ROW, p, programs)


@triton.jit
def rows_phase(
    t, p, programs, h0, c, X, XH, X_UNIT, UPDATE_BIAS, SYMBOLS, LIVE, RESET, Y, PROP, ACT, WOKE,
    BITS, A, B,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr, SCALE: tl.constexpr,
    X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SOFT: tl.constexpr, SAVE: tl.constexpr,
    RB: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The states of this program's sequences are finished, and their cells choose, in step t."""
    FIRST: tl.constexpr = 0 if SYMBOLS is None else K
    for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
        b = r * RB + tl.arange(0, RB)
        x = ()
        if (K_a < N) or (K_x < K):
            if SYMBOLS is None:
                now = X + tl.cast(t, tl.int64) * B * X_ROW
                x = vectors(now, K, b, b < B, X_ROW, X_SLOT, d, BP, LINES)
            else:
                now = SYMBOLS + tl.cast(t, tl.int64) * B + b
                symbol = tl.load(now, mask=b < B, other=0)
                x = vectors(X, K, symbol, b < B, X_ROW, X_SLOT, d, BP, LINES)
        states = finish(
            t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, LINES, SCALE, SOFT, SAVE
        )  # fmt: skip
        select(
            t, b, B, states, x, c, XH, X_UNIT, LIVE, RESET, ACT, WOKE, BITS, N, K, FIRST,
            d, P, BP, LINES, K_a, K_x, K_h,
        )  # fmt: skip
