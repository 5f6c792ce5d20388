"""RIM: Recurrent Independent Mechanisms (Goyal et al., 2019).

Shapes: T steps, B sequences, D input features, N cells of size d, K_a of them active, K slots of
input with null as the first, M heads of key size d_k and value size d_v. All matrices are for row
vectors. `RIMCell` puts the parts of a step in their order; BRIM stacks two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm import checks
from riglstm.models.base import Factory, State, Trace, Traced, changed_start, prepare
from riglstm.models.deferred import Deferred, Gather, deferred_product
from riglstm.models.lstm import gated
from riglstm.selection import top_mask, two_thirds

GROUP_STD = 0.01
"""Start values of the maps without bias: 0.01·N(0, 1)."""


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


class InputAttention(nn.Module):
    """p_j = softmax([0, q_j · k / √d_k]), u_j = Σ p_j v: what each cell takes from the slots.

    Queries are the cells' own, q_j = h_j W^q_j; keys and values belong to the slots,
    k = x W^k and v = x W^v, of 4·d features over all heads. The null slot's input is 0, so its key
    and value are exactly 0: it needs no matrices, and with one slot beside it
    p_j = σ(q_j · k / √d_k).
    """

    def __init__(
        self,
        N: int,
        d: int,
        slot_sizes: Sequence[int],
        heads: int,
        key_size: int,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query = GroupLinear(N, d, heads * key_size, **factory)
        self.keys, self.values = (
            nn.ParameterList(torch.empty(D, heads * size, **factory) for D in slot_sizes)
            for size in (key_size, 4 * d // heads)
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


class RIMCell(nn.Module):
    """One layer of mechanisms; BRIM stacks two of them.

    `slot_sizes`: the width of each input beside the null slot. `active_cells`: two thirds of the
    cells if it is None. The LSTMs start in ±1/√(N·d), the range of one LSTM of the joint size.
    """

    def __init__(
        self,
        slot_sizes: Sequence[int],
        hidden_size: int,
        num_cells: int,
        active_cells: int | None,
        *,
        key_size: int,
        comm_heads: int,
        comm_size: int,
        dropout: float,
        forget_bias: float,
        gate_scale: float,
        input_heads: int = 1,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        sizes = {"num_cells": num_cells, "input_heads": input_heads, "key_size": key_size}
        for name, size in {**sizes, "comm_heads": comm_heads, "comm_size": comm_size}.items():
            checks.check_positive(name, size)
        checks.check_divides(hidden_size, num_cells)
        N, d = num_cells, hidden_size // num_cells
        if 4 * d % input_heads:
            raise ValueError(
                f"input_heads must divide the value size 4 * hidden_size / num_cells = {4 * d} "
                f"of the layer with num_cells = {N}, got {input_heads}; take 1, 2 or 4"
            )
        K_a = two_thirds(N) if active_cells is None else active_cells
        checks.check_count("active_cells", K_a, 1, N, "[1, num_cells]")
        checks.check_dropout(dropout, num_layers=2)
        checks.check_forget_bias(forget_bias)
        checks.check_gate_scale(gate_scale)
        self.K_a, self.dropout = K_a, dropout
        self.input_attention = InputAttention(N, d, slot_sizes, input_heads, key_size, **factory)
        self.lstm = BlockLSTM(N, 4 * d, d, (N * d) ** -0.5, forget_bias, gate_scale, **factory)
        self.communication = Communication(N, d, comm_heads, comm_size, dropout, **factory)

    def forward(
        self, slots: Sequence[Tensor], h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Trace]:
        """One step: inputs (B, ·) and the state (B, N, d) to the new state and what was seen."""
        s, p, u = self.input_attention(h, slots)
        # The cells that the null slot draws most sleep; equal ones (all, at a zero state) by index.
        active = top_mask(log_odds(s), self.K_a)  # (B, N)
        h_tilde, c_tilde = self.lstm(F.dropout(u, self.dropout, self.training), h, c)
        # Sleeping cells are read too, as the candidates that they will not become.
        h_new, r, a = self.communication(gradient_mask(h_tilde, active))
        h, c = merge(active, h_new, h), merge(active, c_tilde, c)
        return h, c, Trace(h.flatten(1), active, p, a, s, r)

    def lay_out(
        self, x: Tensor, deferred: bool
    ) -> tuple[list[tuple[Tensor, ...]], tuple[Deferred, ...]]:
        """What the steps over x (T, B, D) need no state for: keys, drives, dropout, and products.

        Of all but the products T tensors each.
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
            Deferred(
                torch.cat((attention.query.weight, W_h), dim=2), T, B, deferred, self.lstm.bias()
            ),
            Deferred(comm.qkv.weight, T, B, deferred),
            Deferred(out.weight.t().unsqueeze(0), T, N * B, deferred, out.bias.unsqueeze(0)),
        )
        return [by_step(g, T) for g in given], products

    def advance(self, given: tuple[Tensor, ...], state: State) -> tuple[tuple[Tensor, ...], State]:
        """`forward` after `lay_out`: output and rows of the step's products, and the state.

        `given` is what `lay_out` has for the step, then slots, weights and biases of the products.
        Output and state have cells first, (N, B, d), and share no memory: a compiled step then
        adds their gradients up within its own kernels.
        """
        k, drive, kept, to_h, to_qkv, to_out, W_h, W_qkv, W_out, b_h, _, b_out = given
        (h, c), comm, d_k = state, self.communication, k.shape[2]
        q, gates = deferred_product(h, W_h, to_h).split((d_k, 4 * h.shape[2]), dim=2)
        exact = torch.promote_types(h.dtype, torch.float32)
        s = (q.to(exact) * k.to(exact)).sum(dim=2) / d_k**0.5  # (N, B)
        active = top_mask(s.detach().t(), self.K_a).t().contiguous()
        gates = gates + b_h + s.sigmoid().unsqueeze(2) * drive
        h_tilde, c_tilde = gated(gates.to(c.dtype), c)
        h_tilde = gradient_mask(h_tilde, active)
        qkv = deferred_product(h_tilde, W_qkv, to_qkv).transpose(0, 1)
        _, _, a = attend(qkv, comm.heads, comm.size)
        a = a.to(h.dtype).transpose(0, 1).flatten(0, 1).unsqueeze(0)  # (1, N·B, M·d_v)
        y = deferred_product(a, W_out, to_out).to(h.dtype) + b_out
        gate, update = y.view(*h.shape[:2], -1).chunk(2, dim=2)
        h_new = h_tilde + gate.sigmoid() * (update * kept).tanh()
        rows = tuple(row.detach() for row in (h, h_tilde, a))
        h, c = merge(active, h_new, h), merge(active, c_tilde, c)
        return (h.clone(), *rows), (h, c)


class RIM(Traced):
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
    In a trace `views` are the weights of null and x.

    At 600, 600 there are 1,777,800 parameters; 1,649,800 with the authors' comm_size=16. All of
    them learn: the null slot's matrices and off-block LSTM weights of the authors' code, which do
    not, are left out.
    """

    sizes = ("num_cells", "active_cells")

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
        super().__init__(input_size, hidden_size, batch_first, dtype, compile_step)
        self.cell = RIMCell(
            *((input_size,), hidden_size, num_cells, active_cells),
            key_size=key_size,
            comm_heads=comm_heads,
            comm_size=comm_size,
            dropout=dropout,
            forget_bias=forget_bias,
            gate_scale=gate_scale,
            device=device,
            dtype=dtype,
        )
        self.num_cells, self.active_cells = num_cells, self.cell.K_a
        self.cell_size = hidden_size // num_cells
        self.start = changed_start(float(forget_bias), float(gate_scale))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A sequence (T, B, D), or (B, T, D), to outputs (T, B, N·d) and the last state.

        What does not need the state is made for all steps at once before the loop, and where the
        step is compiled the gradients of weights after it. Hooks on parts see each step's calls.
        """
        if hooked(self.cell):
            return super().forward(x, state)
        x, state = prepare(self, x, state)
        state = tuple(s.transpose(0, 1).contiguous() for s in self._by_cell(state))  # (N, B, d)
        # Whoever compiles all of the loop has no use for a step compiled by itself.
        compiled = None if torch.compiler.is_compiling() else self._compiled
        given, products = self.cell.lay_out(x, deferred=compiled is not None)
        weights = (*(p.weight for p in products), *(p.bias for p in products))
        step = self.cell.advance if compiled is None else compiled.of(self.cell, "advance")
        outputs = []
        for given_t in zip(*given, *(p.slots for p in products), strict=True):
            (y, *rows), state = step((*given_t, *weights), state)
            outputs.append(y)
            for product, row in zip(products, rows, strict=True):
                if product.rows is not None:
                    product.rows.append(row)
        if compiled is None:
            y = torch.stack(outputs)  # (T, N, B, d)
        else:
            kept = [p.rows for p in products if p.rows is not None]
            y, *state = Gather.apply(kept, len(outputs), *outputs, *state)  # type: ignore[no-untyped-call]
        y = y.transpose(1, 2).flatten(2)  # (T, B, N·d)
        state = tuple(s.transpose(0, 1).flatten(1).unsqueeze(0) for s in state)
        return y.transpose(0, 1) if self.batch_first else y, state

    def _by_cell(self, state: State) -> State:
        return tuple(s.squeeze(0).unflatten(1, (self.num_cells, -1)) for s in state)  # (B, N, d)

    def _advance(self, x: Tensor, state: State) -> tuple[State, tuple[Trace]]:
        h, c, seen = self.cell((x,), *self._by_cell(state))
        return (h.flatten(1).unsqueeze(0), c.flatten(1).unsqueeze(0)), (seen,)


def by_step(given: Tensor, T: int) -> tuple[Tensor, ...]:
    """(N, T·B, ·) as T tensors (N, B, ·)."""
    steps = given.unflatten(1, (T, -1)).transpose(0, 1)
    # Where cells lie first, a step's strides would tell T, and a compiled step be for one length.
    return torch.unbind(steps.contiguous() if given.is_contiguous() else steps)


def hooked(model: nn.Module) -> bool:
    """True if a part has a hook, which a loop that is laid out would not call."""
    return any(
        part._forward_pre_hooks
        or part._forward_hooks
        or part._backward_pre_hooks
        or part._backward_hooks
        for part in model.modules()
    )
