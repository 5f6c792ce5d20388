"""The map from the input to views, for the `triton` backend's products in bfloat16.

One kernel does what would else be three: round the input, multiply it, and put each view to its
place. Its weights come rounded and with the views' gaps from `pack_kernel`.

Shapes: R = T · B rows of D features, K views of size d, S slots of P ≥ d numbers in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINES = 8
"""Lines of W_in that a program packs."""
_LINES = tl.constexpr(LINES)


@triton.jit
def pack_lines(
    W_IN, OUT, i,
    D: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Lines of W_in (D, K·d) as (D, K·P), zero in the gaps; BW is a power of two that holds K·P."""
    line, col = i * _LINES + tl.arange(0, _LINES)[:, None], tl.arange(0, BW)[None, :]
    view, e = col // P, col % P
    inside = (line < D) & (view < K)
    w = tl.load(W_IN + line * (K * d) + view * d + e, mask=inside & (e < d), other=0.0)
    tl.store(OUT + line * (K * P) + col, w.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def map_kernel(
    X, W, BIAS, XH, R,
    D: tl.constexpr, K: tl.constexpr, S: tl.constexpr, d: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """BM rows of x (R, D) times BN columns of W (D, K·P), plus the bias (K·d), to XH (R, S, P)."""
    WIDTH: tl.constexpr = K * P
    COLUMNS: tl.constexpr = (WIDTH + BN - 1) // BN
    # Programs that run side by side share rows, the larger of both operands.
    r, u = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    row, col = tl.cast(r, tl.int64) * BM + tl.arange(0, BM), u * BN + tl.arange(0, BN)
    there, inside = (row < R)[:, None], (col < WIDTH)[None, :]
    kind = XH.dtype.element_ty
    acc = tl.zeros((BM, BN), tl.float32)
    for m in tl.range(0, (D + BK - 1) // BK, num_stages=STAGES):
        k = m * BK + tl.arange(0, BK)
        x = tl.load(X + (row * D)[:, None] + k[None, :], mask=there & (k < D)[None, :], other=0.0)
        w = tl.load(
            W + (k * WIDTH)[:, None] + col[None, :], mask=(k < D)[:, None] & inside, other=0.0
        )
        x = x.to(kind)
        if WIDE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS is not None:
        view, e = col // P, col % P
        bias = tl.load(BIAS + view * d + e, mask=(view < K) & (e < d), other=0.0)
        acc += bias.to(kind).to(tl.float32)[None, :]
    tl.store(XH + (row * (S * P))[:, None] + col[None, :], acc.to(kind), mask=there & inside)
