"""Recurrent Entity Network (Henaff et al., 2017), without its readout, which needs a question.

Shapes: T steps, B sequences, D input features, N slots of size d.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.checks import check_divides, check_positive
from riglstm.models.base import Recurrent, State


class EntNet(Recurrent):
    r"""Slots with learned keys; each writes as far as the input fits its key or its content.

    .. math::
        s = W_{in} x, \quad g_j = \sigma(s \cdot h_j + s \cdot w_j + b_j)

        \tilde h_j = \phi(U h_j + V s + W w_j + b), \quad
        h_j \leftarrow \frac{h_j + g_j \tilde h_j}{\lVert h_j + g_j \tilde h_j \rVert_2}

    φ is a PReLU with a slope for each feature. A slot starts as its key.

    Args:
        input_size: features of the input.
        hidden_size: all slots side by side, N·d, which is the output.
        num_slots: N.
        batch_first: (B, T, D) instead of (T, B, D).
        compile_step: run the step through torch.compile, from the first call on.

    Parameters, all matrices for column vectors: weight_in (d, D), keys (N, d), bias_gate (N),
    weight_state, weight_input, weight_key (U, V, W of the equations, d x d), bias (d), slope (d).
    """

    sizes = ("num_slots",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_slots: int = 6,
        batch_first: bool = False,
        compile_step: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, batch_first, dtype, compile_step)
        check_positive("num_slots", num_slots)
        check_divides(hidden_size, num_slots, "num_slots")
        N, d = num_slots, hidden_size // num_slots
        self.num_slots, self.slot_size = N, d

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight_in = parameter(d, input_size)
        self.keys = parameter(N, d)
        self.bias_gate = parameter(N)
        self.weight_state, self.weight_input = parameter(d, d), parameter(d, d)
        self.weight_key = parameter(d, d)
        self.bias, self.slope = parameter(d), parameter(d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new start values: N(0, 0.1²), and slopes of 1, with which φ changes nothing."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)
        nn.init.ones_(self.slope)

    def initial_state(self, batch: int) -> State:
        """h (1, B, N·d): the keys, so that gradients reach them from here too."""
        return (self.keys.flatten().repeat(1, batch, 1),)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step for x (B, D): the output, which is all slots (B, N·d), and the state."""
        h = state[0][0].unflatten(1, (self.num_slots, self.slot_size))  # (B, N, d)
        s = F.linear(x, self.weight_in).to(h.dtype).unsqueeze(1)  # (B, 1, d)
        logit = (s * (h + self.keys)).sum(dim=2) + self.bias_gate  # (B, N)
        candidate = (
            F.linear(h, self.weight_state)
            + F.linear(s, self.weight_input)
            + F.linear(self.keys, self.weight_key, self.bias)
        ).to(h.dtype)
        candidate = torch.where(candidate > 0, candidate, self.slope * candidate)
        h = h + logit.sigmoid().unsqueeze(2) * candidate
        square = h.square().sum(dim=2, keepdim=True)
        # A slot that has cancelled itself stays zero; chosen before the root, whose slope there
        # is infinite, so that its gradient stays finite too.
        h = (h / torch.where(square > 0, square, 1).sqrt()).flatten(1)
        return h, (h.unsqueeze(0),)
