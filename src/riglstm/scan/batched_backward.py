"""Backward pass of the `batched` backend, written by hand.

A hard selection passes no gradient to its scores, so the masks of the forward pass are all that
is needed. The loop over time carries only dh and dc; the gradients of weights and inputs are
large products after it. W_q counts as a fifth gate: with its own-state block set to zero it takes
the same input H as the others, so one product serves all five.
"""

from __future__ import annotations

import torch
from torch import Tensor

from riglstm.cell import Weights, others
from riglstm.scan.batched_forward import Saved
from riglstm.scan.rows import Rows, all_rows, rows_of
from riglstm.selection import Selection

ROWS_AT_ONCE = 8192
"""Rows whose selected inputs are rebuilt together after the loop: 40 MB at the paper's sizes."""


def five_gates(W: Tensor, W_q: Tensor | None, K: int) -> Tensor:
    """W (N, (K+N)·d, 4·d) with W_q as a fifth gate, (N, (K+N)·d, 5·d)."""
    if W_q is None:
        return W
    N, d = W.shape[0], W.shape[2] // 4
    fifth = W.new_zeros(N, K + N, d, d)
    j = torch.arange(N, device=W.device).unsqueeze(1)
    fifth[j, others(N, K, W.device)] = W_q.view(-1, K + N - 1, d, d)
    return torch.cat((W, fifth.view(N, -1, d)), dim=2)


def split_gates(dW5: Tensor, W_q: Tensor | None, K: int) -> tuple[Tensor, Tensor | None]:
    """The inverse for gradients: dW, and dW_q, summed over cells where they share it."""
    if W_q is None:
        return dW5, None
    N, d = dW5.shape[0], dW5.shape[2] // 5
    j = torch.arange(N, device=dW5.device).unsqueeze(1)
    fifth = dW5[:, :, 4 * d :].reshape(N, K + N, d, d)
    dW_q = fifth[j, others(N, K, dW5.device)].view(N, -1, d)  # (N, (K+N-1)·d, d)
    return dW5[:, :, : 4 * d].contiguous(), dW_q.sum(0) if W_q.dim() == 2 else dW_q


def backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    active: Tensor,
    saved: Saved,
    weights: Weights,
    sel: Selection,
    reset: Tensor | None,
    product: torch.dtype,
    idle: bool,
) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """Gradients of x, h, c and of every weight, from those of y (T, B, N, d) and the final state.

    `idle` says that some rows did not update, as `active` tells.
    """
    T, B, S, d = saved.V.shape
    K, N, R = sel.K, sel.N, saved.pair.shape[1]
    soft_update = weights.W_q is not None
    W5 = five_gates(weights.W, weights.W_q, K).to(product)  # (N, (K+N)·d, 5·d)
    W5_x, W5_h = (w.contiguous() for w in W5.mT.split((K * d, N * d), dim=2))  # (N, 5·d, K·d)…
    D5 = saved.V.new_empty(T, R, W5.shape[2])
    dV_x = saved.V.new_empty(T, B, K, d)
    dz = saved.V.new_zeros(T, R)
    counts = saved.counts.tolist()
    dh, dc = dh.reshape(B * N, d).clone(), dc.reshape(B * N, d).clone()
    dense = None if counts else all_rows(B, N, x.device)

    for t in reversed(range(T)):
        rows = dense or rows_of(saved.pair[t], counts[t], N)
        dh += dy[t].view(B * N, d)
        dh_row, dc_row = dh.index_select(0, rows.pair), dc.index_select(0, rows.pair)
        through_h = through_c = None
        if idle:
            updates = active[t].view(-1).index_select(0, rows.pair).unsqueeze(-1)
            through_h, through_c = dh_row.masked_fill(updates, 0), dc_row.masked_fill(updates, 0)
            dh_row, dc_row = dh_row.masked_fill(~updates, 0), dc_row.masked_fill(~updates, 0)

        f, i, o, g = saved.gates[t].chunk(4, dim=1)
        tanh_c = saved.tanh_c[t]
        D = D5[t].view(R, -1, d)  # (R, 5, d): gradients before the non-linearities, then of q
        if soft_update:
            h_row = saved.V[t, :, K:].reshape(B * N, d).index_select(0, rows.pair)
            a = saved.a[t].unsqueeze(-1)
            ahead = torch.addcmul(-h_row, o, tanh_c)  # h~ - h
            dz_t = (dh_row * ahead).sum(-1, keepdim=True) * a * (1 - a)
            dz[t] = dz_t.squeeze(-1)
            dz_t = dz_t * sel.update_scale
            torch.mul(ahead, dz_t, out=D[:, 4])
            d_tilde = torch.addcmul(a * dh_row, dz_t, saved.q[t])
            d_old = dh_row - d_tilde
        else:
            d_tilde, d_old = dh_row, torch.zeros_like(dh_row)
        dc_new = torch.addcmul(dc_row, d_tilde * o, 1 - tanh_c * tanh_c)
        D[:, 0] = dc_new * saved.c[t] * f * (1 - f)
        D[:, 1] = dc_new * g * i * (1 - i)
        D[:, 2] = d_tilde * tanh_c * o * (1 - o)
        D[:, 3] = dc_new * i * (1 - g * g)
        dc_old = dc_new * f
        if through_h is not None and through_c is not None:
            d_old, dc_old = d_old + through_h, dc_old + through_c
        dh.index_copy_(0, rows.pair, d_old)
        dc.index_copy_(0, rows.pair, dc_old)

        weight = saved.weight[t].view(B * N, S).index_select(0, rows.pair)  # (R, K+N)
        D_low = D5[t].to(product)
        dH = rows.times(D_low, W5_h).to(dh.dtype).view(R, N, d)
        if sel.peers == "soft":
            dh += _soft_peers(dH, weight[:, K:], saved.V[t, :, K:], rows)
        if sel.views == "soft":
            dH_x = rows.times(D_low, W5_x).to(dh.dtype).view(R, K, d)
            dV_x[t], dh_own = _soft_views(dH_x, weight[:, :K], saved.V[t], rows)
            dh.index_add_(0, rows.pair, dh_own)
        dH.mul_(weight[:, K:].unsqueeze(-1))
        dh += rows.sum_by_sample(dH.view(R, N * d), B).view(B * N, d)
        if reset is not None:
            fresh = reset[t].repeat_interleave(N).unsqueeze(-1)
            dh.masked_fill_(fresh, 0)
            dc.masked_fill_(fresh, 0)

    dW5 = torch.zeros_like(W5, dtype=weights.W.dtype)
    db5 = dW5.new_zeros(N, W5.shape[2])
    for t, steps in _chunks(T, R):
        rows, order = _rows_of_steps(saved, counts, t, steps, N)
        D = D5[t : t + steps].view(steps * R, -1).index_select(0, order)
        H = saved.V[t : t + steps].view(steps * B, S, d).index_select(0, rows.sample)
        weight = saved.weight[t : t + steps].view(-1, S).index_select(0, rows.pair)
        H.mul_(weight.unsqueeze(-1))
        D_low = D.to(product)
        rows.outer(H.view(-1, S * d).to(product), D_low, dW5)
        db5 += rows.sum_by_cell(D)
        if sel.views != "soft":
            dH = rows.times(D_low, W5_x).to(dh.dtype).view(-1, K, d)
            dH.mul_(weight[:, :K].unsqueeze(-1))
            dV_x[t : t + steps] = rows.sum_by_sample(dH.view(-1, K * d), steps * B).view(
                steps, B, K, d
            )

    dx, dW_in, db_in = _input_map(dV_x.view(T * B, K * d), x, weights, product)
    dW, dW_q = split_gates(dW5, weights.W_q, K)
    d_bias = None
    if weights.update_bias is not None:
        d_bias = dz.new_zeros(N).index_add_(0, saved.pair.view(-1) % N, dz.view(-1))
    grads = Weights(
        dW_in, db_in, dW, None if weights.b is None else db5[:, : 4 * d].contiguous(), dW_q, d_bias
    )
    return dx, dh.view(B, N, d), dc.view(B, N, d), grads


def _chunks(T: int, R: int) -> list[tuple[int, int]]:
    """First step and number of steps of each piece of the sequence."""
    most = max(1, ROWS_AT_ONCE // R)
    return [(t, min(most, T - t)) for t in range(0, T, most)]


def _rows_of_steps(
    saved: Saved, counts: list[list[int]], t: int, steps: int, N: int
) -> tuple[Rows, Tensor]:
    """The rows of several steps as one set, and where each stood in the order of the steps.

    A sample of this set is a pair of step and sample.
    """
    B, R = saved.V.shape[1], saved.pair.shape[1]
    start = torch.arange(steps, device=saved.pair.device).unsqueeze(1) * (B * N)
    pair = (saved.pair[t : t + steps] + start).view(-1)
    if not counts:
        order = torch.arange(steps * R, device=pair.device)
        order = order.view(steps, N, B).transpose(0, 1).reshape(-1)
        return rows_of(pair.index_select(0, order), None, N), order
    order = pair.remainder(N).argsort(stable=True)
    total = [sum(n) for n in zip(*counts[t : t + steps], strict=True)]
    return rows_of(pair.index_select(0, order), total, N), order


def _input_map(
    dV: Tensor, x: Tensor, weights: Weights, product: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Back through the input transformation: dx, dW_in, db_in from dV (T·B, K·d)."""
    if weights.W_in is None:
        return dV.view_as(x).to(x.dtype), None, None
    low = dV.to(product)
    dx = (low @ weights.W_in.t().to(product)).view_as(x).to(x.dtype)
    dW_in = (x.reshape(dV.shape[0], -1).t().to(product) @ low).to(weights.W_in.dtype)
    return dx, dW_in, None if weights.b_in is None else dV.sum(0)


def _soft_views(dH: Tensor, weight: Tensor, V: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Back through x^k · softmax(s)_k: gradients of views (B, K, d) and own states (R, d)."""
    (R, K, d), B = dH.shape, V.shape[0]
    weight = weight.to(dH.dtype)
    x = V[:, :K].index_select(0, rows.sample)  # (R, K, d)
    h = V[:, K:].reshape(-1, d).index_select(0, rows.pair)  # (R, d)
    ds = _softmax_backward(weight, (dH * x).sum(-1)).unsqueeze(-1)  # (R, K, 1)
    d_views = torch.addcmul(dH * weight.unsqueeze(-1), ds, h.unsqueeze(1))
    return rows.sum_by_sample(d_views.view(R, K * d), B).view(B, K, d), (ds * x).sum(1)


def _soft_peers(dH: Tensor, weight: Tensor, h: Tensor, rows: Rows) -> Tensor:
    """Back through the scores of h^i · softmax(r)_i: gradient of the state (B·N, d)."""
    (R, N, d), B = dH.shape, h.shape[0]
    others_only = weight.to(dH.dtype).scatter(1, rows.cell.unsqueeze(1), 0)
    own = h.reshape(-1, d).index_select(0, rows.pair)  # (R, d)
    h = h.index_select(0, rows.sample)  # (R, N, d)
    ds = _softmax_backward(others_only, (dH * h).sum(-1)).unsqueeze(-1)  # (R, N, 1)
    d_peers = rows.sum_by_sample((ds * own.unsqueeze(1)).view(R, N * d), B).view(B * N, d)
    return d_peers.index_add_(0, rows.pair, (ds * h).sum(1))


def _softmax_backward(weight: Tensor, d_weight: Tensor) -> Tensor:
    """From the gradient of a softmax along the last dimension to that of its logits."""
    return weight * (d_weight - (weight * d_weight).sum(-1, keepdim=True))
