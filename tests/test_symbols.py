"""A sequence of few symbols: what the layer gives for their vectors, by a shorter way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from helpers import TOL, Problem, assert_close, margins, random_problem, seeded
from riglstm import BackendError, RigLSTM
from riglstm.symbols import run_symbols

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"T": 3, "B": 2, "N": 2, "K": 3, "d": 18, "D": 5}
SMALL |= {"K_a": 1, "K_x": 2, "K_h": 1}
PROBLEMS: dict[str, dict[str, Any]] = {
    "the soft update": {},
    "one query for each cell": {"query": "per_cell", "update_bias": True, "update_scale": 0.5},
    "no soft update, resets, steps left out": {"soft_update": False, "reset": True, "live": True},
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


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "highest") for name in PROBLEMS), ("one query for each cell", "high")],
)
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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A one for each time that the short way is taken."""
    triton = pytest.importorskip("riglstm.scan.triton", reason="the kernels are not in this copy")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py")
    calls: list[int] = []
    short = triton.scan_symbols

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return short(*args, **options)

    monkeypatch.setattr(triton, "scan_symbols", counted)
    return calls


def small(**options: Any) -> tuple[RigLSTM, Tensor, Tensor]:
    torch.manual_seed(0)
    options = {"num_cells": 2, "active_cells": 1, "backend": "triton", **options}
    return RigLSTM(5, 36, **options), torch.zeros(2, 2, dtype=torch.int64), torch.randn(1, 5)


@pytest.mark.parametrize("batch_first", [False, True])
def test_run_symbols_is_the_layer_on_the_vectors(taken: list[int], batch_first: bool) -> None:
    layer, _, _ = small(batch_first=batch_first, bias=not batch_first)
    ids, table = torch.randint(2, (4, 2) if batch_first else (2, 4)), torch.randn(2, 5)
    hx = (5 * torch.randn(1, 4, 36), torch.randn(1, 4, 36))
    with torch.no_grad():
        for state in (None, hx):
            output, (h, c) = run_symbols(layer, ids.to(torch.uint8), table, state)
            want, (h_want, c_want) = layer(F.embedding(ids, table), state)
            for got, expected in ((output, want), (h, h_want), (c, c_want)):
                assert_close(got, expected, 1e-5)
    assert taken == [1, 1]
    assert h.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()


def test_under_autocast_a_state_in_half_precision_is_taken(taken: list[int]) -> None:
    layer, ids, table = small()
    hx = tuple(torch.randn(2, 1, 2, 36).bfloat16())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output, (h, _) = run_symbols(layer, ids, table, hx)  # type: ignore[arg-type]
        want, (h_want, _) = layer(F.embedding(ids, table), hx)  # type: ignore[arg-type]
    assert taken == [1]
    assert (output.dtype, h.dtype) == (want.dtype, h_want.dtype)
    assert_close(output, want, 2e-2)


@pytest.mark.parametrize("what", ["table", "weights", "state", "hook", "symbols"])
def test_where_it_does_not_apply_the_layer_runs_as_ever(taken: list[int], what: str) -> None:
    layer, ids, table = small()
    layer.requires_grad_(what == "weights")
    hx = tuple(torch.zeros(2, 1, 2, 36).requires_grad_(what == "state"))
    called: list[int] = []
    if what == "hook":
        layer.register_forward_pre_hook(lambda *_: called.append(1))
    if what == "symbols":  # nearly as many as steps: the table would cost more than it saves
        table = torch.randn(2, 5)
    table.requires_grad_(what == "table")
    output, _ = run_symbols(layer, ids, table, hx)  # type: ignore[arg-type]
    assert taken == []
    assert output.requires_grad == (what in ("table", "weights", "state"))
    assert called == [1] * (what == "hook")


def test_it_is_for_up_to_64_sequences() -> None:
    symbols = pytest.importorskip("riglstm.scan.fused.symbols", reason="no kernels in this copy")
    layer, _, _ = small(num_cells=2, num_views=1)
    given = (18, layer.selection, layer.weights().W, True)
    assert [symbols.fits(B, *given) for B in (1, 64, 65, 128, 600)] == [True, True, *[False] * 3]


# torch's own, on the way to tangents.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is depr:DeprecationWarning")
def test_what_the_kernels_do_not_support_is_refused_as_by_the_layer(taken: list[int]) -> None:
    for options in ({"cells": "random"}, {"views": "soft"}, {"num_cells": 9}):
        layer, ids, table = small(**options)
        with torch.no_grad(), pytest.raises(BackendError, match="backend='triton' needs"):
            run_symbols(layer, ids, table)
    layer, ids, table = small()
    layer.requires_grad_(False)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="triton"):
        run_symbols(layer, ids, forward_ad.make_dual(table, table))


def test_what_are_no_symbols_is_refused() -> None:
    layer, table = RigLSTM(5, 36, num_cells=2), torch.randn(3, 5)
    with pytest.raises(ValueError, match=r"ids must be whole numbers, .* got torch\.float32 of sh"):
        run_symbols(layer, torch.zeros(2, 2), table)
    with pytest.raises(ValueError, match=r"ids must be whole numbers, .* of shape \(2,\)"):
        run_symbols(layer, torch.zeros(2, dtype=torch.int64), table)
    with pytest.raises(ValueError, match=r"hx must be a pair"):
        run_symbols(layer, torch.zeros(2, 2, dtype=torch.int64), table, torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"table must have shape \(V, input_size = 5\), got"):
        run_symbols(layer, torch.zeros(2, 2, dtype=torch.int64), torch.randn(3, 4))
