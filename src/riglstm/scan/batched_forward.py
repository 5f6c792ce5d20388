"""Forward pass of the `batched` backend: all cells at once, nothing kept for autograd.

Shapes as in `cell.py`; R rows as in `rows.py`; V = [x^1..x^K, h^1..h^N] is what cells choose from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights, others
from riglstm.scan.batched_select import Selector
from riglstm.scan.rows import (
    Rows,
    all_rows,
    awake_only,
    awake_rows,
    rows_per_sample,
    some_idle,
)
from riglstm.selection import Noise, Selection


class Saved(NamedTuple):
    """What the backward pass needs, step by step; of the last step alone if there is none."""

    V: Tensor
    """(T, B, K+N, d): views, and the state before the step."""
    weight: Tensor
    """(T, B, N, K+N): what each vector of V counts for each cell; bool, or floats if soft."""
    pair: Tensor
    """(T, R) int64: the rows of each step."""
    counts: Tensor
    """(T, N) int64: rows of each cell; no steps where every cell has the same."""
    c: Tensor
    """(T, R, d): c before the step."""
    gates: Tensor
    """(T, R, 4·d): f, i, o, g after their non-linearity."""
    tanh_c: Tensor
    """(T, R, d): tanh of c after the step."""
    q: Tensor
    """(T, R, d): W_q Q; no steps without soft update."""
    a: Tensor
    """(T, R): the weight of the new state; no steps without soft update."""


def empty_saved(T: int, h: Tensor, sel: Selection, soft_update: bool) -> Saved:
    """Unwritten buffers for T steps."""
    B, N, d = h.shape
    S, R = sel.K + N, B * rows_per_sample(h.device, sel)
    soft = "soft" in (sel.views, sel.peers)
    exact = torch.promote_types(h.dtype, torch.float32)
    T_q = T if soft_update else 0
    return Saved(
        V=h.new_empty(T, B, S, d),
        weight=h.new_empty(T, B, N, S, dtype=exact if soft else torch.bool),
        pair=h.new_empty(T, R, dtype=torch.int64),
        counts=h.new_empty(T if awake_only(h.device, sel) else 0, N, dtype=torch.int64),
        c=h.new_empty(T, R, d),
        gates=h.new_empty(T, R, 4 * d),
        tanh_c=h.new_empty(T, R, d),
        q=h.new_empty(T_q, R, d),
        a=h.new_empty(T_q, R),
    )


def forward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise | None,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Saved]:
    """y (T, B, N, d), final h and c, active (T, B, N), and what backward needs.

    Matrix products are taken in the dtype `product`, everything else in the state's. A small
    layer's time goes into the number of operations, not into their size: views of buffers are
    therefore made before the loop, one list for all steps.
    """
    T, (B, N, d) = x.shape[0], h.shape
    saved = empty_saved(T if save else 1, h, sel, weights.W_q is not None)
    y = h.new_empty(T, B, N, d)
    woke = torch.empty(T, B, N, dtype=torch.bool, device=h.device)
    c = c.clone(memory_format=torch.contiguous_format)
    # Nothing inside is differentiated, and without autograd's records an operation costs less;
    # what leaves the loop was made outside, as ordinary tensors.
    with torch.inference_mode():
        _loop(x, h, c, weights, sel, noise, live, reset, product, save, y, woke, saved)
    return y, y[-1].clone(), c, woke, saved


def _loop(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise | None,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
    y: Tensor,
    woke: Tensor,
    saved: Saved,
) -> None:
    """All steps: updates c in place, and fills y, woke and saved."""
    T, (B, N, d), K = x.shape[0], h.shape, sel.K
    S, skip = K + N, awake_only(h.device, sel)
    W_in, W, W_q = (
        None if w is None else w.to(product) for w in (weights.W_in, weights.W, weights.W_q)
    )
    assert W is not None
    idle = some_idle(h.device, sel, live)
    dense = None if skip else all_rows(B, N, h.device)
    mixed = product != h.dtype

    def steps(buffer: Tensor) -> tuple[Tensor, ...]:
        return buffer.unbind() if save else buffer.unbind() * T

    x_at, y_at = x.unbind(), y.view(T, B * N, d).unbind()
    V_at, V_x, V_h = steps(saved.V), steps(saved.V[:, :, :K].flatten(2)), steps(saved.V[:, :, K:])
    weight_at = steps(saved.weight.view(-1, B * N, S))
    pair_at, c_at, gates_at, tanh_at = map(steps, (saved.pair, saved.c, saved.gates, saved.tanh_c))
    fio, g_only = steps(saved.gates[:, :, : 3 * d]), steps(saved.gates[:, :, 3 * d :])
    f_at, i_at, o_at, g_at = (steps(part) for part in saved.gates.chunk(4, dim=2))
    q_at, a_at = (steps(saved.q), steps(saved.a)) if W_q is not None else ((), ())
    h_flat, c_flat = h.reshape(B * N, d), c.view(B * N, d)
    H = h.new_empty(saved.pair.shape[1], S, d)
    H_flat = H.view(-1, S * d)
    query = None if W_q is None else _Query(H.to(product), W_q, N, K)
    select = Selector(h, sel, V_at, V_h, woke.unbind(), steps(saved.weight))
    counts = []

    for t in range(T):
        if reset is not None:
            fresh = reset[t].repeat_interleave(N).unsqueeze(-1)
            h_flat = h_flat.masked_fill(fresh, 0)
            c_flat.masked_fill_(fresh, 0)
        write_views(x_at[t], W_in, weights.b_in, V_x[t])
        V_h[t].copy_(h_flat.view(B, N, d))

        active = select(t, noise)
        rows = dense or awake_rows(active)
        pair = rows.pair
        if live is not None:
            active.logical_and_(live[t].unsqueeze(1))
        if save:
            pair_at[t].copy_(pair)
            counts.append(rows.counts)

        torch.index_select(V_at[t], 0, rows.sample, out=H)
        H.mul_(weight_at[t].index_select(0, pair).unsqueeze(-1))
        H_low = H_flat.to(product) if mixed else H_flat
        if mixed:
            gates_at[t].copy_(rows.times(H_low, W))
            if weights.b is not None:
                gates_at[t].add_(weights.b.index_select(0, rows.cell))
        else:
            rows.times(H_low, W, weights.b, out=gates_at[t])
        fio[t].sigmoid_()
        g_only[t].tanh_()
        h_row = h_flat.index_select(0, pair)
        c_row = torch.index_select(c_flat, 0, pair, out=c_at[t])
        c_new = (f_at[t] * c_row).addcmul_(i_at[t], g_at[t])
        tanh_c = torch.tanh(c_new, out=tanh_at[t])
        h_new = o_at[t] * tanh_c

        if query is not None:
            q = query(H_low, rows, q_at[t])
            h_new -= h_row  # the way from the old state to the proposal
            z = (h_new * q).sum(-1)
            if sel.update_scale != 1:
                z *= sel.update_scale
            if weights.update_bias is not None:
                z += weights.update_bias.index_select(0, rows.cell)
            # Eq. (21): a softmax of two logits is a sigmoid of their difference.
            a = torch.sigmoid(z, out=a_at[t])
            h_new = torch.addcmul(h_row, h_new, a.unsqueeze(-1))
        if idle:
            updates = active.view(-1).index_select(0, pair).unsqueeze(-1)
            h_new = torch.where(updates, h_new, h_row)
            c_new = torch.where(updates, c_new, c_row)
        h_flat = y_at[t].copy_(h_flat)
        h_flat.index_copy_(0, pair, h_new)
        c_flat.index_copy_(0, pair, c_new)
    if save and skip:
        saved.counts.copy_(torch.tensor(counts))


class _Query:
    """Eq. (19) for the rows of every step: W_q times H without the cell's own state."""

    def __init__(self, H: Tensor, W_q: Tensor, N: int, K: int) -> None:
        R, S, self.d = H.shape
        self.W_q = W_q
        self.slots = others(N, K, H.device)  # (N, K+N-1)
        self.start = torch.arange(0, R * S, S, device=H.device).unsqueeze(1)
        self.Q = H.new_empty(R, (S - 1) * self.d)
        self.Q_slots = self.Q.view(-1, self.d)

    def __call__(self, H: Tensor, rows: Rows, out: Tensor) -> Tensor:
        """From H (R, (K+N)·d) to out (R, d)."""
        slots = self.slots.index_select(0, rows.cell).add_(self.start).view(-1)
        torch.index_select(H.view(-1, self.d), 0, slots, out=self.Q_slots)
        if self.W_q.dim() == 3:
            return out.copy_(rows.times(self.Q, self.W_q))
        if out.dtype != H.dtype:
            return out.copy_(self.Q @ self.W_q)
        return torch.mm(self.Q, self.W_q, out=out)


def write_views(x: Tensor, W_in: Tensor | None, b_in: Tensor | None, out: Tensor) -> None:
    """Write the views of one step's input (B, D) to out (B, K·d).

    Step by step, not for the whole sequence at once: a product's last bits depend on its number
    of rows, and a sequence cut into pieces must give the same bits.
    """
    if W_in is None:
        out.copy_(x)
    elif W_in.dtype != out.dtype:
        out.copy_(x.to(W_in.dtype) @ W_in)
        if b_in is not None:
            out += b_in
    elif b_in is None:
        torch.mm(x, W_in, out=out)
    else:
        torch.addmm(b_in, x, W_in, out=out)
