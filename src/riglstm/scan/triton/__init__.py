"""The `triton` backend: a whole sequence in one launch on a GPU, forward and back; needs Triton."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import learns, product_dtype, product_on, untraced
from riglstm.scan.base import BackendError
from riglstm.scan.triton.autograd import differentiable
from riglstm.scan.triton.forward import run
from riglstm.scan.triton.kernels.common import interpreted
from riglstm.scan.triton.launch import watched
from riglstm.selection import Noise, Selection


def refusal(
    sel: Selection, d: int, dtype: torch.dtype, device: torch.device, B: int = 1
) -> str | None:
    """What the kernels do not support about a problem; None: they run it."""
    why = _refusal(sel, d, dtype, product_dtype(device, dtype), device.type)
    return _too_many(sel, d, B) if why is None else why


def _too_many(sel: Selection, d: int, B: int) -> str | None:
    """Whether B sequences are more than the kernels count: numbers of a step are of 32 bits.

    Those are gates, what cells give each other, and slots.
    """
    N = sel.N
    most = (2**31 - 1) // max(N * max(N, 5) * d, (sel.K + N) * (d + 7))
    return f"at most {most} sequences of {N} cells of size {d}, got {B}" if most < B else None


def _refusal(*problem: Any) -> str | None:
    """Found out once for a problem; torch.compile would warn of what is kept."""
    return (_refused if torch.compiler.is_compiling() else _known)(*problem)


def _refused(
    sel: Selection, d: int, dtype: torch.dtype, product: torch.dtype, kind: str
) -> str | None:
    if kind != "cuda" and not interpreted():
        return f"a CUDA device, got {kind!r}"
    if not {sel.cells, sel.views, sel.peers} <= {"top", "all"}:
        got = f"cells={sel.cells!r}, views={sel.views!r}, peers={sel.peers!r}"
        return f"cells, views and peers that are 'top' or 'all', got {got}"
    if max(sel.N, sel.K) > 8:
        return f"at most 8 cells and 8 views, got {sel.N} and {sel.K}"
    if not 16 <= d <= 128:
        return f"cells of size 16 to 128, got {d}"
    if dtype != torch.float32 or product not in (torch.float32, torch.bfloat16):
        return f"float32, or bfloat16 under autocast, got {dtype} and products in {product}"
    return None


_known = functools.lru_cache(256)(_refused)


def scan(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    *,
    noise: Noise | None = None,
    live: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """See `riglstm.scan.scan`."""
    product = _checked(x.shape[1], h, c, weights, sel)
    save = learns(x, h, c, *weights)
    if save or watched(x, h, c, *weights):
        y, h, c, woke = differentiable(x, h, c, weights, live, reset, sel, product, save)
    else:
        y, h, c, woke = run(x, h, c, weights, sel, live, reset, product)
    return y, (h, c), woke


@untraced
def _checked(
    B: int, h: Tensor | None, c: Tensor | None, weights: Weights, sel: Selection
) -> torch.dtype:
    """The dtype of products; raises for what the kernels do not support."""
    like, N, d = weights.W if h is None else h, sel.N, weights.W.shape[2] // 4
    kind = "cuda" if like.is_cuda else like.device.type
    product = product_on(kind, like.dtype)
    why = _refusal(sel, d, like.dtype, product, kind)
    if why is not None:
        raise BackendError(f"backend='triton' needs {why}; use backend='batched' or 'auto'")
    if (why := _too_many(sel, d, B)) is not None:
        raise BackendError(
            f"backend='triton' needs {why}; run them in parts, or use backend='batched' or 'auto'"
        )
    for name, state in (("h", h), ("c", c)):
        # Kernels would read what lies behind it.
        if state is not None and state.shape != (B, N, d):
            got = tuple(state.shape)
            raise ValueError(f"{name} must be (B, N, d) = {(B, N, d)}, got {got}; give all of it")
    return product
