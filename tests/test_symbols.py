"""A sequence of few symbols: what the layer gives for their vectors, by a shorter way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import TOL, Problem, assert_close, margins, random_problem, seeded
from riglstm import RigLSTM
from riglstm.symbols import run_symbols

SMALL: dict[str, Any] = {"T": 3, "B": 2, "N": 2, "K": 3, "d": 18, "D": 5}
SMALL |= {"K_a": 1, "K_x": 2, "K_h": 1}
PROBLEMS: dict[str, dict[str, Any]] = {
    "the soft update": {},
    "one query for each cell": {"query": "per_cell", "update_bias": True, "update_scale": 0.5},
    "no soft update, resets, steps left out": {"soft_update": False, "reset": True, "live": True},
    "more sequences than a tile holds": {"B": 67, "T": 2},
}


def problem(**options: Any) -> tuple[Problem, Tensor, Tensor]:
    """In which no selection is close, ids (T, B), and the vectors (V, D) that they stand for."""
    for seed in range(1000):
        gen = seeded(seed)
        p = random_problem(gen, **{**SMALL, **options})
        table = torch.randn(3, p.x.shape[2], generator=gen, dtype=p.x.dtype)
        ids = torch.randint(3, p.x.shape[:2], generator=gen)
        p = replace(p, x=F.embedding(ids, table))
        if margins(p).min() > 1e-4:
            return p, ids, table
    raise AssertionError("no problem without close calls among 1000")


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_kernel_equals_the_reference_on_the_vectors_of_the_symbols(
    name: str, precision: str
) -> None:
    triton = pytest.importorskip("riglstm.scan.triton", reason="the kernels are not in this copy")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py")
    p, ids, table = problem(**PROBLEMS[name])
    want, low = p.run("reference"), p.to(torch.float32)
    torch.set_float32_matmul_precision(precision)
    try:
        y, (h, c) = triton.scan_symbols(
            *(ids, table.float(), low.h, low.c, low.weights, low.sel), live=p.live, reset=p.reset
        )
    finally:
        torch.set_float32_matmul_precision("highest")
    for one, other, what in zip((y, h, c), want[:3], ("y", "h", "c"), strict=True):
        if precision == "highest":
            assert_close(one, other, TOL[torch.float32].value, what)
        else:
            assert float((one.double() - other).norm() / other.norm()) < 2e-3, what


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("backend", ["triton", "batched"])
def test_run_symbols_is_the_layer_on_the_vectors(backend: str, batch_first: bool) -> None:
    if backend == "triton":
        pytest.importorskip("riglstm.scan.triton", reason="the kernels are not in this copy")
        if torch.cuda.is_available():
            pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py")
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_cells": 2, "active_cells": 1, "batch_first": batch_first}
    layer = RigLSTM(5, 36, **options, backend=backend)  # type: ignore[arg-type]
    ids, table = torch.randint(3, (2, 2)), torch.randn(3, 5)
    hx = (torch.randn(1, 2, 36), torch.randn(1, 2, 36))
    with torch.no_grad():
        for state in (None, hx):
            output, (h, c) = run_symbols(layer, ids, table, state)
            want, (h_want, c_want) = layer(F.embedding(ids, table), state)
            for got, expected in ((output, want), (h, h_want), (c, c_want)):
                assert_close(got, expected, 1e-5)
        assert h.data_ptr() != output.data_ptr()


def test_where_gradients_are_wanted_the_layer_runs_as_ever() -> None:
    layer = RigLSTM(5, 36, num_cells=2, backend="batched")
    table = torch.randn(3, 5, requires_grad=True)
    run_symbols(layer, torch.randint(3, (4, 2)), table)[0].sum().backward()
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


def test_what_are_no_symbols_is_refused() -> None:
    layer, table = RigLSTM(5, 36, num_cells=2), torch.randn(3, 5)
    with pytest.raises(ValueError, match=r"ids must be whole numbers, .* got torch\.float32 of sh"):
        run_symbols(layer, torch.zeros(2, 2), table)
    with pytest.raises(ValueError, match=r"ids must be whole numbers, .* of shape \(2,\)"):
        run_symbols(layer, torch.zeros(2, dtype=torch.int64), table)
    with pytest.raises(ValueError, match=r"table must have shape \(V, input_size = 5\), got"):
        run_symbols(layer, torch.zeros(2, 2, dtype=torch.int64), torch.randn(3, 4))
