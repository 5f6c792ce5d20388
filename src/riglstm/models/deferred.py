"""Deferred gradients: those of weights are made once, after a loop of small steps.

On a GPU a small step costs what its number of kernels costs. Gradients of weights only add up over
the steps, so that one product after the loop serves them all.
Shapes: T steps, n maps of i features to o, for R rows each.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from riglstm.checks import product_dtype


class Deferred:
    """A product y_t = x_t W of n maps side by side, (n, R, i) to (n, R, o), in every step t.

    Autograd would make a gradient of W in every step and add it to the last one. Here the loop
    multiplies by `weight`, which wants none, and `slots[t]`, which is never read, gets the
    gradient of y_t. With the x_t that the loop leaves in `rows`, the gradient of W is one product
    over all steps. `bias` (n, up to o) is for the loop to add to the last features of y_t: its
    gradient is one sum. Both can be differentiated no further, so a loop that is not compiled,
    `deferred` = False, leaves them to autograd.
    """

    rows: list[Tensor] | None = None
    """(n, R, i) of each step; None where they are not wanted. From the end of the loop until
    backward autograd has them: see `Gather`."""

    def __init__(
        self, weight: Tensor, T: int, R: int, deferred: bool, bias: Tensor | None = None
    ) -> None:
        # Rounded once, not in every step.
        weight = weight.to(product_dtype(weight.device, weight.dtype))
        bias = weight.new_zeros(len(weight), 0) if bias is None else bias
        shape = len(weight), T, R, weight.shape[2]
        if deferred and torch.is_grad_enabled():
            rows: list[Tensor] = []
            self.rows = rows if weight.requires_grad else None
            slots = _Slots.apply(weight, bias, rows, shape)  # type: ignore[no-untyped-call]
            weight, bias = weight.detach(), bias.detach()
        else:
            slots = weight.new_zeros(1).expand(shape)
        self.weight, self.bias = weight, bias.unsqueeze(1)
        self.slots: tuple[Tensor, ...] = slots.unbind(dim=1)  # (n, R, o) each


class _Slots(torch.autograd.Function):
    """Slots of all steps, (n, T, R, o); backwards, the gradient of W from the rows."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor, rows: list[Tensor], shape: tuple[int, ...]
    ) -> Tensor:
        ctx.rows, ctx.biased, ctx.dtype = rows, bias.shape[1], bias.dtype
        return weight.new_zeros(1).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, (weight_wanted, bias_wanted, *_) = grad.flatten(1, 2), ctx.needs_input_grad
        of_weight, of_bias = None, None
        if weight_wanted:
            x = torch.stack(ctx.rows, dim=1).to(grad.dtype).flatten(1, 2)  # (n, T·R, i)
            of_weight = torch.bmm(x.mT, grad)
        ctx.rows.clear()
        if bias_wanted:
            of_bias = grad[..., grad.shape[2] - ctx.biased :].sum(dim=1, dtype=ctx.dtype)
        return of_weight, of_bias, None, None


class Gather(torch.autograd.Function):
    """Stack the outputs of a loop, pass its state on, and save the rows for backward.

    Autograd notices where a row was changed in place (a batch of one begins with the caller's own
    state), and drops them after backward. Nothing but its results leads to the loop, so that
    backwards it comes before `_Slots`, and hands it the rows.
    """

    @staticmethod
    def forward(ctx: Any, kept: list[list[Tensor]], T: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.kept, ctx.T = kept, T
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(row for rows in kept for row in rows))
        for rows in kept:
            rows.clear()
        return torch.stack(tensors[:T]), *(s.clone() for s in tensors[T:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        for rows in ctx.kept:
            rows[:] = islice(saved, ctx.T)
        # A compiled step copies a gradient that is laid out otherwise than its output was.
        of_outputs = [None] * ctx.T if grad is None else grad.contiguous().unbind()
        return None, None, *of_outputs, *grads


def deferred_product(x: Tensor, weight: Tensor, slot: Tensor) -> Tensor:
    """x W, (n, R, i) to (n, R, o): see `Deferred`."""
    x = x.to(weight.dtype)
    if not slot.requires_grad:
        return torch.bmm(x, weight)
    y: Tensor = _Product.apply(x, weight, slot)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    """x W; the slot gets the gradient of the product, the weight none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.bmm(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return torch.bmm(grad, weight.mT), None, grad
