"""Fused kernels for a GPU: a whole sequence in one launch, forward and back.

Both passes are custom operators, as in `batched`: torch.compile sees each as one node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from riglstm.autocast import product_dtype
from riglstm.cell import Weights
from riglstm.scan.base import BackendError
from riglstm.scan.batched import asked, flat, refuse_transforms
from riglstm.scan.triton_common import interpreted
from riglstm.scan.triton_plan import Saved, empty_saved, sizes
from riglstm.scan.triton_replay import again
from riglstm.scan.triton_run import backward, forward
from riglstm.scan.triton_symbols import Symbols
from riglstm.selection import Noise, Selection


def refusal(sel: Selection, d: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What the kernels do not support about a problem; None: they run it."""
    product = product_dtype(device, dtype)
    if device.type != "cuda" and not interpreted():
        return f"a CUDA device, got {device.type!r}"
    if sel.cells == "random" or {sel.views, sel.peers} & {"random", "soft"}:
        got = f"cells={sel.cells!r}, views={sel.views!r}, peers={sel.peers!r}"
        return f"cells, views and peers that are 'top' or 'all', got {got}"
    if max(sel.N, sel.K) > 8:
        return f"at most 8 cells and 8 views, got {sel.N} and {sel.K}"
    if not 16 <= d <= 128:
        return f"cells of size 16 to 128, got {d}"
    if dtype != torch.float32 or product not in (torch.float32, torch.bfloat16):
        return f"float32, or bfloat16 under autocast, got {dtype} and products in {product}"
    return None


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
    product = product_dtype(x.device, h.dtype)
    _refuse(x, h, c, weights, sel)
    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, h, c, *weights)
    )
    if learns or torch.compiler.is_compiling():
        y, h, c, *saved = _forward(x, h, c, *weights, live, reset, *flat(sel), product, learns)
        return y, (h, c), Saved(*saved).woke
    # Without gradients the operator's own work, a part of a millisecond, is left out.
    y, h, c, woke = again(_run, x, h, c, weights, sel, live, reset, product)
    return y, (h, c), woke


def _refuse(x: Tensor, h: Tensor, c: Tensor, weights: Weights, sel: Selection) -> None:
    """Raise for what the kernels do not support."""
    why = refusal(sel, h.shape[2], h.dtype, h.device)
    if why is not None:
        raise BackendError(f"backend='triton' needs {why}; use backend='batched' or 'auto'")
    refuse_transforms("triton", x, h, c, *weights)


def scan_symbols(
    ids: Tensor,
    table: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    *,
    live: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """y and the final state for symbols ids (T, B) of vectors (V, D), without gradients."""
    product = product_dtype(table.device, h.dtype)
    _refuse(table, h, c, weights, sel)
    with torch.no_grad(), torch.autocast(table.device.type, enabled=False):
        x = Symbols(ids.to(torch.int32).contiguous(), table)
        y, h, c, _ = _run(x, h, c, weights, sel, live, reset, product, save=False)
    return y, (h, c)


def _whole(*weights: Tensor | None) -> Weights:
    """Weights without gaps in memory."""
    return Weights(*(None if w is None else w.contiguous() for w in weights))  # type: ignore[arg-type]


def _run(
    x: Tensor | Symbols,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
    saved: Saved | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward` on the tensors' device, with tensors that lie in memory as the kernels want them.

    The final h is a tensor of its own. Nothing here may be recorded for gradients.
    """
    if h.is_cuda and h.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(h):
            return _run(x, h, c, weights, sel, live, reset, product, save, saved)
    x = x if isinstance(x, Symbols) else x.contiguous()
    live, reset = (None if flags is None else flags.contiguous() for flags in (live, reset))
    whole = (h.contiguous(), c, _whole(*weights))
    y, h, c, woke = forward(x, *whole, sel, live, reset, product, save, saved)
    return y, h.clone(), c, woke


@torch.library.custom_op("riglstm::triton_forward", mutates_args=())
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
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    sel = Selection(N, K, K_a, K_x, K_h, cells, views, peers, update_scale)  # type: ignore[arg-type]
    weights = Weights(W_in, b_in, W, b, W_q, update_bias)
    z = sizes(h.shape[2], sel, W_q is not None, product)
    saved = empty_saved(x.shape[0], h.shape[0], z, h, save)
    y, h, c, _ = _run(x, h, c, weights, sel, live, reset, product, save, saved)
    return y, h, c, *saved


@_forward.register_fake
def _(x: Tensor, h: Tensor, c: Tensor, *args: Any) -> Any:
    W_q, rules, product, save = args[4], args[8:17], args[17], args[18]
    T, (B, _, d) = x.shape[0], h.shape
    z = sizes(d, Selection(*rules), W_q is not None, product)
    y = h.new_empty(T, *h.shape)
    return y, h.new_empty(h.shape), c.new_empty(c.shape), *empty_saved(T, B, z, h, save)


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
    weights = _whole(W_in, b_in, W, b, W_q, update_bias)
    with torch.cuda.device_of(x):
        dx, dh, dc, grads = backward(
            *(dy, dh, dc, x.contiguous(), h.contiguous(), y, Saved(*saved), weights, sel, product),
            *(for_input, for_gates),
        )
    return [dh, dc, *(g for g in asked(dx, grads, for_input, for_gates) if g is not None)]


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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, h, _, *rest = inputs
    weights, (*rules, product, _) = rest[:6], rest[8:]
    y, saved = output[0], output[3:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(x, h, y, *weights, *saved)
    ctx.rules, ctx.product = tuple(rules), product


def _apply_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, h, y, *rest = ctx.saved_tensors
    weights, saved = rest[:6], rest[6:]

    def whole(grad: Tensor | None, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape) if grad is None else grad.contiguous()

    need_x, _, _, *need = ctx.needs_input_grad[:9]
    for_input, for_gates = need_x or any(need[:2]), any(need[2:])
    dh, dc, *out = _backward(
        *(whole(grads[0], y), whole(grads[1], h), whole(grads[2], h), x, h, y, saved),
        *(*weights, *ctx.rules, ctx.product, for_input, for_gates),
    )
    given = iter(out)
    wanted = asked(x, weights, for_input, for_gates)
    dx, *dw = (None if t is None else next(given) for t in wanted)
    return dx, dh, dc, *dw, *(None,) * (2 + len(ctx.rules) + 2)


def _no_second_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "backend='triton' can be differentiated once; for double backward use backend='reference'"
    )


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(_no_second_backward)
