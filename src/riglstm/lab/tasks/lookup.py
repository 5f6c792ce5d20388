"""Vectors of tokens from a table, whose gradient is summed by torch's deterministic way.

On a GPU newer versions of torch add up the gradient of a table of few rows by atomics (pytorch's
pull request 172454), in any order: two runs of one seed would not be the same. It has another way,
which it takes where algorithms have to be deterministic. That is asked for here, for this one sum:
asked for in all of a training, it would slow down or refuse what has nothing to do with a table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_gradient = torch.ops.aten.embedding_dense_backward
_SWITCH = threading.Lock()
"""torch's is one of the whole process: two threads at it would not leave it as it was."""


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """`F.embedding(ids, table)`; compiled, with torch's own gradient."""
    learns = table.requires_grad and torch.is_grad_enabled()
    if table.is_cuda and learns and not torch.compiler.is_compiling():
        return InOrder.apply(ids, table)  # type: ignore[no-any-return, no-untyped-call]
    return F.embedding(ids, table)


class InOrder(torch.autograd.Function):
    """`F.embedding`, whose gradient is summed by torch's deterministic way."""

    @staticmethod
    def forward(ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ids, table = inputs
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        with _deterministic():
            return None, _gradient(grad, ids, ctx.rows, -1, False)


@contextmanager
def _deterministic() -> Iterator[None]:
    # torch's public switch also loads its compiler's options, which takes a second.
    with _SWITCH:
        was = torch._C._get_deterministic_algorithms()
        warned = torch._C._get_deterministic_algorithms_warn_only()
        # Strict where the caller is.
        torch._C._set_deterministic_algorithms(True, warn_only=warned or not was)
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(was, warn_only=warned)
