"""Kernels that pack weights and views as the forward kernels read them.

Shapes: N cells of size d, K views, S = K + N slots, P numbers a slot in memory, G = 4 or 5 gates,
BK, BP and BH: powers of two that hold K, P and N·d.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton.kernels.common import column_unit, quarter_of, unit_of
from riglstm.scan.triton.kernels.input_map import pack_lines

COLUMNS = 32
"""Columns of a tile that a program packs."""


_COLUMNS = tl.constexpr(COLUMNS)


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
