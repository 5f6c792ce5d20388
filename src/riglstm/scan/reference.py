"""The equations as they stand: `cell.step` in a Python loop, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

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
    if torch.compiler.is_exporting():
        return _as_one_node(x, *begin(x, h, c, weights, sel), weights, sel, noise, live, reset)
    y, state, seen = trace(x, h, c, weights, sel, noise=noise, live=live, reset=reset)
    return y, state, seen.active


def _as_one_node(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise | None,
    live: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, State, Tensor]:
    """`scan` in an exported graph: torch's own operator around one step, open in its length.

    torch.onnx.export makes ONNX's `Scan` of it, but does not find the way through its gradient.
    """
    from torch._higher_order_ops.scan import scan as repeat

    _forget_sizes(repeat)
    given = (*(noise or Noise()), live, reset)
    there, B = [g is not None for g in given], x.shape[1]
    if torch.onnx.is_in_onnx_export():
        x, h, c = x.detach(), h.detach(), c.detach()
        weights = Weights(*(None if w is None else w.detach() for w in weights))  # type: ignore[arg-type]

    def one(state: State, present: list[Tensor]) -> tuple[State, tuple[Tensor, Tensor]]:
        parts = iter(present)
        x = next(parts)
        *drawn, live, reset = (next(parts) if is_there else None for is_there in there)
        h, c, seen = step(x, *state, weights, sel, Noise(*drawn), live, reset)
        # AOTInductor finds an open B among what a step takes, so it must be named in it.
        return (h, c), (h.clone().view(B, *h.shape[1:]), seen.active.to(h.dtype))

    # What it carries must not share memory, and what it gives must be numbers.
    state, (y, active) = repeat(one, (h, c.clone()), [x, *(g for g in given if g is not None)])
    return y, state, active.bool()


def _forget_sizes(operator: Callable[..., Any]) -> None:
    """Drop what torch has compiled of its `scan`: sizes of an earlier export would be kept.

    It compiles a function inside the operator once for a process, and compares a size that is open
    now with the number that it was then, which fixes it.
    """
    from torch._C._dynamo.eval_frame import reset_code

    inner = (code for code in operator.__code__.co_consts if isinstance(code, CodeType))
    for code in inner:
        reset_code(code)
