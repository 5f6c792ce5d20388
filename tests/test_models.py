"""What every model of the registry must do. A new model joins by its line in MODELS.

Sizes suit every model's defaults: T steps, B sequences, D input features, H wide.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import close, compiles_steps, slow_bf16
from riglstm import VARIANTS
from riglstm.models import MODELS, base, build, options_of
from riglstm.models.base import State
from riglstm.models.brim import PRESETS

T, B, D, H = 7, 3, 10, 24


@dataclass(frozen=True)
class Case:
    """A model, and options that make it another one."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    input_size: int = D
    draws: bool = False
    """Whether a forward pass draws random numbers, also in eval mode."""
    repeats: bool = False
    """Whether another case's step has the same code, at other sizes or with another selection
    chosen, so that it need not be compiled twice."""

    def __str__(self) -> str:
        return "-".join((self.name, *(str(v) for v in self.options.values())))

    def build(self, seed: int = 0, **options: Any) -> Any:
        """The model in eval mode, its weights spread out so that every path counts."""
        torch.manual_seed(seed)
        model = build(self.name, self.input_size, H, **self.options, **options).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        return model

    def input(self, *, steps: int = T, dtype: torch.dtype = torch.float32) -> Tensor:
        """A batch (T, B, D)."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(steps, B, self.input_size, generator=generator).to(dtype)


def variant(name: str) -> Case:
    """An ablation of RigLSTM."""
    # This one cuts the input into views as large as a cell.
    width = H if name == "no_input_trans" else D
    repeats = name in ("all_inputs", "all_h", "rand_inputs", "rand_h")
    return Case("riglstm", {"variant": name}, width, name.startswith("rand"), repeats)


CASES = [
    *(Case(name) for name in MODELS),
    *(variant(name) for name in VARIANTS),
    Case("riglstm", {"num_layers": 2}, repeats=True),
    Case("brim", PRESETS["cifar"], repeats=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_distinct_case = pytest.mark.parametrize("case", [c for c in CASES if not c.repeats], ids=str)
# Sequences of the others depend on their neighbours in the batch through shared draws.
every_solid_case = pytest.mark.parametrize("case", [c for c in CASES if not c.draws], ids=str)


def run(model: Any, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """A forward pass whose draws, if any, are always the same."""
    torch.manual_seed(2)
    output, state = model(x, state)
    return output, state


def train(model: Any, x: Tensor) -> dict[str, Tensor | None]:
    """Gradients of all parameters after one training step, by name."""
    model.zero_grad()
    output, _ = run(model.train(), x)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output.float() * weight).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@every_case
def test_shapes_attributes_and_batch_first_follow_the_contract(case):
    model = case.build()
    assert (model.input_size, model.hidden_size) == (case.input_size, H)
    assert model.batch_first is False
    assert isinstance(model.streaming, bool)
    output, state = run(model, case.input())
    assert output.shape == (T, B, model.output_size)
    assert isinstance(state, tuple)
    assert all(s.shape[1] == B for s in state)
    start = model.initial_state(B)
    if model.streaming:
        assert [s.shape for s in start] == [s.shape for s in state]
    assert all(s.dtype == torch.float32 for s in (*start, *state))
    other = case.build(batch_first=True)
    swapped, swapped_state = run(other, case.input().transpose(0, 1))
    torch.testing.assert_close(swapped.transpose(0, 1), output)
    torch.testing.assert_close(swapped_state, state)
    if model.streaming:
        # A classifier reads its last step.
        assert torch.equal(base.summary(model, output), output[-1])
        assert torch.equal(base.summary(other, swapped), swapped[:, -1])


@every_case
def test_a_carried_state_and_the_step_in_a_loop_equal_one_long_run(case):
    model, x = case.build(dtype=torch.float64), case.input(dtype=torch.float64)
    whole, last = run(model, x)
    if not model.streaming:
        with pytest.raises(ValueError, match="does not stream: every output attends to every step"):
            model(x, last)
        return
    torch.manual_seed(2)
    state, parts = model.initial_state(B), []
    for part in x.split((1, 4, 2)):
        output, state = model(part, state)
        parts.append(output)
    torch.manual_seed(2)
    stepped, end = base.unroll(model.step, x, model.initial_state(B))
    for got in ((torch.cat(parts), state), (stepped, end)):
        close(got, (whole, last))


@every_solid_case
def test_input_and_state_can_be_cut_by_sequence(case):
    model, x = case.build(dtype=torch.float64), case.input(dtype=torch.float64)
    state = run(model, x)[1] if model.streaming else ()
    whole, last = run(model, x, state)
    part, part_last = run(model, x[:, 1:], tuple(s[:, 1:] for s in state))
    close((part, part_last), (whole[:, 1:], tuple(s[:, 1:] for s in last)))


@every_case
def test_a_seed_decides_weights_outputs_and_gradients_of_every_parameter(case):
    x = case.input()
    first, second, other = case.build(), case.build(), case.build(seed=1)
    assert torch.equal(run(first.train(), x)[0], run(second.train(), x)[0])
    assert not torch.equal(run(first, x)[0], run(other.train(), x)[0])
    again = train(second, x)
    for name, grad in train(first, x).items():
        assert torch.equal(grad, again[name]), name
        assert grad.isfinite().all(), name
        assert grad.any(), name


@every_case
def test_reset_parameters_draws_new_start_values_of_the_same_kind(case):
    model: Any = build(case.name, case.input_size, H, **case.options)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(5)
    model.reset_parameters()
    for name, p in model.state_dict().items():
        drawn = before[name].unique().numel() > 1
        assert torch.equal(p, before[name]) != drawn, name
        if drawn and p.numel() > 30:
            assert 0.6 < p.std() / before[name].std() < 1.6, name
            assert (p.mean() - before[name].mean()).abs() < before[name].std(), name


@every_solid_case
def test_gradients_reach_the_input_and_the_given_state(case):
    model, x = case.build().train(), case.input().requires_grad_()
    start = tuple(s.detach().clone().requires_grad_() for s in model.initial_state(B))
    output, _ = run(model, x, start)
    output[-1].square().sum().backward()
    for t in (x, *start):
        assert t.grad.isfinite().all()
        assert t.grad.any()


@every_case
def test_float64_is_float64_throughout(case):
    model, low = case.build(dtype=torch.float64), case.build()
    low.load_state_dict(model.state_dict())
    output, state = run(model, case.input(steps=1, dtype=torch.float64))
    assert {t.dtype for t in (output, *state, *model.initial_state(B))} == {torch.float64}
    torch.testing.assert_close(
        output.float(), run(low, case.input(steps=1))[0], rtol=1e-4, atol=1e-5
    )


@every_case
@slow_bf16
def test_bf16_autocast_rounds_products_and_carries_the_state_in_full(case):
    model, x = case.build(), case.input()
    exact, _ = run(model, x[:1])
    with torch.autocast("cpu", torch.bfloat16):
        first, _ = run(model, x[:1])
        output, state = run(model, x, None)
        grads = train(model, x)
    # One step: later ones may wake other cells.
    assert (first.float() - exact).abs().max() < 0.05
    assert not torch.equal(first.float(), exact)
    assert output.isfinite().all()
    if model.streaming:
        assert {s.dtype for s in state} == {torch.float32}
    for name, grad in grads.items():
        assert grad.dtype == torch.float32, name
        assert grad.isfinite().all(), name


@every_case
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "a saved state_dict"])
def test_a_copy_is_equal_and_independent(case, way):
    model, x = case.build(), case.input()
    before, _ = run(model, x)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model.state_dict(), file := io.BytesIO())
        file.seek(0)
        other = case.build(seed=1)
        other.load_state_dict(torch.load(file))
    assert torch.equal(run(other, x)[0], before)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    assert not torch.equal(run(other, x)[0], before)
    assert torch.equal(run(model, x)[0], before)


@every_case
def test_bad_inputs_are_refused_with_what_was_expected(case):
    model, x = case.build(), case.input()
    wide = torch.randn(T, B, case.input_size + 1)
    for bad, message in (
        (wide, rf"input_size = {case.input_size}.*got"),
        (x.unsqueeze(0), r"\(T, B, D\).*got"),
        (x[:0], r"at least one step and one sequence.*leave empty batches"),
        (x.double(), r"dtype torch.float32, got torch.float64"),
        (x.numpy(), r"the input must be a Tensor, got ndarray; use torch.as"),
    ):
        with pytest.raises(ValueError, match=message):
            model(bad)


NO_STATES = [
    ((None, None), r"a tuple of \['NoneType', 'NoneType'\]"),
    ([1, "h"], r"a list of \['int', 'str'\]"),
    (torch.zeros(1), "a Tensor"),
    (3, "a int"),
]


@every_case
def test_bad_states_are_refused_with_what_was_expected(case):
    model, x = case.build(), case.input()
    if not model.streaming:
        for bad, got in NO_STATES:
            message = rf"expected state=None, got {got}.*pass the whole"
            with pytest.raises(ValueError, match=message):
                model(x, bad)
        for nothing in (None, (), []):
            model(x, nothing)
        return
    start = model.initial_state(B)
    assert torch.equal(run(model, x, list(start))[0], run(model, x)[0]), "it may be a list"
    for bad in (model.initial_state(B + 1), (*start, start[0])):
        with pytest.raises(ValueError, match=r"state must be a tuple of tensors of shapes.*got"):
            model(x, bad)
    with pytest.raises(ValueError, match=r"state must be torch.float32.*got torch.float64"):
        model(x, tuple(s.double() for s in start))
    for call in (model, *((model.trace,) if hasattr(model, "trace") else ())):
        for bad, got in NO_STATES:
            message = rf"a tuple of tensors of shapes .*got {got}; take it from"
            with pytest.raises(ValueError, match=message):
                call(x, bad)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("batch_first", "yes", r"batch_first must be True or False, got 'yes'"),
        ("compile_step", 2, r"compile_step must be True or False, got 2"),
        ("dropout", "0.1", r"dropout must be a probability in \[0, 1\], got '0.1'"),
        ("dropout", 1.5, r"dropout must be a probability in \[0, 1\], got 1.5"),
        ("dtype", torch.int64, r"dtype must be a floating dtype, got torch.int64; use one of"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(name, option, value, message):
    if option not in options_of(name):
        message = rf"'{option}' is no option of the model '{name}'; it takes .*batch_first"
    with pytest.raises(ValueError, match=message):
        build(name, D, H, **{option: value})


def test_unknown_models_options_and_variants_are_refused_with_the_known_ones():
    for name, options, message in (
        ("no_such_model", {}, r"one of lstm, gridlstm, .*, riglstm.*, got 'no_such_model'"),
        ("rmc", {"heads": 3}, r"'heads' is no option of the model 'rmc'; it takes num_slots, "
         r"num_heads, batch_first, compile_step, device, dtype$"),
        ("riglstm", {"heads": 3}, r"'riglstm'; it takes variant, gate_scale, num_la.*backend"),
        ("riglstm", {"variant": "none"}, r"variant must be one of no_input_trans, .*got 'none'"),
        ("riglstm", {"variant": "all_h", "peers": "top"},
         r"variant='all_h' sets peers='all', got peers='top'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            build(name, D, H, **options)
    assert not {"options", "input_size", "hidden_size"} & set(options_of("riglstm"))


@every_case
@pytest.mark.parametrize("size", [0, -3, 2.5])
def test_sizes_that_are_no_sizes_are_refused(case, size):
    with pytest.raises(ValueError, match=rf"input_size must be .* at least 1, got {size}"):
        build(case.name, size, H, **case.options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"hidden_size must be .* at least 1, got {size}"):
        build(case.name, case.input_size, size, **case.options)  # type: ignore[arg-type]


@pytest.mark.slow
@every_distinct_case
def test_the_compiled_step_equals_the_eager_one_forward_and_backward(case):
    # Every layer is the same code.
    options = {"num_layers": 1} if case.name == "transformer" else {}
    model = case.build(dtype=torch.float64, **options)
    x = case.input(steps=2, dtype=torch.float64)
    if not hasattr(model, "step"):

        def step(x: Tensor, _: State) -> tuple[Tensor, State]:
            output, state = model(x)
            return output, state

        given, start = x, model.initial_state(B)
    else:
        step = model.step
        # From a state that has moved: at a zero one every cell is alike.
        given, start = x[1], run(model, x[:1])[1]
    results = []
    for run_step in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [t.detach().clone().requires_grad_() for t in (given, *start)]
        torch.manual_seed(2)
        output, state = run_step(leaves[0], tuple(leaves[1:]))
        total = sum(t.square().sum() for t in (output, *state))
        learned = [*leaves, *model.parameters()]
        grads = torch.autograd.grad(total, learned, allow_unused=True, materialize_grads=True)
        results.append((output, *state, *grads))
    torch.compiler.reset()
    close(*results, atol=1e-10)


@pytest.mark.slow
@compiles_steps
@slow_bf16
def test_ordinary_use_stays_within_the_compilers_limits(monkeypatch):
    """All models that compile their step do so in one way: one of them is enough."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    case = Case("rmc")
    model, plain = case.build(compile_step=True), case.build()

    def check(batch: int, learns: bool = False) -> None:
        x = torch.randn(2, batch, D).requires_grad_(learns)
        output = model(x)[0]
        assert torch.equal(output, plain(x)[0])
        if output.requires_grad:
            output.sum().backward()

    # Half of the compiler's own patience.
    with torch._dynamo.config.patch(recompile_limit=4):
        for batch in (6, 4, 3):
            for m in (model, plain):
                m.train()
            check(batch)
            check(batch, learns=True)
            with torch.autocast("cpu", torch.bfloat16):
                check(batch)
            for m in (model, plain):
                m.eval()
            with torch.no_grad():
                check(batch + 2)
                check(1)
    torch.compiler.reset()


# With gradients, the first step and those from a carried state are two kinds of call.
@torch.no_grad()
@pytest.mark.parametrize("name", [n for n in MODELS if "compile_step" in options_of(n)])
def test_compile_step_compiles_once_when_first_called(name, monkeypatch):
    compiled = []

    def count(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", count)
    case = Case(name)
    model, plain, x = case.build(compile_step=True), case.build(), case.input()
    assert compiled == []
    for _ in range(2):
        assert torch.equal(run(model, x)[0], run(plain, x)[0])
    assert compiled == [{"fullgraph": True}]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, x)[0], run(plain, x)[0])
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(0.5)
        assert not torch.equal(run(other, x)[0], run(plain, x)[0])
    assert len(compiled) == 3


def test_a_bidirectional_riglstm_does_not_stream_and_has_no_step():
    model: Any = build("riglstm", D, H, bidirectional=True)
    assert not model.streaming
    assert model.output_size == 2 * H
    output, state = model(torch.randn(T, B, D))
    assert output.shape == (T, B, 2 * H)
    assert [s.shape for s in model.initial_state(B)] == [s.shape for s in state]
    with pytest.raises(ValueError, match="bidirectional layer has no single step"):
        model.step(torch.randn(B, D), state)


def test_riglstm_is_the_layer_itself():
    case = Case("riglstm")
    model, x = case.build(), case.input()
    output, _ = model(x)
    assert torch.equal(output, model.layer(x)[0])
    (trace,) = model.trace(x)
    torch.testing.assert_close(trace.output, output)
    (second,) = model.trace(x[1:], model(x[:1])[1])
    assert torch.equal(second.active, trace.active[1:])
