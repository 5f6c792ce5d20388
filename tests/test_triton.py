"""The `triton` backend without a GPU: its kernels in Triton's interpreter, and what it refuses.

The interpreter runs one program after another, so the phases of a step are launched one by one;
on a GPU the same code runs in one launch (`test_triton_gpu.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import (
    TOL,
    Problem,
    assert_equals_the_reference,
    assert_same_gradients,
    clear_problem,
    gradients,
    kernels,
    outputs_and_gradients,
    random_problem,
    relative,
    seeded,
)
from riglstm import BackendError
from riglstm.scan import resolve, scan
from test_triton_gpu import CELLS

(plan,) = kernels("plan", on_a_gpu=False)

pytestmark = pytest.mark.usefixtures("nan_filled_empty")
CPU = torch.device("cpu")
FLOAT = TOL[torch.float32]

SMALL: dict[str, Any] = {"T": 2, "B": 2, "N": 2, "K": 2, "d": 18, "K_a": 1, "K_x": 1, "K_h": 0}
PROBLEMS: dict[str, dict[str, Any]] = {
    "three cells of a ragged size": {"N": 3, "K": 3, "d": 33, "K_a": 2, "K_x": 2, "K_h": 1, "T": 3},
    "resets and masks, no soft update": {
        "reset": True,
        "live": True,
        "soft_update": False,
        "d": 16,
    },
    "every option of the update": {
        **{"query": "per_cell", "update_bias": True, "update_scale": 0.5, "reset": True},
        **{"input_views": "split", "B": 3},
    },
    "everyone looks at everything": {
        **{"cells": "all", "views": "all", "peers": "all", "bias": False, "d": 16, "live": True},
    },
    **{
        f"{rule} drawn, the others ranked": {"N": 3, "K": 3, "d": 4, "K_a": 2, rule: "random"}
        for rule in ("cells", "views", "peers")
    },
}


def one_step(**more: Any) -> Problem:
    return random_problem(seeded(0), **{**SMALL, "T": 1, **more}).to(torch.float32)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_kernels_equal_the_reference(name):
    assert_equals_the_reference(clear_problem(**{**SMALL, **PROBLEMS[name]}), "triton")


QUICK = {"one number", "256", "random"}
"""A few seconds each, and every kind of code."""
ALL = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CELLS]


@pytest.fixture
def wide(nothing_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large cells have the tiles of a small GPU, which are few."""
    monkeypatch.setattr(plan, "_narrowest", lambda tiles, device: 128 if tiles(32) > 20 else 32)


def cells(name: str) -> Problem:
    """Of the sizes that tests on a GPU have, too."""
    sizes = {"T": 2, "B": 2, "D": 5, **CELLS[name]}
    if sizes["N"] * sizes["d"] > 1000:
        # As large as makes cells read one vector after another.
        sizes |= {"T": 1, "B": 1, "N": 9, "K": 2, "d": 230}
    return clear_problem(**sizes)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", ALL)
def test_cells_of_any_size_equal_the_reference(name):
    assert_equals_the_reference(cells(name), "triton")


@pytest.mark.slow
@pytest.mark.usefixtures("tf32", "wide")
@pytest.mark.parametrize("name", [name for name in CELLS if name != "as large as can be"])
def test_products_in_halves_are_within_their_limit_at_any_size(name):
    p = cells(name)
    # Halves hold these as they are, so that the map rounds nothing: the limit is that of the rest.
    W_in = p.weights.W_in.bfloat16().double()
    p = replace(p, x=p.x.bfloat16().double(), weights=p.weights._replace(W_in=W_in))
    assert_equals_the_reference(p, "triton", limit=2e-3)


def test_draws_become_bits_up_to_the_sign():
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


def test_without_gradients_outputs_are_the_same_to_the_bit_and_nobody_elses():
    p = one_step()
    given, want = (p.h.clone(), p.c.clone()), outputs_and_gradients(p, "triton")[0]
    got = p.run("triton")
    assert all(map(torch.equal, (*got, p.h, p.c), (*want, *given)))
    assert len({t.untyped_storage().data_ptr() for t in (*got[:3], p.h, p.c)}) == 5


@pytest.mark.usefixtures("precision_as_before")
def test_what_is_kept_of_a_call_follows_the_precision_and_the_weights():
    p = one_step()
    outputs = []
    for precision in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(precision)
        outputs.append(p.run("triton")[0])
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    # As averages of weights are often kept: torch counts no change of them then.
    p.weights.W.data.mul_(2)
    assert not torch.equal(p.run("triton")[0], outputs[0])


@pytest.mark.parametrize("zeros", [1, 9000])  # more than all programs set to zero at once
def test_packing_sets_counters_and_states_and_nothing_beside_them(zeros):
    from riglstm.scan.triton import forward

    p = one_step(B=300)
    given = (p.sel, 300, 18, CPU, torch.float32, False, 2, None, False)
    made = forward.plan_forward(*given)
    counters = torch.full((zeros + 2,), 7, dtype=torch.int32)
    work = forward.working(1, 300, made, p.h, keep=False, begun=True)
    work = work._replace(counter=counters[1:-1], zeros=zeros)
    c, h = (torch.full_like(p.c, 7.0) for _ in range(2))
    forward.pack(p.weights, made, work, c, h, p.c)
    assert counters.tolist() == [7, *[0] * zeros, 7]
    assert torch.equal(c, p.c)
    assert not h.any()


@pytest.mark.usefixtures("precision_as_before")
@pytest.mark.parametrize(
    ("given", "learns", "precision"),
    [
        *(("", False, "high"), ("h", True, "highest"), ("c", False, "highest")),
        *(pytest.param(given, True, "highest", marks=pytest.mark.slow) for given in ("", "c")),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "batched", "triton"])
def test_what_is_not_given_of_a_state_is_zero_and_has_no_gradient(
    backend, given, learns, precision
):
    torch.set_float32_matmul_precision(precision)
    p = one_step(K_h=1)
    state = {"h": p.h, "c": p.c}
    leaves = [leaf.requires_grad_(learns) for leaf in (p.x, p.weights.W, *map(state.get, given))]
    results = []
    for other in (None, torch.zeros_like(p.h)):
        use = (state[n] if n in given else other for n in "hc")
        y, last, woke = scan(p.x, *use, p.weights, p.sel, backend=backend)
        # With a graph of its own it is that of the operators.
        grads = torch.autograd.grad(y.sum(), leaves, create_graph=not given) if learns else ()
        results.append((y, *last, woke, *grads))
    assert all(map(torch.equal, *results))


def test_a_state_of_another_batch_is_refused_and_nothing_behind_it_read():
    p = one_step()
    words = r"h must be \(B, N, d\) = \(2, 2, 18\), got \(1, 2, 18\)"
    with pytest.raises(ValueError, match=words):
        scan(p.x, p.h[:1], p.c, p.weights, p.sel, backend="triton")
    with pytest.raises(ValueError, match="c must be"):
        scan(p.x, None, p.c[:, :, :17], p.weights, p.sel, backend="triton")


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(("views", "state"), [(1e-8, 1.0), (1e8, 1.0), (1.0, 1e4)])
def test_halves_hold_inputs_and_given_states_of_sizes_far_apart(views, state):
    p = clear_problem(**{**SMALL, "input_views": "split", "soft_update": False, "T": 1})
    W, first = p.weights.W.clone(), p.sel.K * p.h.shape[2]
    W[:, :first] /= views
    W[:, first:] /= state
    p = replace(p, x=p.x * views, h=p.h * state, weights=p.weights._replace(W=W))
    want, got = p.run("reference"), p.to(torch.float32).run("triton")
    assert torch.equal(got[3], want[3])
    assert all(relative(a, b) < 2e-3 for a, b in zip(got[:3], want[:3], strict=True))


@pytest.mark.usefixtures("precision_as_before")
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_nan_in_a_state_is_not_hidden(precision):
    torch.set_float32_matmul_precision(precision)
    p = one_step(cells="all", K_h=1)
    h = p.h.clone()
    h[0, 1, 5] = float("nan")
    p = replace(p, h=h)
    want, got = p.run("reference"), p.run("triton")
    for one, other in zip(got[:3], want[:3], strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert other.isnan().any()


def test_of_equal_scores_the_lower_index_wins_and_nan_wins_over_all():
    p = one_step(N=3, K_a=2)
    # All scores of a zero state tie.
    h = torch.zeros_like(p.h)
    h[1, 2, 5] = float("nan")
    woke = replace(p, h=h, c=torch.zeros_like(p.c)).run("triton")[3][0]
    assert woke.tolist() == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize("upstream", ["h", "c"])
def test_gradients_come_from_each_output_alone(upstream):
    p = clear_problem(**{**SMALL, "T": 1})
    got = gradients(p.to(torch.float32), "triton", upstream)
    assert_same_gradients(got, gradients(p, "reference", upstream), FLOAT.grad)


def refused(p: Problem) -> str:
    with pytest.raises(BackendError) as caught:
        p.run("triton")
    return str(caught.value)


def test_what_it_does_not_support_it_refuses_by_name():
    low = torch.float32
    for options, words in (
        ({"views": "soft"}, "views='soft'"),
        ({"peers": "soft"}, "peers='soft'"),
        ({"N": 17, "K_a": 1}, "at most 16 cells"),
        ({"K": 17}, "16 views"),
        ({"d": 257}, "size 256 at most, got 257"),
    ):
        message = refused(random_problem(seeded(0), **{**SMALL, **options}).to(low))
        assert words in message
        assert "use backend='batched' or 'auto'" in message
    assert "got torch.float64" in refused(random_problem(seeded(0), **SMALL))
    p = random_problem(seeded(0), **{**SMALL, "B": 1, "N": 8, "K": 8, "d": 128}).to(low)
    h, c = (s.expand(262144, -1, -1) for s in (p.h, p.c))
    message = refused(replace(p, x=p.x.expand(-1, 262144, -1), h=h, c=c))
    assert "at most 262143 sequences of 8 cells of size 128, got 262144; run them in" in message
    p = random_problem(seeded(0), **{**SMALL, "T": 1}).to(low)
    p.run("triton")  # what is kept of it does not count under autocast
    with torch.autocast("cpu", torch.float16):
        assert "float16" in refused(p)


def test_auto_leaves_what_it_refuses_to_others(monkeypatch):
    monkeypatch.setattr("riglstm.scan._no_triton", lambda device: None)
    monkeypatch.setattr("riglstm.scan.compiled.available", lambda device: True)
    p = random_problem(seeded(0), **{**SMALL, "B": 1, "N": 8, "K": 8, "d": 128})
    problem = ("auto", torch.device("cuda"), p.sel, 128)
    assert [resolve(*problem, B=B) for B in (262143, 262144)] == ["triton", "compiled"]
    assert resolve(*problem, torch.float64) == resolve(*problem[:3], 257) == "compiled"


@pytest.mark.slow
# Of torch's own, as it makes fake tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_backward_pass_that_is_compiled_sees_operators():
    p = one_step()
    leaves = {n: v.detach().requires_grad_() for n, v in p.leaves().items()}
    want = torch.autograd.grad(p.with_leaves(leaves).run("triton")[0].sum(), leaves["x"])
    loss = p.with_leaves(leaves).run("triton")[0].sum()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    assert torch.equal(leaves["x"].grad, want[0])  # type: ignore[arg-type]


def test_who_looks_at_operators_sees_them_and_the_numbers_are_the_same():
    seen: list[str] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    p = one_step(update_bias=True)
    want, want_grads = outputs_and_gradients(p, "triton")
    with Look():
        got, grads = outputs_and_gradients(p, "triton")
    assert {"riglstm::triton_forward", "riglstm::triton_backward"} <= set(seen)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(grads[n], want_grads[n]) for n in want_grads)
