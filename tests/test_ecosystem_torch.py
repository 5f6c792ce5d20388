"""The layer inside the rest of torch: compiler, autocast, functional calls, wrappers.

And what code written for nn.LSTM does with it: its options, its parameters, by name or size.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from helpers import close, compiles_steps, eager_backends, kernels, numbers
from riglstm import BackendError, RigLSTM, RigLSTMCell, no_decay_parameters, scan
from test_layer import build


def loss_of(layer: nn.Module, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> Tensor:
    y, (h_n, c_n) = layer(x, hx)
    return (y * y).sum() + h_n.sum() + (c_n * c_n).sum()


@pytest.mark.slow
# torch's compiler, on its first use in a process, imports modules of torch that warn.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_layer_equals_eager_forward_and_backward_at_any_length():
    layer = build(backend="batched", bidirectional=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    leaves = tuple(layer.parameters())
    for T, B in ((5, 3), (9, 2)):
        # Neither input nor state is contiguous.
        x = numbers(B, T, 4).transpose(0, 1).requires_grad_()
        hx = (numbers(2, 12, B, seed=2).mT, numbers(2, 12, B, seed=3).mT)
        with torch._dynamo.config.patch(error_on_recompile=T == 9):
            got = compiled(x, hx)
        expected = layer(x, hx)
        close(got, expected)
        losses = (y.pow(2).sum() + c.sum() for y, (_, c) in (got, expected))
        close(*(torch.autograd.grad(loss, (x, *leaves)) for loss in losses))


AROUND: dict[str, Any] = {
    "autocast, which leaves float64 alone": partial(torch.autocast, "cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "another default device": partial(torch.device, "meta"),
}


@eager_backends
@pytest.mark.parametrize("around", AROUND)
def test_a_call_gives_the_same_numbers_within(around, backend):
    layer, x = build(backend=backend, num_layers=2, bidirectional=True), numbers(5, 3, 4)
    packed = pack_sequence([x[:n, b] for b, n in enumerate((3, 5, 2))], enforce_sorted=False)

    def calls() -> tuple[Tensor, ...]:
        y, state = layer(x)
        return y, *state, layer(x, state)[0], layer(packed)[0].data

    want = calls()
    with AROUND[around]():
        got = calls()
    assert all(map(torch.equal, got, want))
    assert all(v.is_inference() == (around == "inference mode") for v in got)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@eager_backends
def test_parametrized_weights_are_the_ones_that_run(backend):
    layer, plain = build(backend=backend), build(backend=backend)
    parametrize.register_parametrization(layer, "weight_gates_l0", Doubled())
    with torch.no_grad():
        plain.weight_gates_l0.mul_(2)
    x = numbers(5, 3, 4)
    close(layer(x), plain(x))
    loss_of(layer, x).backward()
    loss_of(plain, x).backward()
    got, want = layer.parametrizations.weight_gates_l0.original.grad, plain.weight_gates_l0.grad
    close(got, 2 * want)


@eager_backends
def test_checkpoint_recomputes_the_same_gradients(backend):
    layer = build(backend=backend, cells="random")
    x = numbers(5, 3, 4).requires_grad_()
    torch.manual_seed(3)
    leaves = (x, *layer.parameters())
    expected = torch.autograd.grad(loss_of(layer, x), leaves)
    torch.manual_seed(3)
    loss = checkpoint(loss_of, layer, x, use_reentrant=False)
    close(torch.autograd.grad(loss, leaves), expected)


# torch builds its forward-mode formulas with a part of itself that it has since deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_what_batched_cannot_differentiate_it_refuses_by_name_and_the_reference_does():
    layer, x = build(backend="batched"), numbers(5, 3, 4)
    several = torch.stack((x, -x))

    def run(v: Tensor) -> Tensor:
        return layer(v)[0]

    def loss(v: Tensor) -> Tensor:
        return run(v).square().sum()

    def dual() -> Tensor:
        with forward_ad.dual_level():
            return run(forward_ad.make_dual(x, ones))

    y = run(x)
    ones = torch.ones_like(x)
    modes = (
        "backend='batched' has backward() only: no forward-mode derivative, and none of "
        "torch.func's grad, jvp and jac*; use backend='reference' or 'auto'"
    )
    batch = (
        "backend='batched' has one gradient at a time, got a batch of them "
        "(is_grads_batched=True, vectorize=True, vmap); ask for one after another, or use "
        "backend='reference'"
    )
    jacobian = torch.autograd.functional.jacobian
    many = torch.vmap(lambda u: torch.autograd.grad(y, layer.weight_gates_l0, u))
    for call, message in (
        (dual, modes),
        (lambda: jvp(loss, (x,), (ones,)), modes),
        (lambda: grad(loss)(x), modes),
        (lambda: jvp(torch.vmap(run), (several,), (several,)), modes),
        (lambda: jacobian(run, x, vectorize=True), batch),
        (lambda: many(y.expand(2, 5, 3, 12)), batch),
    ):
        with pytest.raises(NotImplementedError) as caught:
            call()
        assert str(caught.value) == message
    with pytest.raises(ValueError, match="needs a dimension of at least 1 here, got one of size 0"):
        torch.vmap(run)(several[:0])
    # Compiled, forward mode would give zeros.
    for transform in (lambda f, x: jvp(f, (x,), (ones,))[1], lambda f, x: jacfwd(f)(x)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, t=transform: t(run, x), backend="aot_eager")
        with pytest.raises(Exception, match="has backward"):
            compiled(x)
    (dx,) = torch.autograd.grad(loss(leaf := x.clone().requires_grad_()), leaf)
    want = jacobian(lambda v: run(v).sum(0), x)
    layer.backend = "reference"
    close(grad(loss)(x), dx)
    close(jvp(loss, (x,), (ones,))[1], dx.sum())
    close(jacobian(lambda v: run(v).sum(0), x, vectorize=True), want)


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, x: grad(f)(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: jacrev(lambda v: f(v) * v.sum((0, 2)))(x),
    "jacfwd": lambda f, x: jacfwd(lambda v: f(v) * v.sum((0, 2)))(x),
    "vmap of grad": lambda f, x: torch.vmap(grad(f))(torch.stack((x, -x))),
    "grad of vmap": lambda f, x: grad(lambda v: torch.vmap(f)(v).sum())(torch.stack((x, -x))),
    "jvp of vmap": lambda f, x: jvp(torch.vmap(f), (x[None],), (x[None],))[1],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_auto_takes_the_reference_where_torch_func_takes_derivatives(transform, compiled):
    answers = []
    for backend in ("auto", "reference"):
        layer = build(backend=backend, num_cells=2)
        said = repr(layer)

        def run(x: Tensor, layer: RigLSTM = layer) -> Any:
            return transform(lambda v: layer(v)[0].square().sum(), x)

        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager") if compiled else run
        answers.append(run(numbers(2 if compiled else 5, 3, 4)))
        assert repr(layer) == said
    close(*answers)
    assert answers[0].abs().max() > 0


@pytest.mark.slow
@compiles_steps
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_backend_stays_compiled_over_many_kinds_of_calls(monkeypatch):
    """Each kind of call has a budget of its own; one version more than it holds would raise.

    A batch size, any other and one, each at the first step and later: six versions serve them
    all. Six are a kind's whole budget here, so two kinds that shared one would exceed it. What a
    step is compiled to does not matter.
    """
    from riglstm.scan import compiled

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", partial(compile_, backend="eager"))
    compiled._step.cache_clear()
    torch._dynamo.reset()
    twin, layer = build(backend="reference"), build(backend="compiled")
    with torch._dynamo.config.patch(recompile_limit=6):
        for B in (4, 5, 1):
            x = numbers(2, B, 4)
            flags = torch.rand(2, B, generator=torch.Generator().manual_seed(1)) < 0.5
            close(layer(x)[0], twin(x)[0])
            with torch.no_grad():
                for options in ({}, {"mask": flags}, {"reset": flags}):
                    close(layer(x, **options)[0], twin(x, **options)[0])
    compiled._step.cache_clear()


@eager_backends
def test_two_backward_passes_through_one_graph_agree_and_add_up(backend):
    layer = build(backend=backend, num_layers=2)
    loss = loss_of(layer, numbers(5, 3, 4))
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    loss.backward()
    for p, first in zip(layer.parameters(), once, strict=True):
        assert torch.equal(p.grad, 2 * first)


@eager_backends
@pytest.mark.parametrize("by_context", [False, True])
def test_layer_made_on_meta_tells_shapes_and_gets_its_weights_later(by_context, backend):
    with torch.device("meta" if by_context else "cpu"):
        device = None if by_context else "meta"
        layer = RigLSTM(4, 12, 2, dtype=torch.float64, backend=backend, device=device)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert "num_layers=2" in repr(layer)
    y, (h_n, c_n) = layer(torch.empty(5, 3, 4, device="meta", dtype=torch.float64))
    assert (y.shape, h_n.shape, c_n.shape) == ((5, 3, 12), (2, 3, 12), (2, 3, 12))
    assert {v.device.type for v in (y, h_n, c_n)} == {"meta"}
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert all(p.isfinite().all() and p.any() for p in layer.parameters())
    source = build(num_layers=2)
    layer.load_state_dict(source.state_dict())
    x = numbers(5, 3, 4)
    close(layer(x), source(x))


@pytest.mark.parametrize("backend", ["triton", "compiled"])
def test_a_layer_may_be_made_on_meta_for_a_backend_that_runs_elsewhere(backend, monkeypatch):
    monkeypatch.setattr(scan.compiled, "available", lambda device: device.type == "cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.device("meta"):
        assert "backend" in repr(RigLSTM(4, 12, backend=backend))
        for wrong in ("tritn", ["triton"]):
            with pytest.raises(BackendError, match="backend must be one of"):
                RigLSTM(4, 12, backend=wrong)


def test_a_layer_for_a_gpu_may_be_made_on_a_cpu_and_moved(monkeypatch):
    asked = []
    monkeypatch.setattr(scan, "_no_triton", lambda device: asked.append(device.type))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    RigLSTM(4, 12, backend="triton")
    assert not asked, "nor is CUDA begun with"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    RigLSTM(4, 12, backend="triton")
    assert asked == ["cpu"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "backend", ["reference", "batched", pytest.param("triton", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("of", ["inputs", "weights"])
def test_vmap_gives_outputs_and_gradients_of_single_calls_without_a_warning(of, backend):
    """Operators make these calls, one after another, and so give their bits."""
    if backend == "triton":
        kernels("forward", on_a_gpu=False)
    layers = [RigLSTM(4, 12, backend=backend) for _ in range(3)]
    weights, _ = torch.func.stack_module_state(layers)
    x = torch.randn(3, 2, 2, 4, requires_grad=of == "inputs")
    for w in weights.values():
        w.requires_grad_(of == "weights")
    wanted = (x,) if of == "inputs" else tuple(weights.values())

    def run(w: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layers[0], w, x)[0]  # type: ignore[no-any-return]

    single = [run({n: w[i] for n, w in weights.items()}, x[i]) for i in range(3)]
    got, want = (
        (y.detach(), *torch.autograd.grad(y.square().sum(), wanted))
        for y in (torch.vmap(run)(weights, x), torch.stack(single))
    )
    with torch.no_grad():
        got, want = (*got, torch.vmap(run)(weights, x)), (*want, want[0])
    near = {"rtol": 1e-5, "atol": 1e-6} if backend == "reference" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(got, want, **near)


STATES = [{}, {"soft_update": False}, {"active_cells": 6}, {"views": "soft"}, {"num_cells": 1}]


@eager_backends
@pytest.mark.parametrize("options", [*STATES, {"num_layers": 2}, {"bidirectional": True}])
def test_final_states_can_be_detached_in_place_as_those_of_nn_lstm(options, backend):
    layer, x = RigLSTM(4, 12, backend=backend, **options), torch.randn(3, 2, 4)
    saved: list[Tensor] = []  # kept, so that no other tensor gets their memory

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, (h, c) = layer(x)
    assert len({v.untyped_storage().data_ptr() for v in (y, h, c)}) == 3
    # So that a change in place cannot reach a gradient unseen.
    assert {h.data_ptr(), c.data_ptr()}.isdisjoint(t.data_ptr() for t in saved)
    h.detach_().zero_()
    c.detach_().zero_()
    y.sum().backward()
    with torch.no_grad():
        y, (h, c) = layer(x)
    # What was made without gradients can enter a graph later.
    scale = nn.Parameter(torch.ones(1))
    (y * scale).sum().backward()
    assert h.mul_(scale).requires_grad
    assert c.mul_(scale).requires_grad
    for made in RigLSTMCell(4, 12)(x[0]):
        assert not made.detach_().requires_grad


@eager_backends
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"cells": "random"}, {"batch_first": True}],
)
def test_a_batch_of_no_sequences_is_a_call_like_any_other(options, backend):
    """As of nn.LSTM: a process without data must not keep the others waiting for its gradients."""
    layer = RigLSTM(4, 12, backend=backend, **options)
    known = {k: v for k, v in options.items() if k != "cells"}
    lstm, x = nn.LSTM(4, 12, **known), torch.randn(3, 0, 4, requires_grad=True)
    x_in = x.transpose(0, 1) if layer.batch_first else x
    y, state = layer(x_in)
    y_want, state_want = lstm(x_in)
    assert y.shape == y_want.shape
    assert [s.shape for s in state] == [s.shape for s in state_want]
    y, (h, c) = layer(x_in, state)
    (y.sum() + h.sum() + c.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
    assert x.grad is not None
    flags = torch.ones(x_in.shape[:2], dtype=torch.bool)
    assert layer(x_in, reset=flags, mask=flags)[0].shape == y.shape
    assert RigLSTMCell(4, 12)(x[0])[0].shape == (0, 12)


def test_positional_arguments_are_those_of_nn_lstm():
    theirs = list(inspect.signature(nn.LSTM.__base__.__init__).parameters)[2:]  # self and mode
    ours = list(inspect.signature(RigLSTM).parameters.values())
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == theirs
    layer = RigLSTM(4, 12, 2, False, True, 0.25, True, 0, "cpu", torch.float64)
    assert (layer.proj_size, layer.weight_gates_l1.dtype) == (0, torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": 1, "batch_first": 0, "bidirectional": 1, "proj_size": 0, "steady_start": 0},
        {"bias": np.True_, "batch_first": np.int64(1), "soft_update": np.True_},
        {"input_size": np.int64(4), "hidden_size": np.int32(12), "num_layers": np.uint8(2)},
        {"num_cells": np.int64(4), "num_views": np.int64(3), "active_cells": np.int64(2)},
        {"views_per_cell": np.int16(2), "peers_per_cell": np.int64(1), "proj_size": np.int64(0)},
        {"dropout": np.float32(0.25), "num_layers": 2, "forget_bias": np.float64(1)},
        {"update_scale": np.float32(0.5), "update_bias": np.float64(2)},
    ],
)
def test_numbers_of_numpy_and_switches_by_1_and_0_become_pythons_own(options):
    layer = RigLSTM(**{"input_size": 4, "hidden_size": 12, **options})
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}
    twin = RigLSTM(**{"input_size": 4, "hidden_size": 12, **plain})
    assert repr(layer) == repr(twin)
    assert "np." not in repr(layer)
    held = {**vars(layer), **vars(layer.selection)}
    assert {k: type(v) for k, v in held.items() if isinstance(v, np.generic)} == {}
    for name in ("bias", "batch_first", "bidirectional", "steady_start"):
        assert isinstance(getattr(layer, name), bool), name
    cell = RigLSTMCell(np.int64(4), np.int64(12), 1)  # type: ignore[arg-type]
    held = (cell.input_size, cell.hidden_size, cell.bias)
    assert (held, *map(type, held)) == ((4, 12, True), int, int, bool)


@pytest.mark.parametrize("bias", [True, False])
def test_all_weights_are_one_list_for_each_layer_and_direction(bias):
    layer = RigLSTM(4, 12, 2, bias, bidirectional=True)
    listed = layer.all_weights
    assert [len(row) for row in listed] == [6 if bias else 3] * 4
    flat = [w for row in listed for w in row]
    assert all(a is b for a, b in zip(flat, layer.parameters(), strict=True))


def test_a_loop_that_fills_biases_by_name_leaves_the_soft_update_alone():
    layer = RigLSTM(4, 12, 2, bidirectional=True)
    for name, p in layer.named_parameters():
        if "bias" in name:
            p.data.fill_(0)
    filled = {name for name, p in layer.named_parameters() if not p.any()}
    assert {name.partition("_l")[0] for name in filled} == {"bias_in", "bias_gates"}
    assert len(filled) == 8
    assert all((layer.weights(k, r).update_bias == 4).all() for k in (0, 1) for r in (False, True))


def test_weight_decay_leaves_biases_and_vectors_of_a_whole_model_alone():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "norm": nn.LayerNorm(4),
            "bias_of_something": nn.Linear(4, 4),
            "rnn": RigLSTM(4, 12, 2),
            "tied": nn.Linear(4, 5),
        }
    )
    model["tied"].weight = model["embed"].weight
    parametrize.register_parametrization(model["rnn"], "bias_gates_l1", Doubled())
    free = no_decay_parameters(model)
    named = dict(model.named_parameters())
    rest = {name for name, p in named.items() if not any(p is q for q in free)}
    gates = [n + s for s in ("_l0", "_l1") for n in ("weight_in", "weight_gates", "weight_query")]
    assert rest == {"embed.weight", "bias_of_something.weight", *(f"rnn.{n}" for n in gates)}
    assert len(free) == len(named) - len(rest)
