"""Kernels of the `triton` backend for the gradient of weights: Hᵀ D5 over the rows of a piece.

Rows are pairs of step and sequence, R of them in pieces of PER. Of a cell, only those in which it
was awake count: they are put in lists first, those of all pieces at once. What it took in, H, is
never written: of XH, loads leave out what it did not.

Shapes: N cells, S slots of P numbers in memory, L numbers of D5, WIDTH = S·P + 8 numbers of H, of
which the first behind the slots is one: its line is the gradient of biases.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 1 << 14
"""Rows of a piece at the most: an entry of a list is the number of a row, and above it the bits."""
_ROW_BITS = tl.constexpr(ROWS.bit_length() - 1)
_MOST = tl.constexpr(ROWS)


@triton.jit(do_not_specialize=["R", "PER"])
def awake_kernel(
    ACT, BITS, LIST, COUNT, R, PER,
    N: tl.constexpr, S: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Rows of a piece from BR · p on in which cell j was awake, to LIST (pieces, N, ROWS) in order.

    COUNT (pieces, N) is how many. An entry has the row, above it a bit for each slot that the cell
    took in, and one for the ones behind them. So none is zero. Who is awake takes something in: ACT
    and BITS say the same.
    """
    first, j, piece = tl.program_id(0) * BR, tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    ACT += piece * PER
    BITS += piece * PER * N
    LIST += (piece * N + j) * _MOST
    R = tl.minimum(R - piece * PER, PER)
    earlier = tl.arange(0, _MOST)
    act = tl.load(ACT + earlier, mask=earlier < tl.minimum(first, R), other=0)
    start = tl.sum((act >> j) & 1, 0)
    row = first + tl.arange(0, BR)
    bits = tl.load(BITS + row * N + j, mask=row < R, other=0)
    awake = (bits != 0).to(tl.int32)
    place = start + tl.cumsum(awake, 0) - 1
    entry = row | ((bits | (1 << S)) << _ROW_BITS)
    tl.store(LIST + place, entry, mask=awake != 0)
    if first + BR >= R:
        tl.store(COUNT + piece * N + j, start + tl.sum(awake, 0))


@triton.jit(do_not_specialize_on_alignment=["COUNT"])
def weights_kernel(
    XH, ONES, D5, LIST, COUNT, DW,
    N: tl.constexpr, S: tl.constexpr, P: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add BM lines by BN columns of Hᵀ D5 of one cell to DW (N, WIDTH, L).

    ONES is a one and seven zeros.
    """
    WIDTH: tl.constexpr = S * P + 8
    LINES: tl.constexpr = (WIDTH + BM - 1) // BM
    COLUMNS: tl.constexpr = L // BN
    tl.static_assert(L % BN == 0 and P % 8 == 0)
    p = tl.program_id(0)
    j, m, n = p // (LINES * COLUMNS), p // COLUMNS % LINES, p % COLUMNS
    line, column = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    behind = tl.max_constancy(line >= S * P, 8)
    start = tl.where(behind, ONES + line % 8, XH + line)
    step = tl.where(behind, 0, S * P)
    # Beyond the ones there is nothing to add to.
    there = line < WIDTH
    bit = _ROW_BITS + tl.max_constancy(tl.minimum(line // P, S), 8)
    gates = D5 + j * L + column
    LIST += j * _MOST
    many = tl.load(COUNT + j)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, tl.cdiv(many, BK), num_stages=STAGES):
        place = i * BK + tl.arange(0, BK)
        entry = tl.load(LIST + place, mask=place < many, other=0)
        row = entry & (_MOST - 1)
        took = ((entry[:, None] >> bit[None, :]) & 1) != 0
        at = start[None, :] + row[:, None] * step[None, :]
        # Eight lines are of one slot, and lie at a multiple of 16 bytes, as XH, ONES and P do: the
        # compiler has to be told, or it loads them one by one, and not ahead.
        at = tl.max_contiguous(tl.multiple_of(at, [1, 16]), [1, 8])
        a = tl.load(at, mask=took, other=0.0)
        b = tl.load(
            gates[None, :] + (row * (N * L))[:, None], mask=(entry != 0)[:, None], other=0.0
        )
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a.T, b, acc)
    out = DW + ((j * WIDTH + line) * L)[:, None] + column[None, :]
    tl.store(out, tl.load(out, mask=there[:, None]) + acc, mask=there[:, None])
