"""Back through the input transformation, for every backend with a backward pass of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from riglstm.cell import Weights


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a @ b).to(dtype)


def input_map(
    dV: Tensor,
    x: Tensor,
    weights: Weights,
    product: torch.dtype,
    for_x: bool = True,
    multiply: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _multiply,
    db_in: Tensor | None = None,
    low_x: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Back through the input transformation: dx, dW_in, db_in from dV (T·B, K·d).

    db_in, and x (T·B, D) in the products' dtype, are given where they are known already.
    """
    low, W_in, b_in = dV.to(product), weights.W_in, weights.b_in
    if W_in is None:
        return dV.view_as(x).to(x.dtype), None, None
    dx = multiply(low, W_in.t().to(product), x.dtype).view_as(x) if for_x else None
    low_x = x.reshape(dV.shape[0], -1).to(product) if low_x is None else low_x
    dW_in = multiply(low_x.t(), low, W_in.dtype)
    if b_in is None:
        return dx, dW_in, None
    db_in = dV.sum(0, dtype=b_in.dtype) if db_in is None else db_in.to(b_in.dtype)
    return dx, dW_in, db_in
