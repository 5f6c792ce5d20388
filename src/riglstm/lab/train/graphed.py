"""A model's training step as captured CUDA graphs, which read its parameters where they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from riglstm.cuda_graphs import CAPTURING, Graphed
from riglstm.lab.train.config import fork_rng
from riglstm.models.base import State


class GraphedCore:
    """The training step of a core, forward and backward, captured for inputs like `example_x`.

    Called like the core, with its present parameters, and differentiated like it; gradients may be
    accumulated. The capture holds for the shape, dtype and device of `example_x`, whose
    requires_grad says whether gradients of the input are wanted, and under the autocast that is
    active now. Parameters stay where they are, frozen or not as they are. A core built with
    compile_step=True is compiled before it is captured. What it must not do, `Graphed` says.
    """

    def __init__(self, core: Any, example_x: Tensor) -> None:
        self.core, self.batch = core, example_x.shape[0 if core.batch_first else 1]
        parameters = [p for p in core.parameters() if p.requires_grad]
        # Gradients of the state are always there: a start may be learned, or carried on.
        state = (s.detach().requires_grad_() for s in core.initial_state(self.batch))
        with CAPTURING, torch.enable_grad():
            self.graph = Graphed(functools.partial(_run, core), (example_x, *state), parameters)

    def __call__(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The core's forward pass; the results are the caller's to keep."""
        state = self.core.initial_state(self.batch) if state is None else state
        y, *state_out = self.graph(x, *state)
        return y, tuple(state_out)


def _run(core: Any, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    y, state = core(x, state)
    return y, *state


@contextlib.contextmanager
def captured(core: nn.Module) -> Iterator[None]:
    """Within it, `core(x)` in training is a captured call, recorded when it is first made.

    Calls of another shape or under another autocast than the first, in eval mode or without
    gradients are the core's own.
    """
    plain: Callable[..., tuple[Tensor, State]] = core.forward
    graphed: GraphedCore | None = None
    kind: tuple[Any, ...] = ()

    def forward(x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        nonlocal graphed, kind
        if not core.training or not torch.is_grad_enabled():
            return plain(x, state)
        if graphed is None:
            # The capture calls the core itself. `forward` must not name itself: such a cycle would
            # keep the graphs' memory beyond the training.
            this, core.forward = core.forward, plain
            try:
                graphed, kind = _capture(core, x), _kind(x)
            finally:
                core.forward = this
        return (graphed if _kind(x) == kind else plain)(x, state)

    core.forward = forward
    try:
        yield
    finally:
        del core.forward


def _capture(core: nn.Module, x: Tensor) -> GraphedCore:
    try:
        # What is drawn in order to capture must not shift what the run draws.
        with fork_rng(x.device):
            return GraphedCore(core, x)
    except RuntimeError as error:
        raise RuntimeError(
            f"the training step of {type(core).__name__} could not be captured as CUDA graphs; "
            "train it without (--no-capture)"
        ) from error


def _kind(x: Tensor) -> tuple[Any, ...]:
    device = x.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return x.shape, x.dtype, x.requires_grad, cast
