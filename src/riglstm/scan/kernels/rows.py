"""The row-wise half of a step as a program does it: what it loads, `finish` and `select`.

Shapes as in `select.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.common import _SLOTS, fetch, wait
from riglstm.scan.kernels.select import _PART, finish, select
from riglstm.scan.kernels.told import awake_before


@triton.jit
def views_of_rows(
    t, b, B, X,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, X_ROW: tl.constexpr, X_SLOT: tl.constexpr,
):  # fmt: skip
    """The views of sequences b in step t, for each cell: parts (8, RB, 8, 16), views slowest."""
    there, at = b < B, tl.cast(t, tl.int64) * B + b
    k = tl.arange(0, _SLOTS)[:, None, None, None]
    n = tl.arange(0, _SLOTS)[None, None, :, None]
    e = tl.arange(0, _PART)[None, None, None, :]
    V = X + at[None, :, None, None] * X_ROW + k * X_SLOT + 0 * n + e
    mask = there[None, :, None, None] & (k < K) & (n < N)
    x = ()
    for i in tl.static_range((d + _PART - 1) // _PART):
        x += (tl.load(V + i * _PART, mask=mask & (i * _PART + e < d), other=0.0),)
    return x


@triton.jit
def ask_ahead(
    t, t1, p, programs, X, XH, B,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, K_a: tl.constexpr, K_x: tl.constexpr,
    X_ROW: tl.constexpr,
):  # fmt: skip
    """Ask for the views of the step after t."""
    after = tl.cast(tl.minimum(t + 1, t1 - 1), tl.int64) * B
    fetch(XH + after * ((K + N) * P), B * ((K + N) * P), p, programs)
    if X_ROW != (K + N) * P and (K_a < N or K_x < K):
        fetch(X + after * X_ROW, B * X_ROW, p, programs)


@triton.jit
def rows_step(
    t, b, h0, c, X, XH, X_UNIT, UPDATE_BIAS, LIVE, RESET, Y, PROP, ACT, WOKE, BITS, A, B, COUNTER,
    target,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr, SCALE: tl.constexpr,
    X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SOFT: tl.constexpr, SAVE: tl.constexpr,
    TOLD: tl.constexpr = False,
):  # fmt: skip
    """The states of sequences b are finished, and their cells choose, in step t.

    With COUNTER, it is waited for between what is known before the step and what is not; if TOLD,
    it says no more than that h~ and W_q Q are about to come.
    """
    row = tl.cast(t, tl.int64) * B + b
    x = ()
    if (K_a < N) or (K_x < K):
        x = views_of_rows(t, b, B, X, N, K, d, X_ROW, X_SLOT)
    unit = None
    live = None
    fresh = None
    if X_UNIT is not None:
        unit = tl.load(X_UNIT + row, mask=b < B, other=1.0)
    if LIVE is not None:
        live = tl.load(LIVE + row, mask=b < B, other=0) != 0
    if RESET is not None:
        fresh = tl.load(RESET + row, mask=b < B, other=0).to(tl.int32)
    act = None
    if TOLD:
        act = awake_before(t, b, B, ACT)
    if COUNTER is not None:
        wait(COUNTER, target)
    states = finish(t, b, B, h0, Y, PROP, ACT, UPDATE_BIAS, A, N, d, BP, SCALE, SOFT, SAVE, act)
    select(
        t, b, B, states[0], x, unit, live, fresh, c, XH, ACT, WOKE, BITS, N, K, d, P, BP, K_a,
        K_x, K_h,
    )  # fmt: skip


@triton.jit
def rows_phase(
    t, p, programs, h0, c, X, XH, X_UNIT, UPDATE_BIAS, LIVE, RESET, Y, PROP, ACT, WOKE, BITS, A, B,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    K_a: tl.constexpr, K_x: tl.constexpr, K_h: tl.constexpr, SCALE: tl.constexpr,
    X_ROW: tl.constexpr, X_SLOT: tl.constexpr, SOFT: tl.constexpr, SAVE: tl.constexpr,
    RB: tl.constexpr,
):  # fmt: skip
    """`rows_step` of all sequences that are this program's."""
    for r in tl.range(p, tl.cdiv(B, RB), programs, num_stages=1):
        rows_step(
            t, r * RB + tl.arange(0, RB), h0, c, X, XH, X_UNIT, UPDATE_BIAS, LIVE, RESET, Y,
            PROP, ACT, WOKE, BITS, A, B, None, 0, N, K, d, P, BP, K_a, K_x, K_h, SCALE, X_ROW,
            X_SLOT, SOFT, SAVE,
        )  # fmt: skip
