"""Python that looks at sizes while torch.jit.trace records what is done with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_resume: Callable[[Any], None] = torch._C._set_tracing_state  # type: ignore[attr-defined]


def tracing() -> bool:
    """Whether torch.jit.trace records what is done."""
    return torch._C._get_tracing_state() is not None


def untraced(look: Callable[P, R]) -> Callable[P, R]:
    """A function that torch.jit.trace neither records nor warns of: sizes are numbers in it."""

    @functools.wraps(look)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        state = torch._C._get_tracing_state()
        if state is None:
            return look(*args, **kwargs)
        _resume(None)
        try:
            return look(*map(_plain, args), **kwargs)
        finally:
            _resume(state)

    return run


def _plain(given: Any) -> Any:
    """A size, or several, as numbers; in a trace they are tensors."""
    if type(given) is tuple:
        return tuple(map(_plain, given))
    return int(given) if isinstance(given, Tensor) and given.dim() == 0 else given
