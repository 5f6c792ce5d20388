"""One test or more per equation (13)-(21), and the step that runs them in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers import TOL, assert_close, numbers, random_problem, seeded, slow_bf16
from riglstm.cell import (
    cell_scores,
    gather,
    input_views,
    lstm,
    query,
    soft_update,
    step,
)

B, N, K, D, d = 3, 4, 2, 5, 6
EXACT = TOL[torch.float64].value


def test_input_views_are_k_linear_maps():
    x, W, b = numbers(B, D), numbers(K, d, D, seed=2), numbers(K, d, seed=3)
    views = input_views(x, W.flatten(0, 1).t(), b.flatten(), K)
    assert views.shape == (B, K, d)
    for k in range(K):
        assert_close(views[:, k], x @ W[k].t() + b[k], EXACT)
    assert_close(input_views(x, W.flatten(0, 1).t(), None, K), views - b, EXACT)


def test_eq13_scores_are_inner_products_with_the_previous_state():
    """P1, in `step`: changing h_0 changes the scores, which know nothing of the new state."""
    p = random_problem(seeded(0), T=1)
    for h in (p.h, 2 * p.h):
        _, _, seen = step(p.x[0], h, p.c, p.weights, p.sel)
        x = input_views(p.x[0], p.weights.W_in, p.weights.b_in, p.sel.K)
        assert_close(seen.view_scores, torch.einsum("bnd,bkd->bnk", h, x), EXACT)
        assert_close(seen.peer_scores, torch.einsum("bjd,bid->bji", h, h), EXACT)


def test_eq14_cell_score_is_the_sum_over_views():
    s = numbers(B, N, K)
    assert_close(cell_scores(s), s[..., 0] + s[..., 1], EXACT)


def test_eq17_h_zeroes_what_is_not_selected():
    x, h = numbers(B, K, d), numbers(B, N, d, seed=2)
    views, peers = numbers(B, N, K, seed=3) > 0, numbers(B, N, N, seed=4) > 0
    H = gather(x, h, views, peers)
    assert H.shape == (B, N, K + N, d)
    for b in range(B):
        for j in range(N):
            for k in range(K):
                assert torch.equal(H[b, j, k], x[b, k] * views[b, j, k])
            for i in range(N):
                assert torch.equal(H[b, j, K + i], h[b, i] * peers[b, j, i])


@pytest.mark.parametrize("bias", [False, True])
def test_eq18_is_an_lstm_cell(bias):
    """Ours has the gates f, i, o, g, nn.LSTMCell i, f, g, o."""
    width = (K + N) * d
    H, c = numbers(B, N, K + N, d), numbers(B, N, d, seed=2)
    W, b = numbers(N, width, 4 * d, seed=3), numbers(N, 4 * d, seed=4) if bias else None
    h_tilde, c_new = lstm(H, c, W, b)
    for j in range(N):
        cell = nn.LSTMCell(width, d, bias=bias, dtype=torch.float64)

        def as_torch(v: Tensor) -> Tensor:
            f, i, o, g = v.chunk(4, dim=-1)
            return torch.cat((i, f, g, o), dim=-1)

        with torch.no_grad():
            cell.weight_ih.copy_(as_torch(W[j]).t())
            if b is not None:
                cell.bias_ih.copy_(as_torch(b[j]))
                cell.bias_hh.zero_()
            want_h, want_c = cell(H[:, j].flatten(1), (torch.zeros(B, d).double(), c[:, j]))
        assert_close(h_tilde[:, j], want_h, EXACT)
        assert_close(c_new[:, j], want_c, EXACT)


@pytest.mark.parametrize("shape", [((K + N - 1) * d, d), (N, (K + N - 1) * d, d)])
def test_eq19_query_leaves_out_the_own_state(shape):
    H, W_q = numbers(B, N, K + N, d), numbers(*shape, seed=2)
    q = query(H, W_q, K)
    assert q.shape == (B, N, d)
    for j in range(N):
        W_j = W_q if W_q.dim() == 2 else W_q[j]
        slots = [s for s in range(K + N) if s != K + j]
        assert_close(q[:, j], H[:, j, slots].flatten(1) @ W_j, EXACT)
        changed = H.clone()
        changed[:, j, K + j] += 1
        assert torch.equal(query(changed, W_q, K), q)
        changed[:, j, slots[-1]] += 1
        assert not torch.equal(query(changed, W_q, K)[:, j], q[:, j])


def test_eq21_weights_sum_to_one():
    """With the same vector as old state and proposal, that vector comes out."""
    h, h_tilde, q = (numbers(B, N, d, seed=seed) for seed in (1, 2, 3))
    mixed, keep = soft_update(h, h, q, 1.0, None)
    assert_close(mixed, h, EXACT)
    assert_close(keep, torch.full((B, N), 0.5).double(), EXACT)
    mixed, keep = soft_update(h, h_tilde, q, 1.0, None)
    keep = keep.unsqueeze(-1)
    assert ((keep > 0) & (keep < 1)).all()
    assert_close(mixed, keep * h + (1 - keep) * h_tilde, EXACT)


@slow_bf16
@pytest.mark.parametrize("soft_update", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inactive_cells_keep_h_and_c(dtype, soft_update):
    """P17: bit for bit, and every active cell moves."""
    p = random_problem(seeded(1), T=1, soft_update=soft_update, dtype=dtype)
    h, c, seen = step(p.x[0], p.h, p.c, p.weights, p.sel)
    asleep = ~seen.active
    assert asleep.any()
    assert torch.equal(h[asleep], p.h[asleep])
    assert torch.equal(c[asleep], p.c[asleep])
    for before, after in ((p.h, h), (p.c, c)):
        assert (before != after)[seen.active].any(-1).all()
    assert (seen.keep[asleep] == 1).all()
    assert (seen.keep[seen.active] < 1).all()
    _, h, c, _ = p.run("batched")
    assert torch.equal(h[asleep], p.h[asleep])
    assert torch.equal(c[asleep], p.c[asleep])
