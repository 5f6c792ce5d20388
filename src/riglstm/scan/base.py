"""What a backend is, and the loop that two of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.selection import Noise, Selection
from riglstm.tracing import tracing

State: TypeAlias = tuple[Tensor, Tensor]
Rules: TypeAlias = tuple[int, int, int, int, int, str, str, str, float]
Extra = TypeVar("Extra")


class BackendError(RuntimeError):
    """A backend asked for by name cannot run here."""


def begin(x: Tensor, h: Tensor | None, c: Tensor | None, weights: Weights, sel: Selection) -> State:
    """The state before x (T, B, D), each (B, N, d): what is given of it, and else zero."""
    if h is None or c is None:
        zero = weights.W.new_zeros(x.shape[1], sel.N, weights.W.shape[2] // 4)
        h, c = zero if h is None else h, zero if c is None else c
    return h, c


def learns(*tensors: Tensor | None) -> bool:
    """Whether a call is differentiated, and so has something to save.

    A trace saves nothing: torch.jit.trace repeats it without gradients, and compares. Operators
    whose call saved nothing run it again for their backward pass.
    """
    if not torch.is_grad_enabled() or tracing():
        return False
    return any(t is not None and t.requires_grad for t in tensors)


def of_shape(own: Tensor, *shape: int) -> Tensor:
    """A tensor that neither anybody else nor a backward pass has, in another shape.

    To autograd it is no view: those cannot be detached in place, and nn.LSTM's states can.
    """
    return cast(Tensor, torch.ops.aten._unsafe_view.default(own, shape))


def flat(sel: Selection) -> Rules:
    """A selection as arguments of an operator, which takes no objects."""
    return (
        *(sel.N, sel.K, sel.K_a, sel.K_x, sel.K_h),
        *(sel.cells, sel.views, sel.peers),
        sel.update_scale,
    )


def asked(
    x: Tensor | None, weights: Iterable[Tensor | None], for_input: bool, for_gates: bool
) -> list[Tensor | None]:
    """What belongs to x and each weight, None for what is not asked for or does not exist."""
    W_in, b_in, *gates = weights
    inputs: list[Tensor | None] = [x, W_in, b_in] if for_input else [None] * 3
    return inputs + (gates if for_gates else [None] * 4)


def needed(ctx: Any) -> tuple[bool, bool]:
    """Whether a gradient is asked for of x, W_in or b_in, and of any other weight."""
    x, _, _, W_in, b_in, *gates = ctx.needs_input_grad[:9]
    return x or W_in or b_in, any(gates)


def handed_out(
    out: Iterable[Tensor], x: Tensor, weights: Sequence[Tensor | None], *wanted: bool
) -> list[Tensor | None]:
    """Gradients of x and each weight, from those alone that an operator gave."""
    given = iter(out)
    return [None if t is None else next(given) for t in asked(x, weights, *wanted)]


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
