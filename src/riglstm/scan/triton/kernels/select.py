"""The row-wise half of a step: Eqs. (20)-(21) of the step before, and the selection, (13)-(16).

A state is finished in vector tiles (lines, RB, PIECE). Where `select` follows, a piece is a whole
vector, and a line a warp.

`select`, for up to 64 sequences, 8 cells of up to 128 numbers and 8 views, takes all scores of all
cells at once, in tiles (8, RB, 8, 16): what is looked at, RB sequences, cells, and 16 numbers of
both. A warp is a cell, eight times four
lanes are what it looks at: a lane adds up most of a score for itself, and all scores together take
as many exchanges as one did. Every score is summed in the same order, so that equal vectors get
equal scores to the last bit (P4). What one warp found and others need, states and the scores that
wake a cell, goes through shared memory once: a tensor is turned so that a thread holds what all
lines have, and taken `apart`.

`select_many`, for everything else, has four cells of a sequence in a warp, a few lanes each, which
look at one vector after another: a view or a peer's state, that each reads for itself from L1.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots, P ≥ d numbers a slot in
memory, M = pieces of a vector; m and z are a kernel's `Memory` and `Sizes`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton.kernels.common import (
    _FRESH,
    _MOST,
    _SLOTS,
    awake_before,
    best,
    cells_of,
    comparable,
    fetch,
    in_registers,
    lines_of,
    poll_vectors,
    products,
    put_mark,
    read,
    score,
    sigmoid,
    store_each,
    tile_of,
    wait,
    write,
)

_PART = tl.constexpr(16)


@triton.jit
def finish(t, b, B, m, z, act=None):
    """Eqs. (20)-(21): the pieces of the cells' states before step t, also written to y.

    With `act`, which is what `awake_before` says, no barrier comes before: h~ and W_q Q are polled
    for here (`poll_vectors`).
    """
    size = tl.cast(B, tl.int64) * (z.N * z.d)
    there = b < B
    row = tl.cast(t - 1, tl.int64) * B + b
    began = there & (b * 0 + t > 0)
    was = tl.where(t < 2, m.h0, m.Y + (t - 2) * size)
    old = read(cells_of(was, b, z), there, z.d, z)
    POLL: tl.constexpr = act is not None
    if POLL:
        new, q = poll_vectors(m.PROP, m.PROP + size, b, there, act, old[0], z)
    else:
        new = read(cells_of(m.PROP, b, z), there, z.d, z)
        if z.SOFT:
            q = read(cells_of(m.PROP + size, b, z), there, z.d, z)
    n = tl.arange(0, lines_of(z.N))[:, None]
    if z.SOFT and m.UPDATE_BIAS is not None:
        bias = tl.load(m.UPDATE_BIAS + n, mask=n < z.N, other=0.0)
    # No load passes a barrier, and all that follows needs the one behind it: so every vector is
    # under way before the first sum waits for its own.
    tl.debug_barrier()
    if not POLL:
        act = tl.load(m.ACT + row, mask=began, other=0)
    act = act[None, :]
    woke = ((act >> n) & 1) != 0
    stays = (((act >> _FRESH) & 1) == 0)[:, :, None]
    if POLL:
        # Every warp has what it waited for. In the first step nothing has been written yet.
        came = there[None, :] & (woke | (t < 1))
        put_mark(cells_of(m.PROP, b, z), came, z)
        if z.SOFT:
            put_mark(cells_of(m.PROP + size, b, z), came, z)
    before = ()
    for i in tl.static_range(len(old)):
        before += (tl.where(stays, old[i], 0.0),)
    states = ()
    if z.SOFT:
        change = ()
        for i in tl.static_range(len(old)):
            change += (new[i] - before[i],)
        logit = z.SCALE * score(change, q)
        if m.UPDATE_BIAS is not None:
            logit += bias
        a = sigmoid(logit)
        if z.SAVE:
            # Not with `woke` in the mask: act would be loaded again, for the lanes that store.
            kept = tl.where(woke, a, 0.0)
            store_each(m.A + row[None, :] * z.N + n, kept, began[None, :] & (n < z.N), z.PIECE // 4)
        for i in tl.static_range(len(old)):
            h = before[i] + a[:, :, None] * change[i]
            states += (tl.where(woke[:, :, None], h, before[i]),)
    else:
        for i in tl.static_range(len(old)):
            states += (tl.where(woke[:, :, None], new[i], before[i]),)
    write(cells_of(m.Y + (t - 1) * size, b, z), states, began, z.d, z)
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
def select(t, b, B, h, x, unit, wake, take, fresh, m, z):
    """Eqs. (13)-(16) for sequences b: who wakes, and a bit for every slot that a cell takes in.

    Of a row, `wake` (RB) and `take` (RB, 8) are bits of cells that may wake, and of slots that each
    may take in; None: all. `unit` and `fresh` are None where they are one and false. Without c, a
    reset of it is left to `gates`.
    """
    tl.static_assert((z.N <= _SLOTS) & (z.K <= _SLOTS) & (z.PIECE <= 128))
    there = b < B
    row = tl.cast(t, tl.int64) * B + b
    HELD: tl.constexpr = z.K + z.N
    held = h
    if unit is not None:
        held = h * (1.0 / unit)[None, :, None]
    step = m.XH + tl.cast(t, tl.int64) * B * (HELD * z.P) + z.K * z.P
    write(tile_of(step, b, HELD * z.P, z.P, z), (held,), there, z.P, z)
    if fresh is not None:
        h = tl.where((fresh == 0)[None, :, None], h, 0.0)
        if m.c is not None:
            # Where a state begins anew, what was just kept is zero, as c is to be.
            write(cells_of(m.c, b, z), (h,), there & (fresh != 0), z.d, z)

    VIEWS: tl.constexpr = (z.K_a < z.N) or (z.K_x < z.K)
    PEERS: tl.constexpr = z.K_h > 0 and z.K_h < z.N - 1
    RB: tl.constexpr = h.shape[1]
    PARTS: tl.constexpr = z.PIECE // _PART
    LOG: tl.constexpr = (PARTS > 1) + (PARTS > 2) + (PARTS > 4)
    states = h.reshape(_SLOTS, RB, PARTS, _PART).permute(0, 1, 3, 2)
    states = apart(states.reshape([_SLOTS, RB, _PART] + [2] * LOG), LOG)
    own = ()
    peers = ()
    for i in tl.static_range((z.d + _PART - 1) // _PART):
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

    awake = tl.where(there, (1 << z.N) - 1, 0)
    if wake is not None:
        awake &= wake
    if z.K_a < z.N:
        total = comparable(tl.sum(tl.where(k < z.K, of_views, 0.0), 0))  # (RB, 8)
        awake &= best(apart(total.reshape(RB, 2, 2, 2), 3), z.K_a, z.N)
    n = tl.arange(0, _SLOTS)[None, :]
    bits = ((1 << z.K) - 1) + 0 * n + 0 * b[:, None]  # (RB, 8)
    if z.K_x < z.K:
        bits = best(for_views, z.K_x, z.K)
    heard = ((1 << z.N) - 1) + 0 * n + 0 * b[:, None]
    if z.K_h == 0:
        heard = (1 << n) + 0 * b[:, None]
    elif PEERS:
        heard = best(for_peers, z.K_h, z.N) | (1 << n)
    code = awake
    if fresh is not None:
        code |= fresh << _FRESH
        heard = tl.where((fresh != 0)[:, None], 0, heard)
    bits = bits | (heard << z.K)
    if take is not None:
        bits &= take
    bits = bits.permute(1, 0)
    n = tl.arange(0, _SLOTS)[:, None]
    act = (awake[None, :] >> n) & 1
    mask = there[None, :] & (n < z.N)
    at = row[None, :] * z.N + n
    store_each(m.BITS + at, tl.where(act != 0, bits, 0), mask, z.PIECE // 4)
    store_each(m.WOKE + at, act, mask, z.PIECE // 4)
    store_each(m.ACT + row[None, :] + 0 * n, code[None, :] + 0 * n, mask & (n < 1), z.PIECE // 4)


@triton.jit
def views_of_few(t, b, B, m, z):
    """The views of sequences b in step t, for each cell: parts (8, RB, 8, 16), views slowest."""
    there, at = b < B, tl.cast(t, tl.int64) * B + b
    k = tl.arange(0, _SLOTS)[:, None, None, None]
    n = tl.arange(0, _SLOTS)[None, None, :, None]
    e = tl.arange(0, _PART)[None, None, None, :]
    V = m.X + at[None, :, None, None] * z.X_ROW + k * z.X_SLOT + 0 * n + e
    mask = there[None, :, None, None] & (k < z.K) & (n < z.N)
    x = ()
    for i in tl.static_range((z.d + _PART - 1) // _PART):
        x += (tl.load(V + i * _PART, mask=mask & (i * _PART + e < z.d), other=0.0),)
    return x


@triton.jit
def prefetch_views(t, t1, p, programs, B, m, z):
    """Prefetch the views of the step after t to L2."""
    after = tl.cast(tl.minimum(t + 1, t1 - 1), tl.int64) * B
    fetch(m.XH + after * ((z.K + z.N) * z.P), B * ((z.K + z.N) * z.P), p, programs)
    if z.X_ROW != (z.K + z.N) * z.P and (z.K_a < z.N or z.K_x < z.K):
        fetch(m.X + after * z.X_ROW, B * z.X_ROW, p, programs)


@triton.jit
def rows_step(t, b, B, m, z, COUNTER=None, target=0):
    """The states of sequences b are finished, and their cells choose, in step t.

    With COUNTER, it is waited for between what is known before the step and what is not; with POLL
    it only says that h~ and W_q Q are about to come.
    """
    row = tl.cast(t, tl.int64) * B + b
    x = ()
    if (z.K_a < z.N) or (z.K_x < z.K):
        x = views_of_few(t, b, B, m, z)
    unit = None
    wake = None
    take = None
    fresh = None
    if m.X_UNIT is not None:
        unit = tl.load(m.X_UNIT + row, mask=b < B, other=1.0)
    if m.MAY_WAKE is not None:
        wake = tl.load(m.MAY_WAKE + row, mask=b < B, other=0)
    if m.MAY_TAKE is not None:
        n = tl.arange(0, _SLOTS)[None, :]
        take = tl.load(
            m.MAY_TAKE + row[:, None] * z.N + n, mask=(b < B)[:, None] & (n < z.N), other=0
        )
    if m.RESET is not None:
        fresh = tl.load(m.RESET + row, mask=b < B, other=0).to(tl.int32)
    act = None
    if z.POLL:
        act = awake_before(t, b, B, m.ACT)
    if COUNTER is not None:
        wait(COUNTER, target)
    states = finish(t, b, B, m, z, act)
    select(t, b, B, states[0], x, unit, wake, take, fresh, m, z)


@triton.jit
def rows_phase(t, p, programs, B, m, z):
    """`rows_step` of all sequences that are this program's."""
    for r in tl.range(p, tl.cdiv(B, z.RB), programs, num_stages=1):
        rows_step(t, r * z.RB + tl.arange(0, z.RB), B, m, z)


@triton.jit
def awake_cells(scores, mask, z):
    """Eqs. (13), (14): whether a cell wakes, (lines, RB)."""
    n = tl.arange(0, lines_of(z.N))
    awake = mask[None, :] & (n < z.N)[:, None]
    if z.K_a < z.N:
        total = scores[0]
        for k in tl.static_range(1, z.K):
            total += scores[k]
        key = comparable(total)
        mine, other = key[:, :, None], tl.trans(key)[None, :, :]
        lower = n[None, None, :] < n[:, None, None]
        before = ((other > mine) | ((other == mine) & lower)) & (n < z.N)[None, None, :]
        awake = awake & (tl.sum(before.to(tl.int32), 2) < z.K_a)
    return awake


@triton.jit
def _vectors(V, b, there, many: tl.constexpr, ROW: tl.constexpr, SLOT: tl.constexpr, z):
    """All pieces of what cells look at, views or states; none if registers do not hold them."""
    out = ()
    if in_registers(many, (z.d + z.PIECE - 1) // z.PIECE, z.N, z.RB, z.WARPS):
        for k in tl.static_range(many):
            out += read(tile_of(V + k * SLOT, b, ROW, 0, z), there, z.d, z)
    return out


@triton.jit
def _scores(
    states, vectors, V, b, there, many: tl.constexpr, ROW: tl.constexpr, SLOT: tl.constexpr, z
):
    """The scores (lines, RB) of each of `_vectors`; without these, they are read one at a time."""
    M: tl.constexpr = len(states)
    out = ()
    if len(vectors) > 0:
        for k in tl.static_range(many):
            out += (score(states, vectors[k * M : k * M + M]),)
    else:
        i = tl.arange(0, 16)[None, None, :]
        every = tl.zeros((states[0].shape[0], states[0].shape[1], 16), tl.float32)
        for k in tl.range(0, many, num_stages=1):
            one = read(tile_of(V + k * SLOT, b, ROW, 0, z), there, z.d, z)
            every = tl.where(i == k, score(states, one)[:, :, None], every)
        for k in tl.static_range(many):
            out += (tl.sum(tl.where(i == k, every, 0.0), 2),)
    return out


@triton.jit
def select_many(t, b0, B, states, x, now, listed, counts, m, z):
    """Eqs. (13)-(16): as `select`. Each sequence is added to the lists of the cells that wake.

    x are the `_vectors` of views, which begin at `now`.
    """
    LINES: tl.constexpr = lines_of(z.N)
    tl.static_assert(z.RB * LINES <= 32, "who woke is a bit of one whole number")
    n = tl.arange(0, LINES)[:, None]
    b = b0 + tl.arange(0, z.RB)
    there = b < B
    row = tl.cast(t, tl.int64) * B + b
    HELD: tl.constexpr = z.K + z.N
    M: tl.constexpr = (z.d + z.PIECE - 1) // z.PIECE
    held = states
    if m.X_UNIT is not None:
        per = (1.0 / tl.load(m.X_UNIT + row, mask=there, other=1.0))[None, :, None]
        held = ()
        for i in tl.static_range(M):
            held += (states[i] * per,)
    step = m.XH + tl.cast(t, tl.int64) * B * (HELD * z.P) + z.K * z.P
    write(tile_of(step, b, HELD * z.P, z.P, z), held, there, z.P, z)
    fresh = (b * 0)[None, :]
    if m.RESET is not None:
        fresh = tl.load(m.RESET + row, mask=there, other=0).to(tl.int32)[None, :]
        kept = ()
        for i in tl.static_range(M):
            kept += (tl.where((fresh == 0)[:, :, None], states[i], 0.0),)
        states = kept
        anew = there & (tl.load(m.RESET + row, mask=there, other=0) != 0)
        # Where a state begins anew, what was just kept is zero, as c is to be.
        write(cells_of(m.c, b, z), states, anew, z.d, z)

    scores = ()
    if (z.K_a < z.N) or (z.K_x < z.K):
        scores = _scores(states, x, now, b, there, z.K, z.X_ROW, z.X_SLOT, z)
    act = awake_cells(scores, there, z)
    if m.MAY_WAKE is not None:
        wake = tl.load(m.MAY_WAKE + row, mask=there, other=0)[None, :]
        act = act & (((wake >> n) & 1) != 0)

    peers = ((1 << z.N) - 1) + 0 * fresh + 0 * n
    seen = ()
    # What the cells' lines wrote to y is now read by all of them.
    tl.debug_barrier()
    if z.K_h > 0 and z.K_h < z.N - 1:
        size = tl.cast(B, tl.int64) * (z.N * z.d)
        before = tl.where(t < 1, m.h0, m.Y + (t - 1) * size)
        seen = _vectors(before, b, there, z.N, z.N * z.d, z.d, z)

    r = tl.arange(0, z.RB)[None, :]
    who = tl.sum(tl.where(act, 1 << (r * LINES + n), 0))
    # A number for each thread, (lines, RB, rest), of which the first warp's count, so that nobody
    # else waits for a place in a list: one atomic a cell for all sequences of the program, whose
    # places are sums of bits.
    EACH: tl.constexpr = 0x01010101 if LINES == 8 else 0x00010001  # the lowest of every LINES bits
    cell, seq = tl.arange(0, LINES)[:, None, None], tl.arange(0, z.RB)[None, :, None]
    rest = tl.arange(0, 32 * z.WARPS // (z.RB * LINES))[None, None, :]
    woke = ((who >> cell) & EACH) + 0 * seq + 0 * rest
    first = (rest == 0) & (seq == 0) & (cell < z.N) & (woke != 0)
    many = (woke * EACH) >> (32 - LINES)
    place = tl.atomic_add(counts + cell + 0 * woke, many, mask=first, sem="relaxed")

    bits = ((1 << z.K) - 1) + 0 * peers
    if z.K_x < z.K:
        keys = ()
        for k in tl.static_range(z.K):
            keys += (comparable(scores[k]),)
        bits = best(keys, z.K_x, z.K)
    if z.K_h == 0:
        peers = (1 << n) + 0 * fresh
    elif z.K_h < z.N - 1:
        of_peers = _scores(states, seen, before, b, there, z.N, z.N * z.d, z.d, z)
        keys = ()
        for k in tl.static_range(z.N):
            keys += (tl.where(n == k, -_MOST, comparable(of_peers[k])),)
        peers = best(keys, z.K_h, z.N) | (1 << n)
    peers = tl.where(fresh != 0, 0, peers)
    on = ((who >> (seq * LINES + cell)) & 1) != 0
    bits = bits | (peers << z.K)
    if m.MAY_TAKE is not None:
        bits &= tl.load(
            m.MAY_TAKE + row[None, :] * z.N + n, mask=there[None, :] & (n < z.N), other=0
        )
    bits = tl.where(on, bits[:, :, None], 0) + 0 * rest
    at = row[None, :, None] * z.N + cell + 0 * rest
    mask = there[None, :, None] & (cell < z.N) & (rest == 0)
    tl.store(m.BITS + at, bits, mask=mask)
    tl.store(m.WOKE + at, on & (rest == 0), mask=mask)
    code = (who >> (tl.arange(0, z.RB) * LINES)) & ((1 << LINES) - 1)
    if m.RESET is not None:
        code |= tl.load(m.RESET + row, mask=there, other=0).to(tl.int32) << _FRESH
    tl.store(m.ACT + row, code, mask=there)
    place = tl.sum(tl.where(seq == 0, place, 0), 1)[:, None, :] - 1
    place += ((woke * EACH) >> (LINES * seq)) & ((1 << LINES) - 1)
    entry = listed + 2 * (cell * B + place)
    tl.store(entry, b0 + seq + 0 * woke, mask=mask & on)
    tl.store(entry + 1, bits, mask=mask & on)


@triton.jit
def rows_many(t, p, programs, B, act, listed, m, z):
    """As `rows_phase`: states of this program's sequences are finished, and their cells choose.

    POLL: h~ and W_q Q are polled for here, of the first sequences those that `act` says.
    """
    for r in tl.range(p, tl.cdiv(B, z.RB), programs, num_stages=1):
        b = r * z.RB + tl.arange(0, z.RB)
        now = m.X + tl.cast(t, tl.int64) * B * z.X_ROW
        x = ()
        if (z.K_a < z.N) or (z.K_x < z.K):
            x = _vectors(now, b, b < B, z.K, z.X_ROW, z.X_SLOT, z)
        if z.POLL:
            if r != p:
                act = awake_before(t, b, B, m.ACT)
            states = finish(t, b, B, m, z, act)
        else:
            states = finish(t, b, B, m, z)
        select_many(t, r * z.RB, B, states, x, now, listed, m.COUNT + t * z.N, m, z)
