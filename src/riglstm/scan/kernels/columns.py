"""Which rows and columns a tile of the kernels has.

Shapes: B sequences, cells of size d, BM sequences by BN columns in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dealt(r, B, BM: tl.constexpr):
    """Places (BM) of tile r in a list of at most B: dealt like cards, so that tiles share equally.

    The first tiles would else be full and the last one empty, where lists are short, and a step
    takes as long as its fullest tile.
    """
    return r + tl.cdiv(B, BM) * tl.arange(0, BM)


@triton.jit
def quarter_of(col):
    """The quarter that a column of a tile stands for, and its number there.

    A thread has the same of all four quarters: of its columns of a product, bits 0 and 3 differ.
    """
    return (col >> 2) & 2 | col & 1, (col >> 4) << 2 | (col >> 1) & 3


@triton.jit
def quarters(acc, BM: tl.constexpr, BN: tl.constexpr):
    """The four quarters (BM, BN / 4) of a product whose columns are those of `quarter_of`."""
    four = acc.reshape(BM, BN // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(BM, BN // 4, 2, 2)
    even, odd = tl.split(four)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def column_unit(u, col, d: tl.constexpr, BN: tl.constexpr):
    """The unit of each column of tile u, or its number of W_q Q; not below d, where it has none.

    The gates are quarters. Tiles have equally many units, in fours: so many are loaded at once.
    """
    UNITS: tl.constexpr = (4 * d + BN - 1) // BN
    PER: tl.constexpr = (d + 4 * UNITS - 1) // (4 * UNITS) * 4
    gate, lane = quarter_of(col)
    unit = tl.where(lane < PER, u * PER + lane, d)
    return tl.where(u < UNITS, unit, (u - UNITS) * BN + gate * (BN // 4) + lane)
