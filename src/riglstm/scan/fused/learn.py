"""Calls of the `triton` backend that are differentiated: as a node of autograd, or an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch

from riglstm.cell import Weights
from riglstm.checks import refuse_batched
from riglstm.scan.base import begin
from riglstm.scan.batched import asked, flat, needed
from riglstm.scan.fused.back import Wanted
from riglstm.scan.fused.operators import by_operator, forward, pull
from riglstm.scan.fused.plan import Saved
from riglstm.scan.fused.run import on_device, plain
from riglstm.selection import Selection

PLAIN = {Tensor, nn.Parameter, type(None)}


def learn(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    live: Tensor | None,
    reset: Tensor | None,
    sel: Selection,
    product: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (T, B, N, d), final h and c, and who woke; can be differentiated once.

    What torch does around an operator takes the host most of a millisecond, forward and back, so
    that one is used only where somebody looks at it.
    """
    if save and unseen(x, h, c, *weights, live, reset):
        out: tuple[Tensor, Tensor, Tensor, Tensor] = _Scan.apply(  # type: ignore[no-untyped-call]
            x, h, c, *weights, live, reset, sel, product
        )
        return out
    h, c = begin(x, h, c, weights, sel)
    y, h, c, *saved = forward(x, h, c, *weights, live, reset, *flat(sel), product, save)
    return y, h, c, Saved(*saved).woke


def unseen(*tensors: Tensor | None) -> bool:
    """Whether nobody looks at operators: no compiler, mode or transform, no tensor of theirs."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state()
        or _functorch.peek_interpreter_stack() is not None
    ) and PLAIN.issuperset(map(type, tensors))


def _of_given(ctx: Any, *states: Tensor | None) -> list[Tensor | None]:
    """The gradients of h and c: autograd takes none for a state that was not given."""
    wanted = ctx.needs_input_grad[1:3]
    return [s if need else None for s, need in zip(states, wanted, strict=True)]


class _Scan(torch.autograd.Function):
    """What the operators compute."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, h, c, *given, live, reset, sel, product = inputs
        weights = Weights(*given)
        y, h_n, c_n, saved, h0 = on_device(
            x, h, c, weights, sel, live, reset, product, save=True, keep=True
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(saved.woke)
        ctx.save_for_backward(x, h0, y, *weights, *saved)
        ctx.sel, ctx.product = sel, product
        return y, h_n, c_n, saved.woke

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched("triton", *grads)
        kept = ctx.saved_tensors
        if torch.is_grad_enabled() or not unseen(*grads[:3], *kept):
            # Its own derivative says why there is none.
            ctx.rules = flat(ctx.sel)
            dx, dh, dc, *dw = by_operator(ctx, kept, *grads)
            return dx, *_of_given(ctx, dh, dc), *dw, *(None,) * 4
        x, h, y, *rest = kept
        weights, saved = Weights(*rest[:6]), Saved(*rest[6:])
        need_x, need_h, need_c = ctx.needs_input_grad[:3]
        for_input, for_gates = needed(ctx)
        dy, dh, dc = (None if g is None else plain(g) for g in grads[:3])
        dy = y.new_zeros(y.shape) if dy is None else dy
        wanted = Wanted(need_x, need_h or need_c, for_input, for_gates)
        dx, dh, dc, dW = pull(dy, dh, dc, x, h, y, saved, weights, ctx.sel, ctx.product, wanted)
        dx, *dw = asked(dx, dW, for_input, for_gates)
        return dx, *_of_given(ctx, dh, dc), *dw, *(None,) * 4
