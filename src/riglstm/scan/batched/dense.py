"""The `batched` backend for small cells where nothing is selected.

Then all cells have the same input V = [x^1..x^K, h^1..h^N], and the gates of all of them are one
product: the step of an LSTM of width M = N·d, with the soft update after it. Buffers are those of
`forward.Saved`, laid out as (T, B, ·) with gates f, i, o, g of width M each; `weight` and
`pair` are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from riglstm.cell import Weights, gather_query, spread_query
from riglstm.scan.base import input_map_gradients
from riglstm.scan.batched.forward import Saved, empty_saved, write_views
from riglstm.selection import Selection

ROWS_AT_ONCE = 2048
"""Samples and steps whose factors are made together in the backward pass."""


def side_by_side(weights: Weights, K: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The cells' matrices as one: gates ((K+N)·d, 4·M), their bias (4·M), W_q ((K+N)·d, M)."""
    N, S = weights.W.shape[0], weights.W.shape[1]
    W = weights.W.unflatten(2, (4, -1)).permute(1, 2, 0, 3).reshape(S, -1)
    b, W_q = weights.b, weights.W_q
    if b is not None:
        b = b.unflatten(1, (4, -1)).transpose(0, 1).flatten()
    if W_q is not None:
        W_q = spread_query(W_q, N, K).flatten(1, 2).transpose(0, 1).flatten(1)
    return W, b, W_q


def forward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    reset: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Saved]:
    """As `forward.forward`."""
    T, (B, N, d), K = x.shape[0], h.shape, sel.K
    M = N * d
    saved = empty_saved(T if save else 1, h, sel, weights.W_q is not None)
    y, c_n = h.new_empty(T, B, N, d), torch.empty_like(h)
    h, c = h.view(B, M), c.reshape(B, M)
    with torch.inference_mode():
        W, b, W_q = side_by_side(weights, K)

        def steps(buffer: Tensor) -> tuple[Tensor, ...]:
            return buffer.unbind() if save else buffer.unbind() * T

        V, gates = saved.V.flatten(2), saved.gates.view(-1, B, 4 * M)
        V_at, V_x, V_h = steps(V), steps(V[:, :, : K * d]), steps(V[:, :, K * d :])
        gates_at, fio = steps(gates), steps(gates[:, :, : 3 * M])
        f_at, i_at, o_at, g_at = (steps(part) for part in gates.chunk(4, dim=2))
        c_at, tanh_at = steps(saved.c.view(-1, B, M)), steps(saved.tanh_c.view(-1, B, M))
        q_at, a_at = steps(saved.q.view(-1, B, M)), steps(saved.a.view(-1, B, N))
        x_at, y_at, y_cells = x.unbind(), y.view(T, B, M).unbind(), y.unbind()
        # Chosen, not multiplied: zero times a state that is not finite is not zero.
        reset_at = None if reset is None else reset.unsqueeze(2).unbind()
        zero = h.new_zeros(())

        for t in range(T):
            if reset_at is not None:
                h = torch.where(reset_at[t], zero, h, out=V_h[t])
                c = torch.where(reset_at[t], zero, c, out=c_at[t])
            else:
                V_h[t].copy_(h)
                c = c_at[t].copy_(c)
            write_views(x_at[t], weights.W_in, weights.b_in, V_x[t])
            if b is None:
                torch.mm(V_at[t], W, out=gates_at[t])
            else:
                torch.addmm(b, V_at[t], W, out=gates_at[t])
            fio[t].sigmoid_()
            g_at[t].tanh_()
            c = (f_at[t] * c).addcmul_(i_at[t], g_at[t])
            tanh_c = torch.tanh(c, out=tanh_at[t])
            if W_q is None:
                h = torch.mul(o_at[t], tanh_c, out=y_at[t])
                continue
            q = torch.mm(V_at[t], W_q, out=q_at[t])
            way = (o_at[t] * tanh_c).sub_(h)  # from the old state to the proposal
            z = (way * q).view(B, N, d).sum(-1)
            if sel.update_scale != 1:
                z *= sel.update_scale
            if weights.update_bias is not None:
                z += weights.update_bias
            a = torch.sigmoid(z, out=a_at[t])
            torch.addcmul(h.view(B, N, d), way.view(B, N, d), a.unsqueeze(-1), out=y_cells[t])
            h = y_at[t]
        c_n.copy_(c.view(B, N, d))
    active = torch.ones(T, B, N, dtype=torch.bool, device=y.device)
    return y, y[-1].clone(), c_n, active, saved


def backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    saved: Saved,
    weights: Weights,
    sel: Selection,
    reset: Tensor | None,
    for_input: bool,
    for_gates: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Weights]:
    """As `backward.backward`."""
    T, B, S, d = saved.V.shape
    K, N = sel.K, sel.N
    M = N * d
    W, _, W_q = side_by_side(weights, K)
    W5 = W if W_q is None else torch.cat((W, W_q), dim=1)  # ((K+N)·d, 5·M)
    W5_x, W5_h = (w.t().contiguous() for w in W5.split((K * d, M)))
    dV_x = dy.new_empty(T, B, K * d)
    dW5, db5 = torch.zeros_like(W5), W5.new_zeros(W5.shape[1])
    d_bias = None if weights.update_bias is None else torch.zeros_like(weights.update_bias)
    dh, dc = dh.reshape(B, M).clone(), dc.reshape(B, M).clone()
    V, most = saved.V.flatten(2), max(1, ROWS_AT_ONCE // B)
    for t in reversed(range(0, T, most)):
        now = slice(t, t + most)
        piece = Saved(*(buffer[now] for buffer in saved))
        D5, dz = dy.new_empty(len(piece.V), B, W5.shape[1]), dy.new_empty(len(piece.V), B, N)
        with torch.inference_mode():
            _loop_back(
                *(dy[now].reshape(-1, B, M), dh, dc, piece, sel),
                *(None if reset is None else reset[now], W5_h, D5, dz),
            )
        D = D5.view(-1, W5.shape[1])
        if for_gates:
            dW5.addmm_(V[now].reshape(-1, S * d).t(), D)
            db5 += D.sum(0)
            if d_bias is not None:
                d_bias += dz.sum((0, 1))
        if for_input:
            torch.mm(D, W5_x, out=dV_x[now].view(-1, K * d))
    dx = dW_in = db_in = None
    if for_input:
        dx, dW_in, db_in = input_map_gradients(dV_x.view(T * B, K * d), x, weights, dh.dtype)
    dW, dW_q = _apart(dW5, weights.W_q, N, K)
    db = None
    if weights.b is not None:
        db = db5[: 4 * M].view(4, N, d).transpose(0, 1).reshape(N, 4 * d)
    grads = Weights(dW_in, db_in, dW, db, dW_q, d_bias)
    return dx, dh.view(B, N, d), dc.view(B, N, d), grads


def _loop_back(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    piece: Saved,
    sel: Selection,
    reset: Tensor | None,
    W5_h: Tensor,
    D5: Tensor,
    dz: Tensor,
) -> None:
    """The steps of a piece, from the last: updates dh, dc (B, M), and fills D5 and dz."""
    steps, B, M = dy.shape
    N, d = sel.N, M // sel.N
    f, i, o, g = piece.gates.view(steps, B, 4 * M).chunk(4, dim=2)  # (steps, B, M) each
    tanh_c, c = piece.tanh_c.view(steps, B, M), piece.c.view(steps, B, M)
    to_fi = torch.stack((c * f * (1 - f), g * i * (1 - i)), dim=2).unbind()
    to_o, to_g = (tanh_c * o * (1 - o)).unbind(), (i * (1 - g.square())).unbind()
    to_c, f_at = (o * (1 - tanh_c.square())).unbind(), f.unbind()
    soft_update = bool(len(piece.q))
    if soft_update:
        h = piece.V[:, :, sel.K :].reshape(steps, B, N, d)
        a = piece.a.view(steps, B, N, 1)
        way = (o * tanh_c).view(steps, B, N, d) - h
        way_at, a_at, da = way.unbind(), a.unbind(), (a * (1 - a)).unbind()
        q_at, D_q = piece.q.view(steps, B, N, d).unbind(), D5[:, :, 4 * M :].unbind()
    D_at, D_fi = D5.unbind(), D5[:, :, : 2 * M].unflatten(2, (2, M)).unbind()
    D_o, D_g = D5[:, :, 2 * M : 3 * M].unbind(), D5[:, :, 3 * M : 4 * M].unbind()
    dy_at, dz_at = dy.unbind(), dz.unsqueeze(3).unbind()
    reset_at = None if reset is None else reset.unsqueeze(2).unbind()

    for t in reversed(range(steps)):
        dh += dy_at[t]
        d_tilde, d_old = dh, None
        if soft_update:
            dh_cells = dh.view(B, N, d)
            dz_t = torch.mul((dh_cells * way_at[t]).sum(-1, keepdim=True), da[t], out=dz_at[t])
            if sel.update_scale != 1:
                dz_t = dz_t * sel.update_scale
            torch.mul(way_at[t], dz_t, out=D_q[t].view(B, N, d))
            d_tilde = torch.addcmul(dh_cells * a_at[t], dz_t, q_at[t]).view(B, M)
            d_old = dh.sub_(d_tilde)
        dc.addcmul_(d_tilde, to_c[t])
        torch.mul(dc.unsqueeze(1), to_fi[t], out=D_fi[t])
        torch.mul(d_tilde, to_o[t], out=D_o[t])
        torch.mul(dc, to_g[t], out=D_g[t])
        dc *= f_at[t]
        if d_old is None:
            torch.mm(D_at[t], W5_h, out=dh)
        else:
            dh.addmm_(D_at[t], W5_h)
        if reset_at is not None:
            dh.masked_fill_(reset_at[t], 0)
            dc.masked_fill_(reset_at[t], 0)


def _apart(dW5: Tensor, W_q: Tensor | None, N: int, K: int) -> tuple[Tensor, Tensor | None]:
    """dW and dW_q from dW5, the inverse of `side_by_side`; a shared W_q is summed."""
    S, d = dW5.shape[0], dW5.shape[0] // (K + N)
    gates, fifth = dW5.split((4 * N * d, dW5.shape[1] - 4 * N * d), dim=1)
    dW = gates.reshape(S, 4, N, d).permute(2, 0, 1, 3).reshape(N, S, 4 * d)
    if W_q is None:
        return dW, None
    blocks = fifth.reshape(K + N, d, N, d).permute(2, 0, 1, 3)  # (N, K+N, d, d)
    dW_q = gather_query(blocks, K)
    return dW, dW_q.sum(0) if W_q.dim() == 2 else dW_q
