"""The backward pass in the interpreter: TF32 in halves, its range, and the gradient of views.

The forward pass is that of a small GPU, in the tiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from helpers import Problem, clear_problem, gradients, random_problem, seeded

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py", allow_module_level=True)
pytest.importorskip("triton")
plan = pytest.importorskip("riglstm.scan.triton.plan", reason="the kernels are not in this copy")
forward = pytest.importorskip("riglstm.scan.triton.forward")
backward = pytest.importorskip("riglstm.scan.triton.backward")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nan_filled_empty", "tf32", "wide")]
LIMIT = 2e-3
DTYPES = (torch.float32, torch.bfloat16)
SMALL: dict[str, Any] = {
    **{"T": 2, "B": 2, "N": 2, "K": 2, "d": 18, "D": 5, "K_a": 1, "K_x": 1, "K_h": 1},
}


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of a small GPU, which are few: the interpreter takes as long for a narrow one."""
    # Nothing is kept.
    monkeypatch.setattr(forward, "plan_forward", forward.plan_forward.__wrapped__)
    monkeypatch.setattr(backward, "plan_backward", backward.plan_backward.__wrapped__)
    monkeypatch.setattr(plan, "_narrowest", lambda tiles, device: 128)
    monkeypatch.setattr(plan, "_rows", lambda device: 2)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-300))


Pull: TypeAlias = Callable[[Tensor | float], dict[str, Tensor]]


def run(p: Problem, backend: str) -> tuple[tuple[Tensor, ...], Pull]:
    """What a problem's `run` gives, and every leaf's gradient by the share of outputs (T, B)."""
    leaves = {n: v.detach().clone().requires_grad_() for n, v in p.leaves().items()}
    y, *rest = p.with_leaves(leaves).run(backend)
    towards = torch.randn(y.shape, generator=seeded(7), dtype=torch.float64)

    def pull(share: Tensor | float) -> dict[str, Tensor]:
        counts = torch.as_tensor(share, dtype=torch.float64).expand(y.shape[:2])
        loss = (y.double() * towards * counts[:, :, None, None]).sum()
        grads = torch.autograd.grad(loss, leaves.values(), retain_graph=True)
        return dict(zip(leaves, grads, strict=True))

    return (y.detach(), *(out.detach() for out in rest)), pull


def puller(p: Problem, backend: str) -> Pull:
    return run(p, backend)[1]


def assert_within_the_limit(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for n in want:
        assert relative(got[n], want[n]) < LIMIT, n


@pytest.mark.parametrize(
    "options",
    [
        {"d": 16, "query": "per_cell", "K_a": 2},
        {"soft_update": False, "d": 17, "bias": False, "T": 1},
        {"N": 3, "B": 3, "reset": True, "live": True, "update_bias": True, "T": 3},
    ],
)
def test_it_is_rounded_and_within_the_limit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = clear_problem(**{**SMALL, **options})
    # Halves hold these as they are, so that the map rounds nothing: the limit is that of the rest.
    W_in = p.weights.W_in.bfloat16().double()
    p = replace(p, x=p.x.bfloat16().double(), weights=p.weights._replace(W_in=W_in))
    (right, pull_right), (ours, pull) = run(p, "reference"), run(p.to(torch.float32), "triton")
    assert torch.equal(ours[3], right[3])
    assert all(relative(a, b) < LIMIT for a, b in zip(ours[:3], right[:3], strict=True))
    got = pull(1)
    assert_within_the_limit(got, pull_right(1))
    monkeypatch.setattr(torch._C, "_get_cublas_allow_fp16_accumulation", lambda: True)
    # But for the forward pass, these are exact.
    assert 1e-5 < relative(got["W"], pull(1)["W"].double()) < 1e-3


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_gradients_hold_inputs_of_sizes_far_from_that_of_states(size: float) -> None:
    p = clear_problem(**{**SMALL, "input_views": "split", "soft_update": False})
    W, views = p.weights.W.clone(), p.sel.K * p.h.shape[2]
    W[:, :views] /= size
    p = replace(p, x=p.x * size, weights=p.weights._replace(W=W))
    want, got = gradients(p, "reference"), gradients(p.to(torch.float32), "triton")
    assert_within_the_limit(got, want)
    # Each is far below the other in the same product.
    for part in (slice(0, views), slice(views, None)):
        assert relative(got["W"][:, part], want["W"][:, part]) < LIMIT


def test_gradients_hold_steps_and_sequences_of_very_different_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = clear_problem(**{**SMALL, "T": 3, "B": 3})
    t, b = torch.arange(3, dtype=torch.float64)[:, None], torch.arange(3, dtype=torch.float64)
    right, ours = puller(p, "reference"), puller(p.to(torch.float32), "triton")
    for apart in (1e-6, 1e3):
        share = apart ** ((t + b) % 3 - 1)
        got = ours(share)
        assert_within_the_limit(got, right(share))
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_get_cublas_allow_fp16_accumulation", lambda: True)
            exact = ours(share)["x"].double()
        # What is not summed over steps holds for the smallest as for the largest.
        far = (got["x"].double() - exact).norm(dim=2) / exact.norm(dim=2)  # (T, B)
        assert float(far.max()) < LIMIT


def test_gradients_of_any_size_have_the_same_bits() -> None:
    pull = puller(clear_problem(**SMALL).to(torch.float32), "triton")
    want = pull(1)
    for power in (-60, 40):
        got = pull(2.0**power)
        for n in want:
            assert torch.equal(got[n], want[n] * 2.0**power), n


@pytest.mark.parametrize("rows", [4, 16384])
def test_pieces_may_have_no_gradient_and_products_one_row(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = clear_problem(**{**SMALL, "T": 3})
    right, ours = puller(p, "reference"), puller(p.to(torch.float32), "triton")
    monkeypatch.setattr(backward, "ROWS_AT_ONCE", rows)
    monkeypatch.setattr(backward, "PRODUCT_ROWS", 1)
    assert_within_the_limit(ours(1), right(1))
    first = torch.tensor([[1.0], [0.0], [0.0]])
    got = ours(first)
    assert not got["x"][1:].any()
    assert_within_the_limit(got, right(first))


# The interpreter's own, of a maximum that on a GPU is what it is of.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_nan_in_a_gradient_is_not_hidden() -> None:
    p = random_problem(seeded(0), **{**SMALL, "cells": "all"}).to(torch.float32)
    share = torch.ones(2, 2)
    share[1, 0] = float("nan")
    want, got = puller(p, "reference")(share), puller(p, "triton")(share)
    for n in want:
        assert torch.equal(got[n].isnan(), want[n].isnan()), n
    assert want["x"].isnan().any()
    assert not want["x"].isnan().all()


@pytest.mark.parametrize("before", ["high", "highest"])
def test_the_precision_may_change_between_the_passes(before: str) -> None:
    p = clear_problem(**SMALL)
    torch.set_float32_matmul_precision(before)
    pull = puller(p.to(torch.float32), "triton")
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    assert_within_the_limit(pull(1), puller(p, "reference")(1))


def test_sums_in_halves_are_not_risked() -> None:
    p = random_problem(seeded(0), **SMALL)
    assert plan.sizes(18, p.sel, True, torch.float32).back == torch.float16
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        kinds = [plan.sizes(18, p.sel, True, dtype).back for dtype in DTYPES]
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


@pytest.mark.parametrize(
    ("R", "N", "K", "in_units"),
    [(7, 3, 2, True), (70, 3, 2, False), (70, 1, 3, False), (20, 8, 8, True)],
)
def test_the_gradient_of_a_view_is_that_of_who_took_it_in(
    R: int, N: int, K: int, in_units: bool
) -> None:
    from riglstm.scan.triton.kernels.backward import views_kernel

    d, L, BM, rng = 5, 32, 16, seeded(R)
    bits = torch.randint(1, 1 << (K + N), (R, N), generator=rng, dtype=torch.int32)
    bits *= torch.rand(R, N, generator=rng) < 0.7  # the others sleep
    # Small whole numbers: sums are exact, in any order. What slept is not read.
    D5 = torch.randint(-4, 5, (R, N, L), generator=rng).float()
    D5[bits == 0] = torch.nan
    W = torch.randint(-4, 5, (N, (K + N) * d, L), generator=rng).float()
    units = [2.0 ** torch.randint(-3, 4, (n,), generator=rng) for n in (R, (K + N) * d)]
    dV, sums = torch.empty(R, K, d), torch.empty(-(-R // BM), K * d)
    of_rows, of_lines = units if in_units else (None, None)
    views_kernel[(K, -(-R // BM))](
        *(D5, of_rows, W, of_lines, bits, dV, sums, R),
        **{"N": N, "K": K, "d": d, "L": L, "BP": 8, "BM": BM, "BK": 16},
        **{"STAGES": 1, "PRECISION": "ieee", "WIDE": True},
    )
    took = torch.stack([((bits >> k) & 1) for k in range(K)]).double()  # (K, R, N)
    of_views = W[:, : K * d].view(N, K, d, L).double()
    want = torch.einsum("krn,rnl,nkdl->rkd", took, D5.double().nan_to_num(), of_views)
    if in_units:
        want *= units[0][:, None, None].double() * units[1][: K * d].view(K, d).double()
    assert torch.equal(dV.double(), want)
    assert torch.equal(sums.double().sum(0), want.sum(0).flatten())
