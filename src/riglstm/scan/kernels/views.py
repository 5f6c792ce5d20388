"""Kernels of the `triton` backend for the gradient of views.

Rows are pairs of step and sequence. Where cells sleep, or choose views, not all of them take in a
view of a row. Rows of which the same cells took it in are put together first, so that a tile of
them has no product with the weights of the others. The rows of all pieces of the backward pass are
sorted at once, each piece by itself: its product comes when its D5 is there.

Shapes: N cells of size d, K views, L numbers of D5 in memory, R rows in pieces of PER, and in those
groups of GROUP.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.weights import ROWS

# An entry of a list has the number of a row in its group, and above it a bit for each cell.
_ROW_BITS = tl.constexpr(ROWS.bit_length() - 1)
_ROW = tl.constexpr(ROWS - 1)


@triton.jit
def _takers(BITS, row, there, k, N: tl.constexpr):
    """A bit for each cell that took view k in."""
    takers = tl.zeros(row.shape, tl.int32)
    for cell in tl.static_range(N):
        bits = tl.load(BITS + row * N + cell, mask=there, other=0)
        takers |= ((bits >> k) & 1) << cell
    return takers


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _key(takers):
    """Its number in Gray's order, of up to eight cells: the next has one cell more or less."""
    key = takers ^ (takers >> 1)
    key = key ^ (key >> 2)
    return key ^ (key >> 4)


@triton.jit
def _piece(BITS, R, PER, N: tl.constexpr):
    """The bits of this program's piece, how many rows it has, and which of the pieces and views."""
    k, piece = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    first = piece * PER
    return BITS + first * N, tl.minimum(R - first, PER), piece * tl.num_programs(1) + k


@triton.jit(do_not_specialize=["R", "PER"])
def count_kernel(
    BITS, COUNT, R, PER,
    N: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """How many of BR rows are of each kind for view k, to COUNT (pieces, K, blocks, 2^N)."""
    KINDS: tl.constexpr = 1 << N
    p, k = tl.program_id(0), tl.program_id(1)
    BITS, R, which = _piece(BITS, R, PER, N)
    row, kind = p * BR + tl.arange(0, BR), tl.arange(0, KINDS)
    key = _key(_takers(BITS, row, row < R, k, N))
    many = tl.histogram(key, KINDS, mask=row < R)
    tl.store(COUNT + (which * tl.num_programs(0) + p) * KINDS + kind, many)


@triton.jit(do_not_specialize=["BLOCKS"])
def starts_kernel(
    COUNT, BLOCKS,
    N: tl.constexpr, GROUP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Of each kind in COUNT's BLOCKS of a piece: where a block's first row goes in its group."""
    MOST: tl.constexpr = GROUP // BR
    tl.static_assert(GROUP % BR == 0)
    which = tl.cast(tl.program_id(2), tl.int64) * tl.num_programs(1) + tl.program_id(1)
    block, kind = tl.program_id(0) * MOST + tl.arange(0, MOST), tl.arange(0, 1 << N)[None, :]
    at = COUNT + (which * BLOCKS + block)[:, None] * (1 << N) + kind
    there = (block < BLOCKS)[:, None]
    counts = tl.load(at, mask=there, other=0)
    many = tl.sum(counts, 0)
    start = (tl.cumsum(many, 0) - many)[None, :] + tl.cumsum(counts, 0) - counts
    tl.store(at, start, mask=there)


@triton.jit
def _equal(key, other):
    """How many others have a key, of either in the lanes of one warp."""
    return tl.sum((key[:, None] == other[None, :]).to(tl.int32), 1)


@triton.jit(do_not_specialize=["R", "PER"])
def sort_kernel(
    BITS, START, LIST, R, PER,
    N: tl.constexpr, GROUP: tl.constexpr, BR: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Put PART rows to their places in LIST (pieces, K, PER): a group's by who took view k in.

    START is what `starts_kernel` made of counts of BR rows. Rows of one kind stay in their order,
    so that sums repeat.
    """
    PARTS: tl.constexpr = BR // PART
    tl.static_assert(BR % PART == 0 and GROUP <= _ROW + 1 and N <= 8)
    p, k = tl.program_id(0) // PARTS, tl.program_id(1)
    BITS, R, which = _piece(BITS, R, PER, N)
    within = tl.arange(0, PART)
    row = tl.program_id(0) * PART + within
    takers = _takers(BITS, row, row < R, k, N)
    key = _key(takers)
    blocks = tl.num_programs(0) // PARTS
    place = tl.load(START + (which * blocks + p) * (1 << N) + key)
    # Behind those of its kind that come before it in its block.
    for first in tl.range(p * BR, tl.program_id(0) * PART, PART, num_stages=1):
        earlier = first + within
        place += _equal(key, _key(_takers(BITS, earlier, earlier < R, k, N)))
    same = (key[:, None] == key[None, :]) & (within[None, :] < within[:, None])
    place += tl.sum(same.to(tl.int32), 1)
    group = p * BR // GROUP * GROUP
    entry = (row - group) | (takers << _ROW_BITS)
    tl.store(LIST + which * PER + group + place, entry, mask=row < R)


@triton.jit(do_not_specialize=["R", "PER"], do_not_specialize_on_alignment=["LIST", "DV", "SUMS"])
def views_kernel(
    D5, D_UNIT, W, W_UNIT, LIST, DV, SUMS, R, PER,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of one view: D5 of all cells that took it in times their weights for it.

    Of the R rows of one piece, whose list is LIST (K, PER). SUMS (tiles of rows, K·d), if it is
    asked for, gets the sum over a tile's rows.
    """
    k, r = tl.program_id(0), tl.program_id(1)
    place = tl.cast(r, tl.int64) * BM + tl.arange(0, BM)
    there = place < R
    entry = tl.load(LIST + tl.cast(k, tl.int64) * PER + place, mask=there, other=0)
    row = place // GROUP * GROUP + (entry & _ROW)
    takers = entry >> _ROW_BITS
    # The cells that any row needs, four bits each: which they are must be known before the loop, or
    # its loads would have half the buffers.
    cells, many = 0, 0
    some = tl.reduce(takers, 0, _either)
    for cell in tl.static_range(N):
        one = (some >> cell) & 1
        cells |= (one * cell) << (4 * many)
        many += one
    unit = tl.arange(0, BP)
    CHUNKS: tl.constexpr = L // BK
    within = tl.arange(0, BK)[None, :]
    tl.static_assert(L % BK == 0 and GROUP % BM == 0 and N <= 8)
    # Columns without a unit have the last one's weights, as in `spread`, and are not written.
    weight = W + ((k * d + tl.minimum(unit, d - 1))[:, None] * L + within)
    rows = D5 + ((row * (N * L))[:, None] + within)
    acc = tl.zeros((BM, BP), tl.float32)
    for i in tl.range(0, many * CHUNKS, num_stages=STAGES):
        j, first = (cells >> (i // CHUNKS * 4)) & 7, i % CHUNKS * BK
        use = (((takers >> j) & 1) != 0)[:, None]
        a = tl.load(rows + (j * L + first), mask=use, other=0.0)
        w = tl.load(weight + (j * ((K + N) * d * L) + first))
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
    if D_UNIT is not None:
        w_unit = tl.load(W_UNIT + k * d + unit, mask=unit < d, other=0.0)
        d_unit = tl.load(D_UNIT + row, mask=there, other=0.0)
        acc = acc * d_unit[:, None] * w_unit[None, :]
    if SUMS is not None:
        # Rows that are not there took nothing in.
        tl.store(SUMS + r * (K * d) + k * d + unit, tl.sum(acc, 0), mask=unit < d)
    at = (row * (K * d))[:, None] + (k * d + unit)[None, :]
    tl.store(DV + at, acc.to(DV.dtype.element_ty), mask=there[:, None] & (unit < d)[None, :])


@triton.jit(do_not_specialize=["TILES"])
def sums_kernel(
    SUMS, OUT, TILES,
    WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sum of all lines of SUMS (TILES, WIDTH), BC columns of it, to OUT (WIDTH)."""
    col = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    acc = tl.zeros((BR, BC), tl.float32)
    for first in tl.range(0, TILES, BR, num_stages=1):
        line = first + tl.arange(0, BR)[:, None]
        at = SUMS + line.to(tl.int64) * WIDTH + col
        acc += tl.load(at, mask=(line < TILES) & (col < WIDTH), other=0.0)
    col = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(OUT + col, tl.sum(acc, 0), mask=col < WIDTH)
