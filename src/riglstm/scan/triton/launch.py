"""Launches of kernels without what Triton finds out anew each time, and buffers for them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from riglstm import checks
from riglstm.scan.triton.kernels.common import KNOWN, interpreted


class Buffer:
    """Memory that only kernels see: Triton takes whatever has a dtype and a `data_ptr`."""

    __slots__ = ("address", "dtype", "memory")

    def __init__(self, dtype: torch.dtype, address: int, memory: Tensor) -> None:
        self.dtype, self.address = dtype, address
        self.memory = memory
        """What it is a part of, which must not be freed before."""

    def data_ptr(self) -> int:
        return self.address


Argument: TypeAlias = Tensor | Buffer | int | None


def nth(of: Tensor | Buffer, i: int, size: int) -> Tensor | Buffer:
    """The i-th of equal parts of a buffer, `size` numbers each; as a tensor, its i-th element."""
    if isinstance(of, Tensor):
        return of[i]
    return Buffer(of.dtype, of.address + i * size * of.dtype.itemsize, of.memory)


class Layout:
    """Buffers of these dtypes and shapes, to be had in one allocation.

    An allocation takes the host microseconds, and so does each view of one as a tensor: a call of
    one step would spend more on its buffers than on its arithmetic.
    """

    def __init__(self, *wanted: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self.wanted, self.starts, self.size = wanted, list[tuple[torch.dtype, int]](), 0
        for dtype, shape in wanted:
            self.starts.append((dtype, self.size))
            self.size += -(-math.prod(shape) * dtype.itemsize // 128) * 128

    def make(self, like: Tensor) -> list[Tensor] | list[Buffer]:
        """All of them, unwritten, where `like` is."""
        # Of its dtype, whatever that is: torch takes twice as long where it is told another.
        return self.cut(like.new_empty(self.size // like.itemsize))

    def cut(self, memory: Tensor) -> list[Tensor] | list[Buffer]:
        """All of them, in memory of `size` bytes."""
        if interpreted():
            memory = memory.view(torch.uint8)
            return [
                memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for (dtype, start), (_, shape) in zip(self.starts, self.wanted, strict=True)
            ]
        first = memory.data_ptr()
        return [Buffer(dtype, first + start, memory) for dtype, start in self.starts]


class Launch:
    """A kernel with its constants; what Triton compiled is cached by kinds of arguments.

    The kernel's whole numbers must not be specialized, and all constants come after its arguments.
    Of a call that took half a millisecond, Triton spent a fifth on finding the kernel that it had
    compiled for just such arguments: by a text of fifty of them. Here a tuple of what matters does.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.rest = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self.ready: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], arguments: Sequence[Argument]) -> None:
        """`kernel[grid](*arguments, **constants)`, on the current device."""
        if interpreted():
            self.kernel[grid](*arguments, **self.constants)
            return
        device = torch.cuda.current_device()
        kinds: list[Any] = [device]
        values: list[int | None] = []
        here = True
        argument: Any  # of a type that is looked up, and not asked for by isinstance
        for argument in arguments:
            what = type(argument)
            if what is Buffer:
                kinds.append(argument.dtype)
                values.append(argument.address)
            elif argument is None:
                kinds.append(None)
                values.append(None)
            elif what is int:
                kinds.append(argument < 2**31)
                values.append(argument)
            else:
                # Triton compiles for a type, and whether an address is a multiple of 16.
                address = argument.data_ptr()
                kinds.append(argument.dtype if address % 16 == 0 else (argument.dtype,))
                values.append(address)
                if argument.get_device() != device:
                    here = False
        key = tuple(kinds)
        compiled = self.ready.get(key)
        if compiled is None:
            compiled = self.kernel[grid](*arguments, **self.constants)
            if compiled is not None:  # a hook of Triton's may keep it
                self.ready[key] = compiled
        elif here and KNOWN and not hooked():  # of a tensor elsewhere, Triton says so
            stream = driver.active.get_current_stream(device)
            compiled.run(
                *(*(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata),
                *(None, None, None, *values, *self.rest),  # nothing for hooks, and no hooks
            )
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *self.rest)
        if (records := getattr(_RECORDS, "launches", None)) is not None:
            records.append(Launched(grid, tuple(arguments), compiled, self.rest))


class Launched(NamedTuple):
    """A launch that was made."""

    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    compiled: Any
    rest: tuple[Any, ...]
    """The constants."""


_RECORDS = threading.local()


@contextlib.contextmanager
def recorded() -> Iterator[list[Launched]]:
    """The launches that this thread makes meanwhile.

    Those of another layer's call in the midst, a finalizer's say, are its own if it records, too.
    """
    before, launches = getattr(_RECORDS, "launches", None), list[Launched]()
    _RECORDS.launches = launches
    try:
        yield launches
    finally:
        _RECORDS.launches = before


def hooked() -> bool:
    """True if a profiler is to hear of launches through Triton."""
    runtime = knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
    )


def watched(*tensors: Tensor | None) -> bool:
    """True if anybody of `checks.watched`, or a launch hook, is to see what is done.

    Then a call goes through torch's operators, and a launch through Triton.
    """
    return checks.watched(*tensors) or hooked()


_LAUNCHES: dict[tuple[Any, ...], Launch] = {}
"""By kernel and constants; as many as there are kernels to compile."""


def prepare(kernel: Any, **constants: Any) -> Launch:
    """The one `Launch` of a kernel with these constants."""
    key = (id(kernel), *constants.items())
    if key not in _LAUNCHES:
        _LAUNCHES[key] = Launch(kernel, constants)
    return _LAUNCHES[key]
