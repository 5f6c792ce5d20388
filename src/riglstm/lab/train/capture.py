"""A core whose training call runs as captured CUDA graphs, for as long as that is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from riglstm.lab.train.graphs import Graphed, graphed
from riglstm.models.base import State


@contextlib.contextmanager
def captured(core: nn.Module, wanted: bool) -> Iterator[None]:
    """Within it, `core(x)` in training is a captured call, recorded when it is first made.

    Calls of another shape or under another autocast than the first, in eval mode or without
    gradients are the core's own.
    """
    if not wanted:
        yield
        return
    core.forward = _Switch(core)
    try:
        yield
    finally:
        del core.forward


class _Switch:
    """`forward` of a core: captured where the call is like the first one in training."""

    def __init__(self, core: nn.Module) -> None:
        self.core = core
        self.plain = core.forward
        self.graphed: Graphed | None = None
        self.kind: tuple[Any, ...] = ()
        self.capturing = False

    def __call__(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if self.capturing or not self.core.training or not torch.is_grad_enabled():
            result: tuple[Tensor, State] = self.plain(x, state)
            return result
        if self.graphed is None:
            self.graphed, self.kind = self._capture(x), _kind(x)
        if _kind(x) != self.kind:
            result = self.plain(x, state)
            return result
        return self.graphed(x, state)

    def _capture(self, x: Tensor) -> Graphed:
        self.capturing = True
        random = torch.cuda.get_rng_state(x.device)
        try:
            return graphed(self.core, x)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise RuntimeError(
                f"the training step of {type(self.core).__name__} could not be captured as CUDA "
                "graphs; train it without (--no-capture)"
            ) from error
        finally:
            self.capturing = False
            # What was drawn in order to capture must not shift what the run draws.
            torch.cuda.set_rng_state(random, x.device)


def _kind(x: Tensor) -> tuple[Any, ...]:
    device = x.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return x.shape, x.dtype, x.requires_grad, cast
