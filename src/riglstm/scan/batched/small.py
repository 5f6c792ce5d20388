"""The `batched` backend for small layers: every cell is computed, and masks choose afterwards.

A small layer's time goes into the number of operations, not into their size. So there are no rows
to pick and no counts to read: a step is one product for all cells, some twenty operations in all.
Samples come last, (·, B), so that each operation runs along contiguous memory whatever the size of
a cell is.

A step's vectors are rows of one matrix: a row of ones, which meets the biases, the views x^1..x^K,
the states h^1..h^N, and c. `Saved.V` is this matrix before each step and after the last,
(T+1, 1+(K+2·N)·d, B); `Saved.weight` are the masks, (T, N·(K+N)+N, B), those of the slots of each
cell and then of the cells; `Saved.gates` are f, i, o, g and W_q Q, (T, N, 5·d, B). The rest of
`Saved` is empty.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from riglstm.cell import Weights, spread_query
from riglstm.scan.base import input_map_gradients, split_gates
from riglstm.scan.batched.forward import Saved
from riglstm.selection import Noise, Selection

CONTIGUOUS = torch.contiguous_format
ROWS_AT_ONCE = 2048
"""Samples and steps that the backward pass takes together."""


def empty_saved(T: int, save: bool, h: Tensor, sel: Selection, soft_update: bool) -> Saved:
    """Unwritten buffers: V for T steps, masks and gates for one if there is no backward pass."""
    B, N, d = h.shape
    S, steps = sel.K + N, T if save else 1
    pair, counts, c, tanh_c, q, a = (h.new_empty(0) for _ in range(6))
    return Saved(
        V=h.new_empty(T + 1, 1 + (S + N) * d, B),
        weight=h.new_empty(steps if selects(sel) else 0, N * S + N, B),
        gates=h.new_empty(steps, N, (5 if soft_update else 4) * d, B),
        **{"pair": pair, "counts": counts, "c": c, "tanh_c": tanh_c, "q": q, "a": a},
    )


def selects(sel: Selection) -> tuple[str, ...]:
    """Which of cells, views and peers are selected, and not all taken."""
    choices = (
        ("cells", sel.cells, sel.K_a, sel.N),
        ("views", sel.views, sel.K_x, sel.K),
        ("peers", sel.peers, sel.K_h, sel.N - 1),
    )
    return tuple(name for name, rule, k, n in choices if rule != "all" and k < n)


def side_by_side(weights: Weights, K: int) -> Tensor:
    """Biases and gates, W_q as a fifth gate, (N, 1+(K+N)·d, 5·d)."""
    W, b, W_q = weights.W, weights.b, weights.W_q
    N, m, n = W.shape
    wide = W.new_empty(N, 1 + m, n if W_q is None else n // 4 * 5)
    wide[:, 0].zero_()
    if b is not None:
        wide[:, 0, :n] = b
    wide[:, 1:, :n] = W
    if W_q is not None:
        wide[:, 1:, n:] = spread_query(W_q, N, K).flatten(1, 2)
    return wide


def _apart(wide: Tensor, weights: Weights, K: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of W, b and W_q from that of `side_by_side`; a shared W_q is summed."""
    dW, dW_q = split_gates(wide[:, 1:], weights.W_q, K)
    db = None if weights.b is None else wide[:, 0, : dW.shape[2]].contiguous()
    return dW.contiguous(), db, dW_q


@functools.lru_cache(64)
def _places(
    rows: int, n: int, k: float, own: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Count places among n from comparisons: `count` (rows, n, n·n), `limit` (rows, n, 1).

    Of L = [s_i < s_j] (n·n), count · L < limit is true for the k that come first, by the rules of
    `selection.top_mask` for numbers: each pair is looked at once, and of equals the lower index is
    ahead. With `own`, row j leaves out entry j, which is always true.
    """
    at = torch.arange(n, device="cpu")
    i, j, p = at.view(1, n, 1), at.view(1, 1, n), at.view(n, 1, 1)
    count = ((p == i).float() - (p == j).float()) * (i < j)
    count = count.repeat(rows, 1, 1, 1)  # (rows, n, n, n)
    limit = (k - at.float()).repeat(rows, 1)
    for row in range(rows if own else 0):
        count[row, :, row, :] = 0
        count[row, :, :, row] = 0
        limit[row, row + 1 :] += 1
        limit[row, row] = float("inf")
    return count.view(rows, n, n * n).to(device, dtype), limit.unsqueeze(2).to(device, dtype)


def _choices(sel: Selection) -> dict[str, tuple[int, int, float, bool]]:
    """Rows, candidates and count of each kind of choice, and whether its own is apart."""
    none = float("inf")
    return {
        "cells": (1, sel.N, none if sel.cells == "all" else sel.K_a, False),
        "views": (sel.N, sel.K, none if sel.views == "all" else sel.K_x, False),
        "peers": (sel.N, sel.N, none if sel.peers == "all" else sel.K_h, True),
    }


@functools.lru_cache(64)
def _joint_places(
    sel: Selection, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`_places` of all choices, where there are as many views as cells, as in the paper.

    The rows are the views and the peers of each cell in turn, then the cells.
    """
    cells, views, peers = (_places(*of, dtype, device) for of in _choices(sel).values())
    slots = (torch.stack(both, dim=1).flatten(0, 1) for both in zip(views, peers, strict=True))
    count, limit = map(torch.cat, zip(slots, cells, strict=True))
    return count, limit


class _Ranking:
    """From scores (rows, n, B) to masks of those that come first."""

    def __init__(self, s: Tensor, count: Tensor, limit: Tensor) -> None:
        rows, n, B = s.shape
        self.one, self.other = s.unsqueeze(2), s.unsqueeze(1)
        self.less = s.new_empty(rows, n, n, B)
        self.pairs = self.less.view(rows, n * n, B)
        self.place = s.new_empty(rows, n, B)
        self.count, self.limit = count, limit

    def __call__(self, out: Tensor) -> None:
        torch.lt(self.one, self.other, out=self.less)
        torch.bmm(self.count, self.pairs, out=self.place)
        torch.lt(self.place, self.limit, out=out)


class _Selector:
    """Eqs. (13)-(16) of every step, from V (T, 1, K+N, d, B) to masks (steps, N·(K+N)+N, B)."""

    def __init__(self, V: Tensor, masks: Tensor, sel: Selection, noise: Noise | None) -> None:
        T, _, S, d, B = V.shape
        N, K = sel.N, sel.K
        self.V, self.h = V.unbind(), V[:, 0, K:].unsqueeze(2).unbind()
        self.products = V.new_empty(N, S, d, B)
        self.s = V.new_empty(N * S + N, B)
        parts = _parts(self.s, sel)
        self.cells, self.views, self.both = parts["cells"][0], parts["views"], parts["both"]
        draws = {} if noise is None else noise._asdict()
        self.drawn = [
            (parts[name], draw.movedim(1, -1).reshape(T, *parts[name].shape).unbind())
            for name, draw in draws.items()
            if draw is not None
        ]
        selected = selects(sel)
        if K == N and len(selected) > 1:
            rows = _Ranking(self.s.view(-1, N, B), *_joint_places(sel, V.dtype, V.device))
            self.rankings = [(rows, per_step(masks.unflatten(1, (-1, N)), T))]
            return
        places = {name: _places(*of, V.dtype, V.device) for name, of in _choices(sel).items()}
        if len(selected) < 3:
            masks.fill_(1)
        self.rankings = [
            (_Ranking(parts[name], *places[name]), per_step(_parts(masks, sel)[name], T))
            for name in selected
        ]

    def __call__(self, t: int) -> None:
        torch.mul(self.h[t], self.V[t], out=self.products)
        torch.sum(self.products, 2, out=self.both)
        torch.sum(self.views, 1, out=self.cells)
        for scores, draws in self.drawn:
            scores.copy_(draws[t])
        # A score that is not a number comes first, so that no selection can hide it (P13).
        self.s.nan_to_num_(nan=float("inf"))
        for rank, masks in self.rankings:
            rank(masks[t])


def _parts(s: Tensor, sel: Selection) -> dict[str, Tensor]:
    """Scores or masks (·, N·(K+N)+N, B): of cells (1, N, B), views (N, K, B), peers (N, N, B)."""
    slots, cells = s.split((sel.N * (sel.K + sel.N), sel.N), dim=-2)
    both = slots.unflatten(-2, (sel.N, -1))
    views, peers = both.split((sel.K, sel.N), dim=-2)
    return {"cells": cells.unsqueeze(-3), "views": views, "peers": peers, "both": both}


def per_step(buffer: Tensor, T: int) -> Sequence[Tensor]:
    """A view for each of T steps; a buffer of one step serves all."""
    views = buffer.unbind()
    return views if len(views) == T else views * T


class _Product:
    """A matrix W (·, m, n) for row vectors times columns (·, m, B), into (·, n, B)."""

    def __init__(self, W: Tensor, B: int) -> None:
        self.times = torch.bmm if W.dim() == 3 else torch.mm
        self.row = B == 1  # one row in front of a matrix is quicker than a column behind it
        self.W = W if self.row else W.mT

    def side(self, columns: Tensor) -> Tensor:
        """Columns, given or to be written, as a call takes them."""
        return columns.mT if self.row else columns

    def __call__(self, v: Tensor, out: Tensor) -> None:
        if self.row:
            self.times(v, self.W, out=out)
        else:
            self.times(self.W, v, out=out)


def forward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise | None,
    live: Tensor | None,
    reset: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Saved]:
    """As `forward.forward`."""
    T, (B, N, d), K = x.shape[0], h.shape, sel.K
    M, S = N * d, K + N
    selected = selects(sel)
    soft_update = weights.W_q is not None
    saved = empty_saved(T, save, h, sel, soft_update)
    V, masks, gates = saved.V, saved.weight, saved.gates
    active = torch.ones(T, N, B, dtype=torch.bool, device=h.device)
    y, c_n = h.new_empty(T, B, N, d), h.new_empty(B, N, d)
    # Nothing inside is differentiated, and without autograd's records an operation costs less;
    # what leaves the loop was made outside, as ordinary tensors.
    with torch.inference_mode():
        V[:, 0].fill_(1)
        V[T, 1 : 1 + K * d].zero_()  # nothing is seen after the last step
        write_views(x, weights.W_in, weights.b_in, V[:T, 1 : 1 + K * d])
        state = V[:, 1 + K * d :].unflatten(1, (2, N, d))
        state[0, 0].copy_(h.permute(1, 2, 0))
        state[0, 1].copy_(c.permute(1, 2, 0))
        state_at, h_at, c_at = (v.unbind() for v in (state, state[:, 0], state[:, 1]))
        slots = V[:T, 1 : 1 + S * d].unflatten(1, (1, S, d))
        select = _Selector(slots, masks, sel, noise) if selected else None
        W, by_cell = side_by_side(weights, K), "views" in selected or "peers" in selected
        if by_cell:
            multiply = _Product(W, B)
            H = V.new_ones(N, 1 + S * d, B)
            H_slots, H_in = H[:, 1:].unflatten(1, (S, d)), multiply.side(H)
            slots_at = slots.unbind() if select is None else select.V
            mask_at = per_step(_parts(masks, sel)["both"].unsqueeze(3), T)
            gates_at = per_step(multiply.side(gates), T)
        else:
            multiply = _Product(W.transpose(0, 1).flatten(1), B)
            V_at = multiply.side(V[:T, : 1 + S * d]).unbind()
            gates_at = per_step(multiply.side(gates.flatten(1, 2)), T)
        parts = gates.unflatten(2, (-1, d))
        f_at, i_at, o_at, g_at = (per_step(parts[:, :, k], T) for k in range(4))
        fio_at = per_step(gates[:, :, : 3 * d], T)
        if soft_update:
            q_at = per_step(parts[:, :, 4], T)
            add_up = _sums(N, d, V).mul_(-sel.update_scale)
            bias = None if weights.update_bias is None else weights.update_bias.unsqueeze(1)
            way, products, z = V.new_empty(N, d, B), V.new_empty(N, d, B), V.new_empty(N, B)
            products_flat, a = products.view(M, B), z.unsqueeze(1)
        tanh_c, new = V.new_empty(N, d, B), V.new_empty(2, N, d, B)
        h_new, c_new = new.unbind()
        sleeps = "cells" in selected or live is not None
        active_at = active.unsqueeze(2).unbind() if sleeps else ()
        cells_at = per_step(masks[:, N * S :].unsqueeze(2), T) if "cells" in selected else ()
        live_at = () if live is None else live.unbind()
        reset_at = () if reset is None else reset.unbind()
        y_at = () if reset is None else y.permute(0, 2, 3, 1).unbind()

        for t in range(T):
            h, c = h_at[t], c_at[t]
            if reset_at:
                state_at[t].masked_fill_(reset_at[t], 0)
            if select is not None:
                select(t)
            if by_cell:
                torch.mul(slots_at[t], mask_at[t], out=H_slots)
                multiply(H_in, gates_at[t])
            else:
                multiply(V_at[t], gates_at[t])
            fio_at[t].sigmoid_()
            g_at[t].tanh_()
            if not sleeps:
                h_new, c_new = h_at[t + 1], c_at[t + 1]
            torch.mul(f_at[t], c, out=c_new).addcmul_(i_at[t], g_at[t])
            torch.tanh(c_new, out=tanh_c)
            if soft_update:
                # From the proposal back to the old state; `add_up` turns the sign.
                torch.addcmul(h, o_at[t], tanh_c, value=-1, out=way)
                torch.mul(way, q_at[t], out=products)
                if bias is None:
                    torch.mm(add_up, products_flat, out=z)
                else:
                    torch.addmm(bias, add_up, products_flat, out=z)
                # Eq. (21): a softmax of two logits is a sigmoid of their difference.
                z.sigmoid_()
                torch.addcmul(h, way, a, value=-1, out=h_new)
            else:
                torch.mul(o_at[t], tanh_c, out=h_new)
            if sleeps:
                if cells_at:
                    active_at[t].copy_(cells_at[t])
                if live_at:
                    active_at[t].logical_and_(live_at[t])
                torch.where(active_at[t], new, state_at[t], out=state_at[t + 1])
            if y_at:  # the next reset may change what is left here
                y_at[t].copy_(h_at[t + 1])
        if not y_at:
            y.copy_(state[1:, 0].permute(0, 3, 1, 2))
        c_n.copy_(state[T, 1].permute(2, 0, 1))
    return y, y[-1].clone(), c_n, active.transpose(1, 2).contiguous(), saved


def write_views(x: Tensor, W_in: Tensor | None, b_in: Tensor | None, out: Tensor) -> None:
    """Write the views of the input x (T, B, D) to out (T, K·d, B).

    Step by step, not for the whole sequence at once: a product's last bits depend on its number
    of rows, and a sequence cut into pieces must give the same bits.
    """
    if W_in is None:
        out.copy_(x.mT)
        return
    row = x.shape[1] == 1
    W = W_in if row else W_in.t()
    b = W.new_zeros(()) if b_in is None else b_in if row else b_in.unsqueeze(1)
    x_at, out_at = (x if row else x.mT).unbind(), (out.mT if row else out).unbind()
    for x_t, out_t in zip(x_at, out_at, strict=True):
        if row:
            torch.addmm(b, x_t, W, out=out_t)
        else:
            torch.addmm(b, W, x_t, out=out_t)


def _sums(N: int, d: int, like: Tensor) -> Tensor:
    """The matrix (N, N·d) that adds up the d numbers of each cell."""
    return torch.eye(N, dtype=like.dtype, device=like.device).repeat_interleave(d, dim=1)


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
    idle: bool,
    for_input: bool,
    for_gates: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Weights]:
    """As `backward.backward`."""
    T, B, N, d = dy.shape
    K, M = sel.K, N * d
    V, masks = saved.V, saved.weight
    W = side_by_side(weights, K)
    selected, idle = selects(sel), idle or sel.awake < N
    by_cell = "views" in selected or "peers" in selected
    if not by_cell:
        W = W.transpose(0, 1).flatten(1).unsqueeze(0)
    _, W_x, W_h = W.split((1, K * d, M), dim=1)  # (N or 1, ·, 5·d or N·5·d)
    dW = torch.zeros_like(W)
    dV_x = dy.new_empty(K * d, T, B)
    d_bias = None if weights.update_bias is None else torch.zeros_like(weights.update_bias)
    dh, dc = (v.permute(1, 2, 0).clone(memory_format=CONTIGUOUS) for v in (dh, dc))
    dy = dy.permute(0, 2, 3, 1).contiguous()
    awake = active.transpose(1, 2).to(dy.dtype) if idle else None  # (T, N, B)
    most = max(1, ROWS_AT_ONCE // B)
    for t in reversed(range(0, T, most)):
        now = slice(t, min(t + most, T))
        steps = now.stop - t
        D = dy.new_empty(steps, *saved.gates.shape[1:])
        dz = dy.new_empty(steps, N, B)
        both = _parts(masks[now], sel)["both"] if by_cell else None  # (steps, N, K+N, B)
        with torch.inference_mode():
            _loop_back(
                *(dy[now], dh, dc, V[now], saved.gates[now], weights, sel),
                None if awake is None else awake[now],
                None if both is None else both[:, :, K:],
                None if reset is None else reset[now],
                *(W_h, D, dz),
            )
        D = D.permute(1, 2, 0, 3).reshape(len(W), -1, steps * B)
        if for_gates:
            slots = V[now, : 1 + (K + N) * d].transpose(0, 1)  # (·, steps, B)
            if both is None:
                H = slots.reshape(1, -1, steps * B)
            else:
                H = V.new_ones(N, 1 + (K + N) * d, steps, B)
                mask = both.permute(1, 2, 0, 3).unsqueeze(2)
                torch.mul(
                    slots[1:].unflatten(0, (1, -1, d)), mask, out=H[:, 1:].unflatten(1, (-1, d))
                )
                H = H.flatten(2)
            dW.baddbmm_(H, D.mT)
            if d_bias is not None:
                d_bias += dz.sum((0, 2))
        if for_input:
            dX = torch.bmm(W_x, D).view(len(W), K, d, steps, B)
            if both is not None:
                dX.mul_(both[:, :, :K].permute(1, 2, 0, 3).unsqueeze(2))
            torch.sum(dX.flatten(1, 2), 0, out=dV_x[:, now])
    dx = dW_in = db_in = None
    if for_input:
        dV = dV_x.permute(1, 2, 0).reshape(T * B, K * d)
        dx, dW_in, db_in = input_map_gradients(dV, x, weights, dy.dtype)
    if not by_cell:
        dW = dW.view(-1, N, dW.shape[2] // N).transpose(0, 1)
    dW, db, dW_q = _apart(dW, weights, K)
    dh, dc = dh.permute(2, 0, 1).contiguous(), dc.permute(2, 0, 1).contiguous()
    return dx, dh, dc, Weights(dW_in, db_in, dW, db, dW_q, d_bias)


def _loop_back(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    V: Tensor,
    gates: Tensor,
    weights: Weights,
    sel: Selection,
    awake: Tensor | None,
    peers: Tensor | None,
    reset: Tensor | None,
    W_h: Tensor,
    D: Tensor,
    dz: Tensor,
) -> None:
    """The steps of a piece, from the last: updates dh, dc (N, d, B), and fills D and dz.

    D (steps, N, 5·d, B) are gradients of the gates' arguments and of W_q Q, dz (steps, N, B) of
    the logit of the new state. What does not depend on dh or dc is made for all steps at once.
    """
    steps, N, d, B = dy.shape
    soft_update = weights.W_q is not None
    h, c = V[:, 1 + sel.K * d :].unflatten(1, (2, N, d)).unbind(1)
    f, i, o, g, *rest = gates.unflatten(2, (-1, d)).unbind(2)
    tanh_c = (f * c).addcmul_(i, g).tanh_()
    to_f, to_i, to_g = c * f * (1 - f), g * i * (1 - i), i * (1 - g.square())
    to_o, to_c = tanh_c * o * (1 - o), o * (1 - tanh_c.square())
    works = None if awake is None else awake.unsqueeze(2)
    if works is not None:
        # A cell asleep keeps what it has, and passes on what it is given.
        to_f, to_i, to_g = to_f.mul_(works), to_i.mul_(works), to_g.mul_(works)
        f = 1 + works * (f - 1)
    to_fi_at, to_g_at, to_o_at, to_c_at, f_at = (
        v.unbind() for v in (torch.stack((to_f, to_i), dim=2), to_g, to_o, to_c, f)
    )
    a_at: Sequence[Tensor] = ()
    if soft_update:
        q = rest[0]
        way = o * tanh_c - h
        z = (way * q).sum(2, keepdim=True).mul_(sel.update_scale)
        a = (z if weights.update_bias is None else z + weights.update_bias.view(N, 1, 1)).sigmoid_()
        slope = a * (1 - a)
        if works is not None:
            a, slope = a * works, slope * works
        a_at, to_z_at = a.unbind(), (way * slope).unbind()
        q_at, way_at = (q * sel.update_scale).unbind(), (way * sel.update_scale).unbind()
        D_q = D[:, :, 4 * d :].unbind()
        add_up, dz_at, dz_cells = _sums(N, d, V), dz.unbind(), dz.unsqueeze(2).unbind()
        product, d_tilde = torch.empty_like(dh), torch.empty_like(dh)
        product_flat = product.view(N * d, B)
    elif works is not None:
        a_at, d_tilde = works.unbind(), torch.empty_like(dh)
    D_fi = D[:, :, : 2 * d].unflatten(2, (2, d)).unbind()
    D_o, D_g = D[:, :, 2 * d : 3 * d].unbind(), D[:, :, 3 * d : 4 * d].unbind()
    dc_twice, dy_at = dc.unsqueeze(1), dy.unbind()
    multiply = _Product(W_h.mT, B)
    D_at = multiply.side(D if peers is not None else D.flatten(1, 2).unsqueeze(1)).unbind()
    dH = dh.new_empty(len(W_h), N * d, B)
    dH_peers, dH_flat, dh_flat = dH.unflatten(1, (N, d)), dH.view(len(W_h), -1), dh.view(1, -1)
    ones, dH_out = dh.new_ones(1, len(W_h)), multiply.side(dH)
    peers_at = None if peers is None else peers.unsqueeze(3).unbind()
    reset_at = None if reset is None else reset.unbind()

    for t in reversed(range(steps)):
        dh.add_(dy_at[t])
        if soft_update:
            torch.mul(dh, to_z_at[t], out=product)
            torch.mm(add_up, product_flat, out=dz_at[t])
            torch.mul(way_at[t], dz_cells[t], out=D_q[t])
            torch.mul(dh, a_at[t], out=d_tilde).addcmul_(q_at[t], dz_cells[t])
            dh.sub_(d_tilde)
        elif a_at:
            torch.mul(dh, a_at[t], out=d_tilde)
            dh.sub_(d_tilde)
        else:
            d_tilde = dh.clone()
            dh.zero_()
        dc.addcmul_(d_tilde, to_c_at[t])
        torch.mul(dc_twice, to_fi_at[t], out=D_fi[t])
        torch.mul(d_tilde, to_o_at[t], out=D_o[t])
        torch.mul(dc, to_g_at[t], out=D_g[t])
        dc.mul_(f_at[t])
        multiply(D_at[t], dH_out)
        if peers_at is not None:
            dH_peers.mul_(peers_at[t])
        dh_flat.addmm_(ones, dH_flat)
        if reset_at is not None:
            dh.masked_fill_(reset_at[t], 0)
            dc.masked_fill_(reset_at[t], 0)
