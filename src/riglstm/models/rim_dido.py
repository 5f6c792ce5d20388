"""The cell of a later rewrite of RIM.

Shapes: T steps, B sequences, D input features, N cells of size d, K_a of them active, M heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm import checks
from riglstm.cell import scores
from riglstm.models import blocks
from riglstm.models.base import State
from riglstm.models.late import Late, Plan, Told, by_step, product
from riglstm.models.seen import Seen
from riglstm.selection import top_mask


class DidoCell(nn.Module):
    """The cell of the rewrite by GitHub user dido1998; it differs from the original in:

    keys and values of the input have biases, which are the null slot's key and value; the K_a
    largest scores of the input wake, not the smallest null weights; sleeping cells' inputs are
    zero; LSTMs have no bias and start in ±1/√d; in the communication values are of size d, each
    cell has an output map M·d to d, and its result is added as it is; dropout acts on attention
    weights. (It also zeroes the queries of sleeping cells, whose results the merge discards:
    there is nothing to compute.)
    """

    def __init__(
        self,
        slot_sizes: Sequence[int],
        N: int,
        d: int,
        K_a: int,
        *,
        key_size: int,
        comm_heads: int,
        comm_size: int,
        dropout: float,
        forget_bias: float,
        gate_scale: float,
        **factory: Unpack[blocks.Factory],
    ) -> None:
        super().__init__()
        checks.check_forget_bias(forget_bias, needs="cell='original'")
        checks.check_gate_scale(gate_scale)
        (D,) = slot_sizes
        self.K_a, self.key_size, self.dropout = K_a, key_size, dropout
        self.comm_heads, self.comm_size = comm_heads, comm_size
        self.query = blocks.GroupLinear(N, d, key_size, **factory)
        self.key = nn.Linear(D, key_size, **factory)
        self.value = nn.Linear(D, 4 * d, **factory)
        self.lstm = blocks.BlockLSTM(
            N, 4 * d, d, bias=False, bound=d**-0.5, gate_scale=gate_scale, **factory
        )
        self.comm_qkv = blocks.GroupLinear(N, d, comm_heads * (2 * comm_size + d), **factory)
        self.comm_out = blocks.GroupLinear(N, comm_heads * d, d, **factory)

    def forward(self, slots: Sequence[Tensor], h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Seen]:
        """One step: the input (B, D) and the state (B, N, d), as in `RIMCell`."""
        (x,) = slots
        k, v = _with_null(self.key, x), _with_null(self.value, x)
        s = scores(self.query(h), k) / self.key_size**0.5  # (B, N, 2): null, x
        active = top_mask(s[..., 1], self.K_a)  # (B, N)
        p = s.softmax(dim=-1)
        u = self._kept(p) @ v.to(p.dtype)  # (B, N, 4·d)
        u = (u * active.unsqueeze(-1)).to(h.dtype)
        h_tilde, c_tilde = self.lstm(u, h, c)
        h_tilde = blocks.gradient_mask(h_tilde, active)
        kept = self._kept(h.new_ones(1).expand(*h.shape[:2], self.comm_heads, h.shape[1]))
        r, a, y = blocks.attend(self.comm_qkv(h_tilde), self.comm_heads, self.comm_size, kept)
        h_new = h_tilde + self.comm_out(y.to(h.dtype)).to(h.dtype)
        h, c = blocks.merge(active, h_new, h), blocks.merge(active, c_tilde, c)
        return h, c, Seen(h.flatten(1), active, p.unsqueeze(2), a, s.unsqueeze(2), r)

    def lay_out(self, x: Tensor, late: bool) -> Plan:
        """The inputs of all steps of RIM, x (T, B, D) to keys, drives and dropout: see `late`.

        A weight p_js is one number: (Σ_s p_js v_s) W = Σ_s p_js (v_s W), of which p is left.
        """
        (T, B, _), (N, _, gates) = x.shape, self.lstm.weight.shape
        k, v = (_with_null(slot_map, x.flatten(0, 1)) for slot_map in (self.key, self.value))
        W_u, W_h = self.lstm.weight.split((gates, gates // 4), dim=1)
        drive = torch.einsum("rsi,nio->nrso", v, W_u)  # (N, T·B, 2, 4·d)
        ones = W_u.new_ones(1)
        views = self._kept(ones.expand(T * B, N, 2)).transpose(0, 1)
        peers = self._kept(ones.expand(T * B, N, self.comm_heads, N)).transpose(0, 1)
        given = (k.expand(N, -1, -1, -1), drive, views, peers)
        products = (
            Late(torch.cat((self.query.weight, W_h), dim=2), T, B, late),
            Late(self.comm_qkv.weight, T, B, late),
            Late(self.comm_out.weight, T, B, late),
        )
        return [by_step(g, T) for g in given], products

    def advance(self, given: tuple[Tensor, ...], state: State) -> Told:
        """`forward` after `lay_out`, with cells first, (N, B, d): see `late.LaidOut`."""
        k, drive, views, peers, to_h, to_qkv, to_out, W_h, W_qkv, W_out, *_ = given
        h, c = state
        q, gates = product(h, W_h, to_h).split((self.key_size, 4 * h.shape[2]), dim=2)
        exact = torch.promote_types(h.dtype, torch.float32)
        s = (q.to(exact).unsqueeze(2) * k.to(exact)).sum(dim=3) / self.key_size**0.5  # (N, B, 2)
        active = top_mask(s[..., 1].detach().t(), self.K_a).t().contiguous()
        u = ((s.softmax(dim=2) * views).unsqueeze(3) * drive).sum(dim=2)  # (N, B, 4·d)
        gates = gates + u * active.unsqueeze(2)
        h_tilde, c_tilde = blocks.gated(gates.to(c.dtype), c)
        h_tilde = blocks.gradient_mask(h_tilde, active)
        qkv = product(h_tilde, W_qkv, to_qkv).transpose(0, 1)
        _, _, y = blocks.attend(qkv, self.comm_heads, self.comm_size, peers.transpose(0, 1))
        y = y.to(h.dtype).transpose(0, 1)  # (N, B, M·d)
        rows = tuple(row.detach() for row in (h, h_tilde, y))
        h_new = h_tilde + product(y, W_out, to_out).to(h.dtype)
        h, c = blocks.merge(active, h_new, h), blocks.merge(active, c_tilde, c)
        return (h.clone(), *rows), (h, c)

    def _kept(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.dropout, self.training)


def _with_null(slot_map: nn.Linear, x: Tensor) -> Tensor:
    """The slots null and x (B, D) through a map with bias, (B, 2, ·): of null, the bias is left."""
    y = slot_map(x)
    return torch.stack((slot_map.bias.to(y.dtype).expand_as(y), y), dim=1)
