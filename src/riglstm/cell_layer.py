"""`RigLSTMCell`: one step, behind the call of `nn.LSTMCell`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from riglstm.layer import RigLSTM
from riglstm.sequence import State


class RigLSTMCell(nn.Module):
    """One step of `RigLSTM`, with the call of `nn.LSTMCell`: `h, c = cell(input, (h, c))`.

    input (B, D) or (D), states (B, hidden_size) or (hidden_size), zero if not given. Options are
    RigLSTM's own; `layer` holds the weights.
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, **options: Any
    ) -> None:
        super().__init__()
        for name in ("num_layers", "batch_first", "dropout", "bidirectional"):
            if name in options:
                raise ValueError(f"{name} is not an option of a single step; use RigLSTM")
        self.layer = RigLSTM(input_size, hidden_size, bias=bias, **options)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """See the class."""
        if input.dim() not in (1, 2):
            raise ValueError(
                "the input must be one step (D) or a batch of them (B, D), "
                f"got {input.dim()} dimensions: {tuple(input.shape)}"
            )
        state = None if hx is None else (hx[0].unsqueeze(0), hx[1].unsqueeze(0))
        _, (h, c) = self.layer(input.unsqueeze(0), state)
        return h.squeeze(0), c.squeeze(0)
