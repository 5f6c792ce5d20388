"""Launches of kernels, without what Triton finds out anew each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from riglstm.scan.triton_common import interpreted

Argument: TypeAlias = Tensor | int | None

_READY: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""A compiled kernel and its constants in order, by all that Triton compiles it for."""


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Argument], **constants: Any
) -> None:
    """`kernel[grid](*arguments, **constants)`; the kernel's whole numbers must not be specialized.

    Of a call that takes half a millisecond, Triton spent a fifth on finding the kernel that it had
    compiled for just such arguments: by a text of fifty of them. Here a tuple of what matters does.
    """
    if interpreted():
        kernel[grid](*arguments, **constants)
        return
    kinds = tuple(map(_kind, arguments))
    key = (id(kernel), torch.cuda.current_device(), kinds, *constants.items())
    ready = _READY.get(key)
    if ready is None:
        compiled = kernel[grid](*arguments, **constants)
        names = kernel.arg_names[len(arguments) :]
        if compiled is not None:  # a hook of Triton's may keep it
            _READY[key] = compiled, tuple(constants[name] for name in names)
    else:
        compiled, rest = ready
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def _kind(argument: Argument) -> Any:
    """What a kernel is compiled for: a type, and whether an address is a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return None if argument is None else argument < 2**31
