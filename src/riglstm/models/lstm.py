"""LSTM: `nn.LSTM`, one layer, behind the contract of the other models.

Shapes: T steps, B sequences, D input features, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.checks import check_forget_bias, check_gate_scale, check_positive
from riglstm.models.base import State, changed_start, check_options, prepare, unroll


class LSTM(nn.Module):
    """An LSTM whose `forward` is the fused kernel of `nn.LSTM` and whose `step` is its equations.

    Parameters are those of `nn.LSTM`, by its names and with its start values U(±1/√H), gates in
    the order i, f, g, o: weight_ih_l0 (4·H, D), weight_hh_l0 (4·H, H), bias_ih_l0 and
    bias_hh_l0 (4·H). They are held here and not in an `nn.LSTM`, as torch.compile refuses to look
    into one. `forget_bias` is added to the start values of the forget gate's bias, in bias_ih_l0;
    `gate_scale` is a factor on the start values of both weight matrices (biases keep theirs).
    """

    streaming = True

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
        super().__init__()
        check_options(batch_first, dtype)
        check_positive("input_size", input_size)
        check_positive("hidden_size", hidden_size)
        check_forget_bias(forget_bias)
        check_gate_scale(gate_scale)
        D, H = input_size, hidden_size
        self.input_size, self.hidden_size, self.output_size = D, H, H
        self.batch_first = batch_first
        self.forget_bias, self.gate_scale = float(forget_bias), float(gate_scale)

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

    def initial_state(self, batch: int) -> State:
        """h and c, (1, B, H) each: zero."""
        size = (1, batch, self.hidden_size)
        return self.weight_hh_l0.new_zeros(size), self.weight_hh_l0.new_zeros(size)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Eqs. (1)-(6) for x (B, D): the output h (B, H), and the state."""
        h, c = (s[0] for s in state)
        W_x, W_h, b_x, b_h = self.weights()
        gates = F.linear(x, W_x, b_x) + F.linear(h, W_h, b_h)
        i, f, g, o = gates.to(c.dtype).chunk(4, dim=1)  # (B, H) each
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
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

    def extra_repr(self) -> str:
        """The sizes, and a start that differs from nn.LSTM's."""
        start = changed_start(self.forget_bias, self.gate_scale)
        return f"{self.input_size}, {self.hidden_size}{start}"
