"""What a backend is, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.inputs import State as State
from riglstm.inputs import begin as begin
from riglstm.selection import Noise, Selection

Extra = TypeVar("Extra")


class BackendError(RuntimeError):
    """A backend asked for by name cannot run here."""


class Scan(Protocol):
    """A backend: see `riglstm.scan.scan` for the arguments."""

    def __call__(
        self,
        x: Tensor,
        h: Tensor | None,
        c: Tensor | None,
        weights: Weights,
        sel: Selection,
        *,
        noise: Noise | None = None,
        live: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, State, Tensor]: ...


def loop(
    step: Callable[..., tuple[Tensor, Tensor, Extra]],
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise | None,
    live: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, State, list[Extra]]:
    """A step over x (T, B, D): y (T, B, N, d), the final state, and what each step gave besides."""
    y, extras = [], []
    for t in range(x.shape[0]):
        h, c, extra = step(
            x[t],
            h,
            c,
            weights,
            sel,
            None if noise is None else noise.at(t),
            None if live is None else live[t],
            None if reset is None else reset[t],
        )
        y.append(h)
        extras.append(extra)
    return torch.stack(y), (h, c), extras


def vmap_by_loop(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of vmap for a forward operator: a call for each, and what they give side by side.

    Its last argument says whether to save for a backward pass. Tensors in a batch of vmap's do not
    tell that they need one; here, by themselves, they do.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if info.batch_size == 0:
            raise ValueError(
                "torch.vmap needs a dimension of at least 1 here, got one of size 0; leave it out"
            )
        made = []
        for i in range(info.batch_size):
            *here, save = (
                a if at is None else a.select(at, i) for a, at in zip(args, in_dims, strict=True)
            )
            needed = any(isinstance(a, Tensor) and a.requires_grad for a in here)
            made.append(operator(*here, save or (needed and torch.is_grad_enabled())))
        out = tuple(torch.stack(each) for each in zip(*made, strict=True))
        return out, (0,) * len(out)

    return rule
