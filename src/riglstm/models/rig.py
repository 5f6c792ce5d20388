"""RigLSTM behind the contract of the other models, with the paper's ten ablations by name.

Shapes: T steps, B sequences, D input features, N cells of size d.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from riglstm.checks import (
    check_choice,
    check_divides,
    check_gate_scale,
    check_positive,
    check_update,
    fitting_cells,
)
from riglstm.layer import VARIANTS, RigLSTM, Trace
from riglstm.models.base import State, changed_start, check_sequence, check_state
from riglstm.selection import Update, settle_update


class Rig(nn.Module):
    """`layer`, a `RigLSTM`, as a model.

    Args:
        input_size, hidden_size: as in `RigLSTM`.
        variant: the paper's name of an ablation, a key of `riglstm.VARIANTS`.
        gate_scale: factor on the start values of the gates' weight matrices (biases keep theirs).
        options: other arguments of `RigLSTM`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        variant: str | None = None,
        gate_scale: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__()
        check_gate_scale(gate_scale)
        changes: dict[str, Any] = {}
        if variant is not None:
            check_choice("variant", variant, tuple(VARIANTS))
            changes = VARIANTS[variant]
        for name in changes.keys() & options.keys():
            raise ValueError(
                f"variant={variant!r} sets {name}={changes[name]!r}, "
                f"got {name}={options[name]!r} as well; leave one of them out"
            )
        self.layer = RigLSTM(input_size, hidden_size, **changes, **options)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.output_size = hidden_size * (1 + self.layer.bidirectional)
        self.batch_first, self.streaming = self.layer.batch_first, not self.layer.bidirectional
        self.gate_scale = float(gate_scale)
        self._scale_gates()

    def reset_parameters(self) -> None:
        """Draw new start values."""
        self.layer.reset_parameters()
        self._scale_gates()

    @torch.no_grad()
    def _scale_gates(self) -> None:
        for layer in range(self.layer.num_layers):
            for reverse in (False, True)[: 1 + self.layer.bidirectional]:
                self.layer.weights(layer, reverse).W.mul_(self.gate_scale)

    def initial_state(self, batch: int) -> State:
        """h and c, (layers · directions, B, N·d) each: zero."""
        rows = self.layer.num_layers * (1 + self.layer.bidirectional)
        like = self.layer.weights().W
        return tuple(like.new_zeros(rows, batch, self.hidden_size) for _ in range(2))

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step of every layer for x (B, D): the output (B, N·d), and the state."""
        if not self.streaming:
            raise ValueError(
                "a bidirectional layer has no single step: it needs the steps to come; "
                "expected bidirectional=False, got True"
            )
        time = int(self.batch_first)
        y, (h, c) = self.layer(x.unsqueeze(time), state)
        return y.squeeze(time), (h, c)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A sequence (T, B, D), or (B, T, D), to outputs (T, B, N·d) and the last state."""
        y, (h, c) = self.layer(x, self._check(x, state))
        return y, (h, c)

    def trace(self, x: Tensor, state: State | None = None) -> list[Trace]:
        """See `RigLSTM.trace`."""
        return self.layer.trace(x, self._check(x, state))

    def extra_repr(self) -> str:
        """A start that differs from the layer's."""
        return changed_start(0.0, self.gate_scale).removeprefix(", ")

    def _check(self, x: Tensor, state: State | None) -> tuple[Tensor, Tensor] | None:
        check_sequence(x, self.input_size, self.batch_first)
        if state is None:
            return None
        h, c = check_state(state, self.initial_state(x.shape[0 if self.batch_first else 1]))
        return h, c


def changes_of(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of `RigLSTM` that the variant among `options` sets; empty without a variant."""
    return VARIANTS.get(options.get("variant") or "", {})


def settled(hidden_size: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `Rig` with its soft update in plain numbers, however it was given.

    What a variant sets is left to it.
    """
    changes = changes_of(options)
    defaults = {name: p.default for name, p in inspect.signature(RigLSTM).parameters.items()}
    said = {**defaults, **options, **changes}
    soft, scale, bias = (said[name] for name in Update._fields)
    check_positive("hidden_size", hidden_size)
    N = fitting_cells(hidden_size) if said["num_cells"] is None else said["num_cells"]
    check_positive("num_cells", N)
    check_divides(hidden_size, N)
    update = check_update(soft, scale, bias)
    plain = settle_update(*update, hidden_size // N, said["bias"])._asdict()
    return {**options, **{name: value for name, value in plain.items() if name not in changes}}
