"""A model's training step as two captured CUDA graphs, one forward and one backward.

A step of a recurrent model is many small kernels; started one by one from Python, a GPU waits for
most of them. A captured graph starts them all at once. What it costs: shapes are fixed, inputs are
copied into the graph's own memory, and only the last forward pass can be differentiated, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from riglstm.models.base import Core, State


class Trainable(Core, Protocol):
    """A core that is an nn.Module."""

    training: bool

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters."""


def graphed(core: Trainable, example_x: Tensor, *, warmup: int = 3) -> Graphed:
    """Capture a core's training step, forward and backward, for inputs like `example_x`, on a GPU.

    Called like the core, `output, state = graphed(core, x)(x, state)`, with its present
    parameters, and differentiated like it; gradients may be accumulated. The capture holds for the
    shape, dtype and device of `example_x`, whose requires_grad says whether gradients of the input
    are wanted, and under the autocast that is active now. The core must be in training mode, and
    its parameters stay where they are, frozen or not as they are. A core built with
    compile_step=True is compiled before it is captured.

    Nothing in the core's forward or backward pass may wait for the GPU (`.item()`, shapes that
    depend on data). `warmup`: passes before the capture, in which compilers and libraries settle.
    """
    if example_x.device.type != "cuda":
        raise ValueError(
            f"CUDA graphs need a CUDA device, got an input on {example_x.device}; "
            "move core and input to a GPU, or call the core itself"
        )
    with torch.cuda.device(example_x.device):
        return Graphed(core, example_x, warmup)


class Captured:
    """Work on a GPU, done once to record it, then repeated into the same tensors by `replay`."""

    def __init__(self, work: Callable[[], tuple[Tensor | None, ...]], pool: Any = None) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.results = work()
        self.pool = self.graph.pool()

    def replay(self) -> None:
        """Do the work again."""
        self.graph.replay()


class Graphed:
    """See `graphed`."""

    outputs: tuple[Tensor, ...]
    """Of the last recorded forward pass, with its autograd graph."""
    output_grads: tuple[Tensor, ...]
    """Where the recorded backward pass starts from."""

    def __init__(self, core: Trainable, example_x: Tensor, warmup: int) -> None:
        if not core.training:
            raise ValueError(
                "a training step is captured: expected a core in training mode, got one in eval "
                "mode; call core.train(), or call the core itself"
            )
        self.core = core
        self.batch = example_x.shape[0 if core.batch_first else 1]
        self.runs = 0
        """Forward passes so far: activations are those of the last."""
        self.spent = 0
        """The last pass that was differentiated: its activations are gone."""
        # Gradients of the state are always there: a start may be learned, or carried on.
        self.x = example_x.detach().clone().requires_grad_(example_x.requires_grad)
        self.state = tuple(
            s.detach().clone().requires_grad_() for s in core.initial_state(self.batch)
        )
        self.parameters = tuple(p for p in core.parameters() if p.requires_grad)
        if not self.parameters and not self.x.requires_grad:
            raise ValueError(
                "a training step is captured: expected parameters or an input that require a "
                "gradient, got none; unfreeze some, or call the core itself"
            )
        self.places = _places(core)
        self.learned = tuple(t for t in (self.x, *self.state, *self.parameters) if t.requires_grad)
        # Casts that autocast remembers from before the capture would not be repeated by it.
        self.autocast = torch.autocast(
            self.x.device.type,
            dtype=torch.get_autocast_dtype(self.x.device.type),
            enabled=torch.is_autocast_enabled(self.x.device.type),
            cache_enabled=False,
        )
        self._warm_up(warmup)
        self.forward_pass = Captured(self._forward)
        self.output_grads = tuple(torch.empty_like(o) for o in self.outputs)
        self.backward_pass = Captured(self._backward, self.forward_pass.pool)
        del self.outputs

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
        if _forms(x, *state) != _forms(self.x, *self.state):
            raise ValueError(
                f"input and state must be as captured, {_forms(self.x, *self.state)}, "
                f"got {_forms(x, *state)}; capture the core anew, or call the core itself"
            )
        if x.requires_grad and not self.x.requires_grad:
            raise ValueError(
                "the input requires a gradient, the captured one did not; "
                "capture the core with example_x.requires_grad_()"
            )
        y, *state_out = _Replay.apply(self, x, *state, *self.parameters)  # type: ignore[no-untyped-call]
        return y, tuple(state_out)

    def _warm_up(self, passes: int) -> None:
        """Run outside the capture, on a stream of its own, as captures demand it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(passes):
                self.output_grads = tuple(torch.zeros_like(o) for o in self._forward())
                self._backward()
        torch.cuda.current_stream().wait_stream(stream)
        # An autograd graph that is still there would lend its nodes, and their stream, to the next.
        del self.outputs

    def _forward(self) -> tuple[Tensor, ...]:
        with torch.enable_grad(), self.autocast:
            y, state = self.core(self.x, self.state)
        self.outputs = (y, *state)
        return tuple(o.detach() for o in self.outputs)

    def _backward(self) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(self.outputs, self.learned, self.output_grads, allow_unused=True)


class _Replay(torch.autograd.Function):
    """Both captured passes as one node of the caller's autograd graph."""

    @staticmethod
    def forward(ctx: Any, graphed: Graphed, *given: Tensor) -> tuple[Tensor, ...]:
        for own, x in zip((graphed.x, *graphed.state), given, strict=False):
            own.copy_(x)
        graphed.forward_pass.replay()
        graphed.runs += 1
        ctx.graphed, ctx.run = graphed, graphed.runs
        # Copies, as the next replay writes to the same memory.
        return tuple(o.clone() for o in graphed.forward_pass.results if o is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        graphed: Graphed = ctx.graphed
        if ctx.run != graphed.runs:
            raise RuntimeError(
                "a captured core keeps the activations of its last forward pass only: expected "
                f"backward through pass {graphed.runs}, got pass {ctx.run}; call backward before "
                "the next forward pass, or capture the core once for each"
            )
        if ctx.run == graphed.spent:
            raise RuntimeError(
                "the captured backward pass uses up the activations: expected one backward "
                f"through pass {ctx.run}, got a second; add the losses up before backward, or "
                "call the core itself"
            )
        graphed.spent = ctx.run
        for own, grad in zip(graphed.output_grads, grads, strict=True):
            own.copy_(grad)
        graphed.backward_pass.replay()
        found = iter(graphed.backward_pass.results)
        # Copies, as autograd may keep a gradient as it is, and add the next one to it.
        return None, *(
            _copy(next(found)) if t.requires_grad else None
            for t in (graphed.x, *graphed.state, *graphed.parameters)
        )


def _places(core: Trainable) -> tuple[tuple[int, bool], ...]:
    """Where the parameters are, and whether they learn: what a replay takes for granted."""
    return tuple((p.data_ptr(), p.requires_grad) for p in core.parameters())


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()


def _forms(*tensors: Tensor) -> str:
    return ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in tensors)


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
