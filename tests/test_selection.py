"""The rules behind Eqs. (14)-(16): who is chosen, who wins a tie, what a soft rule gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import numbers
from riglstm.selection import (
    SLOT_RULES,
    Selection,
    choose_cells,
    draw_noise,
    top_mask,
    weigh_peers,
    weigh_views,
    write_top_mask,
)

INF, NAN = math.inf, math.nan
# Few different numbers, so that most draws hold ties.
NUMBERS = st.sampled_from((-INF, -2.5, -1.0, -0.0, 0.0, 1e-30, 1.0, 1.0, 2.5, INF, NAN))
ROWS = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=4)
)


def best(row: list[float], k: int) -> list[bool]:
    """Whom sorting by (-score, index) puts into the first k places; NaN comes before all."""
    order = sorted(range(len(row)), key=lambda i: (-INF if math.isnan(row[i]) else -row[i], i))
    order.sort(key=lambda i: not math.isnan(row[i]))
    return [i in order[:k] for i in range(len(row))]


def rules(**changes: object) -> Selection:
    """Five cells and four views, three, two and two of them chosen."""
    return Selection(**{**{"N": 5, "K": 4, "K_a": 3, "K_x": 2, "K_h": 2}, **changes})  # type: ignore[arg-type]


@settings(max_examples=300)
@given(ROWS, st.data())
def test_top_mask_sorts_by_score_and_then_by_index(rows, data):
    k = data.draw(st.integers(0, len(rows[0])))
    mask = top_mask(torch.tensor(rows, dtype=torch.float64), k)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [best(row, k) for row in rows]
    assert (mask.sum(-1) == k).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@settings(max_examples=300)
@given(ROWS, st.data())
def test_write_top_mask_equals_top_mask(dtype, rows, data):
    n = len(rows[0])
    k = data.draw(st.integers(0, n))
    # As the scan uses it: scores and mask are slices of larger buffers.
    s = torch.zeros(len(rows), n + 3, dtype=dtype)
    out = torch.ones(len(rows), n + 3, dtype=torch.bool)
    s[:, 2 : n + 2] = torch.tensor(rows, dtype=dtype)
    write_top_mask(s[:, 2 : n + 2], k, torch.arange(n) < k, out[:, 2 : n + 2])
    assert torch.equal(out[:, 2 : n + 2], top_mask(s[:, 2 : n + 2], k))
    assert out[:, [0, 1, n + 2]].all()


def test_noise_is_of_torch_s_generator_for_random_rules_alone_and_differs_between_steps():
    cpu = torch.device("cpu")
    assert draw_noise(rules(views="soft", peers="all"), 3, 2, cpu) is None
    one, two, three = (
        draw_noise(rules(**dict.fromkeys(names, "random")), 3, 2, cpu)
        for names in (("cells", "peers"), ("views",), ("peers",))
    )
    assert (one.cells.shape, one.views, one.peers.shape) == ((3, 2, 5), None, (3, 2, 5, 5))
    assert (two.cells, two.views.shape, two.peers) == (None, (3, 2, 5, 4), None)
    assert (three.cells, three.views, three.peers.shape) == (None, None, (3, 2, 5, 5))
    sel = rules(cells="random")

    def draw() -> Tensor:
        noise = draw_noise(sel, 20, 1, cpu)
        return choose_cells(torch.zeros(20, 1, 5), sel, noise.cells)

    torch.manual_seed(5)
    first = draw()
    assert not torch.equal(first, draw())
    torch.manual_seed(5)
    assert torch.equal(first, draw())
    assert len({tuple(row) for row in first[:, 0].tolist()}) > 3


def test_eq14_top_cells_are_the_k_best():
    s = torch.tensor([[0.1, 3.0, -1.0, 2.0, 0.2], [1.0, 1.0, 1.0, 1.0, 2.0]])
    active = choose_cells(s, rules(), None)
    assert active.int().tolist() == [[0, 1, 0, 1, 1], [1, 1, 0, 0, 1]]


@pytest.mark.parametrize(("rule", "count"), [("top", 2), ("random", 2), ("all", 4)])
def test_eq15_each_cell_takes_k_x_views(rule, count):
    noise = numbers(7, 5, 4, seed=2) if rule == "random" else None
    s = numbers(7, 5, 4)
    views = weigh_views(s, rules(views=rule), noise)
    assert views.dtype == torch.bool
    assert (views.sum(-1) == count).all()
    if rule == "top":
        chosen = s.masked_fill(~views, INF).amin(-1)
        assert (chosen > s.masked_fill(views, -INF).amax(-1)).all()


@pytest.mark.parametrize("rule", SLOT_RULES)
@pytest.mark.parametrize("N", [1, 2, 5])
def test_eq16_own_state_is_always_in(rule, N):
    for K_h in range(N):
        sel = rules(N=N, K_a=1, K_h=K_h, peers=rule)
        noise = numbers(7, N, N, seed=2) if rule == "random" else None
        peers = weigh_peers(numbers(7, N, N), sel, noise)
        assert (peers.diagonal(dim1=1, dim2=2) == 1).all()
        if rule != "soft":
            assert peers.dtype == torch.bool
            assert (peers.sum(-1) == 1 + (N - 1 if rule == "all" else K_h)).all()
