"""Products of many sequences, whose rows go from memory to registers, for sm_90 and halves.

There the tensor cores read one operand from shared memory or from registers, the other always from
shared memory. A tile of 128 x 128 that keeps both there is bound by it: of a piece of 64 columns,
32 KB are written and, as each half of its warps reads all weights, 48 read, which takes 640 cycles,
where the tensor cores take 512. So the weights alone go there.

Of 16 columns, a thread has 2t, 2t + 1, 2t + 8 and 2t + 9 of two rows that are 8 apart, with t its
place among four. Read like that, it would be four bytes at a time. But the order of columns in a
sum is free: a thread reads eight in a row, and in the product these are what it has of 32 columns.
The packed weights have that order, too (`place_of`).

Shapes: P numbers a slot in memory, D numbers of all slots, BM rows by BN columns in a tile, BK
numbers of the sum in a piece.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.common import _INTERPRETED

GROUP = 32
"""Numbers of a row that four threads read together, 16 bytes each."""
_GROUP = tl.constexpr(GROUP)


@triton.jit
def place_of(k):
    """Where in a sum the column comes that lies at k in memory; and the other way round."""
    return (k & -_GROUP) | ((k & 6) << 2) | ((k >> 2) & 6) | (k & 1)


@triton.jit
def lines_read(BM: tl.constexpr):
    """Lines (BM) of a tile in the order in which they are read: a thread's are the two it needs."""
    i = tl.arange(0, BM)
    return i % (BM // 2) // 8 * 16 + i // (BM // 2) * 8 + i % 8


@triton.jit
def _ask(at, taken, m, P: tl.constexpr, BK: tl.constexpr):
    """Piece m of all rows, a group (BM, 16) after another, two numbers in an integer of 32 bits.

    As such they are kept until they are needed: to take them apart is to wait for them.
    """
    piece = ()
    for group in tl.static_range(BK // _GROUP):
        first = m * (BK // 2) + group * (_GROUP // 2)
        # Beyond the last slot, and at the highest bit, nothing is taken in.
        slot = tl.minimum((first + tl.arange(0, _GROUP // 2)) // (P // 2), 31)
        take = ((taken[:, None] >> slot[None, :]) & 1) != 0
        piece += (tl.load(at + first, mask=take, other=0, cache_modifier=".cg"),)
    return piece


@triton.jit
def _halves(words):
    """The two numbers that lie in each integer, the first in its lower half."""
    if _INTERPRETED:
        return words.to(tl.int16), (words >> 16).to(tl.int16)
    # A shift would come between the products, which ptxas would run one after another then.
    return tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], (tl.int16, tl.int16), True, 1
    )


@triton.jit
def _operand(piece, kind: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """A piece as (BM, BK), its lines and columns in their order: no number leaves its thread."""
    PAIR: tl.constexpr = 2 if BK > _GROUP else 1
    PAIRS: tl.constexpr = 2 if BK > 2 * _GROUP else 1
    tl.static_assert(BK == PAIRS * PAIR * _GROUP, "a piece has one, two or four groups")
    words = piece[0]
    if PAIR == 2:
        words = tl.join(words, piece[1])
    if PAIRS == 2:
        words = tl.join(words, tl.join(piece[2], piece[3]))
    low, high = _halves(words)
    a = tl.join(low, high).reshape(2, BM // 16, 8, 4, 2, 2, PAIR, PAIRS, 2)
    a = a.permute(1, 0, 2, 7, 6, 4, 5, 3, 8).reshape(BM, BK)
    return a.to(kind, bitcast=True)


@triton.jit
def product(
    rows, taken, columns, filled, acc,
    D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """acc, and rows times the columns that are filled, by where in memory they begin.

    Rows (BM) and what they take in, a bit for each slot, are in the order of `lines_read`. A turn
    of the loop multiplies AHEAD pieces while as many are under way.
    """
    WIDTH: tl.constexpr = (D + _GROUP - 1) // _GROUP * _GROUP
    GROUPS: tl.constexpr = BK // _GROUP
    TURNS: tl.constexpr = (D + AHEAD * BK - 1) // (AHEAD * BK)
    kind: tl.constexpr = columns.dtype.element_ty
    at = rows.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, _GROUP // 2)[None, :]
    ahead = ()
    for i in tl.static_range(AHEAD):
        ahead += _ask(at, taken, i, P, BK)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        coming = ()
        if AHEAD == 1:
            # Products are waited for in the next turn only: these loads have until then.
            coming += _ask(at, taken, turn + 1, P, BK)
        for i in tl.static_range(AHEAD):
            k = (turn * AHEAD + i) * BK + tl.arange(0, BK)
            mask = filled[:, None] & (k < WIDTH)[None, :]
            w = tl.load(columns[:, None] + k[None, :], mask=mask, other=0.0)
            a = _operand(ahead[i * GROUPS : (i + 1) * GROUPS], kind, BM, BK)
            if WIDE:
                a, w = a.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(a, w.T, acc, input_precision="ieee")
            if AHEAD > 1:
                coming += _ask(at, taken, (turn + 1) * AHEAD + i, P, BK)
        ahead = coming
    return acc
