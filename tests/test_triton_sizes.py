"""The `triton` backend in the interpreter: up to 16 cells of 1 to 256 numbers, and draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import (
    Problem,
    assert_equals_the_reference,
    clear_problem,
    kernels,
    outputs_and_gradients,
    random_problem,
    relative,
    seeded,
)
from test_triton_gpu import CELLS

(plan,) = kernels("plan", on_a_gpu=False)

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "wide")
QUICK = {"one number", "256", "random"}
"""A few seconds each, and every kind of code."""
ALL = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CELLS]


@pytest.fixture
def wide(nothing_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large cells have the tiles of a small GPU, which are few."""
    monkeypatch.setattr(plan, "_narrowest", lambda tiles, device: 128 if tiles(32) > 20 else 32)


def problem(name: str) -> Problem:
    sizes = {"T": 2, "B": 2, "D": 5, **CELLS[name]}
    if sizes["N"] * sizes["d"] > 1000:
        # As large as makes cells read one vector after another.
        sizes |= {"T": 1, "B": 1, "N": 9, "K": 2, "d": 230}
    return clear_problem(**sizes)


@pytest.mark.parametrize("name", ALL)
def test_outputs_states_and_gradients_equal_the_reference(name: str) -> None:
    assert_equals_the_reference(problem(name), "triton")


@pytest.mark.slow
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("name", [name for name in CELLS if name != "as large as can be"])
def test_products_in_halves_are_within_their_limit(name: str) -> None:
    p = problem(name)
    # Halves hold these as they are, so that the map rounds nothing: the limit is that of the rest.
    W_in = p.weights.W_in.bfloat16().double()
    p = replace(p, x=p.x.bfloat16().double(), weights=p.weights._replace(W_in=W_in))
    want, want_grads = outputs_and_gradients(p, "reference")
    got, grads = outputs_and_gradients(p.to(torch.float32), "triton")
    assert torch.equal(got[3], want[3])
    pairs = {n: (grads[n], want_grads[n]) for n in grads}
    pairs |= dict(zip(("y", "h_n", "c_n"), zip(got, want, strict=True), strict=False))
    for what, (one, other) in pairs.items():
        assert relative(one, other) <= 2e-3, what


@pytest.mark.parametrize("rule", ["cells", "views", "peers"])
def test_one_rule_may_draw_while_the_others_rank(rule: str) -> None:
    sizes: dict[str, Any] = {"T": 2, "B": 2, "N": 3, "K": 3, "d": 4, "K_a": 2, "K_x": 2, "K_h": 1}
    assert_equals_the_reference(clear_problem(**sizes, **{rule: "random"}), "triton")


def test_draws_become_bits_up_to_the_sign() -> None:
    from riglstm.scan.triton.forward import drawn

    sizes: dict[str, Any] = {"N": 16, "K": 16, "K_a": 5, "K_x": 4, "K_h": 3, "T": 3, "B": 4}
    rules = dict.fromkeys(("cells", "views", "peers"), "random")
    p = random_problem(seeded(0), **sizes, **rules)
    sel, wake, take = drawn(p.sel, p.noise, None)
    assert (sel.cells, sel.views, sel.peers) == ("all", "all", "all")
    seen, slots = p.trace(), torch.arange(32)
    chosen = torch.cat((seen.views, seen.peers), 3)
    assert torch.equal(((wake.unsqueeze(-1) >> slots[:16]) & 1).bool(), seen.active)
    assert torch.equal(((take.unsqueeze(-1) >> slots) & 1).bool(), chosen)
    assert (take < 0).any()
