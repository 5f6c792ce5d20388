"""One step of RigLSTM, equation by equation.

Shapes: B samples, D input features, N cells of size d, K views of the input, G = 4 gates in the
order f, i, o, g. Read beside the paper: each function is one equation, `step` runs them in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.selection import Noise, Selection, choose_cells, weigh_peers, weigh_views


class Weights(NamedTuple):
    """The trainable numbers of one layer in one direction."""

    W_in: Tensor | None
    """(D, K·d), the K view maps side by side; None: the input is cut into views."""
    b_in: Tensor | None
    """(K·d)."""
    W: Tensor
    """(N, (K+N)·d, 4·d), the gates of each cell; like all matrices here, for row vectors."""
    b: Tensor | None
    """(N, 4·d) (P7)."""
    W_q: Tensor | None
    """((K+N-1)·d, d) for all cells, or (N, (K+N-1)·d, d) (P5); None: no soft update."""
    update_bias: Tensor | None
    """(N), added to the new state's logit in Eq. (21); None: none."""


class Seen(NamedTuple):
    """What a step decided, for traces."""

    active: Tensor
    """(B, N) bool: the cell woke."""
    views: Tensor
    """(B, N, K): bool, or the weights of the soft rule."""
    peers: Tensor
    """(B, N, N) as [j, i]: cell j listens to cell i; the diagonal is always 1."""
    view_scores: Tensor
    """(B, N, K), Eq. (13)."""
    peer_scores: Tensor
    """(B, N, N): h^j · h^i."""
    keep: Tensor
    """(B, N): the weight of the old state; 1 where a cell slept."""


def input_views(x: Tensor, W_in: Tensor | None, b_in: Tensor | None, K: int) -> Tensor:
    """Input transformation: K views x^k of the input; without W_in, K pieces of it."""
    if W_in is not None:
        x = x @ W_in
        x = x if b_in is None else x + b_in
    views: Tensor = x.unflatten(-1, (K, -1))  # (B, K, d)
    return views


def scores(h: Tensor, v: Tensor) -> Tensor:
    """Eq. (13): how well each vector v^k fits each cell, (B, N, K).

    In float32 or better, also under autocast: a rounded score wakes another cell. Products are
    summed one pair at a time, so that equal vectors get equal scores to the last bit (P4).
    """
    exact = torch.promote_types(torch.promote_types(h.dtype, v.dtype), torch.float32)
    return (h.to(exact).unsqueeze(2) * v.to(exact).unsqueeze(1)).sum(dim=-1)


def cell_scores(s: Tensor) -> Tensor:
    """Eq. (14): a cell's relevance is the sum of its views' scores, (B, N)."""
    return s.sum(dim=-1)


def gather(x: Tensor, h: Tensor, views: Tensor, peers: Tensor) -> Tensor:
    """Eqs. (15)-(17): H^j, each cell's own selection of views and states, (B, N, K+N, d)."""
    v = torch.cat((x.to(h.dtype), h), dim=1)  # (B, K+N, d)
    weight = torch.cat((views, peers), dim=2)  # (B, N, K+N)
    return v.unsqueeze(1) * weight.to(h.dtype).unsqueeze(-1)


def lstm(H: Tensor, c: Tensor, W: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Eqs. (1)-(6) for every cell, as Eq. (18) calls them: the proposal h~ and the new c."""
    return gated(torch.einsum("bnj,njg->bng", H.flatten(2), W), c, b)


def gated(gates: Tensor, c: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Eqs. (1)-(6) from their products (B, N, 4·d) on: the proposal h~ and the new c."""
    gates = gates.to(c.dtype)
    if b is not None:
        gates = gates + b
    f, i, o, g = gates.chunk(4, dim=-1)  # (B, N, d) each
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def query(H: Tensor, W_q: Tensor, K: int) -> Tensor:
    """Eq. (19): W_q Q^j, where Q^j is H^j without the cell's own state, (B, N, d)."""
    N, d = H.shape[1], H.shape[3]
    j = torch.arange(N, device=H.device).unsqueeze(1)
    Q = H[:, j, others(N, K, H.device)]  # (B, N, K+N-1, d)
    shape = "ja" if W_q.dim() == 2 else "nja"
    return torch.einsum(f"bnj,{shape}->bna", Q.reshape(-1, N, (K + N - 1) * d), W_q)


def others(N: int, K: int, device: torch.device) -> Tensor:
    """The K+N-1 slots of H^j that enter Q^j, in order, for each cell: (N, K+N-1)."""
    slot = torch.arange(K + N - 1, device=device).expand(N, -1)
    own = K + torch.arange(N, device=device).unsqueeze(1)
    return slot + (slot >= own)


def spread_query(W_q: Tensor, N: int, K: int) -> Tensor:
    """W_q as a map of H^j for each cell, (N, K+N, d, d): zero in the block of the own state."""
    d = W_q.shape[-1]
    blocks = W_q.new_zeros(N, K + N, d, d)
    j = torch.arange(N, device=W_q.device).unsqueeze(1)
    blocks[j, others(N, K, W_q.device)] = W_q.view(-1, K + N - 1, d, d)
    return blocks


def gather_query(blocks: Tensor, K: int) -> Tensor:
    """The inverse: from (N, K+N, d, d) to a W_q for each cell, (N, (K+N-1)·d, d)."""
    N = blocks.shape[0]
    j = torch.arange(N, device=blocks.device).unsqueeze(1)
    return blocks[j, others(N, K, blocks.device)].flatten(1, 2)


def soft_update(
    h: Tensor, h_tilde: Tensor, q: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Eqs. (20)-(21): weigh each cell's old state against its proposal; also the old weight."""
    pair = torch.stack((h, h_tilde), dim=-2)  # (B, N, 2, d)
    logits = scale * (pair * q.to(h.dtype).unsqueeze(-2)).sum(dim=-1)  # (B, N, 2)
    if bias is not None:
        logits = logits + torch.stack((torch.zeros_like(bias), bias), dim=-1)
    a = logits.softmax(dim=-1)
    return (a.unsqueeze(-1) * pair).sum(dim=-2), a[..., 0]


def step(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise | None = None,
    live: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Seen]:
    """One time step: input (B, D) and state (B, N, d) to the new state and what was decided.

    `live` (B): where False the step does not happen: no cell wakes. `reset` (B): where True the
    state is zero before the step.
    """
    noise = noise or Noise()
    if reset is not None:
        h = h.masked_fill(reset[:, None, None], 0)
        c = c.masked_fill(reset[:, None, None], 0)

    x = input_views(x, weights.W_in, weights.b_in, sel.K)  # (B, K, d)
    s = scores(h, x)  # P1: Eq. (13) prints h_t; only h_{t-1} exists here
    r = scores(h, h)
    active = choose_cells(cell_scores(s), sel, noise.cells)
    views = weigh_views(s, sel, noise.views)
    peers = weigh_peers(r, sel, noise.peers)
    if live is not None:
        active = active & live.unsqueeze(-1)

    H = gather(x, h, views, peers)
    h_tilde, c_new = lstm(H, c, weights.W, weights.b)
    if weights.W_q is None:
        h_new, keep = h_tilde, h_tilde.new_zeros(h_tilde.shape[:2])
    else:
        q = query(H, weights.W_q, sel.K)
        h_new, keep = soft_update(h, h_tilde, q, sel.update_scale, weights.update_bias)

    woke = active.unsqueeze(-1)
    seen = Seen(active, views, peers, s, r, keep.masked_fill(~active, 1))
    return torch.where(woke, h_new, h), torch.where(woke, c_new, c), seen  # P6: c is not softened
