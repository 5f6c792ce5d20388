"""The half of a step of the backward kernel that takes tiles: D5 times weights for states.

Shapes: B sequences, N cells of size d, K views, L numbers of D5 in memory, BM sequences by BN of
the N · d units in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.columns import quarter_of, quarters


@triton.jit
def spread(
    t, j, u, place, listed, count, B, first, W, W_UNIT, D5, D_UNIT, PART, BITS,
    N: tl.constexpr, K: tl.constexpr, d: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    COMPACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What cell j's gates ask of BN units of the state; which of them it heard, `grads` minds."""
    b, on = listed, place < count
    unit = u * BN + tl.arange(0, BN)
    # A list is read once more for the rows that a thread writes: of a quarter of the columns, these
    # are four times fewer, and those that it has read already. Units would have to be read for
    # columns in that order, which takes longer.
    QUARTERS: tl.constexpr = COMPACT and D_UNIT is None
    if QUARTERS:
        quarter, lane = quarter_of(tl.arange(0, BN))
        unit = u * BN + quarter * (BN // 4) + lane
    if not COMPACT:
        row = tl.cast(t, tl.int64) * B + b
        on = tl.load(BITS + row * N + j, mask=b < B, other=0) != 0
    start = tl.cast(t - first, tl.int64) * B + b
    if D_UNIT is not None:
        d_unit = tl.load(D_UNIT + start, mask=on, other=0.0)
        w_unit = tl.load(W_UNIT + K * d + unit, mask=unit < N * d, other=0.0)
    within = tl.arange(0, BK)[None, :]
    begun = D5 + ((start * (N * L) + j * L)[:, None] + within)
    # Columns without a unit have the last one's weights, and are not written: a mask would take
    # longer, and without either the last cell's would be read from behind W.
    line = j * (K + N) * d + K * d + tl.minimum(unit, N * d - 1)
    weight = W + (line[:, None] * L + within)
    tl.static_assert(L % BK == 0)
    acc = tl.zeros((BM, BN), tl.float32)
    for m in tl.range(0, L // BK, num_stages=STAGES):
        a = tl.load(begun + m * BK, mask=on[:, None], other=0.0, cache_modifier=".cg")
        w = tl.load(weight + m * BK)
        if WIDE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
    if D_UNIT is not None:
        acc = acc * d_unit[:, None] * w_unit[None, :]
    four = (acc,)
    if QUARTERS:
        four = quarters(acc, BM, BN)
    PART += j * (N * d)
    WIDTH: tl.constexpr = BN // len(four)
    for part in tl.static_range(len(four)):
        to = u * BN + part * WIDTH + tl.arange(0, WIDTH)
        at = (b * (N * N * d))[:, None] + to[None, :]
        asked = four[part].to(PART.dtype.element_ty)
        tl.store(PART + at, asked, mask=on[:, None] & (to < N * d)[None, :])
