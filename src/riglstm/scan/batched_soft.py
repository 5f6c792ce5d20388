"""Backward through the scores of the `soft` rules, which, unlike hard ones, carry a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from riglstm.scan.rows import Rows


def soft_views(dH: Tensor, weight: Tensor, V: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Back through x^k · softmax(s)_k: gradients of views (B, K, d) and own states (R, d)."""
    (R, K, d), B = dH.shape, V.shape[0]
    weight = weight.to(dH.dtype)
    x = V[:, :K].index_select(0, rows.sample)  # (R, K, d)
    h = V[:, K:].reshape(-1, d).index_select(0, rows.pair)  # (R, d)
    ds = _softmax_backward(weight, (dH * x).sum(-1)).unsqueeze(-1)  # (R, K, 1)
    d_views = torch.addcmul(dH * weight.unsqueeze(-1), ds, h.unsqueeze(1))
    return rows.sum_by_sample(d_views.view(R, K * d), B).view(B, K, d), (ds * x).sum(1)


def soft_peers(dH: Tensor, weight: Tensor, h: Tensor, rows: Rows) -> Tensor:
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
