"""The kernels for more sequences than one tile holds, in the interpreter.

Here three are as many as 65 are on a GPU, which the interpreter would take minutes for.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import (
    TOL,
    Problem,
    assert_equals_the_reference,
    clear_problem,
    outputs_and_gradients,
    random_problem,
    seeded,
)

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py", allow_module_level=True)
triton = pytest.importorskip("triton")
plan = pytest.importorskip("riglstm.scan.triton.plan", reason="the kernels are not in this copy")
triton_launch = pytest.importorskip("riglstm.scan.triton.launch")
forward = pytest.importorskip("riglstm.scan.triton.forward")
backward = pytest.importorskip("riglstm.scan.triton.backward")
common = pytest.importorskip("riglstm.scan.triton.kernels.common")
tl, best, comparable, cell = triton.language, common.best, common.comparable, common.cell

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nan_filled_empty", "many")]
FLOAT = TOL[torch.float32]
SMALL: dict[str, Any] = {"T": 2, "B": 6, "N": 2, "K": 2, "d": 18, "D": 5, "K_a": 1, "K_x": 1}
PROBLEMS: dict[str, dict[str, Any]] = {
    "vectors of two pieces": {"N": 3, "K": 3, "d": 36, "K_a": 2, "K_x": 2, "K_h": 1, "B": 5},
    "in fours, steps left out, no soft update": {
        **{"T": 3, "N": 3, "d": 36, "live": True, "soft_update": False, "K_h": 1},
    },
    "resets, steps left out, no soft update": {
        **{"N": 3, "reset": True, "live": True, "soft_update": False, "K_h": 1},
    },
    "every option of the update": {
        **{"query": "per_cell", "update_bias": True, "update_scale": 0.5, "reset": True, "K_h": 0},
    },
    "everyone looks at everything": {
        **{"cells": "all", "views": "all", "peers": "all", "d": 16, "live": True, "T": 1},
    },
    # Every bit of the integers that cells and ranks are counted in.
    "as many cells and views as there may be": {
        **{"N": 8, "K": 8, "d": 16, "K_a": 6, "K_x": 5, "K_h": 6, "B": 3},
        **{"T": 1, "reset": True, "live": True},
    },
}


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is kept.
    monkeypatch.setattr(forward, "plan_forward", forward.plan_forward.__wrapped__)
    monkeypatch.setattr(backward, "plan_backward", backward.plan_backward.__wrapped__)
    monkeypatch.setattr(plan, "FEW", 2)


@pytest.mark.parametrize("name", PROBLEMS)
def test_many_sequences_equal_the_reference(name: str) -> None:
    assert_equals_the_reference(clear_problem(**{**SMALL, **PROBLEMS[name]}), "triton")


def test_tiles_may_be_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are not multiprocessors enough: four sequences at a time, eight warps."""
    monkeypatch.setattr(plan, "_shorter", lambda B, tiles, device: None)
    p = clear_problem(**{**SMALL, **PROBLEMS["vectors of two pieces"], "reset": True})
    assert_equals_the_reference(p, "triton")


@pytest.mark.usefixtures("tf32")
def test_lists_may_be_longer_than_a_tile_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in ((plan, "forward_tiles"), (backward, "backward_tiles")):
        tiles = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, tiles=tiles: tiles(*a) | {"BM": 2})
    p = clear_problem(**{**SMALL, "N": 3, "K_a": 2, "K_h": 1, "reset": True, "live": True})
    want, want_grads = outputs_and_gradients(p, "reference")
    assert want[3].sum(1).max() > 2
    got, grads = outputs_and_gradients(p.to(torch.float32), "triton")
    assert torch.equal(got[3], want[3])
    pairs = [*zip(got[:3], want[:3], strict=True), *((grads[n], want_grads[n]) for n in grads)]
    assert all(float((a - b).norm() / b.norm()) < 2e-3 for a, b in pairs)
    assert float((got[0] - want[0]).norm() / want[0].norm()) > 1e-5  # halves, indeed


def bits(p: Problem) -> tuple[Tensor, Tensor]:
    """Who woke and what each cell took in, as the kernels write it."""
    given = (p.x, p.h, p.c, p.weights, p.sel, p.live, p.reset, torch.float32)
    *_, saved = forward.forward(*given, save=True, keep=True)
    return saved.act, saved.bits


def test_equal_vectors_tie_and_the_lower_index_wins() -> None:
    sizes = {"N": 4, "K": 4, "d": 40, "D": 160, "K_a": 2, "K_x": 2, "K_h": 1}
    p = random_problem(seeded(0), **{**SMALL, **sizes, "T": 1, "input_views": "split"})
    p = p.to(torch.float32)
    # Rows 0 and 1: all states and all views are equal; 2: all states are zero; 3: views are.
    h, x = p.h.clone(), p.x.clone()
    h[:2], x[:, :2] = h[:2, :1], x[:, :2, :40].repeat(1, 1, 4)
    h[2], x[:, 3] = 0, 0
    act, taken = bits(replace(p, h=h, x=x))
    assert act[0, :4].tolist() == [0b11] * 4
    views = taken[0, :4, :2] & 0b1111
    assert views.tolist() == [[0b11, 0b11]] * 4
    peers = taken[0, :3, :2] >> 4  # in row 3 peers differ, and so do their scores
    assert peers.tolist() == [[0b11, 0b11]] * 3


def test_nan_comes_first() -> None:
    p = random_problem(seeded(0), **{**SMALL, "N": 3, "T": 1, "K_a": 1, "K_h": 1, "d": 34})
    h = p.to(torch.float32).h.clone()
    h[0, 1, 33], h[5, 2, 0] = float("nan"), float("nan")
    act, _ = bits(replace(p.to(torch.float32), h=h))
    assert act[0, [0, 5]].tolist() == [0b010, 0b100]


def test_each_sequence_is_once_in_the_lists_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    working, launch = forward.working, triton_launch.Launch.__call__
    monkeypatch.setattr(forward, "working", lambda *a: made.append(working(*a)) or made[-1])

    def in_one(self: Any, grid: tuple[int, ...], arguments: Any) -> None:
        """One program takes all sequences, one tile after another."""
        rows = self.constants.get("PHASE") == 1
        launch(self, (1,) if rows else grid, arguments)

    monkeypatch.setattr(triton_launch.Launch, "__call__", in_one)
    p = clear_problem(**{**SMALL, "T": 3, "B": 9, "N": 3, "d": 20, "K_a": 2, "K_h": 1})
    act, slots = bits(p.to(torch.float32))
    active = p.run("reference")[3]  # (T, B, N)
    for t, n in itertools.product((1, 2), range(3)):
        woke = active[t, :, n].nonzero().flatten().tolist()
        assert ((act[t] >> n) & 1).nonzero().flatten().tolist() == woke
        assert made[0].counts[t, n] == len(woke)
        # Of even and of odd steps there is one each.
        who, what = made[0].listed[t % 2, n, : len(woke)].unbind(1)
        assert sorted(who.tolist()) == woke
        assert torch.equal(what, slots[t, who, n])
    # All that was waited for was taken back, and the rest never came.
    assert not active.any(0).all()
    assert (made[0].proposal.view(torch.int32) == -1).all()


@triton.jit
def _best(SCORES, OUT, k: tl.constexpr, n: tl.constexpr, R: tl.constexpr):
    r, keys = tl.arange(0, R), ()
    for i in tl.static_range(n):
        keys += (comparable(tl.load(SCORES + i * R + r)),)
    tl.store(OUT + r, best(keys, k, n))


@pytest.mark.parametrize(("k", "n"), [(1, 8), (2, 3), (4, 6), (7, 8)])
def test_the_best_are_those_with_fewer_ahead(k: int, n: int) -> None:
    scores = torch.randint(-3, 4, (n, 256), generator=seeded(k)).float()
    # Subnormal numbers differ, too; of both zeros the lower index wins, and NaN comes first.
    inf = float("inf")
    special = {-3: -inf, -2: -1e-45, -1: -0.0, 1: 1e-45, 2: inf, 3: float("nan")}
    for whole, value in special.items():
        scores[scores == whole] = value
    out = torch.empty(256, dtype=torch.int32)
    _best[(1,)](scores, out, k, n, 256)
    value = scores.double().clamp(-1e300, 1e300).nan_to_num(inf)  # (n, R)
    lower = torch.arange(n)[:, None] < torch.arange(n)
    ahead = (value[:, None] > value) | ((value[:, None] == value) & lower[:, :, None])
    want = (ahead.sum(0) < k).int().mul(2 ** torch.arange(n)[:, None]).sum(0)
    assert torch.equal(out, want.int())


@triton.jit
def _units(ARGUMENTS, OUT, R: tl.constexpr):
    r = tl.arange(0, R)
    f, i = tl.load(ARGUMENTS + r), tl.load(ARGUMENTS + R + r)
    o, g = tl.load(ARGUMENTS + 2 * R + r), tl.load(ARGUMENTS + 3 * R + r)
    made = cell(f, i, o, g, tl.load(ARGUMENTS + 4 * R + r), False, True)
    for n in tl.static_range(6):
        tl.store(OUT + n * R + r, made[n])


def test_units_that_share_a_reciprocal_are_exact_however_large_and_keep_nan() -> None:
    x = torch.randn(5, 512, generator=seeded(0), dtype=torch.float64) * 3
    x[:4] *= torch.tensor([1, 1e-3, 10, 1e3]).repeat(128)
    x[0, 0], x[1, 0], x[2, 0] = -1e30, -float("inf"), float("inf")
    x[2, 1], x[0, 2] = float("nan"), float("nan")
    out = torch.empty(6, 512)
    _units[(1,)](x.float(), out, 512)
    f, i, o, g = x[0].sigmoid(), x[1].sigmoid(), x[2].sigmoid(), x[3].tanh()
    c = f * x[4] + i * g
    want = torch.stack([f, i, o, g, c, o * c.tanh()])
    known = torch.arange(512).ge(3) | torch.arange(512).eq(0)
    # A sum may be smaller than what was added.
    off = (out - want).abs() / (1 + x[4].abs())
    assert off[:, known].max() <= 1e-6
    assert out[:, 1].isnan().tolist() == [False, False, True, False, False, True]
    assert out[[0, 4, 5], 2].isnan().all()
