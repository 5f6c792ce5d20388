"""What torch's transforms may do with our operators: some is refused, vmap goes one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

try:
    from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor, is_legacy_batchedtensor
except ImportError:  # a torch that keeps them elsewhere: then torch refuses by itself

    def is_gradtrackingtensor(tensor: Tensor) -> bool:
        return False

    is_batchedtensor = is_legacy_batchedtensor = is_gradtrackingtensor


def refuse_transforms(backend: str, *tensors: Tensor | None) -> None:
    """What torch cannot do with a custom operator: tangents, it would give zeros, torch.func."""
    if torch.compiler.is_compiling():
        return
    dual = _dual()
    for t in tensors:
        if t is not None and (is_gradtrackingtensor(t) or (dual and _may_have_tangent(t))):
            raise _refusal(backend)


def refuse_tangents(backend: str) -> None:
    """The same of a call that is traced, where nobody can say which tensors have tangents."""
    if _dual():
        raise _refusal(backend)


def refuse_batched(backend: str, *grads: Tensor | None) -> None:
    """Several gradients in one backward pass."""
    if torch.compiler.is_compiling():
        return
    if any(g is not None and (is_legacy_batchedtensor(g) or is_batchedtensor(g)) for g in grads):
        raise NotImplementedError(
            f"backend={backend!r} has one gradient at a time, got a batch of them "
            "(is_grads_batched=True, vectorize=True, vmap); ask for one after another, or use "
            "backend='reference'"
        )


def _may_have_tangent(t: Tensor) -> bool:
    # torch does not tell of those in a batch of vmap's.
    return is_batchedtensor(t) or forward_ad.unpack_dual(t).tangent is not None


def _dual() -> bool:
    return getattr(forward_ad, "_current_level", -1) >= 0


def _refusal(backend: str) -> NotImplementedError:
    return NotImplementedError(
        f"backend={backend!r} has backward() only: no forward-mode derivative, and none of "
        "torch.func's grad, jvp and jac*; use backend='reference'"
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
