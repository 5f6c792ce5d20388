"""What the kernels share: barriers, ranks, arithmetic, tiles, and polling instead of a barrier.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots that a cell chooses from,
BM sequences by BN columns in a tile, RB sequences at a time in the row-wise half of a step.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

KNOWN = triton.__version__.startswith(("3.6.", "3.9."))
"""True for versions of Triton whose `run` of a compiled kernel takes addresses, as `Launch` gives
them, and in which a thread holds fours of what is loaded, which `poll_vectors` relies on."""
MOST = 16
"""Most cells, and most views: a cell's slots are bits of one whole number."""
SLOTS = 8
"""Most cells, and most views, where a warp has one of them: in the resident kernel and `select`."""
LINE = 32
"""Integers in a cache line. Counters that are polled lie in lines of their own."""
FRESH = 16
"""The bit of a row's `act` that says that the state was reset before the step."""

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Read once, as the decorators below do."""
_SLOTS = tl.constexpr(SLOTS)
_LINE = tl.constexpr(LINE)
_FRESH = tl.constexpr(FRESH)
# Half a minute; `spin` has the number, too.
_SPINS = tl.constexpr(1 << 26)
# Their differences are finite.
_MOST = tl.constexpr(1.7e38)
_LESS = tl.constexpr(1.6e38)


@triton.jit
def spin(counter, target):
    """Read the counter until it is `target`, and see everything that was written before that.

    It is the difference that counts, as both may have begun anew beyond 32 bits.

    One thread of a program does so, and the others go on at once: were all warps to ask for the
    same address over and over, those who come would wait in line behind them. It is one piece of
    assembly, as a loop of Triton's is one of all threads.

    After many seconds it ends the kernel in an error that the next call of CUDA reports. That is a
    trap, no assertion: a call out of the kernel makes ptxas run matrix products one after another.
    """
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred done;
        .reg .u32 thread, spins;
        .reg .s32 now;
        mov.u32 $0, 0;
        mov.u32 thread, %tid.x;
        setp.ne.u32 done, thread, 0;
        @done bra END;
        mov.u32 spins, 0;
        AGAIN:
        ld.acquire.gpu.global.s32 now, [$1];
        sub.s32 now, now, $2;
        setp.ge.s32 done, now, 0;
        @done bra END;
        add.u32 spins, spins, 1;
        setp.lt.u32 done, spins, 0x4000000;
        @done bra AGAIN;
        trap;
        END:
        }
        """,
        "=&r,l,r",
        [counter.to(tl.int64, bitcast=True), target],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _at_address(how: tl.constexpr, at):
    """Run a piece of assembly on addresses, each time that it is reached."""
    at = at.to(tl.int64, bitcast=True)
    return tl.inline_asm_elementwise(how, "=r,l", [at], tl.int32, False, 1)


@triton.jit
def arrive(counter):
    """Arrive at the barrier, with everything before it written.

    In the interpreter programs run one after another, and barriers do nothing.
    """
    if not _INTERPRETED:
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, target):
    """Wait until the counter, which only grows, reaches `target`.

    The thread that reads does so by an acquire, which also empties the multiprocessor's first-level
    cache, and the others wait for it: what they load afterwards is what others wrote before.

    The launch is cooperative, so every program runs; should one still be missing after many
    seconds, the kernel ends in an error and not in a hang.
    """
    if not _INTERPRETED:
        spin(counter, target)
        tl.debug_barrier()


@triton.jit
def wait_each(counter, target):
    """As `wait`, but every thread reads: quicker in a kernel that has no registers to spare."""
    if not _INTERPRETED:
        spins = 0
        while _at_address("ld.acquire.gpu.global.s32 $0, [$1];", counter) - target < 0:
            spins += 1
            if spins > _SPINS:
                tl.inline_asm_elementwise(
                    "trap; mov.u32 $0, $1;", "=r,r", [spins], tl.int32, False, 1
                )
        tl.debug_barrier()


@triton.jit
def grid_barrier(counter, target):
    """Wait until all programs are here."""
    arrive(counter)
    wait(counter, target)


@triton.jit
def fetch(start, many, p, programs):
    """Prefetch `many` numbers from `start` on to L2, shared among these programs."""
    LANES: tl.constexpr = 128
    PER: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth  # in a line of memory
    if not _INTERPRETED:
        for first in tl.range(p * LANES, tl.cdiv(many, PER), programs * LANES, num_stages=1):
            at = start + tl.minimum((first + tl.arange(0, LANES)) * PER, many - 1)
            _at_address("prefetch.global.L2 [$1]; mov.u32 $0, 0;", at)


@triton.jit
def unit_of(largest):
    """A power of two in which the largest number is between 2^14 and 2^15: float16 ends at 2^16.

    Up there it keeps all ten bits of numbers 2^28 times smaller. Zero, where the largest is below
    2^-80; one, where it is above 2^80, infinite or NaN.
    """
    exponent = (largest.to(tl.int32, bitcast=True) & 0x7F800000) - (14 << 23)
    exponent = tl.where(exponent > (193 << 23), 127 << 23, exponent)
    return tl.where(exponent < (33 << 23), 0, exponent).to(tl.float32, bitcast=True)


@triton.jit
def power_below(largest):
    """The power of two at or below a number, and one over it: both normal, and so never zero."""
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)
    return exponent.to(tl.float32, bitcast=True), ((254 << 23) - exponent).to(
        tl.float32, bitcast=True
    )


@triton.jit
def to_nearest(x, kind: tl.constexpr):
    """Numbers in another dtype, the nearest there is, by way of float32."""
    if x.dtype != kind:
        x = x.to(tl.float32)
    if _INTERPRETED and kind == tl.bfloat16 and x.dtype == tl.float32:
        # The interpreter would cut off what a compiled kernel rounds.
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(kind)


@triton.jit
def comparable(s):
    """Scores for `best`: NaN comes first (P13), -0 is 0, and all that is near overflow ties."""
    return tl.where(s != s, _MOST, tl.minimum(tl.maximum(s, -_LESS), _LESS) + 0.0)


@triton.jit
def _sign(x):
    """-1 where x is below zero, and 0 elsewhere."""
    x = x.to(tl.int32, bitcast=True)
    if _INTERPRETED:
        return x >> 31
    # The compiler would make a comparison of a mere shift.
    return tl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def best(keys, k: tl.constexpr, n: tl.constexpr):
    """A bit for each of the k > 0 largest of n keys; of equals, the lower index (P4)."""
    ranks = tl.zeros_like(keys[0]).to(tl.int32)
    if n <= 8:
        # Four bits of a whole number count how many are ahead of a key.
        for j in tl.static_range(1, n):
            for i in tl.static_range(j):
                # Of two, one more is ahead of the one or of the other. The sign of a difference
                # tells which: a comparison is thought to take longer until it can be used.
                sign = _sign(keys[i] - keys[j])
                ranks += (sign & ((1 << (4 * i)) - (1 << (4 * j)))) + (1 << (4 * j))
        # The highest of the four bits is set where k or more are ahead.
        bits = (~(ranks + (8 - k) * 0x11111111) >> 3) & (0x11111111 & ((1 << (4 * n)) - 1))
        bits = (bits | (bits >> 3)) & 0x03030303
        bits = (bits | (bits >> 6)) & 0x000F000F
        return (bits | (bits >> 12)) & 0xFF
    else:
        bits = ranks
        for j in tl.static_range(n):
            ahead = ranks
            for i in tl.static_range(j):
                ahead += 1 + _sign(keys[i] - keys[j])
            for i in tl.static_range(j + 1, n):
                ahead -= _sign(keys[j] - keys[i])
            bits |= tl.where(ahead < k, 1 << j, 0)
        return bits


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n, at once: Triton's takes microseconds."""
    return 1 << (n - 1).bit_length()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU and one program after another."""
    return bool(_INTERPRETED.value)


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _at_once(x, how: tl.constexpr):
    """Apply the instruction of this name to x."""
    return tl.inline_asm_elementwise(how + " $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _inverse(x):
    """1 / x for x of at least one; a division would also handle smaller ones."""
    return 1.0 / x if _INTERPRETED else _at_once(x, "rcp.approx.ftz.f32")


@triton.jit
def sigmoid(x):
    return _inverse(1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2.0 * sigmoid(2.0 * x) - 1.0


@triton.jit
def _exp_at_most(x):
    """The exponential of x, up to 2^40: the product of three is still a number. NaN stays NaN."""
    x = tl.minimum(x * _LOG2_E, 40.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(x) if _INTERPRETED else _at_once(x, "ex2.approx.ftz.f32")


@triton.jit
def cell(f, i, o, g, c, COARSE: tl.constexpr, MANY: tl.constexpr):
    """Eqs. (1)-(6): f, i, o and g from their arguments, the new c, and o tanh c.

    COARSE, to eleven bits, all but f and i: what these are off by, c adds up at every step, and a
    closed gate would be off by all of it. MANY, where a program has so many units that their
    exponentials and reciprocals bound it.
    """
    if COARSE and not _INTERPRETED:
        n_f, n_i = 1.0 + _exp_at_most(-f), 1.0 + _exp_at_most(-i)
        share = _inverse(n_f * n_i)
        f, i = n_i * share, n_f * share
        o = 0.5 + 0.5 * _at_once(0.5 * o, "tanh.approx.f32")
        g = _at_once(g, "tanh.approx.f32")
        c = f * c + i * g
        return f, i, o, g, c, o * _at_once(c, "tanh.approx.f32")
    elif MANY:
        # With e the exponential of -x, sigmoid x is 1 / (1 + e), and of -2x, tanh x is
        # (1 - e) / (1 + e): several of them share a reciprocal.
        e_g = _exp_at_most(-2.0 * g)
        n_f, n_i, n_g = 1.0 + _exp_at_most(-f), 1.0 + _exp_at_most(-i), 1.0 + e_g
        both = n_i * n_g
        share = _inverse(n_f * both)
        f, rest = both * share, n_f * share
        new = (1.0 - e_g) * rest
        i, g = n_g * rest, n_i * new
        c = f * c + new
        e_c = _exp_at_most(-2.0 * c)
        n_o, n_c = 1.0 + _exp_at_most(-o), 1.0 + e_c
        share = _inverse(n_o * n_c)
        return f, i, n_c * share, g, c, (1.0 - e_c) * share
    else:
        f, i, o, g = sigmoid(f), sigmoid(i), sigmoid(o), tanh(g)
        c = f * c + i * g
        return f, i, o, g, c, o * tanh(c)


@triton.jit
def dealt(r, B, BM: tl.constexpr):
    """Places (BM) of tile r in a list of at most B: dealt like cards, so that tiles share equally.

    The first tiles would else be full and the last one empty, where lists are short, and a step
    takes as long as its fullest tile.
    """
    return r + tl.cdiv(B, BM) * tl.arange(0, BM)


@triton.jit
def load_four(at, step: tl.constexpr, mask):
    """What the four gates have, `step` numbers apart."""
    f = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    i = tl.load(at + step, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(at + 2 * step, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(at + 3 * step, mask=mask, other=0.0).to(tl.float32)
    return f, i, o, g


@triton.jit
def store_four(at, step: tl.constexpr, f, i, o, g, mask):
    """Store what the four gates have, `step` numbers apart."""
    kind = at.dtype.element_ty
    tl.store(at, f.to(kind), mask=mask)
    tl.store(at + step, i.to(kind), mask=mask)
    tl.store(at + 2 * step, o.to(kind), mask=mask)
    tl.store(at + 3 * step, g.to(kind), mask=mask)


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


Memory = namedtuple(
    "Memory",
    "h0 c X XH X_UNIT W W_UNIT BIAS UPDATE_BIAS MAY_WAKE MAY_TAKE RESET Y PROP ACT WOKE BITS GATES "
    "C A LIST COUNT COUNTER",
)
"""What both forward kernels read and write, their first arguments: `m` in what they call."""
Sizes = namedtuple(
    "Sizes", "N K d P G PIECE K_a K_x K_h SCALE X_ROW X_SLOT SOFT SAVE RB WARPS POLL"
)
"""What both are compiled for, but for tiles of `gates`: `z` in what they call."""

# Vector tiles are (lines, RB, PIECE): a line for each cell, RB sequences, and a piece of a vector.
# It lies in a few lanes that add up most of it each for itself. A vector is a tuple of its M
# pieces. Every sum over d goes piece by piece and then in the same order over a piece, so that
# equal vectors get equal scores to the last bit (P4). A piece is 32 numbers: eight lanes take four
# each.
_PIECE = tl.constexpr(32)


@triton.constexpr_function
def lines_of(N: int) -> int:
    """Lines of a vector tile, which hold N cells."""
    return 8 if N <= 8 else 16


@triton.constexpr_function
def in_registers(vectors: int, M: int, N: int, RB: int, WARPS: int) -> bool:
    """True if so many vectors of M pieces take a thread at most 128 registers."""
    return vectors * M * (8 if N <= 8 else 16) * RB <= 128 * WARPS


@triton.jit
def tile_of(V, b, ROW: tl.constexpr, SLOT: tl.constexpr, z):
    """Addresses (lines, RB, PIECE) of the first pieces of N vectors; 0 for SLOT: all one."""
    n, e = tl.arange(0, lines_of(z.N))[:, None, None], tl.arange(0, z.PIECE)[None, None, :]
    return V + tl.cast(b, tl.int64)[None, :, None] * ROW + n * SLOT + e


@triton.jit
def cells_of(V, b, z):
    """`tile_of` the cells' vectors in V (B, N, d)."""
    return tile_of(V, b, z.N * z.d, z.d, z)


@triton.jit
def inside(i: tl.constexpr, mask, d: tl.constexpr, z):
    """Which numbers (lines, RB, PIECE) of piece i there are, of rows where mask is set."""
    n, e = tl.arange(0, lines_of(z.N))[:, None, None], tl.arange(0, z.PIECE)[None, None, :]
    return mask[None, :, None] & (n < z.N) & (i * z.PIECE + e < d)


@triton.jit
def read(at, mask, d: tl.constexpr, z):
    """The M pieces of the vectors at these addresses."""
    out = ()
    for i in tl.static_range((d + z.PIECE - 1) // z.PIECE):
        out += (tl.load(at + i * z.PIECE, mask=inside(i, mask, d, z), other=0.0),)
    return out


@triton.jit
def write(at, pieces, mask, d: tl.constexpr, z):
    """The pieces, d numbers of them, to these addresses."""
    for i in tl.static_range(len(pieces)):
        value = pieces[i].to(at.dtype.element_ty)
        tl.store(at + i * z.PIECE, value, mask=inside(i, mask, d, z))


@triton.jit
def store_each(at, value, mask, LANES: tl.constexpr):
    """Store a number (lines, RB) of each cell, by one of the lanes that have its state.

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
    """The sum over d of the products of two vectors, (lines, RB)."""
    return tl.sum(products(h, v), 2)


# Polling for what `gates` gives to `select`, instead of a barrier.
#
# A barrier of the grid between the two would take as long as three trips of a number through L2:
# until everything is written, until the counter says so, and until it is read. So `select` reads
# each number until it is there. Until then it is MARK, which is no result of arithmetic. The
# reader puts MARK back; the barrier after `select` lies between that and the next number. Each
# number of 32 bits stands for itself: the load is no acquire, and whatever else `gates` wrote,
# such as c, is known to be there behind that barrier. (By the letter of CUDA's memory model plain
# stores race with such loads. They go to L2 as they are, a number at a time.)

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
def poll_vectors(PROP, Q, b, mask, act, like, z):
    """The pieces of h~ and W_q Q (B, N, d) of sequences b, as soon as they are there.

    Only those of cells in `act` (RB) are valid. `like` is a tile that was loaded, of which a thread
    holds fours side by side: these are laid out alike, as the assembly needs it (`KNOWN`; a test
    reads the layout). After many seconds the kernel ends, as it does in `spin`.
    """
    at, also = cells_of(PROP, b, z), cells_of(Q, b, z)
    if _INTERPRETED:
        q = read(also, mask, z.d, z) if z.SOFT else ()
        return read(at, mask, z.d, z), q
    else:
        M: tl.constexpr = (z.d + z.PIECE - 1) // z.PIECE
        tl.static_assert(((z.PIECE == 32) & (M <= 4) | (M == 1)) & (z.d % 4 == 0))
        VECTORS: tl.constexpr = 2 if z.SOFT else 1
        # Of a piece, that a thread has: of whole vectors there are eight warps.
        FOURS: tl.constexpr = b.shape[0] * z.PIECE // 128 if z.PIECE > 32 else 1
        LINES: tl.constexpr = lines_of(z.N)
        n = tl.arange(0, LINES)[:, None, None]
        bits = tl.zeros((LINES, b.shape[0], z.PIECE), tl.int32)
        for i in tl.static_range(M):
            here = inside(i, mask, z.d, z) & (((act[None, :, None] >> n) & 1) != 0)
            bits += tl.where(here, (17 if z.SOFT else 1) << i, 0)
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
            if z.SOFT:
                q += (out[M + i].to(tl.float32, bitcast=True),)
        return new, q


@triton.jit
def put_mark(at, mask, z):
    """Put MARK to vectors of cells (lines, RB) that have one, from these addresses on."""
    mark = tl.full((lines_of(z.N), mask.shape[1], z.PIECE), _MARK, tl.int32)
    mark = mark.to(tl.float32, bitcast=True)
    rows = tl.full((mask.shape[1],), 1, tl.int1)
    for i in tl.static_range((z.d + z.PIECE - 1) // z.PIECE):
        there = inside(i, rows, z.d, z) & mask[:, :, None]
        tl.store(at + i * z.PIECE, mark, mask=there)
