"""Relational Memory Core (Santoro et al., 2018), with the details of its first published code.

Shapes: T steps, B sequences, D input features, S memory slots of size m = heads · head size;
Z has S + 1 rows, the slots and the input.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.checks import check_divides, check_positive
from riglstm.models.base import State, Trace, Traced


class RMC(Traced):
    r"""A memory whose slots attend to each other and to the input, then pass through LSTM gates.

    .. math::
        Z = [M; x'], \quad x' = W x + b

        Z \leftarrow \mathrm{LN}(Z + \mathrm{MHA}(Z)), \quad
        Z \leftarrow \mathrm{LN}(Z + \mathrm{MLP}(Z)), \quad \hat M = Z_{1..S}

        M \leftarrow \sigma(i) \odot \tanh(\hat M) + \sigma(f + 1) \odot M, \quad
        [i, f] = W_x x' + W_m \tanh(M)

    Args:
        input_size: features of the input.
        hidden_size: the whole memory S·m, which is the output.
        num_slots: S.
        num_heads: of the attention; keys and values have m / heads features each.
        batch_first: (B, T, D) instead of (T, B, D).
        compile_step: run the step through torch.compile, from the first call on.

    A trace shows how much each slot attended to the input (`views`, K = 1) and to the slots
    (`peers`), by weights that sum to 1 together, as one softmax makes both. `keep` is the forget
    gate, averaged over a slot's features.
    """

    input_bias, forget_bias = 0.0, 1.0
    sizes = ("num_slots", "num_heads")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_slots: int = 6,
        num_heads: int = 4,
        batch_first: bool = False,
        compile_step: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, batch_first, dtype, compile_step)
        check_positive("num_slots", num_slots)
        check_positive("num_heads", num_heads)
        check_divides(hidden_size, num_slots * num_heads, "num_slots * num_heads")
        m = hidden_size // num_slots
        self.num_slots, self.num_heads, self.slot_size = num_slots, num_heads, m
        linear = partial(nn.Linear, device=device, dtype=dtype)
        norm = partial(nn.LayerNorm, device=device, dtype=dtype)
        self.input = linear(input_size, m)
        self.qkv, self.norm_qkv = linear(m, 3 * m), norm(3 * m)
        self.norm_attention = norm(m)
        self.mlp_in, self.mlp_out, self.norm_mlp = linear(m, m), linear(m, m), norm(m)
        self.gates_input, self.gates_memory = linear(m, 2 * m), linear(m, 2 * m)

    def initial_state(self, batch: int) -> State:
        """M (1, B, S·m): each slot starts as another unit vector, so that they can differ."""
        like = self.input.weight
        M = torch.eye(self.num_slots, self.slot_size, device=like.device, dtype=like.dtype)
        return (M.flatten().expand(1, batch, -1).clone(),)

    def attend(self, Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """MHA(Z) (B, S+1, m) for Z (B, S+1, m); its scores and weights (B, heads, S+1, S+1)."""
        qkv = self.norm_qkv(self.qkv(Z))
        qkv = qkv.unflatten(2, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        q, k, v = qkv.unbind()  # (B, heads, S+1, head size) each
        s = q * q.shape[-1] ** -0.5 @ k.mT
        a = s.softmax(dim=-1)
        return (a @ v).transpose(1, 2).flatten(2), s, a

    def _advance(self, x: Tensor, state: State) -> tuple[State, tuple[Trace]]:
        M = state[0][0].unflatten(1, (self.num_slots, self.slot_size))  # (B, S, m)
        x = self.input(x).unsqueeze(1)  # (B, 1, m)
        Z = torch.cat((M, x.to(M.dtype)), dim=1)  # (B, S+1, m)
        attended, s, a = self.attend(Z)
        Z = self.norm_attention(Z + attended)
        Z = self.norm_mlp(Z + self.mlp_out(F.relu(self.mlp_in(Z))))
        gates = (self.gates_input(x) + self.gates_memory(M.tanh())).to(M.dtype)
        i, f = gates.chunk(2, dim=2)  # (B, S, m) each
        keep = (f + self.forget_bias).sigmoid()
        M = (i + self.input_bias).sigmoid() * Z[:, :-1].tanh() + keep * M
        M = M.flatten(1)
        s, a = (t[:, :, :-1].transpose(1, 2) for t in (s, a))  # (B, S, heads, S+1) each
        seen = Trace(
            output=M,
            views=a[..., -1:],
            peers=a[..., :-1],
            view_scores=s[..., -1:],
            peer_scores=s[..., :-1],
            keep=keep,
        )
        return (M.unsqueeze(0),), (seen,)
