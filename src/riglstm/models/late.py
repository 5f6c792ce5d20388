"""A loop of small steps with what it can do without before it and after it.

On a GPU a small step costs what its number of kernels costs. What does not need the state is made
for all steps at once before the loop (a core's `lay_out`); gradients of weights, which only add up
over the steps, are made after it (`Late`).
Shapes: T steps, B sequences, n maps of i features to o, for R rows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from riglstm.autocast import product_dtype
from riglstm.models.base import CompiledSteps, State, Stepping, prepare


class Late:
    """A product y_t = x_t W of n maps side by side, (n, R, i) to (n, R, o), in every step t.

    Autograd would make a gradient of W in every step and add it to the last one. Here the loop
    multiplies by `weight`, which wants none, and `slots[t]`, which is never read, gets the
    gradient of y_t. With the x_t that the loop leaves in `rows`, the gradient of W is one product
    over all steps. `bias` (n, up to o) is for the loop to add to the last features of y_t: its
    gradient is one sum. Both can be differentiated no further, so a loop that is not compiled,
    `late` = False, leaves them to autograd.
    """

    rows: list[Tensor] | None = None
    """(n, R, i) of each step; None where they are not wanted. From the end of the loop until
    backward autograd has them: see `_Gather`."""

    def __init__(
        self, weight: Tensor, T: int, R: int, late: bool, bias: Tensor | None = None
    ) -> None:
        # Rounded once, not in every step.
        weight = weight.to(product_dtype(weight.device, weight.dtype))
        bias = weight.new_zeros(len(weight), 0) if bias is None else bias
        shape = len(weight), T, R, weight.shape[2]
        if late and torch.is_grad_enabled():
            rows: list[Tensor] = []
            self.rows = rows if weight.requires_grad else None
            slots = _Late.apply(weight, bias, rows, shape)  # type: ignore[no-untyped-call]
            weight, bias = weight.detach(), bias.detach()
        else:
            slots = weight.new_zeros(1).expand(shape)
        self.weight, self.bias = weight, bias.unsqueeze(1)
        self.slots: tuple[Tensor, ...] = slots.unbind(dim=1)  # (n, R, o) each


class _Late(torch.autograd.Function):
    """Slots of all steps, (n, T, R, o); backwards, the gradient of W by the rows it met."""

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


class _Gather(torch.autograd.Function):
    """Outputs and state after the loop as they are, outputs stacked; rows, saved for backward.

    Autograd notices where a row was changed in place (a batch of one begins with the caller's own
    state), and drops them after backward. Nothing but its results leads to the loop, so that
    backwards it comes before `_Late`, and hands it the rows.
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


def product(x: Tensor, weight: Tensor, slot: Tensor) -> Tensor:
    """x W, (n, R, i) to (n, R, o): see `Late`."""
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


Plan: TypeAlias = tuple[Sequence[tuple[Tensor, ...]], Sequence[Late]]
"""Of each thing that a step is given its T tensors; and products."""
Told: TypeAlias = tuple[tuple[Tensor, ...], State]
"""Output and rows of a step's products, and the state."""


def by_step(given: Tensor, T: int) -> tuple[Tensor, ...]:
    """(N, T·B, ·) as T tensors (N, B, ·)."""
    steps = given.unflatten(1, (T, -1)).transpose(0, 1)
    # Where cells lie first, a step's strides would tell T, and a compiled step be for one length.
    return torch.unbind(steps.contiguous() if given.is_contiguous() else steps)


class LaidOut(Stepping, Protocol):
    """A core whose step over a sequence begins after what needs no state."""

    def lay_out(self, x: Tensor, late: bool) -> Plan:
        """For x (T, B, D): what each step is given, and the products that it makes."""

    def advance(self, given: tuple[Tensor, ...], state: State) -> Told:
        """One step: what `lay_out` has for it, then slots, weights and biases of the products.

        Output and state have cells first, (N, B, d), and share no memory: a compiled step then
        adds their gradients up within its own kernels.
        """

    def enter(self, state: State) -> State:
        """The state as `advance` has it."""

    def leave(self, state: State) -> State:
        """The state as `forward` returns it."""


def hooked(model: nn.Module) -> bool:
    """Whether a call of some part is waited for: a loop that is laid out makes none."""
    return any(
        part._forward_pre_hooks
        or part._forward_hooks
        or part._backward_pre_hooks
        or part._backward_hooks
        for part in model.modules()
    )


def run(
    core: LaidOut, compiled: CompiledSteps | None, x: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """`forward` of a model by its `advance`, which may be compiled."""
    x, state = prepare(core, x, state)
    state, outputs = core.enter(state), []
    if torch.compiler.is_compiling():
        # Whoever compiles all of the loop has no use for a step compiled by itself.
        compiled = None
    given, products = core.lay_out(x, late=compiled is not None)
    weights = (*(p.weight for p in products), *(p.bias for p in products))
    step = core.advance if compiled is None else compiled.of(core, "advance")
    for given_t in zip(*given, *(p.slots for p in products), strict=True):
        (y, *rows), state = step((*given_t, *weights), state)
        outputs.append(y)
        for late, row in zip(products, rows, strict=True):
            if late.rows is not None:
                late.rows.append(row)
    if compiled is None:
        y = torch.stack(outputs)  # (T, N, B, d)
    else:
        kept = [p.rows for p in products if p.rows is not None]
        y, *state = _Gather.apply(kept, len(outputs), *outputs, *state)  # type: ignore[no-untyped-call]
    y = y.transpose(1, 2).flatten(2)  # (T, B, N·d)
    return y.transpose(0, 1) if core.batch_first else y, core.leave(state)
