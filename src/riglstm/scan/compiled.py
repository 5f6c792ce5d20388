"""The loop of `reference` around a compiled step.

Only the step is compiled: unrolling a whole sequence takes the compiler minutes (its time grows
faster than the length), the step alone seconds, and one compiled step serves every length.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable

import torch
from torch import Tensor

from riglstm.cell import Weights, step
from riglstm.selection import Noise, Selection


def available(device: torch.device) -> bool:
    """Whether torch.compile can build the step for this device."""
    if device.type == "cpu":
        return any(shutil.which(cxx) for cxx in ("g++", "clang++", "c++"))
    return True


@functools.cache
def _step(sel: Selection) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A compiled step per selection, so that each meets few shapes and recompiles rarely."""

    def run(
        x: Tensor,
        h: Tensor,
        c: Tensor,
        weights: Weights,
        noise: Noise | None,
        live: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        h, c, seen = step(x, h, c, weights, sel, noise, live, reset)
        return h, c, seen.active

    return torch.compile(run)


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
    run = _step(sel)
    y, active = [], []
    for t in range(x.shape[0]):
        h, c, woke = run(
            x[t],
            h,
            c,
            weights,
            None if noise is None else noise.at(t),
            None if live is None else live[t],
            None if reset is None else reset[t],
        )
        y.append(h)
        active.append(woke)
    return torch.stack(y), (h, c), torch.stack(active)
