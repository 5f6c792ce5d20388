"""The row-wise half of a step in the forward kernel: Eqs. (20)-(21) of the step before, (13)-(16).

A state is finished in a tile (8, RB, PIECE): a line for each cell, RB sequences, a piece of a
vector (`pieces.py`). With up to 64 sequences a piece is a whole vector, and a line a warp.

Scores of all cells and all that they look at are taken at once there, in tiles (8, RB, 8, 16):
what is looked at, RB sequences, cells, and 16 numbers of both. A warp is a cell, eight times four
lanes are what it looks at: a lane adds up most of a score for itself, and all scores together take
as many exchanges as one did. Every score is summed in the same order, so that equal vectors get
equal scores to the last bit (P4).

What one warp found and others need, states and the scores that wake a cell, goes through shared
memory once: a tensor is turned so that a thread holds what all lines have, and taken `apart`.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, BP = power of two ≥ P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.cell import sigmoid
from riglstm.scan.kernels.common import _FRESH, _MOST, _SLOTS, best, comparable
from riglstm.scan.kernels.pieces import products, read, score, store_each, tile_of, write
from riglstm.scan.kernels.told import read_told, take_back

_PART = tl.constexpr(16)


@triton.jit
def finish(
    t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A,
    N: tl.constexpr, d: tl.constexpr, PIECE: tl.constexpr, SCALE: tl.constexpr,
    SOFT: tl.constexpr, SAVE: tl.constexpr, act=None,
):  # fmt: skip
    """Eqs. (20)-(21): the pieces of the cells' states before step t, also written to y.

    With `act`, which is what `awake_before` says, no barrier comes before: h~ and W_q Q are waited
    for here (`told.py`).
    """
    size = tl.cast(B, tl.int64) * (N * d)
    there = b < B
    row = tl.cast(t - 1, tl.int64) * B + b
    began = there & (b * 0 + t > 0)
    was = tl.where(t < 2, h0, Y + (t - 2) * size)
    old = read(tile_of(was, b, N * d, d, PIECE), there, N, d, PIECE)
    POLL: tl.constexpr = act is not None
    if POLL:
        new, q = read_told(PROP, PROP + size, b, there, act, old[0], N, d, PIECE, SOFT)
    else:
        new = read(tile_of(PROP, b, N * d, d, PIECE), there, N, d, PIECE)
        if SOFT:
            q = read(tile_of(PROP + size, b, N * d, d, PIECE), there, N, d, PIECE)
    n = tl.arange(0, _SLOTS)[:, None]
    if SOFT and UPDATE_BIAS is not None:
        bias = tl.load(UPDATE_BIAS + n, mask=n < N, other=0.0)
    # No load passes a barrier, and all that follows needs the one behind it: so every vector is
    # under way before the first sum waits for its own.
    tl.debug_barrier()
    if not POLL:
        act = tl.load(ACT + row, mask=began, other=0)
    act = act[None, :]
    woke = ((act >> n) & 1) != 0
    stays = (((act >> _FRESH) & 1) == 0)[:, :, None]
    if POLL:
        # Every warp has what it waited for. In the first step nothing has been written yet.
        came = there[None, :] & (woke | (t < 1))
        take_back(tile_of(PROP, b, N * d, d, PIECE), came, N, d, PIECE)
        if SOFT:
            take_back(tile_of(PROP + size, b, N * d, d, PIECE), came, N, d, PIECE)
    before = ()
    for i in tl.static_range(len(old)):
        before += (tl.where(stays, old[i], 0.0),)
    states = ()
    if SOFT:
        ahead = ()
        for i in tl.static_range(len(old)):
            ahead += (new[i] - before[i],)
        logit = SCALE * score(ahead, q)
        if UPDATE_BIAS is not None:
            logit += bias
        a = sigmoid(logit)
        if SAVE:
            # Not with `woke` in the mask: act would be loaded again, for the lanes that store.
            kept = tl.where(woke, a, 0.0)
            store_each(A + row[None, :] * N + n, kept, began[None, :] & (n < N), PIECE // 4)
        for i in tl.static_range(len(old)):
            h = before[i] + a[:, :, None] * ahead[i]
            states += (tl.where(woke[:, :, None], h, before[i]),)
    else:
        for i in tl.static_range(len(old)):
            states += (tl.where(woke[:, :, None], new[i], before[i]),)
    write(tile_of(Y + (t - 1) * size, b, N * d, d, PIECE), states, began, N, d, PIECE)
    return states


@triton.jit
def apart(x, BITS: tl.constexpr):
    """A tuple of the tensors that the last dimensions of x number, BITS of two each."""
    out = (x,)
    for _ in tl.static_range(BITS):
        low = ()
        high = ()
        for i in tl.static_range(len(out)):
            even, odd = tl.split(out[i])
            low += (even,)
            high += (odd,)
        out = low + high
    return out


@triton.jit
def select(
    t, b, B, h, x, unit, live, fresh, c, XH, ACT, WOKE, BITS,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr,
):  # fmt: skip
    """Eqs. (13)-(16) for sequences b: who wakes, and a bit for every slot that a cell takes in.

    Of a row, `unit`, `live` and `fresh` are None where they are one, true and false. Without
    c, a reset of it is left to `gates`.
    """
    there = b < B
    row = tl.cast(t, tl.int64) * B + b
    HELD: tl.constexpr = K + N
    held = h
    if unit is not None:
        held = h * (1.0 / unit)[None, :, None]
    step = XH + tl.cast(t, tl.int64) * B * (HELD * P) + K * P
    write(tile_of(step, b, HELD * P, P, BP), (held,), there, N, P, BP)
    if fresh is not None:
        h = tl.where((fresh == 0)[None, :, None], h, 0.0)
        if c is not None:
            # Where a state begins anew, what was just kept is zero, as c is to be.
            write(tile_of(c, b, N * d, d, BP), (h,), there & (fresh != 0), N, d, BP)

    VIEWS: tl.constexpr = (K_a < N) or (K_x < K)
    PEERS: tl.constexpr = K_h > 0 and K_h < N - 1
    RB: tl.constexpr = h.shape[1]
    PARTS: tl.constexpr = BP // _PART
    LOG: tl.constexpr = (PARTS > 1) + (PARTS > 2) + (PARTS > 4)
    states = h.reshape(_SLOTS, RB, PARTS, _PART).permute(0, 1, 3, 2)
    states = apart(states.reshape([_SLOTS, RB, _PART] + [2] * LOG), LOG)
    own = ()
    peers = ()
    for i in tl.static_range((d + _PART - 1) // _PART):
        own += (states[i].permute(1, 0, 2)[None, :, :, :],)
        peers += (states[i][:, :, None, :],)
    k = tl.arange(0, _SLOTS)[:, None, None]
    other = k != tl.arange(0, _SLOTS)[None, None, :]
    for_views = ()
    for_peers = ()
    if VIEWS and PEERS:
        # One sum of both, so that the compiler lays peers as it does views.
        both = tl.sum(tl.join(products(own, x), products(own, peers)), 3)
        of_views, of_peers = tl.split(both)
        keys = tl.join(comparable(of_views), tl.where(other, comparable(of_peers), -_MOST))
        keys = apart(keys.permute(1, 2, 3, 0).reshape(RB, _SLOTS, 2, 2, 2, 2), 3)
        for i in tl.static_range(_SLOTS):
            view, peer = tl.split(keys[i])
            for_views += (view,)
            for_peers += (peer,)
    elif VIEWS:
        of_views = tl.sum(products(own, x), 3)
        keys = comparable(of_views).permute(1, 2, 0)
        for_views = apart(keys.reshape(RB, _SLOTS, 2, 2, 2), 3)
    elif PEERS:
        keys = tl.where(other, comparable(tl.sum(products(own, peers), 3)), -_MOST)
        for_peers = apart(keys.permute(1, 2, 0).reshape(RB, _SLOTS, 2, 2, 2), 3)

    awake = tl.where(there if live is None else live, (1 << N) - 1, 0)
    if K_a < N:
        total = comparable(tl.sum(tl.where(k < K, of_views, 0.0), 0))  # (RB, 8)
        awake &= best(apart(total.reshape(RB, 2, 2, 2), 3), K_a, N)
    n = tl.arange(0, _SLOTS)[None, :]
    bits = ((1 << K) - 1) + 0 * n + 0 * b[:, None]  # (RB, 8)
    if K_x < K:
        bits = best(for_views, K_x, K)
    heard = ((1 << N) - 1) + 0 * n + 0 * b[:, None]
    if K_h == 0:
        heard = (1 << n) + 0 * b[:, None]
    elif PEERS:
        heard = best(for_peers, K_h, N) | (1 << n)
    code = awake
    if fresh is not None:
        code |= fresh << _FRESH
        heard = tl.where((fresh != 0)[:, None], 0, heard)
    bits = (bits | (heard << K)).permute(1, 0)
    n = tl.arange(0, _SLOTS)[:, None]
    act = (awake[None, :] >> n) & 1
    mask = there[None, :] & (n < N)
    at = row[None, :] * N + n
    store_each(BITS + at, tl.where(act != 0, bits, 0), mask, BP // 4)
    store_each(WOKE + at, act, mask, BP // 4)
    store_each(ACT + row[None, :] + 0 * n, code[None, :] + 0 * n, mask & (n < 1), BP // 4)
