"""The backward pass of TF32 in halves, in the interpreter: as exact as TF32, and of its range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import Problem, clear_problem, gradients, random_problem, seeded

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py", allow_module_level=True)
pytest.importorskip("triton")
triton_plan = pytest.importorskip(
    "riglstm.scan.triton_plan", reason="the kernels are not in this copy"
)
triton_gradients = pytest.importorskip("riglstm.scan.triton_gradients")
triton_run = pytest.importorskip("riglstm.scan.triton_run")

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "tf32")
LIMIT = 2e-3
DTYPES = (torch.float32, torch.bfloat16)
SMALL: dict[str, Any] = {
    **{"T": 2, "B": 2, "N": 2, "K": 2, "d": 18, "D": 5, "K_a": 1, "K_x": 1, "K_h": 1},
}


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-300))


def pulled(p: Problem, backend: str, share: Tensor) -> dict[str, Tensor]:
    """The gradient of every leaf where output (T, B) counts by its share."""
    leaves = {n: v.detach().clone().requires_grad_() for n, v in p.leaves().items()}
    y = p.with_leaves(leaves).run(backend)[0]
    towards = torch.randn(y.shape, generator=seeded(7), dtype=torch.float64)
    loss = (y.double() * towards * share[:, :, None, None]).sum()
    grads = torch.autograd.grad(loss, leaves.values())
    return dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"d": 16, "query": "per_cell", "K_a": 2},
        {"soft_update": False, "d": 17, "bias": False, "T": 1},
        {"reset": True, "live": True, "update_bias": True, "T": 3},
    ],
)
def test_gradients_are_rounded_and_within_the_limit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = clear_problem(**{**SMALL, **options})
    low, want = p.to(torch.float32), gradients(p, "reference")
    got = gradients(low, "triton")
    assert all(relative(got[n], want[n]) < LIMIT for n in want)
    monkeypatch.setattr(triton_plan, "HALVES_BACK", False)
    exact = gradients(low, "triton")  # but for the forward pass
    assert 1e-5 < relative(got["W"], exact["W"].double()) < 1e-3


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_gradients_hold_inputs_of_sizes_far_from_that_of_states(size: float) -> None:
    p = clear_problem(**{**SMALL, "input_views": "split", "soft_update": False})
    W, views = p.weights.W.clone(), p.sel.K * p.h.shape[2]
    W[:, :views] /= size
    p = replace(p, x=p.x * size, weights=p.weights._replace(W=W))
    want, got = gradients(p, "reference"), gradients(p.to(torch.float32), "triton")
    for n in want:
        assert relative(got[n], want[n]) < LIMIT, n
    # Each is far below the other in the same product.
    for part in (slice(0, views), slice(views, None)):
        assert relative(got["W"][:, part], want["W"][:, part]) < LIMIT


@pytest.mark.parametrize("apart", [1e-6, 1e3])
def test_gradients_hold_steps_and_sequences_of_very_different_sizes(
    apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = clear_problem(**{**SMALL, "T": 3, "B": 3})
    t, b = torch.arange(3, dtype=torch.float64)[:, None], torch.arange(3, dtype=torch.float64)
    share = apart ** ((t + b) % 3 - 1)
    want, got = pulled(p, "reference", share), pulled(p.to(torch.float32), "triton", share)
    for n in want:
        assert relative(got[n], want[n]) < LIMIT, n
    monkeypatch.setattr(triton_plan, "HALVES_BACK", False)
    exact = pulled(p.to(torch.float32), "triton", share)["x"].double()
    # What is not summed over steps holds for the smallest as for the largest.
    far = (got["x"].double() - exact).norm(dim=2) / exact.norm(dim=2)  # (T, B)
    assert float(far.max()) < LIMIT


def test_gradients_of_any_size_have_the_same_bits() -> None:
    p = clear_problem(**SMALL).to(torch.float32)
    share = torch.ones(2, 2, dtype=torch.float64)
    want = pulled(p, "triton", share)
    for power in (-60, 40):
        got = pulled(p, "triton", share * 2.0**power)
        for n in want:
            assert torch.equal(got[n], want[n] * 2.0**power), n


def test_steps_without_a_gradient_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    p = clear_problem(**{**SMALL, "T": 3})
    share = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64).expand(3, 2)
    want = pulled(p, "reference", share)
    monkeypatch.setattr(triton_run, "ROWS_AT_ONCE", 2)  # a piece with no gradient at all
    got = pulled(p.to(torch.float32), "triton", share)
    assert not got["x"][1:].any()
    for n in want:
        assert relative(got[n], want[n]) < LIMIT, n


def test_pieces_and_products_may_be_as_short_as_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    p = clear_problem(**{**SMALL, "T": 3})
    want = gradients(p, "reference")
    monkeypatch.setattr(triton_run, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(triton_gradients, "PRODUCT_ROWS", 1)
    got = gradients(p.to(torch.float32), "triton")
    for n in want:
        assert relative(got[n], want[n]) < LIMIT, n


# The interpreter's own, of a maximum that on a GPU is what it is of.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_nan_in_a_gradient_is_not_hidden() -> None:
    p = random_problem(seeded(0), **{**SMALL, "cells": "all"}).to(torch.float32)
    share = torch.ones(2, 2, dtype=torch.float64)
    share[1, 0] = float("nan")
    want, got = pulled(p, "reference", share), pulled(p, "triton", share)
    for n in want:
        assert torch.equal(got[n].isnan(), want[n].isnan()), n
    assert want["x"].isnan().any()
    assert not want["x"].isnan().all()


@pytest.mark.parametrize("before", ["high", "highest"])
def test_the_precision_may_change_between_the_passes(before: str) -> None:
    p = clear_problem(**SMALL)
    want = pulled(p, "reference", torch.ones(2, 2, dtype=torch.float64))
    low = p.to(torch.float32)
    leaves = {n: v.detach().clone().requires_grad_() for n, v in low.leaves().items()}
    torch.set_float32_matmul_precision(before)
    y = low.with_leaves(leaves).run("triton")[0]
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    towards = torch.randn(y.shape, generator=seeded(7), dtype=torch.float64)
    grads = torch.autograd.grad((y.double() * towards).sum(), leaves.values())
    for n, got in zip(leaves, grads, strict=True):
        assert relative(got, want[n]) < LIMIT, n


def test_sums_in_halves_are_not_risked() -> None:
    p = random_problem(seeded(0), **SMALL)
    assert triton_plan.sizes(18, p.sel, True, torch.float32).back == torch.float16
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        kinds = [triton_plan.sizes(18, p.sel, True, dtype).back for dtype in DTYPES]
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    assert kinds == list(DTYPES)


@pytest.mark.parametrize("d", [16, 20])
def test_bfloat16_has_its_biases_from_the_same_product(d: int) -> None:
    p = clear_problem(**{**SMALL, "d": d, "K_a": 2})
    want = gradients(p, "reference")
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(p.to(torch.float32), "triton")
    for n in ("W", "W_q", "b"):
        assert relative(got[n], want[n]) < 2e-2, n
