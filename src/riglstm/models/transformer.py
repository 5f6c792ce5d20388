"""Transformer encoder (Vaswani et al., 2017; norm first) as a sequence model that does not stream.

Shapes: T steps, B sequences, D input features, H width.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.checks import check_divides, check_dropout, check_input, check_positive
from riglstm.models.base import Factory, State, check_options, check_sequence, describe, reset_parts


class Transformer(nn.Module):
    """Every step attends to every other, later ones included.

    The output (T, B, H) is the encoder's, one vector for each step. A classifier reads the mean
    over the steps: `riglstm.models.base.summary` does this for models that do not stream.

    Positions are sinusoids of the step's index, computed for the length at hand: they have no
    parameters and no longest sequence, so a model trained on 196 steps runs on 576.

    Args:
        input_size: features of the input.
        hidden_size: H, the width of the encoder; 256 in our tables.
        num_layers, num_heads: 4 and 8 there.
        ffn_size: width between the two maps of each layer; default: 4·H.
        dropout: on attention weights, on each branch, and on the embedded input; when training.
        batch_first: (B, T, D) instead of (T, B, D).
    """

    streaming = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_layers: int = 4,
        num_heads: int = 8,
        ffn_size: int | None = None,
        dropout: float = 0.1,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_options(input_size, hidden_size, batch_first, dtype)
        ffn_size = 4 * hidden_size if ffn_size is None else ffn_size
        check_positive("num_layers", num_layers)
        check_positive("num_heads", num_heads)
        check_positive("ffn_size", ffn_size)
        check_divides(hidden_size, num_heads, "num_heads")
        if hidden_size % 2:
            raise ValueError(
                "hidden_size must be even, as positions are pairs of sine and cosine, "
                f"got {hidden_size}; take hidden_size={hidden_size + num_heads}"
            )
        check_dropout(dropout, num_layers=2)
        self.input_size, self.hidden_size, self.output_size = input_size, hidden_size, hidden_size
        self.batch_first, self.dropout = batch_first, float(dropout)
        factory: Factory = {"device": device, "dtype": dtype}
        self.input = nn.Linear(input_size, hidden_size, **factory)
        self.layers = nn.ModuleList(
            EncoderLayer(hidden_size, num_heads, ffn_size, self.dropout, **factory)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size, **factory)

    def reset_parameters(self) -> None:
        """Draw new start values: those of nn.Linear and nn.LayerNorm."""
        reset_parts(self)

    def initial_state(self, batch: int) -> State:
        """Nothing: there is no state that could stand for past steps."""
        return ()

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A whole sequence (T, B, D), or (B, T, D), to outputs (T, B, H).

        The state returned is the last output (1, B, H), to look at: it cannot be carried on.
        """
        check_sequence(x, self.input_size, self.batch_first)
        check_input(x, self.input_size, self.input.weight)
        if state is not None and not (isinstance(state, tuple | list) and len(state) == 0):
            raise ValueError(
                "the Transformer does not stream: every output attends to every step of the "
                "sequence, later ones included, so no state can stand for the steps before; "
                f"expected state=None, got {describe(state)}; pass the whole sequence at once"
            )
        x = x if self.batch_first else x.transpose(0, 1)
        z = self.input(x)
        z = z + positions(z.shape[1], z.shape[2], z)
        z = F.dropout(z, self.dropout, self.training)
        for layer in self.layers:
            z = layer(z)
        z = self.norm(z)  # (B, T, H)
        return z if self.batch_first else z.transpose(0, 1), (z[:, -1].unsqueeze(0),)


class EncoderLayer(nn.Module):
    """z + MHA(LN(z)), then z + FFN(LN(z)), for z (B, T, H)."""

    def __init__(
        self, H: int, num_heads: int, ffn_size: int, dropout: float, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_attention = nn.LayerNorm(H, **factory)
        self.qkv = nn.Linear(H, 3 * H, **factory)
        self.attention_out = nn.Linear(H, H, **factory)
        self.norm_ffn = nn.LayerNorm(H, **factory)
        self.ffn_in = nn.Linear(H, ffn_size, **factory)
        self.ffn_out = nn.Linear(ffn_size, H, **factory)

    def forward(self, z: Tensor) -> Tensor:
        """One layer."""
        p = self.dropout if self.training else 0.0
        qkv = self.qkv(self.norm_attention(z)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # (B, heads, T, head size) each
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        z = z + F.dropout(self.attention_out(a.transpose(1, 2).flatten(2)), p)
        y = F.dropout(F.relu(self.ffn_in(self.norm_ffn(z))), p)
        return z + F.dropout(self.ffn_out(y), p)


def positions(T: int, H: int, like: Tensor) -> Tensor:
    """sin and cos of t / 10000^(2i/H), (T, H), for any T; half precision could not count to T."""
    exact = torch.promote_types(like.dtype, torch.float32)
    t = torch.arange(T, device=like.device, dtype=exact).unsqueeze(1)
    i = torch.arange(0, H, 2, device=like.device, dtype=exact)
    angle = t * torch.exp(i * (-math.log(10000.0) / H))  # (T, H/2)
    return torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1).to(like.dtype)
