"""LSTM, and GridLSTM, which runs as one: `nn.LSTM` behind the models' contract.

Shapes: T steps, B sequences, D input features, H hidden size, N cells of size d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.checks import check_divides, check_forget_bias, check_gate_scale, check_positive
from riglstm.models.base import Recurrent, State, changed_start, prepare, unroll


def gated(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """An LSTM's h and c from c before and its gates i, f, g, o, (..., 4·H), not yet nonlinear."""
    i, f, g, o = gates.chunk(4, dim=-1)  # (..., H) each
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class LSTM(Recurrent):
    """An LSTM: `forward` is the fused kernel of `nn.LSTM`, `step` its equations.

    Parameters are those of `nn.LSTM`, by its names and with its start values U(±1/√H), gates in
    the order i, f, g, o: weight_ih_l0 (4·H, D), weight_hh_l0 (4·H, H), bias_ih_l0 and
    bias_hh_l0 (4·H). They are held here and not in an `nn.LSTM`, as torch.compile refuses to look
    into one. `forget_bias` is added to the start values of the forget gate's bias, in bias_ih_l0;
    `gate_scale` is a factor on the start values of both weight matrices (biases keep theirs).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        forget_bias: float = 0.0,
        gate_scale: float = 1.0,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, batch_first, dtype)
        check_forget_bias(forget_bias)
        check_gate_scale(gate_scale)
        D, H = input_size, hidden_size
        self.forget_bias, self.gate_scale = float(forget_bias), float(gate_scale)
        self.start = changed_start(self.forget_bias, self.gate_scale)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight_ih_l0, self.weight_hh_l0 = parameter(4 * H, D), parameter(4 * H, H)
        self.bias_ih_l0, self.bias_hh_l0 = parameter(4 * H), parameter(4 * H)
        self.reset_parameters()
        self.flatten_parameters()

    def reset_parameters(self) -> None:
        """Draw new start values."""
        self.draw(self.hidden_size**-0.5)

    @torch.no_grad()
    def draw(self, bound: float) -> None:
        """Draw start values in ±bound, then apply `forget_bias` and `gate_scale`."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        self.bias_ih_l0.chunk(4)[1].add_(self.forget_bias)
        self.weight_ih_l0.mul_(self.gate_scale)
        self.weight_hh_l0.mul_(self.gate_scale)

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_x and W_h, then the bias of each."""
        return self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0

    def flatten_parameters(self) -> None:
        """On a GPU, lay the weights out in one piece, as its fused kernel wants them."""
        if self.weight_ih_l0.is_cuda:
            kernel = nn.LSTM(self.input_size, self.hidden_size, device="meta")
            for name, parameter in self.named_parameters():
                setattr(kernel, name, parameter)
            kernel.flatten_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.flatten_parameters()
        return self

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Eqs. (1)-(6) for x (B, D): the output h (B, H), and the state."""
        h, c = (s[0] for s in state)
        W_x, W_h, b_x, b_h = self.weights()
        gates = F.linear(x, W_x, b_x) + F.linear(h, W_h, b_h)
        h, c = gated(gates.to(c.dtype), c)
        return h, (h.unsqueeze(0), c.unsqueeze(0))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A sequence (T, B, D), or (B, T, D), to outputs (T, B, H) and the last state."""
        x, (h, c) = prepare(self, x, state)
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # The fused kernel knows half precision only on processors that have it.
            y, (h_n, c_n) = unroll(self.step, x, (h, c))
        else:
            biases, layers, dropout, bidirectional, batch_first = True, 1, 0.0, False, False
            y, h_n, c_n = torch.lstm(
                *(x, (h, c), self.weights(), biases, layers, dropout),
                *(self.training, bidirectional, batch_first),
            )
        y = y.transpose(0, 1) if self.batch_first else y
        # Autocast gives the fused kernel's state in half precision; it is carried in full.
        return y, (h_n.to(h.dtype), c_n.to(c.dtype))


class GridLSTM(Recurrent):
    """Eqs. (9)-(12): each cell k has its own gates on the common H_t = [x_t, h^1 .. h^N].

    The cells' matrices stacked on each other are those of an LSTM of width N·d, and all else is
    elementwise: that LSTM is what runs. Only the start values differ: U(±1/√d), as a cell of
    size d draws them, instead of U(±1/√(N·d)). `forget_bias` and `gate_scale` are those of `LSTM`.
    """

    sizes = ("num_cells",)

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
        super().__init__(input_size, hidden_size, batch_first, dtype)
        check_positive("num_cells", num_cells)
        check_divides(hidden_size, num_cells)
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

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step for x (B, D): the output (B, N·d), and the state."""
        return self.stack.step(x, state)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A sequence (T, B, D), or (B, T, D), to outputs (T, B, N·d) and the last state."""
        output, state = self.stack(x, state)
        return output, state
