"""Backward kernel of the `triton` backend: the steps of a piece of the sequence in one launch.

Again two phases a step, each followed by a barrier of the grid. `grads` takes one sequence at a
time: it adds up the gradient of its state and goes back through Eqs. (21), (18) to (1), which
gives D5, the gradients of the gates' arguments and of W_q Q. `spread` takes a tile: BM sequences
of one cell j and BN of the N·d units, and multiplies D5 of cell j with its weights for states.
What each cell j gives is written apart and added in the order of cells, so runs are repeatable.

Shapes: T steps, B sequences, N cells of size d, K views, G = 4 or 5 gates, L ≥ G·d numbers of D5
in memory, BP = power of two ≥ d.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton_common import _FRESH, _SLOTS, grid_barrier, tanh


@triton.jit
def _arrived(t, b, B, T, DH, PART, BITS, N: tl.constexpr, K: tl.constexpr, d: tl.constexpr,
             BP: tl.constexpr):  # fmt: skip
    """The gradient (8, BP) of the state of sequence b after step t, less what y brings."""
    n, e = tl.arange(0, _SLOTS), tl.arange(0, BP)
    inside = (n < N)[:, None] & (e < d)[None, :]
    at = n[:, None] * d + e[None, :]
    dh = tl.load(DH + b * (N * d) + at, mask=inside, other=0.0)
    row = tl.cast(t + 1, tl.int64) * B + b
    later = t + 1 < T
    for j in tl.static_range(N):
        heard = tl.load(BITS + row * N + j, mask=later, other=0) >> (K + n)
        use = inside & ((heard & 1) != 0)[:, None]
        part = PART + (b * N + j) * (N * d)
        dh += tl.load(part + at, mask=use, other=0.0, cache_modifier=".cg")
    return dh


@triton.jit
def _grads(
    t, b, B, T, first, DY, DH, DC, PART, h0, Y, ACT, BITS, GATES, C, A, D5, DZ, LIST, COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, SCALE: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Back through Eqs. (21), (18) to (1) for sequence b."""
    n, e = tl.arange(0, _SLOTS), tl.arange(0, BP)
    inside = (n < N)[:, None] & (e < d)[None, :]
    at = n[:, None] * d + e[None, :]
    row = tl.cast(t, tl.int64) * B + b
    act = tl.load(ACT + row)
    woke = ((act >> n) & 1) != 0
    stays = (((act + 0 * n) >> _FRESH) & 1) == 0
    use = inside & woke[:, None]
    saved = GATES + row * (N * G * d) + n[:, None] * (G * d) + e[None, :]
    f = tl.load(saved, mask=use, other=0.0).to(tl.float32)
    i = tl.load(saved + d, mask=use, other=0.0).to(tl.float32)
    o = tl.load(saved + 2 * d, mask=use, other=0.0).to(tl.float32)
    g = tl.load(saved + 3 * d, mask=use, other=0.0).to(tl.float32)
    c_old = tl.load(C + row * (N * d) + at, mask=use, other=0.0)
    dy = tl.load(DY + row * (N * d) + at, mask=inside, other=0.0)
    dc = tl.load(DC + b * (N * d) + at, mask=inside, other=0.0)
    tanh_c = tanh(f * c_old + i * g)
    dh = dy + _arrived(t, b, B, T, DH, PART, BITS, N, K, d, BP)

    out = D5 + (tl.cast(t - first, tl.int64) * B + b) * (N * L) + n[:, None] * L + e[None, :]
    kind = D5.dtype.element_ty
    d_new = tl.where(woke[:, None], dh, 0.0)
    if G == 5:
        q = tl.load(saved + 4 * d, mask=use, other=0.0).to(tl.float32)
        old = tl.where(t == 0, h0, Y + tl.cast(t - 1, tl.int64) * (B * N * d))
        h = tl.load(old + b * (N * d) + at, mask=use & stays[:, None], other=0.0)
        a = tl.load(A + row * N + n, mask=woke, other=0.0)
        ahead = o * tanh_c - h
        dz = tl.sum(d_new * ahead, 1) * a * (1 - a)
        tl.store(DZ + row * N + n, dz, mask=n < N)
        dz *= SCALE
        tl.store(out + 4 * d, (dz[:, None] * ahead).to(kind), mask=inside)
        d_new = d_new * a[:, None] + dz[:, None] * q
    dc_new = tl.where(woke[:, None], dc, 0.0) + d_new * o * (1 - tanh_c * tanh_c)
    tl.store(out, (dc_new * c_old * f * (1 - f)).to(kind), mask=inside)
    tl.store(out + d, (dc_new * g * i * (1 - i)).to(kind), mask=inside)
    tl.store(out + 2 * d, (d_new * tanh_c * o * (1 - o)).to(kind), mask=inside)
    tl.store(out + 3 * d, (dc_new * i * (1 - g * g)).to(kind), mask=inside)
    d_old = tl.zeros((_SLOTS, BP), tl.float32)
    if G == 5:
        d_old = dh - d_new
    d_old = tl.where(woke[:, None], d_old, dh)
    dc_old = tl.where(woke[:, None], dc_new * f, dc)
    tl.store(DH + b * (N * d) + at, tl.where(stays[:, None], d_old, 0.0), mask=inside)
    tl.store(DC + b * (N * d) + at, tl.where(stays[:, None], dc_old, 0.0), mask=inside)
    if COMPACT:
        place = tl.atomic_add(COUNT + t * N + n, 1, mask=woke, sem="relaxed")
        tl.store(LIST + n * B + place, tl.zeros((_SLOTS,), tl.int32) + b, mask=woke)


@triton.jit
def _spread(
    t, j, u, r, B, first, W, D5, PART, BITS, LIST, COUNT,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    COMPACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What cell j's gates ask of BN units of the state; which of them it heard, `grads` minds."""
    place = r * BM + tl.arange(0, BM)
    if COMPACT:
        on = place < tl.load(COUNT + t * N + j, cache_modifier=".cg")
        b = tl.load(LIST + j * B + place, mask=on, other=0, cache_modifier=".cg")
    else:
        b = place
        row = tl.cast(t, tl.int64) * B + b
        on = tl.load(BITS + row * N + j, mask=b < B, other=0) != 0
    unit = u * BN + tl.arange(0, BN)
    inside = unit < N * d
    start = (tl.cast(t - first, tl.int64) * B + b) * (N * L) + j * L
    weight = (j * (K + N) * d + K * d + unit) * L
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in tl.range(0, L, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        a = tl.load(
            D5 + start[:, None] + k[None, :],
            mask=on[:, None] & (k < L)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        w = tl.load(
            W + weight[:, None] + k[None, :], mask=inside[:, None] & (k < L)[None, :], other=0.0
        )
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
    at = ((b * N + j) * (N * d))[:, None] + unit[None, :]
    tl.store(PART + at, acc, mask=on[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["B", "T", "first", "t0", "t1"])
def backward_kernel(
    DY, DH, DC, PART, h0, Y, ACT, BITS, GATES, C, A, W, D5, DZ, LIST, COUNT, COUNTER,
    B, T, first, t0, t1,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    G: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, COMPACT: tl.constexpr,
    WIDE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Steps t1 - 1 down to t0. PHASE is a sum: 1 grads, 2 spread, 4 barriers, 8 the start's gradient."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    TILES: tl.constexpr = N * ((N * d + BN - 1) // BN)
    target = 0
    for back in tl.range(0, t1 - t0, num_stages=1):
        t = t1 - 1 - back
        if PHASE & 8:
            for b in tl.range(p, B, programs, num_stages=1):
                dh = _arrived(t - 1, b, B, T, DH, PART, BITS, N, K, d, BP)
                n, e = tl.arange(0, _SLOTS), tl.arange(0, BP)
                at = b * (N * d) + n[:, None] * d + e[None, :]
                tl.store(DH + at, dh, mask=(n < N)[:, None] & (e < d)[None, :])
        if PHASE & 1:
            for b in tl.range(p, B, programs, num_stages=1):
                _grads(
                    t, b, B, T, first, DY, DH, DC, PART, h0, Y, ACT, BITS, GATES, C, A, D5, DZ, LIST,
                    COUNT, N, K, d, L, BP, G, SCALE, COMPACT,
                )  # fmt: skip
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
        if PHASE & 2:
            for tile in tl.range(p, TILES * tl.cdiv(B, BM), programs, num_stages=1):
                j_u = tile % TILES
                r = tile // TILES
                wanted = r * BM < B
                if COMPACT:
                    wanted = r * BM < tl.load(COUNT + t * N + j_u % N, cache_modifier=".cg")
                if wanted:
                    _spread(
                        t, j_u % N, j_u // N, r, B, first, W, D5, PART, BITS, LIST, COUNT,
                        N, K, d, L, BM, BN, BK, STAGES, PRECISION, COMPACT, WIDE,
                    )  # fmt: skip
        if PHASE & 4:
            target += programs
            grid_barrier(COUNTER, target)
