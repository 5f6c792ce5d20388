"""What a model is, and the loop that every recurrent one shares.

Shapes: T steps, B sequences, D input features, N cells of size d.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from riglstm.checks import (
    check_dtype,
    check_input,
    check_positive,
    check_switch,
    check_tensor,
    product_dtype,
)
from riglstm.scan.compiled import compiled_apart

State: TypeAlias = tuple[Tensor, ...]
"""Tensors with the batch on dimension 1, so that a state can be cut and joined by sequence."""

Step: TypeAlias = Callable[[Tensor, State], tuple[Tensor, State]]
"""One step: x (B, D) and the state to the output (B, H) and the next state."""


class Factory(TypedDict):
    """Where and in which type parameters are made."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class Core(Protocol):
    """A sequence model: `output, state = core(x, state)`."""

    input_size: int
    output_size: int
    batch_first: bool
    streaming: bool
    """True if steps with carried state equal one long run."""

    def initial_state(self, batch: int) -> State:
        """The state before the first step."""

    def __call__(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run a sequence."""


class Recurrent(nn.Module):
    """A model that is a loop over its `step`, which may be compiled."""

    streaming = True
    layers = 1
    """Layers that have a state."""
    sizes: tuple[str, ...] = ()
    """Attributes that `repr` shows beside the two widths."""
    start = ""
    """What `repr` says of start values that are not the usual ones."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        batch_first: bool,
        dtype: torch.dtype | None,
        compile_step: bool = False,
    ) -> None:
        super().__init__()
        check_options(input_size, hidden_size, batch_first, dtype)
        check_switch("compile_step", compile_step)
        self.input_size, self.hidden_size, self.output_size = input_size, hidden_size, hidden_size
        self.batch_first = batch_first
        self._compiled = CompiledSteps() if compile_step else None

    def reset_parameters(self) -> None:
        """Draw new start values, in every part those of its class."""
        reset_parts(self)

    def initial_state(self, batch: int) -> State:
        """h and c of all cells, (layers, B, hidden_size) each: zero."""
        like, size = next(self.parameters()), (self.layers, batch, self.hidden_size)
        return like.new_zeros(size), like.new_zeros(size)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step for x (B, D): the output (B, hidden_size), and the state."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A sequence (T, B, D), or (B, T, D), to outputs (T, B, hidden_size) and the last state."""
        x, state = prepare(self, x, state)
        y, state = unroll(self.next_step(), x, state)
        return y.transpose(0, 1) if self.batch_first else y, state

    def next_step(self) -> Step:
        """`step`, compiled where that was asked for."""
        return self.step if self._compiled is None else self._compiled.of(self)

    def extra_repr(self) -> str:
        """The sizes, and a start that differs from the usual one."""
        own = (f", {name}={getattr(self, name)}" for name in self.sizes)
        return f"{self.input_size}, {self.hidden_size}{''.join(own)}{self.start}"


class Trace(NamedTuple):
    """What one layer of a model did, time first; None for what it does not have.

    Names are those of `riglstm.layer.Trace`.

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


class Traced(Recurrent):
    """A recurrent model that shows what its layers do in each step."""

    def _advance(self, x: Tensor, state: State) -> tuple[State, tuple[Trace, ...]]:
        """One step for x (B, D): the next state, and what each layer did, head by head.

        Where cells do not sleep, `keep` is that of each feature.
        """
        raise NotImplementedError

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step for x (B, D): the output (B, hidden_size), and the state."""
        state, seen = self._advance(x, state)
        return seen[-1].output, state

    def trace(self, x: Tensor, state: State | None = None) -> list[Trace]:
        """What the cells of each layer did, the lowest first, time first."""
        x, state = prepare(self, x, state)
        steps = []
        for x_t in x.unbind():
            state, seen = self._advance(x_t, state)
            steps.append(seen)
        traces = []
        for layer, of_layer in enumerate(zip(*steps, strict=True)):
            parts: list[Any] = [
                None if part[0] is None else torch.stack(part)
                for part in zip(*(one[:-1] for one in of_layer), strict=True)
            ]
            output, active, *by_head, keep = parts
            views, peers, view_scores, peer_scores = (part.mean(dim=3) for part in by_head)
            # A cell that sleeps keeps all of its state, and one that wakes none.
            keep = keep.mean(dim=3) if active is None else (~active).to(output.dtype)
            trace = Trace(output, active, views, peers, view_scores, peer_scores, keep, layer)
            traces.append(trace)
        return traces


class CompiledSteps:
    """A model's step through torch.compile, once for each kind of call.

    Each kind meets two batch sizes at the most before the compiler takes the batch for a variable.

    To be kept by the model as an attribute. The model is not kept here but given to each call, so
    that a shallow copy (nn.DataParallel makes them) runs itself; a deep copy or a pickle of the
    model compiles anew.
    """

    def __init__(self) -> None:
        self.steps: dict[Hashable, Callable[..., tuple[Any, State]]] = {}

    def of(
        self, model: nn.Module, method: str = "step"
    ) -> Callable[[Any, State], tuple[Any, State]]:
        """The compiled step of a model, or another method of a tensor or a tuple of them."""
        learns = tuple(p.requires_grad for p in model.parameters())
        mode = (model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), learns)

        def step(x: Any, state: State) -> tuple[Any, State]:
            given = (x, *state) if isinstance(x, Tensor) else (*x, *state)
            tensors = tuple((t.dtype, t.device, t.requires_grad) for t in given)
            product = product_dtype(given[0].device, state[0].dtype)
            kind = (method, mode, tensors, product, state[0].shape[1] == 1)
            if kind not in self.steps:
                self.steps[kind] = compiled_apart(lambda m, x, state: getattr(m, method)(x, state))
            return self.steps[kind](model, x, state)

        return step

    def __getstate__(self) -> dict[str, Any]:
        return {"steps": {}}


def reset_parts(model: nn.Module) -> None:
    """Draw new start values in the parts of a model."""
    for part in model.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None and part is not model:
            reset()


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
    return x, check_state(state, start)


def summary(core: Core, output: Tensor) -> Tensor:
    """What a classifier reads of a model's output: (T, B, H) to (B, H), or from (B, T, H).

    The last step of a model that streams has seen everything. One that does not stream has seen
    everything at every step, and is averaged over them.
    """
    time = 1 if core.batch_first else 0
    return output.select(time, -1) if core.streaming else output.mean(dim=time)


def check_options(
    input_size: int, hidden_size: int, batch_first: bool, dtype: torch.dtype | None
) -> None:
    """The options that models have in common."""
    check_positive("input_size", input_size)
    check_positive("hidden_size", hidden_size)
    check_switch("batch_first", batch_first)
    if dtype is not None:
        check_dtype(dtype)


def check_sequence(x: Tensor, input_size: int, batch_first: bool) -> None:
    """A batch of sequences fits the model."""
    check_tensor("the input", x)
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


def check_state(state: State, expected: State) -> State:
    """A given state has the form of the initial one; given back as a tuple."""
    want = [tuple(s.shape) for s in expected]
    tensors = isinstance(state, tuple | list) and all(isinstance(s, Tensor) for s in state)
    got = [tuple(s.shape) for s in state] if tensors else describe(state)
    if want != got:
        other = "from initial_state(batch)" if tensors else "leave it out"
        raise ValueError(
            f"the state must be a tuple of tensors of shapes {want}, got {got}; "
            f"take it from the model's own output, or {other}"
        )
    for got_s, want_s in zip(state, expected, strict=True):
        if got_s.dtype != want_s.dtype or got_s.device != want_s.device:
            raise ValueError(
                f"the state must be {want_s.dtype} on {want_s.device} like the model, "
                f"got {got_s.dtype} on {got_s.device}; move it with .to()"
            )
    return tuple(state)


def changed_start(forget_bias: float, gate_scale: float) -> str:
    """The options of the gates' start values that differ from the defaults, for a `repr`."""
    bias = f", forget_bias={forget_bias}" if forget_bias else ""
    return bias + (f", gate_scale={gate_scale}" if gate_scale != 1 else "")


def describe(state: object) -> str:
    """Describe what was given as a state, for an error message."""
    if isinstance(state, Iterable) and not isinstance(state, Tensor | str):
        return f"a {type(state).__name__} of {[type(s).__name__ for s in state]}"
    return f"a {type(state).__name__}"
