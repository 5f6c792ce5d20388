"""Kernels for weights in the backward pass: their layout, their gradient, and what cells took in.

Weights are laid out in lines: a line is what one number of H gives to all gates of a cell.

Shapes: N cells of size d, K views, S = K + N slots, G = 4 or 5 gates, L ≥ G·d numbers of a line in
memory, P ≥ d numbers of a slot. BL lines of BG, or BG and BQ, columns are taken at a time; BS and
BP are powers of two that hold S and P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton.kernels.common import unit_of

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
