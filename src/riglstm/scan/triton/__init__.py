"""The `triton` backend: a whole sequence in one launch on a GPU, forward and back; needs Triton."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import learns, product_dtype, product_on, untraced
from riglstm.scan.base import BackendError
from riglstm.scan.triton.autograd import differentiable
from riglstm.scan.triton.forward import run
from riglstm.scan.triton.kernels.common import MOST, interpreted
from riglstm.scan.triton.launch import watched
from riglstm.selection import Noise, Selection, choose_cells, weigh_peers, weigh_views

LARGEST = 256
"""Numbers of a cell."""


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
    if not {sel.cells, sel.views, sel.peers} <= {"top", "all", "random"}:
        got = f"cells={sel.cells!r}, views={sel.views!r}, peers={sel.peers!r}"
        return f"cells, views and peers that are 'top', 'all' or 'random', got {got}"
    if max(sel.N, sel.K) > MOST:
        return f"at most {MOST} cells and {MOST} views, got {sel.N} and {sel.K}"
    if d > LARGEST:
        return f"cells of size {LARGEST} at most, got {d}"
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
    wake = None if live is None else -live.int()  # every bit, or none
    take = None
    if noise is not None:
        sel, wake, take = drawn(sel, noise, wake)
    masks = (wake, take, reset)
    if save or watched(x, h, c, *weights):
        y, h, c, woke = differentiable(x, h, c, weights, *masks, sel, product, save)
    else:
        y, h, c, woke = run(x, h, c, weights, sel, *masks, product)
    return y, (h, c), woke


def drawn(
    sel: Selection, noise: Noise, wake: Tensor | None
) -> tuple[Selection, Tensor | None, Tensor | None]:
    """What `random` rules choose, as masks under which the rules that are left take everything.

    They rank the noise, which is there before the first step. The masks have a bit for each cell
    that may wake, (T, B), of those in `wake`, and one for each slot that a cell may take in,
    (T, B, N); None: all.
    """
    rules: dict[str, Any] = {n: "all" for n, draw in noise._asdict().items() if draw is not None}
    take = None
    if noise.cells is not None:
        chosen = _bits(choose_cells(noise.cells, sel, noise.cells))
        wake = chosen if wake is None else wake & chosen
    if noise.views is not None:
        take = _bits(weigh_views(noise.views, sel, noise.views)) | -1 << sel.K
    if noise.peers is not None:
        heard = _bits(weigh_peers(noise.peers, sel, noise.peers)) << sel.K | (1 << sel.K) - 1
        take = heard if take is None else take & heard
    return replace(sel, **rules), wake, take


def _bits(chosen: Tensor) -> Tensor:
    """A mask (..., n) as whole numbers (...), a bit each."""
    n = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    return (chosen.int() << n).sum(-1, dtype=torch.int32)


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
