"""What a call of ours may be inside: torch.func, forward mode, a trace, an export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from riglstm.scan.base import BackendError
from riglstm.tracing import tracing

_DERIVATIVES = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)


def suited(backend: str, name: str) -> str:
    """The backend that runs here, from the one asked for and the one that `auto` would take.

    Operators of ours have backward() only, and are none of ONNX's: there `auto` takes the
    reference. A loop in Python has as many steps in a trace as its example had.
    """
    if tracing():
        if torch.onnx.is_in_onnx_export():
            raise BackendError(
                "torch.onnx.export(..., dynamo=False) would fix the length of sequences, got a "
                "model with a RigLSTM; use dynamo=True, or riglstm.onnx.export for the layer alone"
            )
        if name in ("reference", "compiled"):
            raise BackendError(
                f"torch.jit.trace would fix the length of sequences with backend={name!r}; use "
                "backend='batched' or 'auto', or torch.export"
            )
    elif differentiating():
        if backend == "auto":
            return "reference"
        refuse_transforms(name)
    elif torch.compiler.is_exporting() and _for_onnx():
        if backend not in ("auto", "reference"):
            raise BackendError(
                f"torch.onnx.export needs backend='auto' or 'reference', got {backend!r}, which is "
                "no operator of ONNX; set layer.backend = 'auto'"
            )
        return "reference"
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def differentiating() -> bool:
    """True inside torch.func's grad, jvp and jac*, or a level of forward mode."""
    if _functorch.peek_interpreter_stack() is None:
        return _dual()
    stack = _functorch.get_interpreter_stack() or ()
    return _dual() or any(level.key() in _DERIVATIVES for level in stack)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _for_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def _dual() -> bool:
    return getattr(forward_ad, "_current_level", -1) >= 0


def refuse_transforms(backend: str) -> None:
    """Raise for `batched` and `triton` where a derivative is taken that they do not have."""
    if backend in ("batched", "triton") and differentiating():
        raise NotImplementedError(
            f"backend={backend!r} has backward() only: no forward-mode derivative, and none of "
            "torch.func's grad, jvp and jac*; use backend='reference' or 'auto'"
        )


def refuse_batched(backend: str, *grads: Tensor | None) -> None:
    """Several gradients in one backward pass."""
    if torch.compiler.is_compiling():
        return
    batched = (_functorch.is_legacy_batchedtensor, _functorch.is_batchedtensor)
    if any(g is not None and any(is_one(g) for is_one in batched) for g in grads):
        raise NotImplementedError(
            f"backend={backend!r} has one gradient at a time, got a batch of them "
            "(is_grads_batched=True, vectorize=True, vmap); ask for one after another, or use "
            "backend='reference'"
        )


def one_by_one(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of vmap for a forward operator: a call for each, and what they give side by side.

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
