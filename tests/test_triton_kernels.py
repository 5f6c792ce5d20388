"""The `triton` backend without a GPU: its kernels in the interpreter, each beside another way.

Many sequences: three are as many here as 65 are on a GPU, which the interpreter would take minutes
for. Few: the kernel whose weights stay in registers computes as the one of tiles. The backward
pass: TF32 in halves, its range, and the gradient of views, after the forward pass of a small GPU.
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
    assert_close,
    assert_equals_the_reference,
    assert_same_gradients,
    assert_within,
    clear_problem,
    gradients,
    kernels,
    outputs_and_gradients,
    random_problem,
    relative,
    seeded,
)
from train_helpers import assert_same

modules = ("plan", "forward", "backward", "kernels.common")
plan, forward, backward, common = kernels(*modules, on_a_gpu=False)
triton = pytest.importorskip("triton")
tl, best, comparable, cell = triton.language, common.best, common.comparable, common.cell

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nan_filled_empty")]
many_sequences = pytest.mark.usefixtures("many")
few_in_halves = pytest.mark.usefixtures("tf32", "nothing_kept")
on_a_small_gpu = pytest.mark.usefixtures("tf32", "wide")
FLOAT = TOL[torch.float32]
LIMIT = 2e-3
SMALL: dict[str, Any] = {"T": 2, "B": 2, "N": 2, "K": 2, "d": 18, "D": 5, "K_a": 1, "K_x": 1}
MANY: dict[str, Any] = {**SMALL, "B": 6}


@pytest.fixture
def many(nothing_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FEW", 2)


@pytest.fixture
def wide(nothing_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of a small GPU, which are few: the interpreter takes as long for a narrow one."""
    monkeypatch.setattr(plan, "_narrowest", lambda tiles, device: 128)
    monkeypatch.setattr(plan, "_rows", lambda device: 2)


OF_MANY: dict[str, dict[str, Any]] = {
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


@many_sequences
@pytest.mark.parametrize("name", OF_MANY)
def test_many_sequences_equal_the_reference(name):
    assert_equals_the_reference(clear_problem(**{**MANY, **OF_MANY[name]}), "triton")


@many_sequences
def test_tiles_may_be_wide(monkeypatch):
    """As where there are not multiprocessors enough: four sequences at a time, eight warps."""
    monkeypatch.setattr(plan, "_shorter", lambda B, tiles, device: None)
    p = clear_problem(**{**MANY, **OF_MANY["vectors of two pieces"], "reset": True})
    assert_equals_the_reference(p, "triton")


@pytest.mark.usefixtures("many", "tf32")
def test_lists_may_be_longer_than_a_tile_of_halves(monkeypatch):
    for place, name in ((forward, "forward"), (backward, "backward"), (backward, "views")):
        tiles = getattr(place, f"{name}_tiles")
        monkeypatch.setattr(place, f"{name}_tiles", lambda *a, tiles=tiles: tiles(*a) | {"BM": 2})
    p = clear_problem(**{**MANY, "N": 3, "K_a": 2, "K_h": 1, "reset": True, "live": True})
    (got, _), (want, _) = assert_equals_the_reference(p, "triton", limit=LIMIT)
    assert want[3].sum(1).max() > 2
    assert relative(got[0], want[0]) > 1e-5  # halves, indeed


def bits(p: Problem) -> tuple[Tensor, Tensor]:
    """Who woke and what each cell took in, as the kernels write it."""
    given = (p.x, p.h, p.c, p.weights, p.sel, None, None, p.reset, torch.float32)
    *_, saved = forward.forward(*given, save=True, keep=True)
    return saved.act, saved.bits


@many_sequences
def test_equal_vectors_tie_and_the_lower_index_wins_and_nan_comes_first():
    sizes = {"N": 4, "K": 4, "d": 40, "D": 160, "K_a": 2, "K_x": 2, "K_h": 1}
    p = random_problem(seeded(0), **{**MANY, **sizes, "T": 1, "input_views": "split"})
    p = p.to(torch.float32)
    # Rows 0 and 1: all states and all views are equal; 2: all states are zero; 3: views are.
    h, x = p.h.clone(), p.x.clone()
    h[:2], x[:, :2] = h[:2, :1], x[:, :2, :40].repeat(1, 1, 4)
    h[2], x[:, 3] = 0, 0
    # Rows 4 and 5: the first and the last number of two states each are none.
    h[4, [1, 3], 39], h[5, [0, 2], 0] = float("nan"), float("nan")
    act, taken = bits(replace(p, h=h, x=x))
    assert act[0].tolist() == [0b11] * 4 + [0b1010, 0b0101]
    views = taken[0, :4, :2] & 0b1111
    assert views.tolist() == [[0b11, 0b11]] * 4
    peers = taken[0, :3, :2] >> 4  # in row 3 peers differ, and so do their scores
    assert peers.tolist() == [[0b11, 0b11]] * 3


@many_sequences
def test_each_sequence_is_once_in_the_lists_of_its_cells(monkeypatch):
    made: list[Any] = []
    working, launch = forward.working, plan.Launch.__call__
    monkeypatch.setattr(forward, "working", lambda *a: made.append(working(*a)) or made[-1])

    def in_one(self: Any, grid: tuple[int, ...], arguments: Any) -> None:
        """One program takes all sequences, one tile after another."""
        rows = self.constants.get("PHASE") == 1
        launch(self, (1,) if rows else grid, arguments)

    monkeypatch.setattr(plan.Launch, "__call__", in_one)
    p = clear_problem(**{**MANY, "T": 3, "B": 9, "N": 3, "d": 20, "K_a": 2, "K_h": 1})
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


@pytest.mark.parametrize(("k", "n"), [(1, 8), (2, 3), (4, 6), (7, 8), (8, 9), (1, 16), (15, 16)])
def test_the_best_are_those_with_fewer_ahead(k, n):
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


def test_units_that_share_a_reciprocal_are_exact_however_large_and_keep_nan():
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


OF_FEW: dict[str, dict[str, Any]] = {
    "a slot of two pieces, fewer cells than views, rows of two blocks": {
        **{"K": 3, "d": 40, "K_x": 2, "K_h": 1, "B": 9, "T": 1},
    },
    "resets and steps left out": {"reset": True, "live": True, "K_h": 0},
    "no soft update": {"soft_update": False, "K_h": 1, "bias": False, "T": 1},
    "a query for each cell": {"query": "per_cell", "update_bias": True, "K_h": 1, "T": 1},
    "the last of W_q Q beside the last units": {"d": 36, "K_h": 1, "T": 1},
}


@few_in_halves
@pytest.mark.parametrize(
    ("name", "rounded"), [*((name, False) for name in OF_FEW), ("resets and steps left out", True)]
)
def test_weights_in_registers_compute_what_the_kernel_of_tiles_computes(name, rounded, monkeypatch):
    """`rounded`: in bfloat16, whose products the interpreter gets wrong, but both alike."""
    p = clear_problem(**{**SMALL, **OF_FEW[name]}).to(torch.float32)
    # Rows take their time in the interpreter; what is kept for gradients does not depend on them.
    learns = p.h.shape[0] < 9 and not rounded
    launched, launch = list[str](), plan.Launch.__call__

    def spy(self: Any, *args: Any) -> None:
        launched.append(self.kernel.fn.__name__)
        launch(self, *args)

    monkeypatch.setattr(plan.Launch, "__call__", spy)

    def run() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        launched.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            return outputs_and_gradients(p, "triton") if learns else (p.run("triton"), {})

    got, grads = run()
    assert "resident_kernel" in launched
    assert "tiled_kernel" not in launched
    # As on a small GPU.
    monkeypatch.setattr(forward, "resident_tiles", lambda z, B, device: None)
    want, want_grads = run()
    assert "tiled_kernel" in launched
    assert "resident_kernel" not in launched
    assert torch.equal(got[3], want[3])
    for one, other, what in zip(got[:3], want[:3], ("y", "h", "c"), strict=True):
        assert_close(one, other, FLOAT.value, what)
    assert_same_gradients(grads, want_grads, FLOAT.grad)


@few_in_halves
def test_programs_that_have_no_tile_change_nothing(monkeypatch):
    p = clear_problem(**{**SMALL, "T": 1}).to(torch.float32)
    want, plan_forward = p.run("triton"), forward.plan_forward

    more = lambda *a: (made := plan_forward(*a))._replace(programs=made.programs + 3)  # noqa: E731
    monkeypatch.setattr(forward, "plan_forward", more)
    assert all(map(torch.equal, p.run("triton"), want))


@few_in_halves
@pytest.mark.parametrize(
    ("apart", "rows", "more"),
    [
        (False, 2, {"B": 3, "K_h": 1, "reset": True, "T": 1}),
        (True, 1, {"K_h": 1, "T": 1}),
        (True, 2, {"B": 3, "K_h": 1, "reset": True, "live": True}),
    ],
)
def test_programs_that_select_or_multiply_compute_as_those_that_do_both(
    apart, rows, more, monkeypatch
):
    p = clear_problem(**{**SMALL, **more}).to(torch.float32)
    want, tiles, seen = outputs_and_gradients(p, "triton"), plan.resident_tiles, []

    def others(*args: Any) -> dict[str, Any]:
        seen.append({**tiles(*args), "APART": apart, "RB": rows})
        return seen[-1]

    monkeypatch.setattr(forward, "resident_tiles", others)
    assert_same(outputs_and_gradients(p, "triton"), want)
    assert seen


@few_in_halves
def test_the_last_of_w_q_q_is_the_same_beside_the_last_units_as_in_a_tile_of_its_own(monkeypatch):
    # 33 numbers: one is left, and of the seven lanes that have no unit six stay free.
    more = {"d": 33, "K_a": 2, "K_h": 1, "query": "per_cell", "T": 1}
    p = clear_problem(**{**SMALL, **more}).to(torch.float32)
    with torch.no_grad():
        p.weights.W_q.mul_(2.0**-20)  # in a unit of its own
    got = outputs_and_gradients(p, "triton")
    z = plan.Sizes(2, 2, 33, 40, 192, 5, *(torch.float16,) * 3)
    assert plan.columns(z, 32, by_gate=True) == plan.columns(z, 32) - 1
    apart = plan.columns
    for module in (plan, forward):
        monkeypatch.setattr(module, "columns", lambda z, BN, by_gate=False: apart(z, BN))
    assert_same(got, outputs_and_gradients(p, "triton"))


@on_a_small_gpu
@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_gradients_hold_inputs_of_sizes_far_from_that_of_states(size):
    p = clear_problem(**{**SMALL, "input_views": "split", "soft_update": False})
    W, views = p.weights.W.clone(), p.sel.K * p.h.shape[2]
    W[:, :views] /= size
    p = replace(p, x=p.x * size, weights=p.weights._replace(W=W))
    want, got = gradients(p, "reference"), gradients(p.to(torch.float32), "triton")
    assert_within(got, want, LIMIT)
    # Each is far below the other in the same product.
    for part in (slice(0, views), slice(views, None)):
        assert relative(got["W"][:, part], want["W"][:, part]) < LIMIT


@on_a_small_gpu
def test_gradients_hold_steps_and_sequences_of_very_different_sizes(monkeypatch):
    p = clear_problem(**{**SMALL, "T": 3, "B": 3})
    t, b = torch.arange(3, dtype=torch.float64)[:, None], torch.arange(3, dtype=torch.float64)
    low = p.to(torch.float32)
    for apart in (1e-6, 1e3):
        share = apart ** ((t + b) % 3 - 1)
        got = gradients(low, "triton", "y", share)
        assert_within(got, gradients(p, "reference", "y", share), LIMIT)
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_get_cublas_allow_fp16_accumulation", lambda: True)
            exact = gradients(low, "triton", "y", share)["x"].double()
        # What is not summed over steps holds for the smallest as for the largest.
        far = (got["x"].double() - exact).norm(dim=2) / exact.norm(dim=2)  # (T, B)
        assert float(far.max()) < LIMIT


@on_a_small_gpu
def test_gradients_of_any_size_have_the_same_bits():
    p = clear_problem(**SMALL).to(torch.float32)
    want = gradients(p, "triton", "y")
    for power in (-60, 40):
        got = gradients(p, "triton", "y", torch.full((2, 2), 2.0**power))
        for n in want:
            assert torch.equal(got[n], want[n] * 2.0**power), n


@on_a_small_gpu
@pytest.mark.parametrize("rows", [4, 16384])
def test_pieces_may_have_no_gradient_and_products_one_row(rows, monkeypatch):
    p = clear_problem(**{**SMALL, "T": 3})
    monkeypatch.setattr(backward, "ROWS_AT_ONCE", rows)
    monkeypatch.setattr(backward, "PRODUCT_ROWS", 1)
    for share in (torch.ones(3, 1), torch.tensor([[1.0], [0.0], [0.0]])):
        got = gradients(p.to(torch.float32), "triton", "y", share)
        assert_within(got, gradients(p, "reference", "y", share), LIMIT)
    assert not got["x"][1:].any()


# The interpreter's own, of a maximum that on a GPU is what it is of.
@on_a_small_gpu
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_nan_in_a_gradient_is_not_hidden():
    p = random_problem(seeded(0), **{**SMALL, "cells": "all"}).to(torch.float32)
    share = torch.ones(2, 2)
    share[1, 0] = float("nan")
    want, got = (gradients(p, backend, "y", share) for backend in ("reference", "triton"))
    for n in want:
        assert torch.equal(got[n].isnan(), want[n].isnan()), n
    assert want["x"].isnan().any()
    assert not want["x"].isnan().all()


@on_a_small_gpu
@pytest.mark.parametrize("before", ["high", "highest"])
def test_the_precision_may_change_between_the_passes(before):
    p = clear_problem(**SMALL)
    torch.set_float32_matmul_precision(before)
    leaves = {n: v.float().requires_grad_() for n, v in p.leaves().items()}
    y = p.with_leaves(leaves).run("triton")[0]
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    got = torch.autograd.grad(y, leaves.values(), torch.ones_like(y))
    exact = {n: v.requires_grad_() for n, v in p.leaves().items()}
    want = torch.autograd.grad(p.run("reference")[0].sum(), exact.values())
    assert_within(*(dict(zip(leaves, grads, strict=True)) for grads in (got, want)), LIMIT)


@on_a_small_gpu
@pytest.mark.parametrize("d", [16, 20])
def test_bfloat16_has_its_biases_from_the_same_product(d):
    p = clear_problem(**{**SMALL, "d": d, "K_a": 2})
    want = gradients(p, "reference")
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(p.to(torch.float32), "triton")
    for n in ("W", "W_q", "b"):
        assert relative(got[n], want[n]) < 2e-2, n
