"""The kernel whose weights stay in registers, in the interpreter: as the other computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import (
    TOL,
    assert_close,
    assert_same_gradients,
    clear_problem,
    outputs_and_gradients,
)
from riglstm.selection import Selection
from train_helpers import assert_same

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py", allow_module_level=True)
pytest.importorskip("triton")
plan = pytest.importorskip("riglstm.scan.triton.plan", reason="the kernels are not in this copy")
forward = pytest.importorskip("riglstm.scan.triton.forward")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nan_filled_empty")]
FLOAT = TOL[torch.float32]
SMALL: dict[str, Any] = {"T": 2, "B": 2, "N": 2, "K": 2, "d": 18, "D": 5, "K_a": 1, "K_x": 1}
PROBLEMS: dict[str, dict[str, Any]] = {
    "a slot of two pieces, fewer cells than views, rows of two blocks": {
        **{"K": 3, "d": 40, "K_x": 2, "K_h": 1, "B": 9, "T": 1},
    },
    "resets and steps left out": {"reset": True, "live": True, "K_h": 0},
    "no soft update": {"soft_update": False, "K_h": 1, "bias": False, "T": 1},
    "a query for each cell": {"query": "per_cell", "update_bias": True, "K_h": 1, "T": 1},
    "the last of W_q Q beside the last units": {"d": 36, "K_h": 1, "T": 1},
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched."""
    from riglstm.scan.triton.launch import Launch

    names: list[str] = []
    run = Launch.__call__

    def spy(self: Launch, *args: Any) -> None:
        names.append(self.kernel.fn.__name__)
        run(self, *args)

    monkeypatch.setattr(Launch, "__call__", spy)
    return names


def in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, few sequences are computed as on a small GPU: with the kernel of tiles."""
    monkeypatch.setattr(forward, "plan_forward", forward.plan_forward.__wrapped__)  # nothing kept
    monkeypatch.setattr(plan, "resident_tiles", lambda z, B, device: None)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_computes_what_the_kernel_of_tiles_computes(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = clear_problem(**{**SMALL, **PROBLEMS[name]}).to(torch.float32)
    # Rows take their time in the interpreter; what is kept for gradients does not depend on them.
    learns = p.h.shape[0] < 9
    run = outputs_and_gradients if learns else lambda p, backend: (p.run(backend), {})
    got, grads = run(p, "triton")
    assert "resident_kernel" in launched
    assert "tiled_kernel" not in launched
    launched.clear()
    in_tiles(monkeypatch)
    want, want_grads = run(p, "triton")
    assert "tiled_kernel" in launched
    assert "resident_kernel" not in launched
    assert torch.equal(got[3], want[3])
    for one, other, what in zip(got[:3], want[:3], ("y", "h", "c"), strict=True):
        assert_close(one, other, FLOAT.value, what)
    assert_same_gradients(grads, want_grads, FLOAT.grad)


def test_it_computes_the_same_in_bfloat16(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = clear_problem(**{**SMALL, "T": 1}).to(torch.float32)

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return p.run("triton")

    got = run()
    assert "resident_kernel" in launched
    launched.clear()
    in_tiles(monkeypatch)
    want = run()
    assert "tiled_kernel" in launched
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, FLOAT.value)


@pytest.mark.usefixtures("tf32")
def test_programs_that_have_no_tile_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p = clear_problem(**{**SMALL, "T": 1}).to(torch.float32)
    want, plan_forward = p.run("triton"), forward.plan_forward

    def with_more(*args: Any, **options: Any) -> Any:
        made = plan_forward(*args, **options)
        return made._replace(programs=made.programs + 3)

    monkeypatch.setattr(forward, "plan_forward", with_more)
    for one, other in zip(p.run("triton"), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("apart", "rows", "more"),
    [
        (False, 2, {"B": 3, "K_h": 1, "reset": True, "T": 1}),
        (True, 1, {"K_h": 1, "T": 1}),
        (True, 2, {"B": 3, "K_h": 1, "reset": True, "live": True}),
    ],
)
def test_programs_that_select_or_multiply_compute_as_those_that_do_both(
    apart: bool, rows: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = clear_problem(**{**SMALL, **more}).to(torch.float32)
    want, tiles, seen = outputs_and_gradients(p, "triton"), plan.resident_tiles, []

    def others(*args: Any) -> dict[str, Any]:
        seen.append({**tiles(*args), "APART": apart, "RB": rows})
        return seen[-1]

    monkeypatch.setattr(forward, "plan_forward", forward.plan_forward.__wrapped__)
    monkeypatch.setattr(plan, "resident_tiles", others)
    assert_same(outputs_and_gradients(p, "triton"), want)
    assert seen


@pytest.mark.usefixtures("tf32")
def test_the_last_of_w_q_q_is_the_same_beside_the_last_units_as_in_a_tile_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    monkeypatch.setattr(forward, "plan_forward", forward.plan_forward.__wrapped__)
    assert_same(got, outputs_and_gradients(p, "triton"))


@pytest.mark.parametrize(("B", "programs"), [(1, 97), (33, 113), (64, 128)])
def test_there_is_a_program_for_each_pair_of_sequences_and_each_tile(
    B: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "interpreted", lambda: False)
    monkeypatch.setattr(plan, "chip", lambda device: (132, 232_448))
    sel = Selection(6, 6, 4, 4, 4)
    made = plan.plan_forward.__wrapped__(
        *(sel, B, 100, torch.device("cuda"), torch.bfloat16, True, 2, None, False)
    )
    assert made.tile["APART"]
    assert made.programs == programs


@pytest.mark.parametrize(
    ("N", "d", "multiprocessors", "apart", "rows"),
    [
        (6, 100, 132, True, 2),  # 96 tiles, as the last of W_q Q has none of its own
        (6, 100, 127, False, 1),
        (6, 100, 108, False, 1),
        (5, 50, 132, True, 1),
        (4, 16, 132, True, 1),
        (4, 64, 84, True, 2),
    ],
)
def test_programs_select_or_multiply_where_there_are_enough_of_them(
    N: int, d: int, multiprocessors: int, apart: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "interpreted", lambda: False)
    monkeypatch.setattr(plan, "chip", lambda device: (multiprocessors, 232_448))
    b16, P = torch.bfloat16, plan.aligned(d, torch.bfloat16)
    z = plan.Sizes(N, N, d, P, 5 * P, 5, b16, b16, b16)
    for B in (1, 64):
        tile = plan.resident_tiles(z, B, torch.device("cuda"))
        assert (tile["APART"], tile["RB"]) == (apart, rows)
        assert not apart or N * tile["TILES"] + -(-64 // rows) <= multiprocessors


@pytest.mark.parametrize(
    ("held", "B", "multiprocessors", "kept"),
    [
        (torch.float16, 64, 132, True),
        (torch.bfloat16, 1, 96, True),
        (torch.bfloat16, 64, 95, False),
        (torch.float16, 65, 132, False),
        (torch.float32, 64, 132, False),
    ],
)
def test_weights_are_kept_where_each_program_has_one_tile_of_halves(
    held: torch.dtype, B: int, multiprocessors: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "interpreted", lambda: False)
    monkeypatch.setattr(plan, "chip", lambda device: (multiprocessors, 232_448))
    z = plan.Sizes(6, 6, 100, 104, 512, 5, torch.float32, held, held)
    assert (plan.resident_tiles(z, B, torch.device("cuda")) is not None) == kept


def test_both_counters_are_there_and_set_to_zero() -> None:
    from riglstm.scan.triton.kernels.common import LINE

    p = clear_problem(**SMALL).to(torch.float32)
    made = plan.plan_forward(
        *(p.sel, 2, p.h.shape[2], p.h.device, torch.bfloat16, True, 2, None, False)
    )
    assert made.by_gate
    work = forward.working(3, 2, made, p.h, keep=False, begun=False)
    assert min(work.counter.numel(), work.zeros) > LINE
