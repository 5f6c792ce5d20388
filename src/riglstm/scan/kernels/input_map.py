"""The map from the input to views, for the `triton` backend's products in bfloat16 and in halves.

One kernel does what would else be three: round the input, multiply it, and put each view to its
place. Its weights come rounded and with the views' gaps from `pack_kernel`. Of many sequences the
forward kernel does that itself (`ahead.py`).

With TF32 in halves another kernel makes halves of the input first. float16 has not TF32's range: so
each line of W_in is divided by a power of two, by which its feature is multiplied, and then each
row of the input by another one. What is cut off of a feature is small beside what another one can
add to some view of the row. So a view some 2^28 below another of its row loses bits, as it does in
XH.

Shapes: R = T · B rows of D features, K views of size d, S slots of P ≥ d numbers in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.common import power_below, to_nearest, unit_of

LINES = 8
"""Lines of W_in that a program packs."""
_LINES = tl.constexpr(LINES)
# Where the largest numbers of a line and of a row end up: float16 ends at 2^16.
_HIGH = tl.constexpr(2.0**14)
_BOTH = tl.constexpr(2.0**-28)


@triton.jit
def pack_lines(
    W_IN, OUT, SIZES, i,
    D: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Lines of W_in (D, K·d) as (D, K·P), zero in the gaps; BW is a power of two that holds K·P.

    With SIZES (D,), each line is divided by one.
    """
    line, col = i * _LINES + tl.arange(0, _LINES)[:, None], tl.arange(0, BW)[None, :]
    view, e = col // P, col % P
    inside = (line < D) & (view < K)
    w = tl.load(W_IN + line * (K * d) + view * d + e, mask=inside & (e < d), other=0.0)
    w = w.to(tl.float32)
    if SIZES is not None:
        size = tl.abs(w)
        # A weight that is infinite takes no bits from the others.
        size = tl.max(tl.where(size < float("inf"), size, 0.0), 1)[:, None]
        size, per = power_below(size)
        tl.store(SIZES + line, size, mask=line < D)
        w = w * per * _HIGH
    tl.store(OUT + line * (K * P) + col, to_nearest(w, OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B", "R"])
def halve_kernel(
    X, SIZES, BIAS, h0, OUT, X_SIZE, X_UNIT, B, R,
    D: tl.constexpr, X_ROW: tl.constexpr, BIASES: tl.constexpr, STATES: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """BR rows of x (R, D) in halves, as (R, X_ROW), and the X_SIZE by which they are divided.

    The unit of a row of XH is known here, before its views are: no view is larger than the sum of
    what each feature can add to any. It holds the state that was given, if any, and one, which no
    other state gets above.
    """
    row, k = tl.cast(tl.program_id(0), tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    there = row < R
    size = tl.load(SIZES + k, mask=k < D, other=0.0)
    at = row[:, None] * D + k
    x = tl.load(X + at, mask=there[:, None] & (k < D), other=0.0).to(tl.float32) * size
    each = tl.abs(x)
    scale, per = power_below(tl.max(each, 1))
    x = (x * per[:, None] * _HIGH).to(OUT.dtype.element_ty)
    tl.store(OUT + row[:, None] * X_ROW + k, x, mask=there[:, None] & (k < X_ROW))
    tl.store(X_SIZE + row, scale, mask=there)
    # A weight is less than twice its line's size.
    most = 2.0 * tl.sum(each, 1)
    if BIAS is not None:
        j = tl.arange(0, BW)
        bias = tl.load(BIAS + j, mask=j < BIASES, other=0.0).to(tl.float32)
        most += tl.max(tl.abs(bias), 0)
    unit = tl.maximum(unit_of(most), unit_of(1.0 + 0.0 * scale))
    if h0 is not None:
        n = tl.arange(0, BH)[None, :]
        h = tl.load(h0 + (row % B)[:, None] * STATES + n, mask=n < STATES, other=0.0)
        unit = tl.maximum(unit, unit_of(tl.max(tl.abs(h), 1)))
    tl.store(X_UNIT + row, unit, mask=there)


@triton.jit
def map_tile(
    row, at, there, u, X, X_SIZE, W, BIAS, XH, X_UNIT, VIEWS,
    D: tl.constexpr, X_ROW: tl.constexpr, K: tl.constexpr, S: tl.constexpr, d: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows `at` (BM) of x that are `there`, times BN columns of W (D, K·P), plus the bias (K·d).

    To `row` of XH (R, S, P). With X_SIZE they are those of `halve_kernel`, X_ROW numbers each, and
    the views go to VIEWS (R, K, P) in float32, and to XH in units of X_UNIT.
    """
    WIDTH: tl.constexpr = K * P
    col = u * BN + tl.arange(0, BN)
    rows, inside = there[:, None], (col < WIDTH)[None, :]
    kind = XH.dtype.element_ty
    # Numbers that are rounded on their way are the second operand, which lies in shared memory. As
    # the first one Triton has them in registers, and up to 3.6 writes to these while a product of
    # the turn before still reads them (its issue 9433): at times a tile was wrong by some products.
    TURNED: tl.constexpr = X.dtype.element_ty != kind
    acc = tl.zeros((BN, BM) if TURNED else (BM, BN), tl.float32)
    for m in tl.range(0, (D + BK - 1) // BK, num_stages=STAGES):
        k = m * BK + tl.arange(0, BK)
        x = tl.load(
            X + (at * X_ROW)[:, None] + k[None, :], mask=rows & (k < X_ROW)[None, :], other=0.0
        )
        w = tl.load(
            W + (k * WIDTH)[:, None] + col[None, :], mask=(k < D)[:, None] & inside, other=0.0
        )
        x = to_nearest(x, kind)
        if WIDE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        if TURNED:
            acc = tl.dot(w.T, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee")
    if TURNED:
        acc = acc.T
    if X_SIZE is not None:
        acc = acc * _BOTH * tl.load(X_SIZE + row, mask=there, other=0.0)[:, None]
    if BIAS is not None:
        view, e = col // P, col % P
        bias = tl.load(BIAS + view * d + e, mask=(view < K) & (e < d), other=0.0).to(tl.float32)
        if X_SIZE is None:
            bias = to_nearest(bias, kind).to(tl.float32)
        acc += bias[None, :]
    if X_SIZE is not None:
        tl.store(VIEWS + (row * WIDTH)[:, None] + col[None, :], acc, mask=rows & inside)
        acc = acc * (1.0 / tl.load(X_UNIT + row, mask=there, other=1.0))[:, None]
    out = XH + (row * (S * P))[:, None] + col[None, :]
    tl.store(out, to_nearest(acc, kind), mask=rows & inside)


@triton.jit(do_not_specialize=["R"])
def map_kernel(
    X, X_SIZE, W, BIAS, XH, X_UNIT, VIEWS, R,
    D: tl.constexpr, X_ROW: tl.constexpr, K: tl.constexpr, S: tl.constexpr, d: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """All rows: a `map_tile` a program."""
    COLUMNS: tl.constexpr = (K * P + BN - 1) // BN
    # Programs that run side by side share rows, the larger of both operands.
    r, u = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    row = tl.cast(r, tl.int64) * BM + tl.arange(0, BM)
    map_tile(
        row, row, row < R, u, X, X_SIZE, W, BIAS, XH, X_UNIT, VIEWS, D, X_ROW, K, S, d, P, BM, BN,
        BK, STAGES, WIDE,
    )  # fmt: skip
