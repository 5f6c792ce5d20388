"""The map from the input to views within the forward kernel, for more than 64 sequences.

It is done two steps ahead, beside `gates`, by programs that have no tile of gates, if there are
any. Where the input is of another dtype than products are it is rounded a step before that: what a
product rounds on its way goes through shared memory twice, and took longer than a tile of gates.

Shapes: T steps, B sequences, D features, N cells, K views of size d, slots of P ≥ d numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.common import to_nearest
from riglstm.scan.kernels.input_map import map_tile

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
