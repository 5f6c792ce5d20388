"""The equations as they stand: `cell.step` in a Python loop, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from riglstm.cell import Seen, Weights, step
from riglstm.selection import Noise, Selection


def trace(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    *,
    noise: Noise | None = None,
    live: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Seen]:
    """The whole sequence, and every decision of every step, stacked over time."""
    y, seen = [], []
    for t in range(x.shape[0]):
        h, c, at_t = step(
            x[t],
            h,
            c,
            weights,
            sel,
            noise=None if noise is None else noise.at(t),
            live=None if live is None else live[t],
            reset=None if reset is None else reset[t],
        )
        y.append(h)
        seen.append(at_t)
    return torch.stack(y), (h, c), Seen(*map(torch.stack, zip(*seen, strict=True)))


def scan(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    *,
    noise: Noise | None = None,
    live: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """See `riglstm.scan.scan`."""
    y, state, seen = trace(x, h, c, weights, sel, noise=noise, live=live, reset=reset)
    return y, state, seen.active
