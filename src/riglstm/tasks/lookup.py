"""Vectors of tokens from a table, with a gradient that is summed in a fixed order.

On a GPU newer versions of torch add up the gradient of a table of few rows by atomics (pytorch's
pull request 172454), in any order: two runs of one seed would not be the same. It has another way,
which it takes where algorithms have to be deterministic. That is asked for here, for this one sum:
asked for in all of a training, it would slow down or refuse what has nothing to do with a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_gradient = torch.ops.aten.embedding_dense_backward


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """`F.embedding(ids, table)`."""
    if table.is_cuda and table.requires_grad and torch.is_grad_enabled():
        return InOrder.apply(ids, table)  # type: ignore[no-any-return, no-untyped-call]
    return F.embedding(ids, table)


class InOrder(torch.autograd.Function):
    """`F.embedding`, whose gradient has the same bits each time."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        with _deterministic():
            return None, _gradient(grad, ids, ctx.rows, -1, False)


@contextmanager
def _deterministic() -> Iterator[None]:
    # torch's public switch also loads its compiler's options, which takes a second.
    was = torch._C._get_deterministic_algorithms()
    warned = torch._C._get_deterministic_algorithms_warn_only()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was, warn_only=warned)
