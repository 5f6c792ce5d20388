"""What the forward kernels read: packed weights, and the views of the input.

`pack_kernel` packs the weights. For products in bfloat16 and in scaled float16 the map from the
input to views is a kernel, too: it rounds the input, multiplies it, and puts each view to its
place. Its weights come rounded and with the views' gaps from `pack_kernel`. In float32 torch maps
the input, and `hold_kernel` puts the views to their places.

With TF32 in halves another kernel makes halves of the input first. float16 has not TF32's range: so
each line of W_in is divided by a power of two, by which its feature is multiplied, and then each
row of the input by another one. What is cut off of a feature is small beside what another one can
add to some view of the row. So a view some 2^28 below another of its row loses bits, as it does in
XH.

With more than 64 sequences the tiled kernel maps the input itself (input prefetch): two steps
ahead, beside `gates`, by programs that have no tile of gates, if there are any. Where the input is
of another dtype than products it is rounded a step before that: what a product rounds on its way
goes through shared memory twice, and took longer than a tile of gates.

Shapes: T steps, B sequences, R = T · B rows of D features, N cells and K views of size d, S = K + N
slots of P ≥ d numbers in memory, G = 4 or 5 gates; BK, BP and BH: powers of two that hold K, P and
N·d.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton.kernels.common import (
    column_unit,
    power_below,
    quarter_of,
    to_nearest,
    unit_of,
)

# Where the largest numbers of a line and of a row end up: float16 ends at 2^16.
_HIGH = tl.constexpr(2.0**14)
_BOTH = tl.constexpr(2.0**-28)


@triton.constexpr_function
def lines_at_once(BW: int) -> int:
    """Lines of W_in that a program packs, BW numbers each."""
    return min(8, 8192 // BW)


@triton.jit
def pack_lines(
    W_IN, OUT, SIZES, i,
    D: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Lines of W_in (D, K·d) as (D, K·P), zero in the gaps; BW is a power of two that holds K·P.

    With SIZES (D,), each line is divided by one.
    """
    LINES: tl.constexpr = lines_at_once(BW)
    line, col = i * LINES + tl.arange(0, LINES)[:, None], tl.arange(0, BW)[None, :]
    view, e = col // P, col % P
    inside = (line < D) & (view < K)
    w = tl.load(W_IN + line * (K * d) + view * d + e, mask=inside & (e < d), other=0.0)
    w = w.to(tl.float32)
    if SIZES is not None:
        size = tl.abs(w)
        # A weight that is infinite takes no bits from the others.
        size = tl.max(tl.where(size < float("inf"), size, 0.0), 1)[:, None]
        size, per = power_below(size)
        tl.store(SIZES + line, size, mask=line < D)
        w = w * per * _HIGH
    tl.store(OUT + line * (K * P) + col, to_nearest(w, OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B", "R"])
def halve_kernel(
    X, SIZES, BIAS, h0, OUT, X_SIZE, X_UNIT, B, R,
    D: tl.constexpr, X_ROW: tl.constexpr, BIASES: tl.constexpr, STATES: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """BR rows of x (R, D) in halves, as (R, X_ROW), and the X_SIZE by which they are divided.

    The unit of a row of XH is known here, before its views are: no view is larger than the sum of
    what each feature can add to any. It holds the state that was given, if any, and one, which no
    other state gets above.
    """
    row, k = tl.cast(tl.program_id(0), tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    there = row < R
    size = tl.load(SIZES + k, mask=k < D, other=0.0)
    at = row[:, None] * D + k
    x = tl.load(X + at, mask=there[:, None] & (k < D), other=0.0).to(tl.float32) * size
    each = tl.abs(x)
    scale, per = power_below(tl.max(each, 1))
    x = (x * per[:, None] * _HIGH).to(OUT.dtype.element_ty)
    tl.store(OUT + row[:, None] * X_ROW + k, x, mask=there[:, None] & (k < X_ROW))
    tl.store(X_SIZE + row, scale, mask=there)
    # A weight is less than twice its line's size.
    most = 2.0 * tl.sum(each, 1)
    if BIAS is not None:
        j = tl.arange(0, BW)
        bias = tl.load(BIAS + j, mask=j < BIASES, other=0.0).to(tl.float32)
        most += tl.max(tl.abs(bias), 0)
    unit = tl.maximum(unit_of(most), unit_of(1.0 + 0.0 * scale))
    if h0 is not None:
        n = tl.arange(0, BH)[None, :]
        h = tl.load(h0 + (row % B)[:, None] * STATES + n, mask=n < STATES, other=0.0)
        unit = tl.maximum(unit, unit_of(tl.max(tl.abs(h), 1)))
    tl.store(X_UNIT + row, unit, mask=there)


@triton.jit
def map_tile(
    row, at, there, u, X, X_SIZE, W, BIAS, XH, X_UNIT, VIEWS,
    D: tl.constexpr, X_ROW: tl.constexpr, K: tl.constexpr, S: tl.constexpr, d: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows `at` (BM) of x that are `there`, times BN columns of W (D, K·P), plus the bias (K·d).

    To `row` of XH (R, S, P). With X_SIZE they are those of `halve_kernel`, X_ROW numbers each, and
    the views go to VIEWS (R, K, P) in float32, and to XH in units of X_UNIT.
    """
    WIDTH: tl.constexpr = K * P
    col = u * BN + tl.arange(0, BN)
    rows, inside = there[:, None], (col < WIDTH)[None, :]
    kind = XH.dtype.element_ty
    # Numbers that are rounded on their way are the second operand, which lies in shared memory. As
    # the first one Triton has them in registers, and up to 3.6 writes to these while a product of
    # the turn before still reads them (its issue 9433): at times a tile was wrong by some products.
    TURNED: tl.constexpr = X.dtype.element_ty != kind
    acc = tl.zeros((BN, BM) if TURNED else (BM, BN), tl.float32)
    for m in tl.range(0, (D + BK - 1) // BK, num_stages=STAGES):
        k = m * BK + tl.arange(0, BK)
        x = tl.load(
            X + (at * X_ROW)[:, None] + k[None, :], mask=rows & (k < X_ROW)[None, :], other=0.0
        )
        w = tl.load(
            W + (k * WIDTH)[:, None] + col[None, :], mask=(k < D)[:, None] & inside, other=0.0
        )
        x = to_nearest(x, kind)
        if WIDE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        if TURNED:
            acc = tl.dot(w.T, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee")
    if TURNED:
        acc = acc.T
    if X_SIZE is not None:
        acc = acc * _BOTH * tl.load(X_SIZE + row, mask=there, other=0.0)[:, None]
    if BIAS is not None:
        view, e = col // P, col % P
        bias = tl.load(BIAS + view * d + e, mask=(view < K) & (e < d), other=0.0).to(tl.float32)
        if X_SIZE is None:
            bias = to_nearest(bias, kind).to(tl.float32)
        acc += bias[None, :]
    if X_SIZE is not None:
        tl.store(VIEWS + (row * WIDTH)[:, None] + col[None, :], acc, mask=rows & inside)
        acc = acc * (1.0 / tl.load(X_UNIT + row, mask=there, other=1.0))[:, None]
    out = XH + (row * (S * P))[:, None] + col[None, :]
    tl.store(out, to_nearest(acc, kind), mask=rows & inside)


@triton.jit(do_not_specialize=["R"])
def map_kernel(
    X, X_SIZE, W, BIAS, XH, X_UNIT, VIEWS, R,
    D: tl.constexpr, X_ROW: tl.constexpr, K: tl.constexpr, S: tl.constexpr, d: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """All rows: a `map_tile` a program."""
    COLUMNS: tl.constexpr = (K * P + BN - 1) // BN
    # Programs that run side by side share rows, the larger of both operands.
    r, u = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    row = tl.cast(r, tl.int64) * BM + tl.arange(0, BM)
    map_tile(
        row, row, row < R, u, X, X_SIZE, W, BIAS, XH, X_UNIT, VIEWS, D, X_ROW, K, S, d, P, BM, BN,
        BK, STAGES, WIDE,
    )  # fmt: skip


# Programs that are counted at once: more than multiprocessors, and less than the sum below holds.
_LANES = tl.constexpr(256)


@triton.jit
def _unused(t, p, programs, COUNT, N: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr):
    """Which one program p is of those that have no tile of gates in step t, and how many are.

    There is one at the least, and there are up to _LANES programs.
    """
    other = tl.arange(0, _LANES)
    j, r = other % N, other // (N * TILES)
    count = tl.load(COUNT + t * N + j)
    free = (other < programs) & (r * BM >= count)
    # Both numbers in one sum.
    both = tl.sum(tl.where(free, 1 + tl.where(other < p, 1 << 10, 0), 0))
    return both >> 10, both & 1023


@triton.jit
def _rounded(t, B, LOW, ROW: tl.constexpr, SAVE: tl.constexpr):
    """Where step t of the rounded input is: a backward pass needs all of them, the map two."""
    return LOW + tl.cast(t if SAVE else t & 1, tl.int64) * B * ROW


@triton.jit
def round_rows(
    t, T, first, step, taken, B, X, LOW,
    D: tl.constexpr, X_ROW: tl.constexpr, ROW: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Step t < T of x in the products' dtype, zero in rows' gaps: a share, one of `step` programs'.

    The first ones are taken otherwise, and have none where the others are enough.
    """
    BR: tl.constexpr = 32
    BD: tl.constexpr = 256
    PARTS: tl.constexpr = (ROW + BD - 1) // BD
    OUT, parts = _rounded(t, B, LOW, ROW, SAVE), PARTS * tl.cdiv(B, BR)
    # Three parts take no longer than a tile of the map.
    enough = 3 * (step - taken) >= parts
    first, step = tl.where(enough, first - taken, first), tl.where(enough, step - taken, step)
    if (first >= 0) & (t < T):
        for i in tl.range(first, parts, step, num_stages=1):
            b = tl.cast(i // PARTS, tl.int64) * BR + tl.arange(0, BR)[:, None]
            k = i % PARTS * BD + tl.arange(0, BD)
            inside = (b < B) & (k < ROW)[None, :]
            at = X + (tl.cast(t, tl.int64) * B + b) * X_ROW + k[None, :]
            x = tl.load(at, mask=inside & (k < D)[None, :], other=0.0)
            x = to_nearest(x, LOW.dtype.element_ty)
            tl.store(OUT + b * ROW + k[None, :], x, mask=inside)


@triton.jit
def map_ahead(
    t, T, p, programs, busy, B, X, X_SIZE, W, BIAS, XH, X_UNIT, VIEWS, LOW, COUNT,
    D: tl.constexpr, X_ROW: tl.constexpr, LOW_ROW: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    d: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """The views of step t + 2, by the programs that have no tile of gates in step t.

    Where these may be too few for two tiles each, by all. With LOW, x is rounded to it a step
    before it is mapped.
    """
    COLUMNS: tl.constexpr = (K * P + BN - 1) // BN
    tiles, left = COLUMNS * tl.cdiv(B, BM), programs - N * TILES * tl.cdiv(B, BM)
    everyone = (2 * left < tiles) | (programs > _LANES)
    if everyone | (busy == 0):
        first, step = programs - 1 - p, programs
        if not everyone:
            first, step = _unused(t, p, programs, COUNT, N, TILES, BM)
        if LOW is not None:
            round_rows(t + 3, T, first, step, tiles, B, X, LOW, D, X_ROW, LOW_ROW, SAVE)
        tiles = tl.where(t + 2 < T, tiles, 0)
        for tile in tl.range(first, tiles, step, num_stages=1):
            r, u = tile // COLUMNS, tile % COLUMNS
            b = tl.cast(r, tl.int64) * BM + tl.arange(0, BM)
            row = tl.cast(t + 2, tl.int64) * B + b
            if LOW is None:
                map_tile(
                    row, row, b < B, u, X, X_SIZE, W, BIAS, XH, X_UNIT, VIEWS, D, X_ROW, K, K + N,
                    d, P, BM, BN, BK, STAGES, WIDE,
                )  # fmt: skip
            else:
                low = _rounded(t + 2, B, LOW, LOW_ROW, SAVE)
                map_tile(
                    row, b, b < B, u, low, None, W, BIAS, XH, None, None, D, LOW_ROW, K, K + N, d,
                    P, BM, BN, BK, STAGES, WIDE,
                )  # fmt: skip


PACKED_COLUMNS = 32
"""Columns of a tile that a program packs."""
_COLUMNS = tl.constexpr(PACKED_COLUMNS)


@triton.constexpr_function
def _at_once(BP: int) -> int:
    """Slots that are loaded at once: a thread holds 32 numbers of each of four."""
    return 4 if BP <= 128 else 1


@triton.jit(do_not_specialize=["B"])
def hold_kernel(
    X, h0, XH, X_UNIT, B,
    N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, d: tl.constexpr, P: tl.constexpr,
    BK: tl.constexpr, BP: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The views of one row as the forward kernel holds them; with X_UNIT, in units of it.

    float16 has TF32's ten bits in half the bytes, but not its range. States are written in the same
    unit: one that holds the state that was given, and one, which no other state gets above.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    k, e = tl.arange(0, BK)[:, None], tl.arange(0, BP)[None, :]
    x = tl.load(X + row * (K * d) + k * d + e, mask=(k < K) & (e < d), other=0.0)
    if X_UNIT is not None:
        at = row % B * (N * d) + tl.arange(0, BH)
        h = tl.load(h0 + at, mask=tl.arange(0, BH) < N * d, other=0.0)
        unit = tl.maximum(unit_of(tl.max(tl.max(tl.abs(x), 1), 0)), unit_of(tl.max(tl.abs(h), 0)))
        unit = tl.maximum(unit, unit_of(1.0 + 0.0 * unit))
        tl.store(X_UNIT + row, unit)
        x /= unit
    tl.store(XH + row * (S * P) + k * P + e, x.to(XH.dtype.element_ty), mask=(k < K) & (e < P))


@triton.jit
def _columns(
    W, W_Q, j, u, first, col,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    TILES: tl.constexpr, FOLDED: tl.constexpr, PER_CELL: tl.constexpr, BY_GATE: tl.constexpr,
):  # fmt: skip
    """_at_once slots (BP, BC) from the first on, of columns `col` (1, BC) of tile u of cell j.

    Beyond the last slot they are zero. Columns lie side by side, as in W, so that threads beside
    each other read what lies together.
    """
    S: tl.constexpr = K + N
    U: tl.constexpr = BN // 4
    UNITS: tl.constexpr = (4 * d + BN - 1) // BN
    # The last of W_q, where its tiles leave them to the last one of units.
    REST: tl.constexpr = (TILES - UNITS) * BN
    if BY_GATE:
        gate = col // U
        unit = u * U + col % U
        if u >= UNITS:
            unit = (u - UNITS) * BN + col
    else:
        gate, _ = quarter_of(col)
        unit = column_unit(u, col, d, BN)
    out = ()
    for i in tl.static_range(_at_once(BP)):
        s = first + i
        k = tl.where(s < S, tl.arange(0, BP), d)[:, None]
        slot = (j * (S - 1) if PER_CELL else 0) + s - tl.where(s > K + j, 1, 0)
        heard = (k < d) & (s + 0 * k != K + j)
        if u >= UNITS:
            w = tl.load(W_Q + (slot * d + k) * d + unit, mask=heard & (unit < d), other=0.0)
        else:
            at = ((j * S + s) * d + k) * (4 * d) + gate * d + unit
            w = tl.load(W + at, mask=(k < d) & (unit < d), other=0.0)
            if FOLDED:
                q = REST + col - d % U
                here = (u + 0 * col == UNITS - 1) & (col >= d % U) & (col < U) & (q < d)
                w += tl.load(W_Q + (slot * d + k) * d + q, mask=heard & here, other=0.0)
        out += (w,)
    return out


@triton.jit
def _pack_tile(
    W, W_Q, OUT, W_UNIT, tile,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
    BP: tl.constexpr, TILES: tl.constexpr, FOLDED: tl.constexpr, PER_CELL: tl.constexpr,
    BY_GATE: tl.constexpr,
):  # fmt: skip
    """_COLUMNS of its columns, see `pack_kernel`: part `tile` of all."""
    S: tl.constexpr = K + N
    AT_ONCE: tl.constexpr = _at_once(BP)
    PARTS: tl.constexpr = BN // _COLUMNS
    part, tile = tile % PARTS, tile // PARTS
    j, u = tile // TILES, tile % TILES
    k, col = tl.arange(0, BP)[None, :], part * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    size = tl.full((1, _COLUMNS), 1.0, tl.float32)
    # No load passes a store: so those of several slots are under way before the first store.
    if W_UNIT is not None:
        largest = tl.zeros((BP, _COLUMNS), tl.float32)
        for first in tl.range(0, S, AT_ONCE):
            slots = _columns(
                W, W_Q, j, u, first, col, N, K, d, BN, BP, TILES, FOLDED, PER_CELL, BY_GATE
            )  # fmt: skip
            for i in tl.static_range(AT_ONCE):
                largest = tl.maximum(largest, tl.abs(slots[i]))
        size = unit_of(tl.max(largest, 0)[None, :])
        size = tl.where(size == 0, 1.0, size)
        tl.store(W_UNIT + tile * BN + col, size)
    out = OUT + (tile * BN + col).trans() * (S * P) + k
    for first in tl.range(0, S, AT_ONCE):
        slots = _columns(
            W, W_Q, j, u, first, col, N, K, d, BN, BP, TILES, FOLDED, PER_CELL, BY_GATE
        )  # fmt: skip
        for i in tl.static_range(AT_ONCE):
            packed = (slots[i] / size).to(OUT.dtype.element_ty).trans()
            tl.store(out + (first + i) * P, packed, mask=(k < P) & (first + i < S))


@triton.jit
def _fill(OUT, FROM, many):
    """So many numbers of FROM, or without it zeros, to OUT, by all programs together."""
    BLOCK: tl.constexpr = 1024
    step = tl.num_programs(0) * BLOCK
    for start in tl.range(tl.program_id(0) * BLOCK, many, step, num_stages=1):
        at = start + tl.arange(0, BLOCK)
        value = tl.zeros((BLOCK,), OUT.dtype.element_ty)
        if FROM is not None:
            value = tl.load(FROM + at, mask=at < many)
        tl.store(OUT + at, value, mask=at < many)


@triton.jit(do_not_specialize=["zeros", "numbers"])
def pack_kernel(
    W, W_Q, W_IN, C0, OUT, W_UNIT, OUT_IN, SIZES, COUNTER, C, H, zeros, numbers,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr, TILES: tl.constexpr,
    PER_CELL: tl.constexpr, BY_GATE: tl.constexpr,
):  # fmt: skip
    """_COLUMNS columns of W (N, S·d, 4·d) and W_q.

    To (N, tiles, BN, S·P), as the forward kernel reads it: BN / 4 units with four gates each, in an
    order that gives all gates of a unit to one thread or BY_GATE, or BN columns of W_q; in units of
    W_UNIT where there are any. Where TILES are not enough for all of W_q, the rest of it lies where
    the last tile of units has no unit, among the columns of the first gate.

    What else is given is written on the way. OUT_IN gets W_IN, and SIZES what its lines are divided
    by: see `pack_lines`. `zeros` integers from COUNTER on become zero: those of the next kernel's
    barriers, and the counts behind them. Of C and H, `numbers` each, H becomes zero, and C a copy
    of C0, or zero without it.
    """
    FOLDED: tl.constexpr = G == 5 and (TILES - (4 * d + BN - 1) // BN) * BN < d
    tl.static_assert(BY_GATE or not FOLDED)
    PARTS: tl.constexpr = N * TILES * (BN // _COLUMNS)
    tile = tl.program_id(0)
    if COUNTER is not None:
        _fill(COUNTER, None, zeros)
    if C is not None:
        _fill(C, C0, numbers)
    if H is not None:
        _fill(H, None, numbers)
    if tile < PARTS:
        _pack_tile(
            W, W_Q, OUT, W_UNIT, tile, N, K, d, P, BN, BP, TILES, FOLDED, PER_CELL, BY_GATE
        )  # fmt: skip
    elif OUT_IN is not None:
        pack_lines(W_IN, OUT_IN, SIZES, tile - PARTS, D, K, d, P, BW)
