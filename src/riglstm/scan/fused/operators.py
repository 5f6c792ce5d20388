"""Both passes of the `triton` backend as custom operators, as in `batched`.

torch.compile sees each as one node, and so do fake tensors and whoever else traces a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import refuse_batched, refuse_transforms
from riglstm.scan.base import vmap_by_loop
from riglstm.scan.batched import asked, handed_out, needed
from riglstm.scan.fused.back import Wanted, backward
from riglstm.scan.fused.input_map import rounded
from riglstm.scan.fused.plan import Saved, empty_saved, sizes
from riglstm.scan.fused.run import on_device, plain, whole
from riglstm.selection import Selection


@torch.library.custom_op("riglstm::triton_forward", mutates_args=())
def forward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    W_in: Tensor | None,
    b_in: Tensor | None,
    W: Tensor,
    b: Tensor | None,
    W_q: Tensor | None,
    update_bias: Tensor | None,
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
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    sel = Selection(N, K, K_a, K_x, K_h, cells, views, peers, update_scale)  # type: ignore[arg-type]
    weights = Weights(W_in, b_in, W, b, W_q, update_bias)
    refuse_transforms("triton")  # in a graph nobody has asked before
    given = (x, h, c, weights, sel, live, reset, product)
    y, h, c, saved, _ = on_device(*given, save, keep=True)
    assert isinstance(saved, Saved)
    return y, h, c, *saved


@forward.register_fake
def _(x: Tensor, h: Tensor, c: Tensor, *args: Any) -> Any:
    refuse_transforms("triton")
    W_in, W_q, rules, product, save = args[0], args[4], args[8:17], args[17], args[18]
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
    dx, *states, grads = pull(
        *(dy, dh, dc, x, h, y, Saved(*saved), weights, sel, product),
        Wanted(x=for_input, state=True, views=for_input, gates=for_gates),
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


def pull(
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
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Weights]:
    """`backward` on the tensors' device, with tensors that lie in memory as the kernels want them.

    Nothing here may be recorded for gradients.
    """
    if h.is_cuda and h.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(h):
            return pull(dy, dh, dc, x, h, y, saved, weights, sel, product, wanted)
    # x is read by torch alone, which takes it as it lies.
    return backward(dy, dh, dc, x, plain(h), y, saved, whole(weights), sel, product, wanted)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, h, c, *rest = inputs
    weights, (live, reset, *rules, product, ctx.saves) = rest[:6], rest[6:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    # As in `batched`: a graph may have been made without gradients.
    kept = output[3:] if ctx.saves else (c, live, reset)
    ctx.save_for_backward(x, h, output[0], *weights, *kept)
    ctx.rules, ctx.product = tuple(rules), product


def _apply_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_batched("triton", *grads)
    nothing = (None,) * (2 + len(ctx.rules) + 2)
    kept = ctx.saved_tensors
    if not ctx.saves:
        x, h, y, *weights, c, live, reset = kept
        with torch.no_grad():
            again = forward(x, h, c, *weights, live, reset, *ctx.rules, ctx.product, True)
        kept = (x, h, y, *weights, *again[3:])
    return *by_operator(ctx, kept, *grads), *nothing


def by_operator(
    ctx: Any, kept: Sequence[Tensor], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of x, h, c and the weights; `kept` are ctx's tensors, to be had from it once."""
    x, h, y, *rest = kept
    weights, saved = rest[:6], rest[6:]

    def there(grad: Tensor | None, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape) if grad is None else grad.contiguous()

    wanted = needed(ctx)
    dh, dc, *out = _backward(
        *(there(grads[0], y), there(grads[1], h), there(grads[2], h), x, h, y, saved),
        *(*weights, *ctx.rules, ctx.product, *wanted),
    )
    dx, *dw = handed_out(out, x, weights, *wanted)
    return dx, dh, dc, *dw


def _no_second_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "backend='triton' can be differentiated once; for double backward use backend='reference'"
    )


forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(_no_second_backward)
forward.register_vmap(vmap_by_loop(forward))
