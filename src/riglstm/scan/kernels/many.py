"""The row-wise half of a step, as `select.py` has it, for more than 64 sequences.

There a warp has a cell, and what it looks at lies side by side in the lanes. Here it has four cells
of a sequence, a few lanes each (`pieces.py`), which look at one vector after another: a view
or a peer's state, that each reads for itself from the first-level cache.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, M = pieces of a vector.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.common import _FRESH, _MOST, _SLOTS, best, comparable
from riglstm.scan.kernels.pieces import read, score, tile_of, write
from riglstm.scan.kernels.select import finish
from riglstm.scan.kernels.told import awake_before

_BYTES = tl.constexpr(0x01010101)


@triton.jit
def awake_cells(scores, mask, K_a: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Eqs. (13), (14): whether a cell wakes, (8, RB)."""
    n = tl.arange(0, _SLOTS)
    awake = mask[None, :] & (n < N)[:, None]
    if K_a < N:
        total = scores[0]
        for k in tl.static_range(1, K):
            total += scores[k]
        key = comparable(total)
        mine, other = key[:, :, None], tl.trans(key)[None, :, :]
        lower = n[None, None, :] < n[:, None, None]
        ahead = ((other > mine) | ((other == mine) & lower)) & (n < N)[None, None, :]
        awake = awake & (tl.sum(ahead.to(tl.int32), 2) < K_a)
    return awake


@triton.jit
def select_many(
    t, b0, B, states, x, h0, Y, c, XH, X_UNIT, LIVE, RESET, ACT, WOKE, BITS, LIST, COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr,
    PIECE: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
    RB: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Eqs. (13)-(16): as `select`. Each sequence is added to the lists of the cells that wake."""
    tl.static_assert(RB * _SLOTS <= 32, "who woke is a bit of one whole number")
    n = tl.arange(0, _SLOTS)[:, None]
    b = b0 + tl.arange(0, RB)
    there = b < B
    row = tl.cast(t, tl.int64) * B + b
    HELD: tl.constexpr = K + N
    M: tl.constexpr = (d + PIECE - 1) // PIECE
    held = states
    if X_UNIT is not None:
        per = (1.0 / tl.load(X_UNIT + row, mask=there, other=1.0))[None, :, None]
        held = ()
        for i in tl.static_range(M):
            held += (states[i] * per,)
    step = XH + tl.cast(t, tl.int64) * B * (HELD * P) + K * P
    write(tile_of(step, b, HELD * P, P, PIECE), held, there, N, P, PIECE)
    fresh = (b * 0)[None, :]
    if RESET is not None:
        fresh = tl.load(RESET + row, mask=there, other=0).to(tl.int32)[None, :]
        kept = ()
        for i in tl.static_range(M):
            kept += (tl.where((fresh == 0)[:, :, None], states[i], 0.0),)
        states = kept
        anew = there & (tl.load(RESET + row, mask=there, other=0) != 0)
        # Where a state begins anew, what was just kept is zero, as c is to be.
        write(tile_of(c, b, N * d, d, PIECE), states, anew, N, d, PIECE)

    scores = ()
    if (K_a < N) or (K_x < K):
        for k in tl.static_range(K):
            scores += (score(states, x[k * M : k * M + M]),)
    live = there
    if LIVE is not None:
        live = there & (tl.load(LIVE + row, mask=there, other=0) != 0)
    act = awake_cells(scores, live, K_a, N, K)

    peers = ((1 << N) - 1) + 0 * fresh + 0 * n
    seen = ()
    # What the cells' lines wrote to y is now read by all of them.
    tl.debug_barrier()
    if K_h > 0 and K_h < N - 1:
        size = tl.cast(B, tl.int64) * (N * d)
        now = tl.where(t < 1, h0, Y + (t - 1) * size)
        for k in tl.static_range(N):
            seen += read(tile_of(now + k * d, b, N * d, 0, PIECE), there, N, d, PIECE)

    r = tl.arange(0, RB)[None, :]
    who = tl.sum(tl.where(act, 1 << (r * _SLOTS + n), 0))
    # A number for each thread, (8, RB, rest), of which the first warp's count, so that nobody else
    # waits for a place in a list: one atomic a cell for all sequences of the program, whose places
    # are sums of bits.
    cell, seq = tl.arange(0, _SLOTS)[:, None, None], tl.arange(0, RB)[None, :, None]
    rest = tl.arange(0, 32 * WARPS // (RB * _SLOTS))[None, None, :]
    woke = ((who >> cell) & _BYTES) + 0 * seq + 0 * rest
    first = (rest == 0) & (seq == 0) & (cell < N) & (woke != 0)
    place = tl.atomic_add(COUNT + cell + 0 * woke, (woke * _BYTES) >> 24, mask=first, sem="relaxed")

    bits = ((1 << K) - 1) + 0 * peers
    if K_x < K:
        keys = ()
        for k in tl.static_range(K):
            keys += (comparable(scores[k]),)
        bits = best(keys, K_x, K)
    if K_h == 0:
        peers = (1 << n) + 0 * fresh
    elif K_h < N - 1:
        keys = ()
        for k in tl.static_range(N):
            key = comparable(score(states, seen[k * M : k * M + M]))
            keys += (tl.where(n == k, -_MOST, key),)
        peers = best(keys, K_h, N) | (1 << n)
    peers = tl.where(fresh != 0, 0, peers)
    on = ((who >> (seq * _SLOTS + cell)) & 1) != 0
    bits = tl.where(on, (bits | (peers << K))[:, :, None], 0) + 0 * rest
    at = row[None, :, None] * N + cell + 0 * rest
    mask = there[None, :, None] & (cell < N) & (rest == 0)
    tl.store(BITS + at, bits, mask=mask)
    tl.store(WOKE + at, on & (rest == 0), mask=mask)
    code = (who >> (tl.arange(0, RB) * _SLOTS)) & 255
    if RESET is not None:
        code |= tl.load(RESET + row, mask=there, other=0).to(tl.int32) << _FRESH
    tl.store(ACT + row, code, mask=there)
    place = tl.sum(tl.where(seq == 0, place, 0), 1)[:, None, :] - 1
    place += ((woke * _BYTES) >> (8 * seq)) & 255
    entry = LIST + 2 * (cell * B + place)
    tl.store(entry, b0 + seq + 0 * woke, mask=mask & on)
    tl.store(entry + 1, bits, mask=mask & on)


@triton.jit
def views_of_rows(
    t, b, B, X,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, PIECE: tl.constexpr, K_a: tl.constexpr,
    K_x: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr,
):  # fmt: skip
    """The K · M pieces of the views of sequences b in step t, where cells look at any."""
    x = ()
    if (K_a < N) or (K_x < K):
        now = X + tl.cast(t, tl.int64) * B * X_ROW
        for k in tl.static_range(K):
            x += read(tile_of(now + k * X_SLOT, b, X_ROW, 0, PIECE), b < B, N, d, PIECE)
    return x


@triton.jit
def rows_many(
    t, p, programs, h0, c, X, XH, X_UNIT, UPDATE_BIAS, LIVE, RESET, Y, PROP, ACT, WOKE, BITS, A,
    LIST, COUNT, B,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, PIECE: tl.constexpr,
    K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr, SCALE: tl.constexpr,
    X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SOFT: tl.constexpr, SAVE: tl.constexpr,
    RB: tl.constexpr, WARPS: tl.constexpr, POLL: tl.constexpr, act,
):  # fmt: skip
    """As `rows_phase`: states of this program's sequences are finished, and their cells choose.

    POLL: h~ and W_q Q are waited for here, of the first sequences those that `act` says.
    """
    for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
        b = r * RB + tl.arange(0, RB)
        x = views_of_rows(t, b, B, X, N, K, d, PIECE, K_a, K_x, X_ROW, X_SLOT)
        if POLL:
            if r != p:
                act = awake_before(t, b, B, ACT)
            states = finish(
                t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, PIECE, SCALE, SOFT, SAVE, act
            )  # fmt: skip
        else:
            states = finish(
                t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, PIECE, SCALE, SOFT, SAVE
            )  # fmt: skip
        select_many(
            t, r * RB, B, states, x, h0, Y, c, XH, X_UNIT, LIVE, RESET, ACT, WOKE, BITS, LIST,
            COUNT + t * N, N, K, d, P, PIECE, K_a, K_x, K_h, RB, WARPS,
        )  # fmt: skip
