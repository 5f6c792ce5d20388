"""Vectors of all cells in pieces, for the row-wise phase.

A tile is (8, RB, PIECE): a line for each cell, RB sequences, and a piece of a vector; so a vector
lies in a few lanes, which add up most of it each for itself. A vector is a tuple of its M pieces.
Every sum over d goes piece by piece and then in the same order over a piece, so that equal vectors
get equal scores to the last bit (P4).

Shapes: B sequences, N cells of size d.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.common import _SLOTS

PIECE = 32
"""Numbers of a vector that eight lanes take at a time, four each."""

_PIECE = tl.constexpr(PIECE)


@triton.jit
def tile_of(V, b, ROW: tl.constexpr, SLOT: tl.constexpr, PIECE: tl.constexpr):
    """Addresses (8, RB, PIECE) of the first pieces of the cells' vectors; 0 for SLOT: all one."""
    n, e = tl.arange(0, _SLOTS)[:, None, None], tl.arange(0, PIECE)[None, None, :]
    return V + tl.cast(b, tl.int64)[None, :, None] * ROW + n * SLOT + e


@triton.jit
def inside(i: tl.constexpr, mask, N: tl.constexpr, d: tl.constexpr, PIECE: tl.constexpr):
    """Which numbers (8, RB, PIECE) of piece i there are, of rows where mask is set."""
    n, e = tl.arange(0, _SLOTS)[:, None, None], tl.arange(0, PIECE)[None, None, :]
    return mask[None, :, None] & (n < N) & (i * PIECE + e < d)


@triton.jit
def read(at, mask, N: tl.constexpr, d: tl.constexpr, PIECE: tl.constexpr):
    """The M pieces of the vectors at these addresses."""
    out = ()
    for i in tl.static_range((d + PIECE - 1) // PIECE):
        out += (tl.load(at + i * PIECE, mask=inside(i, mask, N, d, PIECE), other=0.0),)
    return out


@triton.jit
def write(at, pieces, mask, N: tl.constexpr, d: tl.constexpr, PIECE: tl.constexpr):
    """The pieces, d numbers of them, to these addresses."""
    for i in tl.static_range(len(pieces)):
        value = pieces[i].to(at.dtype.element_ty)
        tl.store(at + i * PIECE, value, mask=inside(i, mask, N, d, PIECE))


@triton.jit
def store_each(at, value, mask, LANES: tl.constexpr):
    """Store a number (8, RB) of each cell, by one of the lanes that have its state.

    They are a dimension along which addresses grow, so that the compiler lays them as for states:
    else it would send all numbers to one warp, through shared memory.
    """
    lane = tl.arange(0, LANES)[None, None, :]
    mask = mask[:, :, None] & (lane < 1)
    tl.store(at[:, :, None] + lane, value[:, :, None] + 0 * lane, mask=mask)


@triton.jit
def products(h, v):
    """The products of states with what they look at, added up piece by piece."""
    s = h[0] * v[0].to(tl.float32)
    for i in tl.static_range(1, len(h)):
        s += h[i] * v[i].to(tl.float32)
    return s


@triton.jit
def score(h, v):
    """The sum over d of the products of two vectors, (8, RB)."""
    return tl.sum(products(h, v), 2)
