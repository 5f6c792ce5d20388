"""Polling for what `gates` gives to `select`, instead of a barrier.

A barrier of the grid between the two would take as long as three trips of a number through L2:
until everything is written, until the counter says so, and until it is read. So `select` reads each
number until it is there. Until then it is MARK, which is no result of arithmetic. The reader puts
MARK back; the barrier after `select` lies between that and the next number. Each number of 32 bits
stands for itself: the load is no acquire, and whatever else `gates` wrote, such as c, is known to
be there behind that barrier. (By the letter of CUDA's memory model plain stores race with such
loads. They go to L2 as they are, a number at a time.)

Shapes: B sequences, N cells of size d, vector tiles (lines, RB, 32), up to four of a vector, or one
of whole vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.triton.kernels.common import _INTERPRETED, inside, lines_of, read, tile_of

# All bits are set: a NaN, but not the one that arithmetic and tensor cores give, 0x7FFFFFFF.
_MARK = tl.constexpr(-1)


@triton.jit
def awake_before(t, b, B, ACT):
    """What `select` wrote of sequences b (RB) in step t - 1: who woke, a bit each."""
    row = tl.cast(t - 1, tl.int64) * B + b
    return tl.load(ACT + row, mask=(b < B) & (b * 0 + t > 0), other=0)


@triton.constexpr_function
def _polling(pieces: int, vectors: int, fours: int) -> str:
    """Assembly that loads fours of all pieces of one or two vectors until none is MARK.

    What it gives comes first among its operands: all numbers of the first piece of the first
    vector, and so on. Then come addresses of the first vector's first piece, one for each number,
    those of the second, and numbers whose bit i + 4 v says whether piece i of vector v is wanted.
    """
    per, loads = 4 * fours, pieces * vectors * fours
    out = loads * 4
    names = [f"p{n}" for n in range(loads)]
    lines = [f".reg .pred done, {', '.join(names)};", ".reg .b32 bit, most, spins;"]
    lines += ["mov.u32 spins, 0;"]
    poll = []
    for n, name in enumerate(names):
        vector, piece, four = n // (pieces * fours), n // fours % pieces, n % fours
        wanted, at = out + 2 * per + 4 * four, out + vector * per + 4 * four
        four_of = [f"${4 * n + i}" for i in range(4)]
        lines += [
            f"and.b32 bit, ${wanted}, {1 << (piece + 4 * vector)}; setp.ne.u32 {name}, bit, 0;"
        ]
        lines += [f"mov.b32 {number}, 0;" for number in four_of]
        # A piece is 32 numbers, or the only one.
        poll += [
            f"@{name} ld.relaxed.gpu.global.v4.b32 {{{', '.join(four_of)}}}, [${at}+{128 * piece}];"
        ]
    poll += ["max.u32 most, $0, $1;", *(f"max.u32 most, most, ${n};" for n in range(2, out))]
    poll += ["setp.ne.u32 done, most, 0xFFFFFFFF;", "@done bra END;", "add.u32 spins, spins, 1;"]
    poll += ["setp.lt.u32 done, spins, 0x4000000;", "@done bra AGAIN;", "trap;"]
    return "\n".join(["{", *lines, "AGAIN:", *poll, "END:", "}"])


@triton.constexpr_function
def _operands(pieces: int, vectors: int, fours: int) -> str:
    """The operands of `_polling`, and those of a tensor of the layout that they need."""
    out, per = 4 * pieces * vectors * fours, 4 * fours
    return ",".join(["=&r"] * out + ["l"] * (2 * per) + ["r"] * (2 * per))


@triton.jit
def poll_vectors(
    PROP, Q, b, mask, act, like,
    N: tl.constexpr, d: tl.constexpr, PIECE: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The pieces of h~ and W_q Q (B, N, d) of sequences b, as soon as they are there.

    Only those of cells in `act` (RB) are valid. `like` is a tile that was loaded, of which a thread
    holds fours side by side: these are laid out alike, as the assembly needs it (`KNOWN`; a test
    reads the layout). After many seconds the kernel ends, as it does in `spin`.
    """
    at, also = tile_of(PROP, b, N, N * d, d, PIECE), tile_of(Q, b, N, N * d, d, PIECE)
    if _INTERPRETED:
        q = read(also, mask, N, d, PIECE) if SOFT else ()
        return read(at, mask, N, d, PIECE), q
    else:
        M: tl.constexpr = (d + PIECE - 1) // PIECE
        tl.static_assert(((PIECE == 32) & (M <= 4) | (M == 1)) & (d % 4 == 0))
        VECTORS: tl.constexpr = 2 if SOFT else 1
        # Of a piece, that a thread has: of whole vectors there are eight warps.
        FOURS: tl.constexpr = b.shape[0] * PIECE // 128 if PIECE > 32 else 1
        LINES: tl.constexpr = lines_of(N)
        n = tl.arange(0, LINES)[:, None, None]
        bits = tl.zeros((LINES, b.shape[0], PIECE), tl.int32)
        for i in tl.static_range(M):
            here = inside(i, mask, N, d, PIECE) & (((act[None, :, None] >> n) & 1) != 0)
            bits += tl.where(here, (17 if SOFT else 1) << i, 0)
        out = tl.inline_asm_elementwise(
            _polling(M, VECTORS, FOURS),
            _operands(M, VECTORS, FOURS),
            [
                at.to(tl.int64, bitcast=True), also.to(tl.int64, bitcast=True), bits,
                like.to(tl.int32, bitcast=True),
            ],
            dtype=(tl.int32,) * (M * VECTORS),
            is_pure=False,
            pack=4 * FOURS,
        )  # fmt: skip
        new = ()
        q = ()
        for i in tl.static_range(M):
            new += (out[i].to(tl.float32, bitcast=True),)
            if SOFT:
                q += (out[M + i].to(tl.float32, bitcast=True),)
        return new, q


@triton.jit
def put_mark(at, mask, N: tl.constexpr, d: tl.constexpr, PIECE: tl.constexpr):
    """Put MARK to vectors of cells (lines, RB) that have one, from these addresses on."""
    mark = tl.full((lines_of(N), mask.shape[1], PIECE), _MARK, tl.int32)
    mark = mark.to(tl.float32, bitcast=True)
    rows = tl.full((mask.shape[1],), 1, tl.int1)
    for i in tl.static_range((d + PIECE - 1) // PIECE):
        there = inside(i, rows, N, d, PIECE) & mask[:, :, None]
        tl.store(at + i * PIECE, mark, mask=there)
