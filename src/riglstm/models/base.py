"""What a model is, and the loop that every recurrent one shares.

Shapes: T steps, B sequences, D input features, N cells of size d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from riglstm.checks import check_input

State: TypeAlias = tuple[Tensor, ...]
"""Tensors with the batch on dimension 1, so that a state can be cut and joined by sequence."""

Step: TypeAlias = Callable[[Tensor, State], tuple[Tensor, State]]
"""One step: x (B, D) and the state to the output (B, H) and the next state."""


class Core(Protocol):
    """A sequence model: `output, state = core(x, state)`, (T, B, D) to (T, B, output_size)."""

    input_size: int
    output_size: int
    batch_first: bool
    streaming: bool
    """Whether steps with carried state equal one long run."""

    def initial_state(self, batch: int) -> State:
        """The state before the first step."""

    def __call__(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run a sequence."""


class Stepping(Protocol):
    """A model that has a step."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Step`."""


class Trace(NamedTuple):
    """What one layer of a model did, under RigLSTM's names; time first, None: it has no such thing.

    T steps, B sequences, N cells (or slots, or heads), K slots of input that a cell chooses from.
    Weights of several heads are averaged.
    """

    output: Tensor
    """(T, B, the layer's width)."""
    active: Tensor | None = None
    """(T, B, N) bool: the cell woke."""
    views: Tensor | None = None
    """(T, B, N, K): the weight of each slot of input in what the cell took in."""
    peers: Tensor | None = None
    """(T, B, N, N): [j, i] is the weight with which cell j listened to cell i."""
    view_scores: Tensor | None = None
    """(T, B, N, K): what `views` was made from, before it was selected or normalised."""
    peer_scores: Tensor | None = None
    """(T, B, N, N): what `peers` was made from."""
    keep: Tensor | None = None
    """(T, B, N): the weight of the old state in the new one; 1 where a cell slept."""
    layer: int = 0


def step_of(model: Stepping, compile_step: bool) -> Step:
    """The model's step, or with `compile_step` one that is compiled when it is first called.

    To be kept by the model as an attribute: a copy or a pickle of the model then has its own.
    """
    return _CompiledStep(model) if compile_step else model.step


class _CompiledStep:
    """A step compiled on first use; copied and pickled as what it was before that."""

    def __init__(self, model: Stepping) -> None:
        self.model = model
        self.compiled: Step | None = None

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if self.compiled is None:
            step = self.model.step

            def run(x: Tensor, state: State) -> tuple[Tensor, State]:
                return step(x, state)

            # The compiler counts recompilations per code object, and gives up after some: with one
            # object for all models, those of other sizes would use up this one's.
            run.__code__ = run.__code__.replace()
            self.compiled = torch.compile(run, fullgraph=True)
        return self.compiled(x, state)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "compiled": None}


def unroll(step: Step, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Run a step over x (T, B, D): outputs (T, B, H) and the last state."""
    outputs = []
    for x_t in x.unbind():
        y, state = step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs), state


def prepare(core: Core, x: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Check what `forward` was given: the input as (T, B, D), and the state to start from."""
    check_sequence(x, core.input_size, core.batch_first)
    x = x.transpose(0, 1) if core.batch_first else x
    start = core.initial_state(x.shape[1])
    check_input(x, core.input_size, start[0])
    if state is None:
        return x, start
    check_state(state, start)
    return x, state


def run(core: Core, step: Step, x: Tensor, state: State | None) -> tuple[Tensor, State]:
    """`forward` of a model that is nothing but its step."""
    x, state = prepare(core, x, state)
    y, state = unroll(step, x, state)
    return y.transpose(0, 1) if core.batch_first else y, state


def summary(core: Core, output: Tensor) -> Tensor:
    """What a classifier reads of a model's output: (T, B, H) to (B, H), or from (B, T, H).

    The last step of a model that streams has seen everything. One that does not stream has seen
    everything at every step, and is averaged over them.
    """
    time = 1 if core.batch_first else 0
    return output.select(time, -1) if core.streaming else output.mean(dim=time)


def check_sequence(x: Tensor, input_size: int, batch_first: bool) -> None:
    """A batch of sequences fits the model."""
    shape = "(B, T, D)" if batch_first else "(T, B, D)"
    if x.dim() != 3 or x.shape[2] != input_size:
        raise ValueError(
            f"the input must be {shape} with D = input_size = {input_size}, "
            f"got shape {tuple(x.shape)}"
        )
    if 0 in x.shape:
        raise ValueError(
            "the input must have at least one step and one sequence, "
            f"got shape {tuple(x.shape)}; leave empty batches out"
        )


def check_multiple(hidden_size: int, name: str, parts: int) -> None:
    """The parts of a model share its width evenly."""
    if hidden_size % parts:
        raise ValueError(
            f"hidden_size must be a multiple of {name} = {parts}, got {hidden_size}; "
            f"take hidden_size={-(-hidden_size // parts) * parts}, or another {name}"
        )


def check_state(state: State, expected: State) -> None:
    """A given state has the form of the initial one."""
    want = [tuple(s.shape) for s in expected]
    got = [tuple(s.shape) for s in state]
    if want != got:
        raise ValueError(
            f"the state must be a tuple of tensors of shapes {want}, got {got}; "
            "take it from the model's own output, or from initial_state(batch)"
        )
    for got_s, want_s in zip(state, expected, strict=True):
        if got_s.dtype != want_s.dtype or got_s.device != want_s.device:
            raise ValueError(
                f"the state must be {want_s.dtype} on {want_s.device} like the model, "
                f"got {got_s.dtype} on {got_s.device}; move it with .to()"
            )
