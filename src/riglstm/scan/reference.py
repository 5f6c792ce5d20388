"""The equations as they stand: `cell.step` in a Python loop, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from riglstm.cell import Seen, Weights, step
from riglstm.scan.base import State, begin, loop
from riglstm.selection import Noise, Selection


def trace(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    *,
    noise: Noise | None = None,
    live: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, State, Seen]:
    """The whole sequence, and every decision of every step, stacked over time."""
    h, c = begin(x, h, c, weights, sel)
    y, state, seen = loop(step, x, h, c, weights, sel, noise, live, reset)
    return y, state, Seen(*map(torch.stack, zip(*seen, strict=True)))


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
) -> tuple[Tensor, State, Tensor]:
    """See `riglstm.scan.scan`."""
    y, state, seen = trace(x, h, c, weights, sel, noise=noise, live=live, reset=reset)
    return y, state, seen.active
