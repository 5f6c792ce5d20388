"""All cells of a step at once, and a backward pass written by hand.

Both passes are custom operators: torch.compile sees each as one node, so a sequence of any length
compiles at once and its data-dependent row counts stay out of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from riglstm.autocast import product_dtype
from riglstm.cell import Weights
from riglstm.scan import dense
from riglstm.scan.base import asked, begin, flat, handed_out, learns, needed
from riglstm.scan.batched_backward import backward
from riglstm.scan.batched_forward import Saved, empty_saved, forward
from riglstm.scan.rows import some_idle
from riglstm.scan.transforms import one_by_one, refuse_batched, refuse_transforms
from riglstm.selection import Noise, Selection


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
    h, c = begin(x, h, c, weights, sel)
    product = product_dtype(x.device, h.dtype)
    save = learns(x, h, c, *weights)
    y, h, c, active, *_ = _forward(
        x, h, c, *weights, *(noise or Noise()), live, reset, *flat(sel), product, save
    )
    return y, (h, c), active


@torch.library.custom_op("riglstm::batched_forward", mutates_args=())
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
    noise_cells: Tensor | None,
    noise_views: Tensor | None,
    noise_peers: Tensor | None,
    live: Tensor | None,
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
    Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    sel = Selection(N, K, K_a, K_x, K_h, cells, views, peers, update_scale)  # type: ignore[arg-type]
    weights = Weights(W_in, b_in, W, b, W_q, update_bias)
    refuse_transforms("batched")  # in a graph nobody has asked before
    if dense.fits(W, sel, some_idle(h.device, sel, live), product, h.dtype):
        y, h, c, active, saved = dense.forward(
            x.contiguous(), h.contiguous(), c, weights, sel, reset, save
        )
        return y, h, c, active, *saved
    y, h, c, active, saved = forward(
        x.contiguous(),
        h.contiguous(),
        c,
        weights,
        sel,
        Noise(noise_cells, noise_views, noise_peers) if sel.draws else None,
        live,
        reset,
        product,
        save,
    )
    return y, h, c, active, *saved


@_forward.register_fake
def _(x: Tensor, h: Tensor, c: Tensor, *args: Any) -> Any:
    refuse_transforms("batched")
    W_q, rules, save = args[4], args[11:20], args[21]
    saved = empty_saved(x.shape[0] if save else 1, h, Selection(*rules), W_q is not None)
    y = h.new_empty(x.shape[0], *h.shape)
    active = h.new_empty(x.shape[0], *h.shape[:2], dtype=torch.bool)
    return y, h.new_empty(h.shape), c.new_empty(c.shape), active, *saved


@torch.library.custom_op("riglstm::batched_backward", mutates_args=())
def _backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    active: Tensor,
    saved: list[Tensor],
    W_in: Tensor | None,
    b_in: Tensor | None,
    W: Tensor,
    b: Tensor | None,
    W_q: Tensor | None,
    update_bias: Tensor | None,
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
    idle: bool,
    for_input: bool,
    for_gates: bool,
) -> list[Tensor]:
    sel = Selection(N, K, K_a, K_x, K_h, cells, views, peers, update_scale)  # type: ignore[arg-type]
    weights = Weights(W_in, b_in, W, b, W_q, update_bias)
    if dense.fits(W, sel, idle, product, dh.dtype):
        dx, dh, dc, grads = dense.backward(
            *(dy, dh, dc, x, Saved(*saved), weights, sel, reset, for_input, for_gates)
        )
    else:
        dx, dh, dc, grads = backward(
            *(dy, dh, dc, x, active, Saved(*saved), weights, sel, reset, product, idle),
            *(for_input, for_gates),
        )
    wanted = asked(dx, grads, for_input, for_gates)
    return [dh, dc, *(g for g in wanted if g is not None)]


@_backward.register_fake
def _(
    dy: Tensor, dh: Tensor, dc: Tensor, x: Tensor, active: Tensor, saved: list[Tensor], *args: Any
) -> list[Tensor]:
    wanted = asked(x, args[:6], *args[-2:])
    return [t.new_empty(t.shape) for t in (dh, dc, *wanted) if t is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *state, W_in, b_in, W, b, W_q, update_bias = inputs[:9]
    *drawn, live, reset = inputs[9:14]
    *rules, product, ctx.saves = inputs[14:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    # A graph that was made without gradients, by torch.export say, saves nothing.
    kept = output[3:] if ctx.saves else (*state, *drawn, live)
    ctx.save_for_backward(x, W_in, b_in, W, b, W_q, update_bias, reset, *kept)
    ctx.idle = some_idle(x.device, Selection(*rules), live)
    ctx.rules, ctx.product, ctx.shape = tuple(rules), product, output[0].shape


def _apply_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_batched("batched", *grads)
    x, *rest = ctx.saved_tensors
    weights, reset, kept = rest[:6], rest[6], rest[7:]
    if not ctx.saves:
        with torch.no_grad():
            h, c, *others = kept
            again = _forward(x, h, c, *weights, *others, reset, *ctx.rules, ctx.product, True)
        kept = again[3:]
    active, *saved = kept
    like = saved[0]

    def whole(grad: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return like.new_zeros(shape) if grad is None else grad.contiguous()

    dy = whole(grads[0], ctx.shape)
    dh, dc = (whole(g, ctx.shape[1:]) for g in grads[1:3])
    wanted = needed(ctx)
    dh, dc, *out = _backward(
        *(dy, dh, dc, x, active, saved, *weights, reset, *ctx.rules, ctx.product, ctx.idle),
        *wanted,
    )
    dx, *dw = handed_out(out, x, weights, *wanted)
    nothing = (None,) * (3 + 2 + len(ctx.rules) + 2)
    return dx, dh, dc, *dw, *nothing


def _no_second_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "backend='batched' can be differentiated once; for double backward use backend='reference'"
    )


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(_no_second_backward)
_forward.register_vmap(one_by_one(_forward))
