"""The parts that RIM and BRIM are made of; `rim.RIMCell` puts them in order.

Shapes: B sequences, N cells of size d, K slots of input with null as the first, M heads of
key size d_k and value size d_v. All matrices are for row vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm import checks
from riglstm.selection import two_thirds

GROUP_STD = 0.01
"""Start values of the maps without bias: 0.01·N(0, 1)."""


class Factory(TypedDict):
    """Where and in which type parameters are made."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class GroupLinear(nn.Module):
    """y_j = x_j W_j: a map of its own for each cell, without bias."""

    def __init__(self, N: int, inputs: int, outputs: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(N, inputs, outputs, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new start values."""
        nn.init.normal_(self.weight, std=GROUP_STD)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, inputs) to (B, N, outputs)."""
        return torch.einsum("bni,nio->bno", x, self.weight)


class BlockLSTM(nn.Module):
    """h̃_j, c̃_j = LSTM_j(u_j, h_j, c_j): N LSTMs that share nothing; gates i, f, g, o.

    Weights and biases start uniform in ±bound. `forget_bias` is added to the start values of the
    forget gates in the first of the two biases. `gate_scale` is a factor on the start values of the
    weight matrices (biases keep theirs).
    """

    def __init__(
        self,
        N: int,
        inputs: int,
        d: int,
        bound: float,
        forget_bias: float = 0.0,
        gate_scale: float = 1.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.bound, self.forget_bias, self.gate_scale = bound, forget_bias, gate_scale
        self.weight = nn.Parameter(torch.empty(N, inputs + d, 4 * d, **factory))
        self.bias_ih, self.bias_hh = (
            nn.Parameter(torch.empty(N, 4 * d, **factory)) for _ in range(2)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new start values."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -self.bound, self.bound)
        self.weight.mul_(self.gate_scale)
        self.bias_ih.chunk(4, dim=1)[1].add_(self.forget_bias)

    def forward(self, u: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, N, inputs) and the state (B, N, d) to the candidates h̃, c̃."""
        H = torch.cat((u, h), dim=-1)  # (B, N, inputs + d)
        gates = torch.einsum("bnj,njg->bng", H, self.weight).to(c.dtype)  # (B, N, 4·d)
        return gated(gates + self.bias(), c)

    def bias(self) -> Tensor:
        """Both vectors as one, (N, 4·d)."""
        return self.bias_ih + self.bias_hh


def gated(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """An LSTM's h̃ and c̃ from its gates i, f, g, o (B, N, 4·d) before their nonlinearities."""
    i, f, g, o = gates.chunk(4, dim=-1)  # (B, N, d) each
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class InputAttention(nn.Module):
    """p_j = softmax([0, q_j · k / √d_k]), u_j = Σ p_j v: what each cell takes from the slots.

    Queries are the cells' own, q_j = h_j W^q_j; keys and values belong to the slots,
    k = x W^k and v = x W^v. The null slot's input is 0, so its key and value are exactly 0: it
    needs no matrices, and with one slot beside it p_j = σ(q_j · k / √d_k).
    """

    def __init__(
        self,
        N: int,
        d: int,
        slot_sizes: Sequence[int],
        heads: int,
        key_size: int,
        value_size: int,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query = GroupLinear(N, d, heads * key_size, **factory)
        self.keys, self.values = (
            nn.ParameterList(torch.empty(D, heads * size, **factory) for D in slot_sizes)
            for size in (key_size, value_size)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new start values."""
        for weight in (*self.keys, *self.values):
            nn.init.normal_(weight, std=GROUP_STD)

    def forward(self, h: Tensor, slots: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The scores and weights (B, N, M, K) of the slots, and the inputs u (B, N, M·d_v)."""
        q = self.query(h).unflatten(2, (self.heads, 1, -1))  # (B, N, M, 1, d_k)
        k, v = (self._project(slots, weights) for weights in (self.keys, self.values))
        # Summed in float32 or better: autocast has rounded queries and keys, which are products;
        # scores rounded once more would tie, and wake other cells.
        exact = torch.promote_types(h.dtype, torch.float32)
        s = (q.to(exact) * k.to(exact)).sum(dim=-1) / q.shape[-1] ** 0.5
        s = F.pad(s, (1, 0))  # (B, N, M, K)
        p = s.softmax(dim=-1)
        u = (p[..., 1:].unsqueeze(-1) * v).sum(dim=3).flatten(2)
        return s, p, u.to(h.dtype)

    def _project(self, slots: Sequence[Tensor], weights: nn.ParameterList) -> Tensor:
        """Each slot's own map of its input, (B, 1, M, K - 1, d_k or d_v)."""
        mapped = [x @ W for x, W in zip(slots, weights, strict=True)]
        return torch.stack([m.unflatten(1, (1, self.heads, -1)) for m in mapped], dim=3)


def log_odds(s: Tensor) -> Tensor:
    """log (1 - p) / p for the null slot's weight p, the mean over heads: (B, N) of s (B, N, M, K).

    It ranks cells as 1 - p does, and goes on where p rounds to 1. With one slot beside null and
    one head it is that slot's score to the last bit: log p would round small scores to ties.
    """
    s = s.detach()
    if s.shape[2] == 1:
        return (s[..., 1:].logsumexp(dim=3) - s[..., 0]).squeeze(2)
    log_p = s.log_softmax(dim=-1)
    return log_p[..., 1:].flatten(2).logsumexp(dim=2) - log_p[..., 0].logsumexp(dim=2)


def attend(qkv: Tensor, heads: int, key_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """a_j = Σ_i softmax_i(q_j · k_i / √d_k) v_i over all N cells: a (B, N, M·d_v).

    `qkv` (B, N, M·(d_k + d_k + d_v)). Also returned: scores and weights (B, N, M, N). All N x N
    pairs are multiplied and summed as they are: compiled, this is fewer kernels than batched
    products, which want copies. Cells come first inside, as the maps leave them in memory.
    """
    exact = torch.promote_types(qkv.dtype, torch.float32)
    sizes = (key_size, key_size, qkv.shape[-1] // heads - 2 * key_size)
    q, k, v = qkv.to(exact).transpose(0, 1).unflatten(2, (heads, -1)).split(sizes, dim=-1)
    s = (q.unsqueeze(1) * k.unsqueeze(0)).sum(dim=-1) / key_size**0.5  # (N, N, B, M)
    p = s.softmax(dim=1)
    a = (p.unsqueeze(-1) * v.unsqueeze(0)).sum(dim=1)  # (N, B, M, d_v)
    return s.permute(2, 0, 3, 1), p.permute(2, 0, 3, 1), a.transpose(0, 1).flatten(2)


class Communication(nn.Module):
    """h'_j = h̃_j + σ(G a_j + b_g) ⊙ tanh(Dropout(F a_j + b_f)): the cells read one another.

    a_j is the attention of cell j over all cells, by queries, keys and values of their own; G and
    F are shared by the cells, and side by side in one map.
    """

    def __init__(
        self, N: int, d: int, heads: int, size: int, dropout: float, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.heads, self.size, self.dropout = heads, size, dropout
        self.qkv = GroupLinear(N, d, heads * 3 * size, **factory)
        self.gate_update = nn.Linear(heads * size, 2 * d, **factory)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates (B, N, d) to h' (B, N, d), and scores and weights (B, N, M, N)."""
        s, p, a = attend(self.qkv(h), self.heads, self.size)
        gate, update = self.gate_update(a.to(h.dtype)).to(h.dtype).chunk(2, dim=-1)  # (B, N, d)
        return h + gate.sigmoid() * F.dropout(update, self.dropout, self.training).tanh(), s, p


def gradient_mask(h: Tensor, active: Tensor) -> Tensor:
    """The values of h (B, N, d); backwards, the gradient times m_j: 0 into cells that sleep."""
    return torch.where(active.unsqueeze(-1), h, h.detach())


def merge(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """m h' + (1 - m) h, chosen instead of multiplied: sleeping cells keep every bit."""
    return torch.where(active.unsqueeze(-1), new, old)


def reset_parts(module: nn.Module) -> None:
    """Draw new start values in every part of a model."""
    for part in module.modules():
        if isinstance(part, GroupLinear | BlockLSTM | InputAttention | nn.Linear):
            part.reset_parameters()


def cell_counts(hidden_size: int, num_cells: int, active_cells: int | None) -> tuple[int, int, int]:
    """N, d and K_a, checked; two thirds of the cells are active if not said otherwise."""
    checks.check_positive("hidden_size", hidden_size)
    checks.check_positive("num_cells", num_cells)
    checks.check_divides(hidden_size, num_cells)
    K_a = two_thirds(num_cells) if active_cells is None else active_cells
    checks.check_count("active_cells", K_a, 1, num_cells, "[1, num_cells]")
    return num_cells, hidden_size // num_cells, K_a


def check_sizes(dropout: float, **sizes: int) -> None:
    """Sizes are whole and above zero, dropout is a probability."""
    for name, size in sizes.items():
        checks.check_positive(name, size)
    checks.check_dropout(dropout, num_layers=2)
