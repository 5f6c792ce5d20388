"""What both kernels share: the barrier of a grid, keys and ranks, the numbers of a launch.

Shapes: T steps, B sequences, N cells of size d, K views, S = K + N slots that a cell chooses from.
"""

from __future__ import annotations

import triton
import triton.language as tl

SLOTS = 8
"""Most cells, and most views: tiles of a row have this many lines."""
FRESH = 16
"""The bit of a row's `act` that says: the state was reset before the step."""

_SLOTS = tl.constexpr(SLOTS)
_FRESH = tl.constexpr(FRESH)
_SPINS = tl.constexpr(1 << 26)


@triton.jit
def peek(counter):
    """The counter, and everything written before it was raised to that."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];",
        "=r,l",
        [counter.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def grid_barrier(counter, target):
    """Wait until all programs came here: the counter only grows, `target` is its value then.

    The launch is cooperative, so every program runs; should one still be missing after many
    seconds, the kernel ends in an error and not in a hang.
    """
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    spins = 0
    while peek(counter) < target:
        spins += 1
        tl.device_assert(spins < _SPINS, "riglstm: a program of the grid never came")
    tl.debug_barrier()


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2.0 * sigmoid(2.0 * x) - 1.0


@triton.jit
def order(s):
    """Scores as integers of the same order: -0 equals 0, and NaN comes first (P13)."""
    bits = tl.where(s == 0, 0.0, s).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(s != s, 0x7FFFFFFF, bits)


@triton.jit
def top(key, k: tl.constexpr):
    """The k largest of each line of keys (8, 8); of equals, the lower index (P4)."""
    i = tl.arange(0, _SLOTS)
    one, other = key[:, :, None], key[:, None, :]
    first = i[None, :, None] < i[None, None, :]
    ahead = (one > other) | ((one == other) & first)  # (8, 8, 8): [line, i, j], i is ahead of j
    return tl.sum(ahead.to(tl.int32), 1) < k


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return int(triton.next_power_of_2(n))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU and one program after another."""
    return bool(triton.knobs.runtime.interpret)
