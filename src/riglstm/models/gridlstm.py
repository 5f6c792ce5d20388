"""GridLSTM as the RigLSTM paper defines it: N cells that all read each other, without selection.

Shapes: T steps, B sequences, D input features, N cells of size d.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from riglstm.checks import check_divides, check_positive
from riglstm.models.base import State
from riglstm.models.lstm import LSTM


class GridLSTM(nn.Module):
    """Eqs. (9)-(12): each cell k has its own gates on the common H_t = [x_t, h^1 .. h^N].

    The cells' matrices stacked on each other are those of an LSTM of width N·d, and all else is
    elementwise: that LSTM is what runs. Only the start values differ: U(±1/√d), as a cell of
    size d draws them, instead of U(±1/√(N·d)). `forget_bias` and `gate_scale` are those of `LSTM`.
    """

    streaming = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_cells: int = 6,
        forget_bias: float = 0.0,
        gate_scale: float = 1.0,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("num_cells", num_cells)
        check_positive("hidden_size", hidden_size)
        check_divides(hidden_size, num_cells)
        self.input_size, self.hidden_size, self.output_size = input_size, hidden_size, hidden_size
        self.batch_first = batch_first
        self.num_cells, self.cell_size = num_cells, hidden_size // num_cells
        self.stack = LSTM(
            *(input_size, hidden_size),
            forget_bias=forget_bias,
            gate_scale=gate_scale,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new start values, in each cell those of an LSTM of its size."""
        self.stack.draw(self.cell_size**-0.5)

    def cell_parameters(self, k: int) -> tuple[Tensor, Tensor]:
        """W^k (4, d, D + N·d) on H_t, and the sum of both biases (4, d); gates i, f, g, o."""
        W_x, W_h, b_x, b_h = self.stack.weights()
        gates = (4, self.num_cells, self.cell_size)
        W = torch.cat((W_x, W_h), dim=1).unflatten(0, gates)  # (4, N, d, D + N·d)
        return W[:, k], (b_x + b_h).unflatten(0, gates)[:, k]

    def initial_state(self, batch: int) -> State:
        """h and c of all cells, (1, B, N·d) each: zero."""
        return self.stack.initial_state(batch)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step for x (B, D): the output (B, N·d), and the state."""
        return self.stack.step(x, state)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A sequence (T, B, D), or (B, T, D), to outputs (T, B, N·d) and the last state."""
        output, state = self.stack(x, state)
        return output, state
