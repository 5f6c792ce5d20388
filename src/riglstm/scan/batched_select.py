"""Selection in the `batched` backend: Eqs. (13)-(16) in few operations, between fixed buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from riglstm.cell import cell_scores
from riglstm.selection import (
    LOWEST,
    Noise,
    Selection,
    choose_cells,
    weigh_peers,
    weigh_views,
    write_top_mask,
)

Steps: TypeAlias = Sequence[Tensor]
"""One tensor for each step."""


class Selector:
    """Eqs. (13)-(16) of every step, between buffers that are made once."""

    def __init__(
        self,
        h: Tensor,
        sel: Selection,
        V: Steps,
        V_h: Steps,
        active: Steps,
        weight: Steps,
    ) -> None:
        (B, N, d), K = h.shape, sel.K
        self.sel, self.V, self.h, self.active = sel, V, V_h, active
        self.exact = torch.promote_types(h.dtype, torch.float32)
        self.products = h.new_empty(B, N, K + N, d, dtype=self.exact)
        self.s = h.new_empty(B, N, K + N, dtype=self.exact)
        self.s_views, self.s_peers = self.s[:, :, :K], self.s[:, :, K:]
        self.own_scores = self.s_peers.diagonal(dim1=1, dim2=2)
        self.views = [w[:, :, :K] for w in weight]
        self.peers = [w[:, :, K:] for w in weight]
        self.own = [w.diagonal(dim1=1, dim2=2) for w in self.peers]
        first = torch.arange(K + N, device=h.device)
        self.first_a, self.first_x = first[:N] < sel.K_a, first[:K] < sel.K_x
        self.first_h = first[:N] < sel.K_h
        hard = "soft" not in (sel.views, sel.peers)
        self.fast_cells = sel.cells == "top" and sel.K_a < N
        self.fast_views = hard and sel.views == "top" and sel.K_x < K
        self.fast_peers = hard and sel.peers == "top" and sel.K_h < N - 1
        # As many views as cells and the same count of both, as in the paper: one ranking for two.
        self.together = self.fast_views and self.fast_peers and K == N and sel.K_x == sel.K_h
        if self.together:
            self.s_both = self.s.view(B, 2 * N, N)
            self.both = [w.view(B, 2 * N, N) for w in weight]

    def __call__(self, t: int, noise: Noise | None) -> Tensor:
        """From V (B, K+N, d) and h (B, N, d) of step t, write active (B, N) and weight."""
        sel, s_views, s_peers = self.sel, self.s_views, self.s_peers
        h, V, active = self.h[t], self.V[t], self.active[t]
        if h.dtype != self.exact:
            h, V = h.to(self.exact), V.to(self.exact)
        torch.mul(h.unsqueeze(2), V.unsqueeze(1), out=self.products)
        torch.sum(self.products, -1, out=self.s)
        draw = Noise() if noise is None else noise.at(t)
        if self.fast_cells:
            write_top_mask(cell_scores(s_views), sel.K_a, self.first_a, active)
        else:
            active.copy_(choose_cells(cell_scores(s_views), sel, draw.cells))
        if self.fast_peers:
            s_peers.clamp_(min=LOWEST)
            self.own_scores.fill_(float("-inf"))
        if self.together:
            write_top_mask(self.s_both, sel.K_x, self.first_x, self.both[t])
        elif self.fast_views:
            write_top_mask(s_views, sel.K_x, self.first_x, self.views[t])
        else:
            self.views[t].copy_(weigh_views(s_views, sel, draw.views))
        if self.fast_peers:
            if not self.together:
                write_top_mask(s_peers, sel.K_h, self.first_h, self.peers[t])
            self.own[t].fill_(True)
        else:
            self.peers[t].copy_(weigh_peers(s_peers, sel, draw.peers))
        return active
