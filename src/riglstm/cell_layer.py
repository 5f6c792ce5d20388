"""`RigLSTMCell`: one step, behind the call of `nn.LSTMCell`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from riglstm import checks
from riglstm.layer import RigLSTM
from riglstm.scan.base import of_shape
from riglstm.sequence import State


class RigLSTMCell(nn.Module):
    """One step of `RigLSTM`, with the call of `nn.LSTMCell`: `h, c = cell(input, (h, c))`.

    input (B, D) or (D), states (B, hidden_size) or (hidden_size), zero if not given. Options are
    RigLSTM's own; `layer` holds the weights.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name in ("num_layers", "batch_first", "dropout", "bidirectional", "proj_size"):
            if name in options:
                raise ValueError(f"{name} is not an option of a single step; use RigLSTM")
        self.layer = RigLSTM(
            input_size, hidden_size, bias=bias, device=device, dtype=dtype, **options
        )
        own = self.layer
        self.input_size, self.hidden_size, self.bias = own.input_size, own.hidden_size, own.bias

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """See the class."""
        checks.check_tensor("the input", input)
        if input.dim() not in (1, 2):
            raise ValueError(
                "the input must be one step (D) or a batch of them (B, D), "
                f"got {input.dim()} dimensions: {tuple(input.shape)}"
            )
        like = self.layer.weights().W
        checks.check_input(input.unsqueeze(0), self.input_size, like, tuple(input.shape))
        state = None
        if hx is not None:
            checks.check_pair(hx)
            shape = (*input.shape[:-1], self.hidden_size)
            meaning = "batch, hidden_size" if input.dim() == 2 else "hidden_size"
            for name, given in zip(("h_0", "c_0"), hx, strict=True):
                checks.check_state(name, given, shape, meaning, like)
            state = (hx[0].unsqueeze(0), hx[1].unsqueeze(0))
        _, (h, c) = self.layer(input.unsqueeze(0), state)
        shape = (-1, self.hidden_size)[2 - input.dim() :]
        return of_shape(h, *shape), of_shape(c, *shape)
