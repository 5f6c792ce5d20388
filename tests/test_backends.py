"""Three witnesses: the oracle equals the reference, and the fast backends equal both.

Selections are compared before numbers. Buffers that a backend leaves unwritten hold NaN here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from helpers import (
    ALL_VARIANTS,
    EAGER,
    TOL,
    Problem,
    ask_oracle,
    assert_close,
    assert_equals_oracle,
    assert_equals_the_reference,
    assert_same_gradients,
    clear_problem,
    compiles_steps,
    eager_backends,
    gradients,
    kept_by_batched,
    kernels,
    margins,
    random_problem,
    seeded,
    selections,
    slow_bf16,
)
from riglstm import RigLSTM
from riglstm.cell import input_views, scores
from riglstm.inputs import flat
from riglstm.scan import compiled
from riglstm.scan.batched import backward, forward, native
from riglstm.selection import CELL_RULES, SLOT_RULES, draw_noise, top_mask

pytestmark = pytest.mark.usefixtures("nan_filled_empty")

CPU = torch.device("cpu")
EXACT = TOL[torch.float64]


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of compiled code."""
    marks = (
        pytest.mark.skipif(not compiled.available(CPU), reason="torch.compile needs a compiler"),
        pytest.mark.usefixtures("fresh_compiler"),
        # torch's compiler imports scripts that torch deprecates.
        pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is:DeprecationWarning"),
        compiles_steps,
    )
    for mark in marks:
        test = mark(test)
    return test


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No test meets code compiled for another one, and none may quietly run without any."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


WAYS = ("awake", "every row", *(("native", "native forward") if native.library() else ()))
"""Of `batched`: that of large layers, here with a backward pass in short pieces; of other devices,
with a row for every cell; of small layers; and of those between, with a backward pass in Python."""


@contextlib.contextmanager
def by(way: str) -> Iterator[None]:
    """Within it `batched` runs that way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LARGEST", 2**30 if way.startswith("native") else 0)
        for limit in ("SMALL", "SMALL_CELL"):
            patch.setattr(native, limit, 2**30 if way == "native" else 0)
        if way == "awake":
            patch.setattr(backward, "ROWS_AT_ONCE", 13)
        if way == "every row":
            patch.setattr(forward, "awake_only", lambda device, sel: False)
        yield


def test_each_way_runs_its_own_loops(monkeypatch):
    """In C++, forward and backward; in Python, backward: pieces of two of six steps, or all six."""
    for way in WAYS:
        in_cpp, in_python = Mock(wraps=native._run), Mock(wraps=backward._loop)
        with by(way), monkeypatch.context() as patch:
            patch.setattr(native, "_run", in_cpp)
            patch.setattr(backward, "_loop", in_python)
            gradients(random_problem(seeded(0)), "batched")
        assert ([args[0] for args, _ in in_cpp.call_args_list], in_python.call_count) == {
            "awake": ([], 3),
            "every row": ([], 1),
            "native": (["forward", "backward"], 0),
            "native forward": (["forward"], 1),
        }[way]


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes and rules of a problem; the number of cell updates is bounded for the oracle's sake."""
    T, N, K = draw(st.integers(1, 64)), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return {
        "T": T,
        "B": draw(st.integers(1, max(1, min(3, 512 // (T * N))))),
        "N": N,
        "K": K,
        "d": draw(st.integers(1, 33)),
        "D": draw(st.integers(1, 9)),
        "K_a": draw(st.integers(1, N)),
        "K_x": draw(st.integers(1, K)),
        "K_h": draw(st.integers(0, N - 1)),
        "cells": draw(st.sampled_from(CELL_RULES)),
        "views": draw(st.sampled_from(SLOT_RULES)),
        "peers": draw(st.sampled_from(SLOT_RULES)),
        "input_views": draw(st.sampled_from(("linear", "split"))),
        "soft_update": draw(st.booleans()),
        "query": draw(st.sampled_from(("shared", "per_cell"))),
        "bias": draw(st.booleans()),
        "update_scale": draw(st.sampled_from((1.0, 0.25, 3.0))),
        "update_bias": draw(st.booleans()),
        "live": draw(st.booleans()),
        "reset": draw(st.booleans()),
    }


@eager_backends
@given(options(), st.integers(0, 2**32))
@example({"T": 1, "B": 1, "N": 1, "K": 1, "d": 1, "K_a": 1, "K_x": 1, "K_h": 0}, 0)
@example({"T": 64, "B": 1, "N": 8, "K": 8, "d": 33, "K_a": 5, "K_x": 5, "K_h": 5}, 1)
@example({"T": 63, "B": 2, "N": 5, "K": 5, "d": 33, "K_a": 3, "K_x": 1, "K_h": 0}, 2)
def test_the_oracle_equals_the_backend_at_any_size(backend, problem, seed):
    p = random_problem(seeded(seed), **problem)
    answer = ask_oracle(p)
    for way in WAYS if backend == "batched" else WAYS[:1]:
        with by(way):
            assert_selects_and_equals(p, backend, answer)


def assert_selects_and_equals(p: Problem, backend: str, answer: dict[str, Tensor]) -> None:
    active, views, peers = selections(p, backend)
    assert torch.equal(active, answer["active"])
    for name, rule, chosen in (("views", p.sel.views, views), ("peers", p.sel.peers, peers)):
        if rule == "soft":
            assert_close(chosen, answer[name], EXACT.value, name)
        else:
            assert torch.equal(chosen, answer[name].bool()), name
    assert_equals_oracle(p.run(backend), answer)


def variant_layer(name: str, backend: str) -> tuple[RigLSTM, Problem]:
    """A layer of a variant, and the problem that a call of it poses, random draws included."""
    N, K, d = 4, 3, 5
    T, B, D = 5, 2, K * d
    torch.manual_seed(11)
    counts = {"active_cells": 2, "views_per_cell": 2, "peers_per_cell": 1}
    options = {"num_cells": N, "num_views": K, **counts, **ALL_VARIANTS[name]}
    layer = RigLSTM(D, N * d, backend=backend, dtype=torch.float64, **options)
    plain = random_problem(seeded(12), T=T, B=B, N=N, K=K, d=d, D=D, live=True, reset=True)
    torch.manual_seed(13)
    noise = draw_noise(layer.selection, T, B, CPU)
    # Steps that are left out hold nothing here; what a layer makes of them (P19) it tests itself.
    return layer, replace(
        plain,
        x=plain.x.masked_fill(~plain.live.unsqueeze(-1), 0),
        weights=layer.weights(),
        sel=layer.selection,
        noise=noise,
        reset=plain.reset & plain.live,
    )


@pytest.mark.parametrize(
    ("N", "d"), [(1, 1), (9, 1), (16, 1), (1, 7), (9, 7), (16, 7), (1, 129), (3, 129), (2, 200)]
)
def test_odd_sizes_equal_the_oracle_and_every_gradient_of_the_reference(N, d):
    for B, K in ((1, N), (3, 2)):
        counts = {"K_a": max(1, N // 2), "K_x": max(1, K // 2), "K_h": N // 2}
        p = random_problem(seeded(7), T=3, B=B, N=N, K=K, d=d, update_bias=True, **counts)
        answer, want = ask_oracle(p), gradients(p, "reference")
        for way in WAYS:
            with by(way):
                assert_equals_oracle(p.run("batched"), answer)
                assert_same_gradients(gradients(p, "batched"), want, EXACT.grad)


@pytest.mark.parametrize("name", ALL_VARIANTS)
def test_the_oracle_equals_every_variant_of_the_layer_and_of_its_trace(name):
    for backend in EAGER:
        layer, p = variant_layer(name, backend)
        answer = ask_oracle(p, layer.paper_parameters())
        state = tuple(s.flatten(1).unsqueeze(0) for s in (p.h, p.c))
        torch.manual_seed(13)
        y, (h, c) = layer(p.x, state, reset=p.reset, mask=p.live)
        for what, got in (("output", y), ("h", h[0]), ("c", c[0])):
            assert_close(got.detach(), answer[what].flatten(-2), EXACT.value, what)
    torch.manual_seed(13)
    (trace,) = layer.trace(p.x, state, reset=p.reset, mask=p.live)
    assert torch.equal(trace.active, answer["active"])
    for what in ("views", "peers", "view_scores", "peer_scores", "keep"):
        assert_close(getattr(trace, what).detach(), answer[what], EXACT.value, what)
    assert_close(trace.output.detach(), answer["output"].flatten(2), EXACT.value, "output")
    for rule, chosen in ((p.sel.views, trace.views), (p.sel.peers, trace.peers)):
        assert chosen.dtype == (torch.float64 if rule == "soft" else torch.bool)
    if name == "default":
        # A test of variants says nothing where every rule would choose everything.
        for chosen in (trace.active, trace.views, trace.peers):
            assert chosen.any()
            assert not chosen.all()
        assert len({tuple(row) for row in trace.active.flatten(0, 1).tolist()}) > 2


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("name", ALL_VARIANTS)
def test_the_oracle_equals_every_variant_of_the_compiled_step(name):
    """Three variants with their gradients, the others forward only: a compilation takes 10 s.

    No vector instructions: without them the compiler needs half the time. The test of ties below
    is compiled with them.
    """
    flags = {"update_bias": True, "live": True, "reset": True}
    p = random_problem(seeded(12), **flags, **ALL_VARIANTS[name])
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        if name in ("default", "soft_inputs", "soft_h"):
            (out, _), _ = assert_equals_the_reference(p, "compiled", torch.float64)
        else:
            with torch.no_grad():
                out = p.run("compiled")
    assert_equals_oracle(out, ask_oracle(p))


@pytest.mark.parametrize("query", ["shared", "per_cell"])
@pytest.mark.parametrize("name", ALL_VARIANTS)
def test_every_variant_has_every_gradient_of_the_reference_by_every_way(name, query):
    update = {"update_bias": True, "update_scale": 2.0, "query": query}
    p = random_problem(seeded(21), T=7, live=True, reset=True, **update, **ALL_VARIANTS[name])
    for way in WAYS:
        with by(way):
            _, (_, want_grads) = assert_equals_the_reference(p, "batched", torch.float64)
            if way == "every row":
                assert kept_by_batched(p)[1].pair.shape[1] == p.h.shape[0] * p.sel.N
    assert all(grad.abs().max() > 0 for grad in want_grads.values())


@given(options(), st.sampled_from(("yhc", "y", "h", "c", "yh", "hc")), st.integers(0, 2**32))
def test_backends_agree_in_every_gradient_at_any_size_from_any_output(problem, upstream, seed):
    problem |= {"T": min(problem["T"], 9), "d": min(problem["d"], 9)}
    p = random_problem(seeded(seed), **problem)
    want = gradients(p, "reference", upstream)
    for way in WAYS:
        with by(way):
            assert_same_gradients(gradients(p, "batched", upstream), want, EXACT.grad)


@pytest.fixture(params=["batched", "triton"])
def operators(request: pytest.FixtureRequest) -> str:
    """The backends whose backward pass is written by hand; `triton` in the interpreter."""
    if request.param == "triton":
        kernels("forward", on_a_gpu=False)
    return str(request.param)


@pytest.fixture
def small(operators: str) -> Problem:
    """A problem for such a backend, in a dtype that it takes."""
    T, dtype = (1, torch.float32) if operators == "triton" else (5, torch.float64)
    sizes = {"B": 2, "N": 2, "K": 2, "d": 18, "K_a": 1, "K_x": 1, "query": "per_cell"}
    return random_problem(seeded(6), T=T, **sizes, dtype=dtype)


def test_inputs_and_gradients_need_not_be_contiguous(operators, small):
    leaves = small.leaves()
    strided = {name: v.mT.contiguous().mT for name, v in leaves.items() if v.dim() > 1}
    assert not strided["x"].is_contiguous()
    turned = small.with_leaves(leaves | strided)
    # Without the final state, whose gradient is then made up, and as contiguous.
    got, want = gradients(turned, operators, "y"), gradients(small, operators, "y")
    assert all(torch.equal(got[name], want[name]) for name in want)
    small.h.requires_grad_()
    expanded, whole = (
        torch.autograd.grad((y := small.run(operators)[0]), small.h, towards.to(y).expand_as(y))[0]
        for towards in (torch.ones(()), torch.ones(len(small.x), 2, 2, 18))
    )
    assert torch.equal(expanded, whole)


@pytest.mark.parametrize(
    "operators", ["batched", pytest.param("triton", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("alone", ["x", "W_in", "b_in", "W", "b", ""])
def test_a_gradient_is_the_same_whichever_others_are_asked_for(alone, state, operators, small):
    """Of the input or a weight alone, or of everything but the state."""

    def grads(learned: set[str]) -> dict[str, Tensor]:
        leaves = {n: v.detach().clone() for n, v in small.leaves().items()}
        asked = {n: v.requires_grad_() for n, v in leaves.items() if n in learned}
        y, *final, _ = small.with_leaves(leaves).run(operators)
        loss = sum(v.square().sum() for v in (y, *final)[: 3 if state else 1])
        return dict(zip(asked, torch.autograd.grad(loss, asked.values()), strict=True))

    every = set(small.leaves())
    for way in WAYS if operators == "batched" else ("native",):
        with by(way):
            want, got = grads(every), grads({alone} if alone else every - {"h", "c"})
            assert all(torch.equal(got[n], want[n]) for n in got)


def test_a_second_derivative_and_gradients_in_a_batch_are_refused_and_not_misread(operators, small):
    small.x.requires_grad_()
    y = small.run(operators)[0]
    with pytest.raises(NotImplementedError, match="one gradient at a time, got a batch of them"):
        torch.autograd.grad(y, small.x, torch.ones(2, *y.shape).to(y), is_grads_batched=True)
    (dx,) = torch.autograd.grad(y.sum(), small.x, create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once; for double"):
        dx.sum().backward()


@pytest.mark.parametrize(
    "extra",
    [{}, {"views": "soft", "peers": "soft", "query": "per_cell", "update_bias": True}],
    ids=["default", "soft"],
)
def test_first_and_second_derivatives_of_the_reference_are_the_numeric_ones(extra):
    tiny = {"T": 2, "B": 1, "N": 3, "K": 2, "d": 1, "D": 2, "K_x": 1}
    p = clear_problem(**tiny, **extra)
    leaves = p.leaves()

    def f(*values: Tensor) -> tuple[Tensor, ...]:
        return p.with_leaves(dict(zip(leaves, values, strict=True))).run("reference")[:3]

    values = tuple(v.clone().requires_grad_() for v in leaves.values())
    assert torch.autograd.gradcheck(f, values)
    assert torch.autograd.gradgradcheck(f, values)


@slow_bf16
@eager_backends
@pytest.mark.parametrize(
    ("dtype", "product", "of_input"),
    [
        *((dtype, dtype, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        *((torch.float32, torch.bfloat16, x) for x in (torch.float32, torch.bfloat16)),
    ],
    ids=["float32", "float16", "bfloat16", "autocast", "autocast of a bfloat16 input"],
)
@pytest.mark.parametrize("name", ["default", "soft_inputs", "soft_h", "no_soft_state_updating"])
def test_short_dtypes_follow_float64_wherever_they_select_alike(
    name, dtype, product, of_input, backend
):
    sizes = {"T": 8, "B": 64, "N": 6, "K": 6, "d": 8, "K_h": 2}
    low = random_problem(seeded(31), **sizes, **ALL_VARIANTS[name], dtype=dtype)
    low = replace(low, x=low.x.to(of_input))
    exact, tol, leaves = low.to(torch.float64), TOL[product], low.leaves()
    cast = torch.autocast("cpu", torch.bfloat16, enabled=product != dtype)
    with cast:
        chosen = selections(low, backend, product)
    pairs = zip(chosen, selections(exact, "reference"), strict=True)
    others = [(got != want).flatten(2).any(-1) for got, want in pairs if want.dtype == torch.bool]
    flipped = torch.stack(others).any(0)  # (T, B)
    # Where a sequence first leaves float64's selections, the choice was a close one.
    left, first = flipped.any(0).nonzero().flatten(), flipped.int().argmax(0)
    assert (margins(exact)[first[left], left] < tol.margin).all()
    alike = ~flipped.any(0)
    assert alike.double().mean() >= tol.share

    with cast:
        y, h, c, _ = low.run(backend)
        got = gradients(low, backend, share=alike.double())
    assert {y.dtype, h.dtype, c.dtype} == {dtype}
    want = exact.run("reference")
    assert_close(y[:, alike], want[0][:, alike], tol.value, "y")
    assert_close(h[alike], want[1][alike], tol.value, "h")
    assert_close(c[alike], want[2][alike], tol.value, "c")
    assert all(grad.dtype == leaves[name].dtype for name, grad in got.items())
    assert_same_gradients(got, gradients(exact, "reference", share=alike.double()), tol.grad)


@slow_bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "bfloat16"])
@eager_backends
def test_scores_stay_float32_where_products_are_bf16(backend, dtype):
    p = random_problem(seeded(32), T=1, B=256, N=6, K=6, d=8, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        x = input_views(p.x[0], p.weights.W_in, p.weights.b_in, 6)
        if backend == "batched":
            x = kept_by_batched(p, torch.bfloat16)[1].V[0, :, :6]
        active, views, _ = selections(p, backend, torch.bfloat16)
        y, h, c, woke = p.run(backend)
    assert {y.dtype, h.dtype, c.dtype} == {dtype}
    s = scores(p.h, x)
    assert s.dtype == torch.float32
    assert torch.equal(active[0], top_mask(s.sum(-1), 2))
    assert torch.equal(views[0], top_mask(s, 2))
    assert torch.equal(woke, active)
    # The views are rounded, and scores rounded as much would have chosen otherwise.
    W_in, b_in = (w.double() for w in p.weights[:2])
    assert not torch.equal(x.double(), input_views(p.x[0].double(), W_in, b_in, 6))
    rounded = (p.h.bfloat16().unsqueeze(2) * x.bfloat16().unsqueeze(1)).sum(-1)
    assert not torch.equal(views[0], top_mask(rounded, 2))


def tied_problem(dtype: torch.dtype, B: int = 4, d: int = 33) -> Problem:
    """Eight equal views, and eight equal states: every choice of the first step is a tie."""
    sizes = {"T": 3, "B": B, "N": 8, "K": 8, "d": d, "K_a": 5, "K_x": 3, "K_h": 4}
    p = random_problem(seeded(42), **sizes, input_views="split", dtype=dtype)
    return replace(
        p, x=p.x[:, :, :d].repeat(1, 1, 8), h=p.h[:, :1].repeat(1, 8, 1), c=torch.zeros_like(p.c)
    )


@slow_bf16
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "d"), [(1, 5), (33, 5), (4, 33), (33, 33)])
@pytest.mark.parametrize(
    ("backend", "way"), [("reference", "native"), *(("batched", way) for way in WAYS)]
)
def test_equal_vectors_tie_exactly_and_the_lower_index_wins(backend, way, B, d, dtype):
    with by(way):
        active, views, peers = selections(tied_problem(dtype, B, d), backend)
    assert torch.equal(active[0], (torch.arange(8) < 5).expand(B, 8))
    assert torch.equal(views, (torch.arange(8) < 3).expand_as(views))
    own = torch.eye(8, dtype=torch.bool)
    rank = torch.where(own, 8, (~own).cumsum(1) - 1)  # a cell's place among the others
    assert torch.equal(peers[0], ((rank < 4) | own).expand(B, 8, 8))


@pytest.mark.slow
@compiles
def test_compiled_breaks_ties_as_the_reference_does():
    p = tied_problem(torch.float32)
    with torch.no_grad():
        got = p.run("compiled")
    assert torch.equal(got[3][0], (torch.arange(8) < 5).expand(4, 8))
    want = p.run("reference")
    assert torch.equal(got[3], want[3])
    for a, b in zip(got[:3], want[:3], strict=True):
        assert_close(a, b, TOL[torch.float32].value)


@pytest.mark.parametrize("input_views", ["linear", "split"])
@eager_backends
def test_nan_in_the_input_reaches_its_own_sample_from_then_on(backend, input_views):
    p = random_problem(seeded(43), T=6, B=4, input_views=input_views)
    p.x[2, 1, -1] = float("nan")
    y, h, c, active = p.run(backend)
    broken = y.isnan().flatten(2).any(-1)  # (T, B)
    assert broken.nonzero().tolist() == [[t, 1] for t in range(2, 6)]
    for state in (h, c):
        assert state.isnan().flatten(1).any(1).tolist() == [False, True, False, False]
    assert (active.sum(-1) == p.sel.K_a).all()


@eager_backends
def test_nan_in_a_state_wakes_its_cell_and_is_heard_by_the_others(backend):
    p = random_problem(seeded(44), B=4, K_a=1, K_h=1)
    p.h[2, 3, 0] = float("nan")
    active, _, peers = selections(p, backend)
    assert active[0, 2].tolist() == [False, False, False, True]
    assert peers[0, 2, :, 3].all()
    assert (active.sum(-1) == 1).all()
    y = p.run(backend)[0]
    assert y[:, 2].isnan().flatten(1).any(1).all()
    assert y[:, [0, 1, 3]].isfinite().all()


@eager_backends
def test_scores_that_overflow_still_choose_k_h_others(backend):
    """Not the own state in their place, though its score is set to -inf to keep it out."""
    p = random_problem(seeded(45), T=1, B=1, N=3, d=3, K_h=1)
    h = 1e200 * torch.tensor([[[1.0, -1, 0], [-1, 0, 1], [0, 1, -1]]], dtype=torch.float64)
    p = replace(p, h=h)
    assert (p.trace().peer_scores[0, 0, [0, 0, 1], [1, 2, 2]] == float("-inf")).all()
    for way in WAYS:
        with by(way):
            peers = selections(p, backend)[2]
        assert peers[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 1]]


def test_steps_are_kept_only_for_a_gradient(monkeypatch):
    kept, run = [], forward.forward
    monkeypatch.setattr(forward, "forward", lambda *args: (kept.append(run(*args)), kept[-1])[1])
    monkeypatch.setattr(native, "LARGEST", 0)
    p = random_problem(seeded(54), T=6)
    for learns, graph in ((True, True), (True, False), (False, True)):
        p.weights.W.requires_grad_(learns)
        with torch.set_grad_enabled(graph):
            p.run("batched")
    assert [{len(v) for v in out[4]} for out in kept] == [{6}, {1}, {1}]


def test_the_custom_operators_keep_torch_s_rules():
    """Fake tensors, schemas and autograd keys, as torch.compile and export rely on them."""
    p = random_problem(seeded(55), live=True, reset=True)
    for weights in (p.weights, p.weights._replace(W_q=None)):
        leaves = [v.clone().requires_grad_() for v in (p.x, p.h, p.c)]
        args = (*leaves, *weights, None, None, None, p.live, p.reset, *flat(p.sel))
        torch.library.opcheck(forward.forward_op, (*args, torch.float64, True))
