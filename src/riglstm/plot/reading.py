"""What a trace holds, and the input beside it, in one form: time first, on the CPU.

Shapes: T steps, B sequences, N cells, K views, C channels of the input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from riglstm.layer import Trace
    from riglstm.models.base import Trace as ModelTrace

LayerTrace: TypeAlias = "Trace | ModelTrace"
"""One layer of a trace; that of another model than RigLSTM may lack parts."""
Traces: TypeAlias = "LayerTrace | Sequence[LayerTrace]"

MOST_DRAWN = 3
"""Sequences that are drawn where none are named."""


class Layer(NamedTuple):
    """A layer with its name, which is empty where there is only one."""

    name: str
    trace: LayerTrace

    @property
    def awake(self) -> Tensor:
        """(T, B, N) bool; cells of a model without sleep are always awake."""
        if self.trace.active is not None:
            return self.trace.active.bool().cpu()
        return torch.ones(self.part("peer_scores").shape[:3], dtype=torch.bool)

    def part(self, name: str) -> Tensor:
        """A part of the trace, on the CPU; raises ValueError where the model has none."""
        found: Tensor | None = getattr(self.trace, name)
        if found is None:
            raise ValueError(
                f"expected a trace with {name!r}, got one of a model that has none; RigLSTM has"
            )
        found = found.detach().cpu()
        # NumPy has no bfloat16.
        return found.float() if found.dtype == torch.bfloat16 else found


class Input(NamedTuple):
    """The input of a layer on the CPU."""

    values: Tensor
    """(T, B, C)."""
    size: tuple[int, ...] = ()
    """Rows and columns of pictures; empty where it is none."""


def read_layers(trace: Traces) -> list[Layer]:
    """The layers of a trace with their names: numbers, where there are several."""
    # A trace is a tuple itself.
    traces: list[Any] = [trace] if hasattr(trace, "active") else list(trace)
    if not traces or not all(hasattr(one, "active") for one in traces):
        raise TypeError(
            f"expected what rnn.trace(x) returns, or one of its layers, got {type(trace).__name__}"
        )
    if len(traces) == 1:
        return [Layer("", *traces)]
    reverse = [" reverse" * getattr(one, "reverse", False) for one in traces]
    return [Layer(f"layer {t.layer}{r}", t) for t, r in zip(traces, reverse, strict=True)]


def read_input(given: Any, T: int, B: int) -> Input:
    """The input of T steps and B sequences, in whatever form it was given."""
    x = torch.as_tensor(given).detach().cpu().float()
    shape = tuple(x.shape)
    if shape[:2] == (T, B) and x.dim() <= 3:
        return Input(x.reshape(T, B, -1))
    # Before pictures: one number a step is no picture of one column.
    if shape[:2] == (B, T) and x.dim() == 3:
        return Input(x.transpose(0, 1))
    if x.dim() in (3, 4) and shape[0] == B and shape[1] * shape[2] == T:
        return Input(x.reshape(B, T, -1).transpose(0, 1), (shape[1], shape[2]))
    if B == 1 and shape[:1] == (T,) and x.dim() <= 2:
        return Input(x.reshape(T, 1, -1))
    raise ValueError(
        f"input must be (T, B, C) or (B, T, C) with T = {T} and B = {B}, or pictures "
        f"(B, rows, columns) with rows · columns = {T}, got shape {shape}"
    )


def read(
    trace: Traces,
    input: Any,
    sequences: Iterable[int] | None,
    labels: Sequence[str] | None,
) -> tuple[list[Layer], Input | None, list[int], Sequence[str]]:
    """Layers, input, and the numbers and labels of the sequences to draw."""
    layers = read_layers(trace)
    T, B = layers[0].trace.output.shape[:2]
    chosen = list(range(min(B, MOST_DRAWN))) if sequences is None else list(sequences)
    if not chosen or not all(0 <= b < B for b in chosen):
        raise ValueError(f"sequences must be numbers from 0 to {B - 1}, got {chosen}")
    if labels is None:
        labels = [f"sequence {b}" for b in chosen]
    if len(labels) != len(chosen):
        raise ValueError(f"labels must be {len(chosen)}, one a sequence, got {len(labels)}")
    return layers, None if input is None else read_input(input, T, B), chosen, labels


def correlation(active: Tensor, brightness: Tensor) -> Tensor:
    """Pearson's r over time of being awake (T, B, N) with the input's brightness (T, B): (B, N).

    With binarised digits, +1 is a cell that wakes on the stroke and nowhere else, -1 one that wakes
    on the background alone. NaN where a cell was always or never awake, or the input is constant.
    """
    a, p = (x.double() - x.double().mean(0) for x in (active, brightness.unsqueeze(2)))
    scale = ((a * a).sum(0) * (p * p).sum(0)).sqrt()
    return torch.where(scale > 0, (a * p).sum(0) / scale, math.nan)


def largest(values: Tensor) -> float:
    """The largest absolute value that is a number; 0 where there is none."""
    found = values[values.isfinite()].abs()
    return float(found.max()) if found.numel() else 0.0


def percent(share: float) -> str:
    """A share without decimals; only exact ones are written 0% and 100%."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def number(r: float) -> str:
    """A correlation with its sign; a dash where there is none."""
    return "–" if math.isnan(r) else f"{r:+.2f}".replace("-", "−")
