"""What a backend is, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from riglstm.cell import Weights, gather_query, spread_query
from riglstm.inputs import State as State
from riglstm.inputs import begin as begin
from riglstm.selection import Noise, Selection

Extra = TypeVar("Extra")

WEIGHTS = "Tensor? W_in, Tensor? b_in, Tensor W, Tensor? b, Tensor? W_q, Tensor? update_bias"
"""`Weights` in the schema of an operator."""
RULES = (
    "SymInt N, SymInt K, SymInt K_a, SymInt K_x, SymInt K_h, "
    "str cells, str views, str peers, float update_scale"
)
"""A selection in it, as `inputs.flat` gives it."""


class BackendError(RuntimeError):
    """A backend asked for by name cannot run here."""


def asked(
    x: Tensor | None, weights: Iterable[Tensor | None], for_input: bool, for_gates: bool
) -> list[Tensor | None]:
    """The items of x and of each weight; None for what is not asked for or does not exist."""
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
    """Gradients of x and each weight, None where the operator gave none."""
    given = iter(out)
    return [None if t is None else next(given) for t in asked(x, weights, *wanted)]


def five_gates(W: Tensor, W_q: Tensor | None, K: int) -> Tensor:
    """W (N, (K+N)·d, 4·d) with W_q as a fifth gate, (N, (K+N)·d, 5·d)."""
    if W_q is None:
        return W
    return torch.cat((W, spread_query(W_q, W.shape[0], K).flatten(1, 2)), dim=2)


def split_gates(dW5: Tensor, W_q: Tensor | None, K: int) -> tuple[Tensor, Tensor | None]:
    """The inverse for gradients: dW, and dW_q, summed over cells where they share it."""
    if W_q is None:
        return dW5.contiguous(), None
    d = dW5.shape[2] // 5
    dW, fifth = dW5.split((4 * d, d), dim=2)
    dW_q = gather_query(fifth.unflatten(1, (-1, d)), K)  # (N, (K+N-1)·d, d)
    return dW.contiguous(), dW_q.sum(0) if W_q.dim() == 2 else dW_q


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
    """Run a step over x (T, B, D): y (T, B, N, d), the final state, and each step's extras."""
    y, extras = [], []
    # As views of one call: each x[t] would have a gradient as large as x.
    for t, x_t in enumerate(x.unbind()):
        h, c, extra = step(
            *(x_t, h, c, weights, sel),
            None if noise is None else noise.at(t),
            None if live is None else live[t],
            None if reset is None else reset[t],
        )
        y.append(h)
        extras.append(extra)
    return torch.stack(y), (h, c), extras


def vmap_by_loop(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a vmap rule for a forward operator: one call for each, and the results stacked.

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


def rounded_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a @ b).to(dtype)


def input_map_gradients(
    dV: Tensor,
    x: Tensor,
    weights: Weights,
    product: torch.dtype,
    for_x: bool = True,
    multiply: Callable[[Tensor, Tensor, torch.dtype], Tensor] = rounded_product,
    db_in: Tensor | None = None,
    low_x: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Back through the input transformation: dx, dW_in, db_in from dV (T·B, K·d).

    db_in, and x (T·B, D) in the products' dtype, are given where they are known already.
    """
    low, W_in, b_in = dV.to(product), weights.W_in, weights.b_in
    if W_in is None:
        return dV.view_as(x).to(x.dtype), None, None
    # By W_in in one layout, however it lies: another may round otherwise.
    W_in = W_in.contiguous()
    dx = multiply(low, W_in.t().to(product), x.dtype).view_as(x) if for_x else None
    low_x = x.reshape(dV.shape[0], -1).to(product) if low_x is None else low_x
    dW_in = multiply(low_x.t(), low, W_in.dtype)
    if b_in is None:
        return dx, dW_in, None
    db_in = dV.sum(0, dtype=b_in.dtype) if db_in is None else db_in.to(b_in.dtype)
    return dx, dW_in, db_in
