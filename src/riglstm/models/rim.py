"""RIM: Recurrent Independent Mechanisms (Goyal et al., 2019).

Shapes: T steps, B sequences, D input features, N cells of size d, K_a of them active, M heads.
A step is written here in its order; its parts are in `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm import checks
from riglstm.models import base, blocks
from riglstm.models.base import CompiledSteps, State, Trace, changed_start, check_options, prepare
from riglstm.models.late import Late, Plan, Told, by_step, hooked, product, run
from riglstm.models.seen import Seen, trace
from riglstm.selection import top_mask


class RIMCell(nn.Module):
    """One layer of mechanisms; BRIM stacks two of them.

    `slot_sizes`: the width of each input beside the null slot. The LSTMs start in ±1/√(N·d), the
    range of one LSTM of the joint size.
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
        input_heads: int = 1,
        **factory: Unpack[blocks.Factory],
    ) -> None:
        super().__init__()
        checks.check_forget_bias(forget_bias)
        checks.check_gate_scale(gate_scale)
        self.K_a, self.dropout = K_a, dropout
        self.input_attention = blocks.InputAttention(
            N, d, slot_sizes, input_heads, key_size, 4 * d // input_heads, **factory
        )
        self.lstm = blocks.BlockLSTM(
            N, 4 * d, d, (N * d) ** -0.5, forget_bias, gate_scale, **factory
        )
        self.communication = blocks.Communication(N, d, comm_heads, comm_size, dropout, **factory)

    def forward(self, slots: Sequence[Tensor], h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Seen]:
        """One step: inputs (B, ·) and the state (B, N, d) to the new state and what was seen."""
        s, p, u = self.input_attention(h, slots)
        # The cells that the null slot draws most sleep; equal ones (all, at a zero state) by index.
        active = top_mask(blocks.log_odds(s), self.K_a)  # (B, N)
        h_tilde, c_tilde = self.lstm(F.dropout(u, self.dropout, self.training), h, c)
        # Sleeping cells are read too, as the candidates that they will not become.
        h_new, r, a = self.communication(blocks.gradient_mask(h_tilde, active))
        h, c = blocks.merge(active, h_new, h), blocks.merge(active, c_tilde, c)
        return h, c, Seen(h.flatten(1), active, p, a, s, r)

    def lay_out(self, x: Tensor, late: bool) -> Plan:
        """The inputs of all steps of RIM, x (T, B, D) to keys, drives and dropout: see `late`.

        A cell's weight p_j is one number, and dropout does not look at the state:
        Dropout(p_j v) W = p_j (Dropout(v) W), of which only p_j is left to the step.
        """
        (T, B, _), (N, _, gates) = x.shape, self.lstm.weight.shape
        attention, comm, d = self.input_attention, self.communication, gates // 4
        (W_k,), (W_v,) = attention.keys, attention.values
        W_u, W_h = self.lstm.weight.split((gates, d), dim=1)
        k, v = (x.flatten(0, 1) @ torch.cat((W_k, W_v), dim=1)).split((W_k.shape[1], gates), dim=1)
        # Dropout's 1/(1 - p) in the weights' precision, which autocast's products do not have.
        v = v.to(W_u.dtype).unsqueeze(1).expand(-1, N, -1)
        v = F.dropout(v, self.dropout, self.training)
        drive = torch.bmm(v.transpose(0, 1), W_u)  # (N, T·B, 4·d)
        kept = F.dropout(W_u.new_ones(1).expand(T * B, N, d), self.dropout, self.training)
        # A key for every cell, so that its gradient is summed over them once, after the loop.
        given = (k.expand(N, -1, -1), drive, kept.transpose(0, 1))
        out = comm.gate_update
        products = (
            Late(torch.cat((attention.query.weight, W_h), dim=2), T, B, late, self.lstm.bias()),
            Late(comm.qkv.weight, T, B, late),
            Late(out.weight.t().unsqueeze(0), T, N * B, late, out.bias.unsqueeze(0)),
        )
        return [by_step(g, T) for g in given], products

    def advance(self, given: tuple[Tensor, ...], state: State) -> Told:
        """`forward` after `lay_out`, with cells first, (N, B, d): see `late.LaidOut`."""
        k, drive, kept, to_h, to_qkv, to_out, W_h, W_qkv, W_out, b_h, _, b_out = given
        (h, c), comm, d_k = state, self.communication, k.shape[2]
        q, gates = product(h, W_h, to_h).split((d_k, 4 * h.shape[2]), dim=2)
        exact = torch.promote_types(h.dtype, torch.float32)
        s = (q.to(exact) * k.to(exact)).sum(dim=2) / d_k**0.5  # (N, B)
        active = top_mask(s.detach().t(), self.K_a).t().contiguous()
        gates = gates + b_h + s.sigmoid().unsqueeze(2) * drive
        h_tilde, c_tilde = blocks.gated(gates.to(c.dtype), c)
        h_tilde = blocks.gradient_mask(h_tilde, active)
        qkv = product(h_tilde, W_qkv, to_qkv).transpose(0, 1)
        _, _, a = blocks.attend(qkv, comm.heads, comm.size)
        a = a.to(h.dtype).transpose(0, 1).flatten(0, 1).unsqueeze(0)  # (1, N·B, M·d_v)
        y = product(a, W_out, to_out).to(h.dtype) + b_out
        gate, update = y.view(*h.shape[:2], -1).chunk(2, dim=2)
        h_new = h_tilde + gate.sigmoid() * (update * kept).tanh()
        rows = tuple(row.detach() for row in (h, h_tilde, a))
        h, c = blocks.merge(active, h_new, h), blocks.merge(active, c_tilde, c)
        return (h.clone(), *rows), (h, c)


class RIM(nn.Module):
    r"""Recurrent Independent Mechanisms.

    In each step the cells ask what the input holds for them; the K_a cells that the null slot
    draws least run an LSTM of their own on it and then read the other cells:

    .. math::
        p_j = \sigma(q_j \cdot k / \sqrt{d_k}), \quad q_j = W^q_j h_j, \; k = W^k x, \; v = W^v x

        \tilde h_j, \tilde c_j = \mathrm{LSTM}_j(\mathrm{Dropout}(p_j v), h_j, c_j)

        h'_j = \tilde h_j + \sigma(G a_j + b_g) \odot \tanh(\mathrm{Dropout}(F a_j + b_f))

    with a_j the attention of cell j over all h̃. The other cells keep h and c, and their LSTMs get
    no gradient in that step.

    Args:
        input_size: D.
        hidden_size: the whole width N·d; 600 = 6 x 100 in the paper.
        batch_first: (B, T, D) instead of (T, B, D).
        num_cells: N.
        active_cells: K_a; default: two thirds of the cells, rounded: 4 of 6.
        key_size: d_k of the input attention; its values are of size 4·d.
        comm_heads: heads of the communication.
        comm_size: its d_k = d_v per head; 32 in the paper's appendix, 16 in its authors' code.
        dropout: in training only.
        forget_bias: added to the start values of the LSTMs' forget biases.
        gate_scale: factor on the start values of the LSTMs' weight matrices (biases keep theirs).
        compile_step: run the step through torch.compile, from the first call on.

    Inputs: x (T, B, D); state = (h, c), each (1, B, hidden_size), zero if not given.
    Outputs: h of every step, all cells (T, B, hidden_size); the last state.

    At 600, 600 there are 1,777,800 parameters; 1,649,800 with the authors' comm_size=16. All of
    them learn: the null slot's matrices and off-block LSTM weights of the authors' code, which do
    not, are left out.
    """

    streaming = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        batch_first: bool = False,
        num_cells: int = 6,
        active_cells: int | None = None,
        key_size: int = 64,
        comm_heads: int = 4,
        comm_size: int = 32,
        dropout: float = 0.1,
        forget_bias: float = 0.0,
        gate_scale: float = 1.0,
        compile_step: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_options(batch_first, dtype, compile_step)
        blocks.check_sizes(
            dropout,
            input_size=input_size,
            key_size=key_size,
            comm_heads=comm_heads,
            comm_size=comm_size,
        )
        N, d, K_a = blocks.cell_counts(hidden_size, num_cells, active_cells)
        self.input_size, self.hidden_size, self.output_size = input_size, hidden_size, hidden_size
        self.batch_first, self.num_cells, self.cell_size = batch_first, N, d
        self.active_cells = K_a
        self.cell = RIMCell(
            *((input_size,), N, d, K_a),
            key_size=key_size,
            comm_heads=comm_heads,
            comm_size=comm_size,
            dropout=dropout,
            forget_bias=forget_bias,
            gate_scale=gate_scale,
            device=device,
            dtype=dtype,
        )
        self.forget_bias, self.gate_scale = float(forget_bias), float(gate_scale)
        self._compiled = CompiledSteps() if compile_step else None

    def reset_parameters(self) -> None:
        """Draw new start values: 0.01·N(0, 1) for maps without bias, nn.Linear's for the others."""
        blocks.reset_parts(self.cell)

    def initial_state(self, batch: int) -> State:
        """h and c of all cells, (1, B, N·d) each: zero."""
        like, size = self.cell.lstm.weight, (1, batch, self.hidden_size)
        return like.new_zeros(size), like.new_zeros(size)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step for x (B, D): the output (B, N·d), and the state."""
        state, (seen,) = self._advance(x, state)
        return seen.output, state

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A sequence (T, B, D), or (B, T, D), to outputs (T, B, N·d) and the last state."""
        loop = base.run if hooked(self.cell) else run
        return loop(self, self._compiled, x, state)

    def lay_out(self, x: Tensor, late: bool) -> Plan:
        """What the steps of a sequence need no state for: see `late.LaidOut`."""
        return self.cell.lay_out(x, late)

    def advance(self, given: tuple[Tensor, ...], state: State) -> Told:
        """One step after `lay_out`: see `late.LaidOut`."""
        return self.cell.advance(given, state)

    def enter(self, state: State) -> State:
        """Both parts with cells first, (N, B, d)."""
        return tuple(s.transpose(0, 1).contiguous() for s in self._by_cell(state))

    def leave(self, state: State) -> State:
        """Both parts as (1, B, N·d)."""
        return tuple(s.transpose(0, 1).flatten(1).unsqueeze(0) for s in state)

    def _by_cell(self, state: State) -> State:
        return tuple(s.squeeze(0).unflatten(1, (self.num_cells, -1)) for s in state)  # (B, N, d)

    def trace(self, x: Tensor, state: State | None = None) -> list[Trace]:
        """What the cells did, time first; `views` are the weights of the slots null, x."""
        return trace(self._advance, *prepare(self, x, state))

    def _advance(self, x: Tensor, state: State) -> tuple[State, tuple[Seen]]:
        h, c, seen = self.cell((x,), *self._by_cell(state))
        return (h.flatten(1).unsqueeze(0), c.flatten(1).unsqueeze(0)), (seen,)

    def extra_repr(self) -> str:
        """The sizes, and a start that differs from the authors'."""
        start = changed_start(self.forget_bias, self.gate_scale)
        return (
            f"{self.input_size}, {self.hidden_size}, num_cells={self.num_cells}, "
            f"active_cells={self.active_cells}{start}"
        )
