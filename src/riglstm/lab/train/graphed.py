"""A model's training step as captured CUDA graphs, which read its parameters where they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from riglstm.cuda_graphs import CAPTURING, Graphed
from riglstm.models.base import Core, State


class Trainable(Core, Protocol):
    """A core that is an nn.Module."""

    training: bool

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters."""


def graphed(core: Trainable, example_x: Tensor) -> GraphedCore:
    """Capture a core's training step, forward and backward, for inputs like `example_x`, on a GPU.

    Called like the core, `output, state = graphed(core, x)(x, state)`, with its present
    parameters, and differentiated like it; gradients may be accumulated. The capture holds for the
    shape, dtype and device of `example_x`, whose requires_grad says whether gradients of the input
    are wanted, and under the autocast that is active now. The core must be in training mode, and
    its parameters stay where they are, frozen or not as they are. A core built with
    compile_step=True is compiled before it is captured. What it must not do, `Graphed` says.
    """
    if example_x.device.type != "cuda":
        raise ValueError(
            f"CUDA graphs need a CUDA device, got an input on {example_x.device}; "
            "move core and input to a GPU, or call the core itself"
        )
    return GraphedCore(core, example_x)


class GraphedCore:
    """See `graphed`."""

    def __init__(self, core: Trainable, example_x: Tensor) -> None:
        if not core.training:
            raise ValueError(
                "a training step is captured: expected a core in training mode, got one in eval "
                "mode; call core.train(), or call the core itself"
            )
        self.core, self.places = core, _places(core)
        self.batch = example_x.shape[0 if core.batch_first else 1]
        parameters = [p for p in core.parameters() if p.requires_grad]
        if not parameters and not example_x.requires_grad:
            raise ValueError(
                "a training step is captured: expected parameters or an input that require a "
                "gradient, got none; unfreeze some, or call the core itself"
            )
        # Gradients of the state are always there: a start may be learned, or carried on.
        state = (s.detach().requires_grad_() for s in core.initial_state(self.batch))
        with CAPTURING, torch.enable_grad():
            self.graph = Graphed(functools.partial(_run, core), (example_x, *state), parameters)

    def __call__(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The core's forward pass; the results are the caller's to keep."""
        if not self.core.training:
            raise ValueError(
                "the core was captured in training mode, and is in eval mode now; "
                "call the core itself, or core.train() first"
            )
        if _places(self.core) != self.places:
            raise ValueError(
                "the core's parameters must be as captured, got some that have moved in memory, "
                "or that were frozen or unfrozen since; capture the core anew"
            )
        state = self.core.initial_state(self.batch) if state is None else state
        own = self.graph.own
        if _forms(x, *state) != _forms(*own):
            raise ValueError(
                f"input and state must be as captured, {_forms(*own)}, "
                f"got {_forms(x, *state)}; capture the core anew, or call the core itself"
            )
        if x.requires_grad and not own[0].requires_grad:  # type: ignore[union-attr]
            raise ValueError(
                "the input requires a gradient, the captured one did not; "
                "capture the core with example_x.requires_grad_()"
            )
        y, *state_out = self.graph(x, *state)
        return y, tuple(state_out)


def _run(core: Trainable, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    y, state = core(x, state)
    return y, *state


def _places(core: Trainable) -> tuple[tuple[int, bool], ...]:
    """Where the parameters are, and whether they learn: what a replay takes for granted."""
    return tuple((p.data_ptr(), p.requires_grad) for p in core.parameters())


def _forms(*tensors: Tensor | None) -> str:
    return ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors if t is not None)


@contextlib.contextmanager
def captured(core: nn.Module) -> Iterator[None]:
    """Within it, `core(x)` in training is a captured call, recorded when it is first made.

    Calls of another shape or under another autocast than the first, in eval mode or without
    gradients are the core's own.
    """
    core.forward = _Switch(core)
    try:
        yield
    finally:
        del core.forward


class _Switch:
    """`forward` of a core: captured where the call is like the first one in training."""

    def __init__(self, core: nn.Module) -> None:
        self.core = core
        self.plain: Callable[..., tuple[Tensor, State]] = core.forward
        self.graphed: GraphedCore | None = None
        self.kind: tuple[Any, ...] = ()
        self.capturing = False

    def __call__(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if self.capturing or not self.core.training or not torch.is_grad_enabled():
            return self.plain(x, state)
        if self.graphed is None:
            self.graphed, self.kind = self._capture(x), _kind(x)
        return (self.graphed if _kind(x) == self.kind else self.plain)(x, state)

    def _capture(self, x: Tensor) -> GraphedCore:
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
