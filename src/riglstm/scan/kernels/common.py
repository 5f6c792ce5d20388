"""What the kernels share: the barrier of a grid, keys and ranks.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots that a cell chooses from.
"""

from __future__ import annotations

import triton
import triton.language as tl

KNOWN = triton.__version__.startswith(("3.6.", "3.9."))
"""Whether this version of Triton has been read. `run` of a kernel that it compiled takes what
`Launch` gives it: addresses too, where Triton would ask the driver about each tensor. And a thread
has fours of what is loaded, which `told.py` relies on."""
SLOTS = 8
"""Most cells, and most views: tiles of a row have this many lines, and the resident kernel as many
warps, a slot each."""
LINE = 32
"""Whole numbers in a line of memory. One counter is read while another changes: in another line."""
FRESH = 16
"""The bit of a row's `act` that says: the state was reset before the step."""

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Asked once, as the decorators below do."""
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
    """What this piece of assembly makes of addresses, each time that it is come to."""
    at = at.to(tl.int64, bitcast=True)
    return tl.inline_asm_elementwise(how, "=r,l", [at], tl.int32, False, 1)


@triton.jit
def arrive(counter):
    """Say that this program came to the barrier, and has written what it had to.

    In the interpreter programs run one after another: there is nobody to tell.
    """
    if not _INTERPRETED:
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, target):
    """Wait until those came that are waited for: the counter only grows, to `target` then.

    The thread that reads does so by an acquire, which also empties the multiprocessor's first-level
    cache, and the others wait for it: what they load afterwards is what others wrote before.

    The launch is cooperative, so every program runs; should one still be missing after many
    seconds, the kernel ends in an error and not in a hang. In the interpreter nobody is waited for,
    see `arrive`.
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
    """Wait here until all programs came here."""
    arrive(counter)
    wait(counter, target)


@triton.jit
def fetch(start, many, p, programs):
    """Ask for `many` numbers from `start` on, shared among these programs, to be brought to L2."""
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
    """-1 where x is below zero, else 0."""
    x = x.to(tl.int32, bitcast=True)
    if _INTERPRETED:
        return x >> 31
    # The compiler would make a comparison of a mere shift.
    return tl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def best(keys, k: tl.constexpr, n: tl.constexpr):
    """A bit for each of the k > 0 largest of n keys; of equals, the lower index (P4).

    Four bits of a whole number count how many are ahead of a key.
    """
    ranks = tl.zeros_like(keys[0]).to(tl.int32)
    for j in tl.static_range(1, n):
        for i in tl.static_range(j):
            # Of two, one more is ahead of the one or of the other. The sign of a difference tells
            # which: a comparison is thought to take longer until it can be used.
            sign = _sign(keys[i] - keys[j])
            ranks += (sign & ((1 << (4 * i)) - (1 << (4 * j)))) + (1 << (4 * j))
    # The highest of the four bits is set where k or more are ahead.
    bits = (~(ranks + (8 - k) * 0x11111111) >> 3) & (0x11111111 & ((1 << (4 * n)) - 1))
    bits = (bits | (bits >> 3)) & 0x03030303
    bits = (bits | (bits >> 6)) & 0x000F000F
    return (bits | (bits >> 12)) & 0xFF


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n, at once: Triton's takes microseconds."""
    return 1 << (n - 1).bit_length()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU and one program after another."""
    return bool(_INTERPRETED.value)
