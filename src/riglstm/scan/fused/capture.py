"""One call of the forward pass as a CUDA graph, with tensors of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

SMALL = 8192
"""Numbers up to which tensors are copied by one kernel together: it gives 65,536 to a program, so
that large ones are copied sooner one by one."""

Results: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""y, h, c, woke."""
Place: TypeAlias = tuple[int, int]
"""A device and a stream of it."""
Run: TypeAlias = Callable[..., Results]

_SIDES: dict[Place, torch.cuda.Stream] = {}
"""Where captures for a stream are made. Each has its own while torch's 32 streams last, as what
cuBLAS works in belongs to the stream of the capture: two graphs that share it must not run at
once."""
UNENDED: list[torch.cuda.CUDAGraph] = []
"""Of captures that could not be ended: torch's allocator asks them at every allocation, so they
must never be freed. After one of them nothing more is captured."""


class CaptureError(RuntimeError):
    """torch is left in the middle of a capture."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            "a call without gradients that comes again is captured as a CUDA graph: expected a "
            f"capture that torch can begin and end, got: {error}. torch's random numbers on this "
            "GPU may not work any more; start anew without RIGLSTM_REPLAY=1 in the environment"
        )


class Replay:
    """A call as a graph, with tensors of its own that it reads from and writes to."""

    def __init__(
        self, run: Run, given: Sequence[Tensor | None], rest: Sequence[Any], place: Place, pool: Any
    ) -> None:
        weights, sel, product = rest
        # Tensors made under inference mode could never again be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.given = [
                None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
                for t in given
            ]
            self.small_in = all(t is None or t.numel() <= SMALL for t in given)
            self._copy_in(given)
            x, h, c, live, reset = self.given
            self.graph, self.results = _capture(
                lambda: run(x, h, c, weights, sel, live, reset, product), place, pool
            )
        self.small_out = all(t.numel() <= SMALL for t in self.results)
        self.place = place

    def __call__(self, given: Sequence[Tensor | None]) -> Results:
        """The results for these inputs, which are the caller's own."""
        self._copy_in(given)
        self.graph.replay()
        y, h, c, woke = self.results
        if not self.small_out:
            return y.clone(), h.clone(), c.clone(), woke.clone()
        own = torch.empty_like(y), torch.empty_like(h), torch.empty_like(c)
        torch._foreach_copy_(own, (y, h, c))
        return *own, woke.clone()

    def _copy_in(self, given: Sequence[Tensor | None]) -> None:
        first = 0
        if self.small_in:
            torch._foreach_copy_(self.given[:3], given[:3])  # type: ignore[arg-type]
            first = 3
        for own, t in zip(self.given[first:], given[first:], strict=True):
            if own is not None and t is not None:
                own.copy_(t)


def _capture(
    work: Callable[[], Results], place: Place, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Work that is done once, so that all is compiled and at hand, and then recorded."""
    current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    side = _SIDES.get(place)
    if side is None:
        side = _SIDES[place] = _stream_beside(current, place[0])
    side.wait_stream(current)
    with torch.cuda.stream(side):
        work()
        collects = gc.isenabled()
        # What is collected may wait for the GPU, which no capture outlives.
        gc.disable()
        try:
            results = _record(work, graph, pool)
        finally:
            if collects:
                gc.enable()
    current.wait_stream(side)
    return graph, results


def _stream_beside(current: torch.cuda.Stream, device: int) -> torch.cuda.Stream:
    """One that is neither the current stream nor has been had here before, if there is one."""
    taken = {current, *_SIDES.values()}
    for _ in range(32):
        side = torch.cuda.Stream(device)
        if side not in taken:
            break
    return side


def _record(work: Callable[[], Results], graph: torch.cuda.CUDAGraph, pool: Any) -> Results:
    UNENDED.append(graph)
    try:
        # CUDA calls of other threads do not spoil it.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    except Exception as error:
        raise CaptureError(error) from error
    try:
        return work()
    finally:
        _end(graph)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except Exception as error:
        raise CaptureError(error) from error
    UNENDED.remove(graph)
