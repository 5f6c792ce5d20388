"""Gradients of the `triton` backend: one definition, for autograd directly and for its operators.

Both passes are custom operators, as in `batched`: torch.compile sees each as one node, and so does
whoever else traces a call. What torch does around an operator takes the host most of a millisecond,
forward and back, so that calls that nobody watches do the operators' work without them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import refuse_batched, refuse_second_backward, refuse_transforms
from riglstm.inputs import begin, flat
from riglstm.scan.base import asked, handed_out, needed, vmap_by_loop
from riglstm.scan.triton.backward import Needs, backward
from riglstm.scan.triton.forward import on_device, plain, whole
from riglstm.scan.triton.launch import watched
from riglstm.scan.triton.plan import Saved, empty_saved, rounded, sizes
from riglstm.selection import Selection


def differentiable(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    wake: Tensor | None,
    take: Tensor | None,
    reset: Tensor | None,
    sel: Selection,
    product: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (T, B, N, d), final h and c, and who woke; can be differentiated once."""
    h, c = begin(x, h, c, weights, sel)
    given = (x, h, c, *weights, wake, take, reset)
    apply: Any = forward if not save or watched(*given) else _Scan.apply
    y, h, c, _, woke, *_ = apply(*given, *flat(sel), product, save)
    return y, h, c, woke


def _forward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    W_in: Tensor | None,
    b_in: Tensor | None,
    W: Tensor,
    b: Tensor | None,
    W_q: Tensor | None,
    update_bias: Tensor | None,
    wake: Tensor | None,
    take: Tensor | None,
    reset: Tensor | None,
    N: int,
    K: int,
    K_a: int,
    K_x: int,
    K_h: int,
    cells: str,
    views: str,
    peers: str,
    update_scale: float,
    product: torch.dtype,
    save: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """y, the final h and c, and `Saved`."""
    sel = Selection(N, K, K_a, K_x, K_h, cells, views, peers, update_scale)  # type: ignore[arg-type]
    weights = Weights(W_in, b_in, W, b, W_q, update_bias)
    refuse_transforms("triton")  # in a graph nobody has asked before
    given = (x, h, c, weights, sel, wake, take, reset, product)
    y, h, c, saved = on_device(*given, save, keep=True)
    assert isinstance(saved, Saved)
    return y, h, c, *saved


forward = torch.library.custom_op("riglstm::triton_forward", _forward, mutates_args=())


@forward.register_fake
def _(x: Tensor, h: Tensor, c: Tensor, *args: Any) -> Any:
    refuse_transforms("triton")
    W_in, W_q, (*rules, product, save) = args[0], args[4], args[9:]
    T, (B, _, d) = x.shape[0], h.shape
    z = sizes(d, Selection(*rules), W_q is not None, product)
    y = h.new_empty(T, *h.shape)
    width = 0 if W_in is None else rounded(z, B, x.shape[2], x.dtype, save)
    low = x.new_empty(T * B, width, dtype=z.held) if width else None
    return y, h.new_empty(h.shape), c.new_empty(c.shape), *empty_saved(T, B, z, h, save, x=low)


@torch.library.custom_op("riglstm::triton_backward", mutates_args=())
def _backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor,
    saved: list[Tensor],
    W_in: Tensor | None,
    b_in: Tensor | None,
    W: Tensor,
    b: Tensor | None,
    W_q: Tensor | None,
    update_bias: Tensor | None,
    N: int,
    K: int,
    K_a: int,
    K_x: int,
    K_h: int,
    cells: str,
    views: str,
    peers: str,
    update_scale: float,
    product: torch.dtype,
    for_input: bool,
    for_gates: bool,
) -> list[Tensor]:
    sel = Selection(N, K, K_a, K_x, K_h, cells, views, peers, update_scale)  # type: ignore[arg-type]
    weights = Weights(W_in, b_in, W, b, W_q, update_bias)
    dx, *states, grads = _pull(
        *(dy, dh, dc, x, h, y, Saved(*saved), weights, sel, product),
        Needs(x=for_input, state=True, views=for_input, gates=for_gates),
    )
    return [g for g in (*states, *asked(dx, grads, for_input, for_gates)) if g is not None]


@_backward.register_fake
def _(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor,
    saved: list[Tensor],
    *args: Any,
) -> list[Tensor]:
    wanted = asked(x, args[:6], *args[-2:])
    return [t.new_empty(t.shape) for t in (dh, dc, *wanted) if t is not None]


def _pull(
    dy: Tensor,
    dh: Tensor | None,
    dc: Tensor | None,
    x: Tensor,
    h: Tensor,
    y: Tensor,
    saved: Saved,
    weights: Weights,
    sel: Selection,
    product: torch.dtype,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Weights]:
    """`backward` on the tensors' device, with tensors that lie in memory as the kernels want them.

    Nothing here may be recorded for gradients.
    """
    if h.is_cuda and h.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(h):
            return _pull(dy, dh, dc, x, h, y, saved, weights, sel, product, needs)
    # x is read by torch alone, which takes it as it lies.
    return backward(dy, dh, dc, x, plain(h), y, saved, whole(weights), sel, product, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, h, c, *rest = inputs
    weights, masks, (*rules, product, ctx.saves) = rest[:6], rest[6:9], rest[9:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    # As in `batched`: a graph may have been made without gradients.
    kept = output[3:] if ctx.saves else (c, *masks)
    ctx.save_for_backward(x, h, output[0], *weights, *kept)
    ctx.rules, ctx.product = tuple(rules), product


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of every input of `_forward`, from those of y and the final h and c."""
    refuse_batched("triton", *grads)
    x, h, y, *rest = ctx.saved_tensors
    weights, kept = rest[:6], rest[6:]
    if not ctx.saves:
        c, *masks = kept
        with torch.no_grad():
            again = forward(x, h, c, *weights, *masks, *ctx.rules, ctx.product, True)
        kept = again[3:]
    dy, dh, dc = grads[:3]
    dy = y.new_zeros(y.shape) if dy is None else dy
    needs_x, *needs_state = ctx.needs_input_grad[:3]
    wanted = needed(ctx)
    if torch.is_grad_enabled() or watched(dy, dh, dc, x, h, y, *rest):
        # The operator has no derivative of its own, and says why.
        dh, dc = (h.new_zeros(h.shape) if g is None else g.contiguous() for g in (dh, dc))
        dh, dc, *out = _backward(
            *(dy.contiguous(), dh, dc, x, h, y, kept),
            *(*weights, *ctx.rules, ctx.product, *wanted),
        )
        dx, *dw = handed_out(out, x, weights, *wanted)
    else:
        dh, dc = (None if g is None else plain(g) for g in (dh, dc))
        needs = Needs(needs_x, any(needs_state), *wanted)
        sel, of = Selection(*ctx.rules), Weights(*weights)
        dx, dh, dc, dW = _pull(
            plain(dy), dh, dc, x, h, y, Saved(*kept), of, sel, ctx.product, needs
        )
        dx, *dw = asked(dx, dW, *wanted)
    states = (g if need else None for g, need in zip((dh, dc), needs_state, strict=True))
    return dx, *states, *dw, *(None,) * (3 + len(ctx.rules) + 2)


class _Scan(torch.autograd.Function):
    """The forward operator's work and gradients, without torch's work around an operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


forward.register_autograd(_gradients, setup_context=_setup_context)
_backward.register_autograd(refuse_second_backward("triton"))
forward.register_vmap(vmap_by_loop(forward))
