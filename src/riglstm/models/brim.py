"""BRIM: Bidirectional Recurrent Independent Mechanisms (Mittal et al., 2020).

Shapes: T steps, B sequences, D input features, N cells of size d, which differ between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from riglstm.models.base import State, Trace, Traced, changed_start
from riglstm.models.rim import RIMCell

PRESETS: dict[str, dict[str, Any]] = {
    "mnist": {"num_cells": (6, 3), "active_cells": (4, 2), "input_heads": 4, "key_size": 64},
    "cifar": {"num_cells": (6, 6), "active_cells": (4, 4), "input_heads": 1, "key_size": 32},
}
"""Keyword arguments of `BRIM`: its authors' two set-ups, both with 300 as input and hidden size."""


class BRIM(Traced):
    r"""Two layers of mechanisms, the lower one reading the input and the upper one's last state.

    .. math::
        h^1_t, c^1_t = \mathrm{RIM}_1(\{0, x_t, h^2_{t-1}\}, h^1_{t-1}, c^1_{t-1})

        h^2_t, c^2_t = \mathrm{RIM}_2(\{0, h^1_t\}, h^2_{t-1}, c^2_{t-1})

    Each layer is a `RIMCell`: its cells attend to the slots in braces, of which each has its own
    key and value map; the cells that the null slot 0 draws most, on the mean over the heads,
    sleep. A slot of states is the whole layer, sleeping cells included. The slots need not have
    the same width, as they had to in the authors' code.

    Args:
        input_size: D.
        hidden_size: the whole width N·d of each layer; the output is the upper layer's.
        batch_first: (B, T, D) instead of (T, B, D).
        num_cells: N of the lower and the upper layer.
        active_cells: K_a of both; default: two thirds of the cells, rounded.
        input_heads, key_size: of the attention to the slots; its values are of size 4·d in all.
        comm_heads, comm_size: heads of the communication, and their d_k = d_v.
        dropout: in training only.
        forget_bias: added to the start values of the LSTMs' forget biases.
        gate_scale: factor on the start values of the LSTMs' weight matrices (biases keep theirs).

    The state is (h, c), each (2, B, hidden_size), the lower layer first; zero if not given.
    In a trace `views` are the weights of null, x and h^2 below, and of null and h^1 above.

    At 300, 300 there are 1,797,900 parameters with the `mnist` preset and 1,089,000 with `cifar`.
    """

    layers = 2
    sizes = ("num_cells", "active_cells")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        batch_first: bool = False,
        num_cells: Sequence[int] = (6, 3),
        active_cells: Sequence[int] | None = None,
        input_heads: int = 4,
        key_size: int = 64,
        comm_heads: int = 4,
        comm_size: int = 32,
        dropout: float = 0.1,
        forget_bias: float = 0.0,
        gate_scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, batch_first, dtype)
        _check_pair("num_cells", num_cells, (6, 3))
        if active_cells is not None:
            _check_pair("active_cells", active_cells, (4, 2))
        self.lower, self.upper = (
            RIMCell(
                *(slot_sizes, hidden_size, N, K_a),
                key_size=key_size,
                comm_heads=comm_heads,
                comm_size=comm_size,
                dropout=dropout,
                forget_bias=forget_bias,
                gate_scale=gate_scale,
                input_heads=input_heads,
                device=device,
                dtype=dtype,
            )
            for slot_sizes, N, K_a in zip(
                ((input_size, hidden_size), (hidden_size,)),
                num_cells,
                active_cells or (None, None),
                strict=True,
            )
        )
        self.num_cells, self.active_cells = tuple(num_cells), (self.lower.K_a, self.upper.K_a)
        self.start = changed_start(float(forget_bias), float(gate_scale))

    def _advance(self, x: Tensor, state: State) -> tuple[State, tuple[Trace, Trace]]:
        h_1, c_1 = (s[0].unflatten(1, (self.num_cells[0], -1)) for s in state)  # (B, N, d)
        h_2, c_2 = (s[1].unflatten(1, (self.num_cells[1], -1)) for s in state)  # (B, N, d)
        h_1, c_1, lower = self.lower((x, h_2.flatten(1)), h_1, c_1)
        h_2, c_2, upper = self.upper((h_1.flatten(1),), h_2, c_2)
        h, c = (
            torch.stack([s.flatten(1) for s in both]) for both in ((h_1, h_2), (c_1, c_2))
        )  # (2, B, N·d)
        return (h, c), (lower, upper)


def _check_pair(name: str, value: Sequence[int], example: tuple[int, int]) -> None:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(
            f"{name} must be a pair, for the lower and the upper layer, got {value!r}; "
            f"give it as {example}"
        )
