"""RIM over a sequence: what needs no state before the loop, gradients of weights after it.

Its step, held to NumPy in test_rim.py, is the witness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import compiles_steps, slow_bf16
from riglstm.models.base import unroll
from riglstm.models.deferred import Deferred, deferred_product
from riglstm.models.rim import RIM
from test_rim import TOL, a_rim, a_state, random, seeded

pytestmark = pytest.mark.slow

Run = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that `compile_step` asks for, with a step that is left as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: function)


def results(model: RIM, run: Run, B: int = 3, T: int = 6) -> dict[str, Tensor]:
    """Outputs, last state, and the gradients of input, state and parameters."""
    gen = seeded(21)
    x = random(gen, T, B, model.input_size).requires_grad_()
    state = tuple(s.requires_grad_() for s in a_state(gen, model, B))
    output, (h, c) = run(x, state)
    loss = (output * random(gen, *output.shape)).sum() + (c * random(gen, *c.shape)).sum()
    named = dict(zip(("x", "h_0", "c_0"), (x, *state), strict=True)) | {
        name: p for name, p in model.named_parameters() if p.requires_grad
    }
    gradients = torch.autograd.grad(loss, list(named.values()))
    found = {"output": output, "h": h, "c": c}
    return found | {f"d{n}": g for n, g in zip(named, gradients, strict=True)}


def assert_as_its_steps(model: RIM, run: Run | None = None, B: int = 3) -> None:
    """A model, or what was made of it, over a sequence beside its steps one by one."""
    want = results(model, functools.partial(unroll, model.step), B)
    got = results(model, model if run is None else run, B)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert value.any(), name
        assert (got[name] - value).abs().max() < TOL, name


@pytest.mark.parametrize("compile_step", [False, True])
@pytest.mark.parametrize(("K_a", "B"), [(2, 3), (4, 3), (1, 1)])
def test_a_sequence_equals_its_steps_forward_and_backward(compile_step, K_a, B, uncompiled):
    assert_as_its_steps(a_rim(seeded(20), active_cells=K_a, compile_step=compile_step), B=B)


@compiles_steps
# The compiler makes an instance of every autograd function that it traces.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
def test_a_compiled_sequence_equals_its_steps(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert_as_its_steps(a_rim(seeded(20), compile_step=True))
    torch.compiler.reset()


def test_frozen_weights_leave_the_others_gradients_as_they_are(uncompiled):
    model = a_rim(seeded(20), compile_step=True)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 2 == 0)
    assert_as_its_steps(model)


def test_a_step_makes_three_products_and_three_backward(uncompiled):
    """All others, those for the gradients of weights too, are made once a sequence."""
    model, counts = a_rim(seeded(20), compile_step=True), []
    names = ("aten::bmm", "aten::mm", "aten::addmm", "aten::baddbmm")
    for T in (4, 9):
        with torch.profiler.profile() as forward:
            output, _ = model(random(seeded(22), T, 2, 5))
        with torch.profiler.profile() as backward:
            output.sum().backward()
        for seen in (forward, backward):
            counts.append(sum(event.name in names for event in seen.events()))
    assert (counts[2] - counts[0], counts[3] - counts[1]) == (3 * 5, 3 * 5)


def test_a_changed_start_is_noticed_where_it_is_a_row(uncompiled):
    """A batch of one has the same layout with cells first: nothing is copied."""
    for compile_step in (False, True):
        model = a_rim(seeded(20), compile_step=compile_step)
        state = a_state(seeded(21), model, 1)
        output, _ = model(random(seeded(22), 3, 1, 5), state)
        state[0].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_kept_graph_gives_the_same_gradients_again(uncompiled):
    model = a_rim(seeded(20), compile_step=True)
    output, (_, c) = model(random(seeded(22), 4, 2, 5))
    loss = output.sum() + c.sum()
    first, second = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=again)
        for again in (True, False)
    )
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_deferred_gradients_are_not_differentiated_by_mistake(uncompiled):
    """Of the weights in the gradient of x, which the loop has without their history."""
    model = a_rim(seeded(20), compile_step=True)
    x = random(seeded(22), 3, 2, 5).requires_grad_()
    (slope,) = torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


def test_the_last_state_alone_can_be_differentiated_and_changed(uncompiled):
    found = []
    for compile_step in (False, True):
        model = a_rim(seeded(20), compile_step=compile_step)
        _, (h, c) = model(random(seeded(22), 3, 1, 5))
        h.mul_(2)
        found.append(torch.autograd.grad(h.sum() + c.sum(), list(model.parameters())))
    for want, got in zip(*found, strict=True):
        assert (got - want).abs().max() < TOL


@slow_bf16
def test_a_biass_deferred_gradient_is_summed_in_its_own_precision():
    weight, bias = torch.ones(1, 3, 4, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        deferred, x = Deferred(weight, 1, 257, True, bias), torch.ones(1, 257, 3)
        y = deferred_product(x, deferred.weight, deferred.slots[0])
    deferred.rows.append(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    # bf16 has 256 and 258.
    assert torch.equal(bias.grad, torch.full((1, 2), 257.0))


@compiles_steps
def test_a_model_that_compiles_its_step_can_be_compiled_as_a_whole():
    model = a_rim(seeded(20), compile_step=True)
    assert_as_its_steps(model, torch.compile(model, backend="eager", fullgraph=True))
    torch.compiler.reset()


@torch.no_grad()
def test_a_compiled_step_is_for_sequences_of_any_length(monkeypatch):
    graphs: list[Any] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    model = a_rim(seeded(20), compile_step=True)
    for T in (4, 6, 9, 1):
        model(random(seeded(22), T, 3, 5))
    assert len(graphs) == 1
    torch.compiler.reset()


def test_every_step_cell_and_sample_draws_its_own_dropout():
    model = a_rim(seeded(20), dropout=0.5).train()
    torch.manual_seed(0)
    given, _ = model.cell.lay_out(torch.ones(40, 8, 5, dtype=torch.float64), deferred=False)
    masks = [torch.stack(steps) for steps in given[1:]]
    for mask in masks:
        for dim in range(3):
            assert (mask.diff(dim=dim) != 0).any(dim=dim).all(dim=-1).any()
    kept = masks[-1]
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert abs(kept.mean().item() - 1) < 0.1


def test_eager_sequences_can_be_differentiated_twice():
    model = a_rim(seeded(20))
    found = []
    for run in (model, functools.partial(unroll, model.step)):
        x = random(seeded(22), 3, 2, 5).requires_grad_()
        output, _ = run(x, a_state(seeded(23), model, 2))
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), list(model.parameters())))
    for got, want in zip(*found, strict=True):
        assert want.any()
        assert (got - want).abs().max() < 1e-8
