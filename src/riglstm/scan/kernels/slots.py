"""The products of the resident kernel: each warp owns a slot.

The product of a tile is one of eight slots at once, a third dimension of `tl.dot`, along which the
compiler lays the warps. What a warp multiplies is loaded by its own lanes, 16 bytes each, to the
very registers that the tensor core reads, without shared memory. For that, the numbers of a slot
are multiplied in another order than they lie in memory, the same for both factors (`_rows`,
`_columns`). The sum over slots goes through shared memory.

Shapes: N cells and K views, 8 at most, in slots of P numbers in memory, BM rows and BN columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.common import _SLOTS


@triton.jit
def slot_and_line():
    """The slot and the line of eight that are a lane's, of all 256 lanes (8 warps): four are alike.

    A tensor of the 64 pairs alone has fewer numbers than there are threads. The compiler takes it
    that loading such is cheap, and repeats it for each layout of a product.
    """
    lane = tl.arange(0, 32 * _SLOTS)
    return lane // 32, lane // 4 % 8


@triton.jit
def _opaque(x):
    """x itself; the compiler may not take apart what it was put together from."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)


@triton.jit
def _piece(V, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr,
           BLOCKS: tl.constexpr, CACHE: tl.constexpr):  # fmt: skip
    """32 numbers, or 16 at the end, of BLOCKS times eight lines of eight slots, as lanes hold them.

    Bit r of `take` says whether a lane's line of block r is wanted.

    Threads lie along what is contiguous first, and then along x: four lanes have a line, a warp has
    eight lines of a slot, all warps all slots, and blocks are left for the registers.
    """
    BK: tl.constexpr = 32 if piece * 32 + 16 < P else 16
    x = tl.arange(0, BLOCKS * 8 * _SLOTS)[:, None]
    e = tl.max_contiguous(tl.arange(0, BK), BK // 4)[None, :]
    block = tl.arange(0, BLOCKS)[:, None, None, None]
    wanted = ((take.reshape(1, 8 * _SLOTS, 4, 1) >> block) & 1) != 0
    wanted = tl.broadcast_to(wanted, (BLOCKS, 8 * _SLOTS, 4, BK // 4)).reshape(x.shape[0], BK)
    # Else it is taken to differ from number to number, and each is loaded by itself.
    tl.static_assert(P % 8 == 0)
    mask = tl.max_constancy(wanted & (piece * 32 + e < P), [1, BK // 4])
    # Two sums, and the second of constants: a lane has one address for all that it loads.
    at = V + (x % 8 * ROW + x // 8 % _SLOTS * P + e)
    at += x // (8 * _SLOTS) * (8 * ROW) + piece * 32
    v = tl.load(at, mask=mask, other=0.0, cache_modifier=CACHE)
    return v.reshape(BLOCKS, _SLOTS, 8, 4, BK // 16, 2, 2)


@triton.jit
def _rows(V, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr, BM: tl.constexpr):
    """A piece of what BM rows have in eight slots, (8, BM, 32 or 16)."""
    v = _piece(V, take, ROW, P, piece, BM // 8, ".cg")
    return v.permute(1, 0, 2, 4, 5, 3, 6).reshape(_SLOTS, BM, v.shape[4] * 16)


@triton.jit
def _columns(W, take, ROW: tl.constexpr, P: tl.constexpr, piece: tl.constexpr, BN: tl.constexpr):
    """The weights of BN columns for it, (8, 32 or 16, BN)."""
    w = _piece(W, take, ROW, P, piece, BN // 8, "")
    return w.permute(1, 4, 5, 3, 6, 0, 2).reshape(_SLOTS, w.shape[4] * 16, BN)


@triton.jit
def weights_of(W, take, ROW: tl.constexpr, P: tl.constexpr, BN: tl.constexpr):
    """All pieces of the weights for eight slots."""
    out = ()
    for piece in tl.static_range((P + 31) // 32):
        out += (_columns(W, take, ROW, P, piece, BN),)
    return out


@triton.jit
def product(
    acc, V, take, weights,
    ROW: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """acc (8, BM, BN) and the product of each slot of V with its weights.

    AHEAD pieces are asked for before the one that is multiplied.
    """
    PIECES: tl.constexpr = (P + 31) // 32
    rows = (_rows(V, take, ROW, P, 0, BM),)
    for i in tl.static_range(1, AHEAD):
        if i < PIECES:
            rows += (_rows(V, take, ROW, P, i, BM),)
    for i in tl.static_range(PIECES):
        if i + AHEAD < PIECES:
            rows += (_rows(V, take, ROW, P, i + AHEAD, BM),)
        a, w = rows[i], weights[i]
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def taken(BITS, rows, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr):
    """Whether a lane's slot is taken in: bit r for the view of its row of block r, 8 + r the state.

    All in one number, so that all of them are asked for before the first is waited for.
    """
    slot, line = slot_and_line()
    both = tl.zeros_like(line)
    for r in tl.static_range(BM // 8):
        bits = tl.load(BITS + line * N + r * (8 * N), mask=line + r * 8 < rows, other=0)
        both |= (((bits >> slot) & 1) | (((bits >> (K + slot)) & 1) << 8)) << r
    if WIDE:
        return both
    return _opaque(both)


@triton.jit
def masked(acc, take, BM: tl.constexpr, BN: tl.constexpr):
    """acc (8, BM, BN), and zero in rows whose bit in `take` (256,) is not set."""
    block = tl.arange(0, BM // 8)[None, :, None, None, None, None]
    bit = (take.reshape(_SLOTS, 1, 8, 1, 4, 1) >> block) & 1
    lanes = acc.reshape(_SLOTS, BM // 8, 8, BN // 8, 4, 2)
    return tl.where(bit != 0, lanes, 0.0).reshape(_SLOTS, BM, BN)


@triton.jit
def sum_slots(acc, BM: tl.constexpr):
    """acc (8, BM, 32) summed over slots, in a fixed order: four gates (BM, 8)."""
    x = acc.reshape(2, 2, 2, BM, 2, 2, 8).permute(3, 6, 4, 5, 0, 1, 2)
    for _ in tl.static_range(3):
        even, odd = tl.split(x)
        x = even + odd
    f_o, i_g = tl.split(x)
    f, o = tl.split(f_o)
    i, g = tl.split(i_g)
    return f, i, o, g
