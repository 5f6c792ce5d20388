"""Captured graphs: the bookkeeping everywhere, the capture itself where there is a GPU."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers import (
    ALL_VARIANTS,
    TOL,
    assert_close,
    assert_equals_the_reference,
    assert_same_gradients,
    close,
    random_problem,
    seeded,
    slow_bf16,
)
from riglstm import RigLSTM, cuda_graphs, scan
from riglstm.lab.tasks.balls import FEATURES, BallsNetwork
from riglstm.lab.train.graphed import GraphedModule
from riglstm.models import MODELS, build, options_of
from riglstm.scan import compiled
from riglstm.selection import Selection

T, B, D, H = 5, 3, 10, 24


class Repeated:
    """`cuda_graphs.Captured` for a CPU: a replay does the work anew, into the same memory."""

    def __init__(self, work: Callable[[], tuple[Tensor | None, ...]], *_: Any) -> None:
        self.work, self.pool = work, None
        self.results = work()

    def replay(self) -> None:
        for old, new in zip(self.results, self.work(), strict=True):
            if old is not None and new is not None:
                old.copy_(new)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures on a CPU."""
    monkeypatch.setattr(cuda_graphs, "Captured", Repeated)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())


def models(name: str, **options: Any) -> tuple[Any, Any]:
    """Two equal models in training mode, without dropout if not said otherwise."""
    torch.manual_seed(0)
    quiet = {"dropout": 0.0} if "dropout" in options_of(name) else {}
    model, other = (
        build(name, D, H, **{"dtype": torch.float64, **quiet, **options}) for _ in range(2)
    )
    other.load_state_dict(model.state_dict())
    return model, other


def batch(seed: int, device: str = "cpu") -> Tensor:
    x = torch.randn(T, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.to(device).requires_grad_()


def compare(core: Any, twin: Any, with_state: bool, device: str = "cpu") -> None:
    """Two batches, gradients accumulated; the second from the first one's state if it streams."""
    # A state that is learned has an autograd graph, which must not be there at the capture.
    like = [tuple(s.detach().requires_grad_(s.requires_grad) for s in core.initial_state(B))]
    captured, kept = GraphedModule(core, batch(0, device), *like[: int(with_state)]), []
    given, twin_given = ((m.initial_state(B),) if with_state else () for m in (core, twin))
    for seed in (1, 2):
        x, twin_x = batch(seed, device), batch(seed, device)
        y, state = captured(x, *given)
        twin_y, twin_state = twin(twin_x, *twin_given)
        torch.testing.assert_close(y, twin_y)
        torch.testing.assert_close(state, twin_state)
        kept.append((y, y.clone()))
        for output, last in ((y, state), (twin_y, twin_state)):
            (output.square().sum() + sum(s.sin().sum() for s in last)).backward()
        torch.testing.assert_close(x.grad, twin_x.grad)
        if with_state and twin.streaming:
            given, twin_given = ((tuple(s.detach() for s in last),) for last in (state, twin_state))
    for p, q in zip(core.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert all(torch.equal(y, then) for y, then in kept), "results are the caller's"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_equal_the_cores_own(name, with_state):
    compare(*models(name), with_state)


# torch, when the first product of a process runs in the backward thread; the compiler, which asks
# carried states, which are no leaves, for their gradient, advises faster products, loads parts of
# torch that torch has given up, and makes instances of autograd functions.
on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Its message starts on a new line.
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is depr:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning"
    ),
]


def marked(test: Callable[..., None]) -> Callable[..., None]:
    """A test of the capture itself."""
    return functools.reduce(lambda test, mark: mark(test), on_a_gpu, test)


@marked
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MODELS),
        *((n, {"compile_step": True}) for n in MODELS if "compile_step" in options_of(n)),
    ],
)
def test_a_captured_core_equals_the_core_on_a_gpu(name, options, with_state):
    core, twin = models(name, **options)[0].cuda(), models(name)[0].cuda()
    compare(core, twin, with_state, "cuda")


def rolled_out(device: str, tol: float) -> None:
    """The whole network of the balls, captured with its roll-out, beside its twin."""
    nets = [BallsNetwork(build("riglstm", FEATURES, H)).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    frames = torch.rand(T, B, 64, 64, device=device)
    captured = GraphedModule(nets[0], frames, 3)
    for _ in range(2):
        made = [captured(frames, 3), nets[1](frames, 3)]
        assert_close(*made, tol)
        for logits in made:
            logits.square().mean().backward()
    assert_same_gradients(*({n: p.grad for n, p in net.named_parameters()} for net in nets), tol)


@pytest.mark.usefixtures("no_gpu")
def test_a_network_is_captured_with_its_roll_out():
    rolled_out("cpu", 1e-6)


@marked
def test_a_network_is_captured_with_its_roll_out_on_a_gpu():
    # cuDNN's convolutions are in TF32.
    rolled_out("cuda", 1e-3)


def train(captured: Any, core: Any, seed: int) -> tuple[Tensor, ...]:
    """Output and gradients of a pass whose draws follow from the seed."""
    torch.manual_seed(seed)
    core.zero_grad(set_to_none=True)
    y, _ = captured(batch(1, "cuda"))
    y.square().sum().backward()
    return y.detach(), *(p.grad for p in core.parameters() if p.grad is not None)


@marked
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rim", {"dropout": 0.5}),
        ("rim", {"dropout": 0.5, "compile_step": True}),
        ("transformer", {"dropout": 0.5}),
        ("riglstm", {"variant": "rand_cells"}),
    ],
)
def test_each_replay_draws_anew_and_a_seed_repeats_it_on_a_gpu(name, options):
    core = models(name, **options)[0].cuda()
    captured = GraphedModule(core, batch(0, "cuda"))
    first, again, other = (train(captured, core, seed) for seed in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], other[0])
    y = captured(batch(1, "cuda"))[0].detach()
    assert not torch.equal(captured(batch(1, "cuda"))[0], y)


@pytest.mark.usefixtures("no_gpu")
def test_a_backward_through_an_earlier_pass_or_a_second_through_one_is_refused():
    core, _ = models("entnet")
    captured = GraphedModule(core, batch(0))
    first, _ = captured(batch(1))
    captured(batch(2))
    with pytest.raises(RuntimeError, match="expected backward through that one, got another"):
        first.sum().backward()
    y, state = captured(batch(1))
    y.sum().backward(retain_graph=True)
    before = core.keys.grad.clone()
    for again in (y, state[0]):
        with pytest.raises(RuntimeError, match="got another or a second; call backward"):
            again.sum().backward(retain_graph=True)
    assert torch.equal(core.keys.grad, before)
    captured(batch(1))[0].sum().backward()


@slow_bf16
@pytest.mark.usefixtures("no_gpu")
def test_the_capture_keeps_the_autocast_that_was_active():
    core, x = models("rmc", dtype=torch.float32)[0], batch(0).float().detach()
    with torch.autocast("cpu", torch.bfloat16):
        captured = GraphedModule(core, x)
        expected, _ = core(x)
    assert torch.equal(captured(x)[0], expected)
    assert not torch.equal(core(x)[0], expected)


EXACT = TOL[torch.float64]


@pytest.fixture
def cache(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> cuda_graphs.Cache:
    """That of the `compiled` backend, in use on a CPU, around a step that is not compiled."""

    def plain(sel: Selection, kind: Any) -> Callable[..., Any]:
        return lambda x, h, c, weights, _, *flags: compiled.step(x, h, c, weights, sel, *flags)

    own = cuda_graphs.Cache(graphs=4, kinds=6)
    monkeypatch.setattr(compiled, "GRAPHS", own)
    monkeypatch.setattr(compiled, "_step", plain)
    monkeypatch.setattr(compiled, "_repeats", lambda x: True)
    return own


def captures(cache: cuda_graphs.Cache) -> list[int]:
    """Graphs of each kind, the least recently used first."""
    return [len(kind.graphs) for kind in cache.kinds.values()]


@pytest.mark.parametrize("flags", [{}, {"live": True, "reset": True}], ids=["plain", "flags"])
@pytest.mark.parametrize("name", ALL_VARIANTS)
def test_the_loop_and_its_graph_equal_the_reference_for_every_rule(name, flags, cache):
    for seed, known in ((1, [0]), (2, [1]), (3, [1])):
        p = random_problem(seeded(seed), T=4, update_bias=True, **ALL_VARIANTS[name], **flags)
        assert_equals_the_reference(p, "compiled", torch.float64)
        assert captures(cache) == known, "captured when a kind comes again, and once"


@pytest.mark.parametrize("calls", [1, 2], ids=["loop", "graph"])
def test_a_second_derivative_and_several_gradients_at_once_are_refused(calls, cache):
    layer, x = soft(), torch.randn(4, 2, D, dtype=torch.float64, requires_grad=True)
    for _ in range(calls):
        output, _ = layer(x)
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    assert captures(cache) == [calls - 1]
    many = torch.ones(2, *output.shape, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="one gradient at a time"):
        torch.autograd.grad(output, x, many, retain_graph=True, is_grads_batched=True)
    once = " can be differentiated once; for double backward use backend='reference'"
    with pytest.raises(NotImplementedError, match=f"'compiled'{once}"):
        (output.square().mean() + grad.square().sum()).backward()


def test_a_loop_leaves_the_filters_of_warnings_alone():
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("mine", UserWarning, stacklevel=1)
            cuda_graphs.Loop(lambda v: (v * 2,), (x,))(x)[0].sum().backward()
    assert [str(w.message) for w in shown] == ["mine"], "once for a place in the code"


def losses(layer: RigLSTM, *seeds: int) -> list[Tensor]:
    """One for each input: all of them wait for their backward pass."""
    found = []
    for seed in seeds:
        x = torch.randn(4, 2, D, generator=seeded(seed), dtype=torch.float64)
        y, (h, c) = layer(x.to(layer.weight_in_l0.device))
        found.append(y.square().sum() + h.sin().sum() + c.cos().sum())
    return found


def soft(**options: Any) -> RigLSTM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_cells": 4, "views": "soft", "dtype": torch.float64}
    return RigLSTM(D, H, backend="compiled", **{**sizes, **options})


def gradients_of(losses: list[Tensor], layer: RigLSTM, order: tuple[int, ...]) -> list[Tensor]:
    """Summed over backward passes in an order, in which one may come twice."""
    layer.zero_grad()
    for i in order:
        losses[i].backward(retain_graph=True)
    return [p.grad.clone() for p in layer.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0, 2, 1)])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_calls_that_wait_for_each_other_are_differentiated_in_any_order(
    options, order, most, cache
):
    cache.most_graphs = most
    layer = soft(**options)
    losses(layer, 0), losses(layer, 0)
    got = gradients_of(losses(layer, 1, 2, 3), layer, order)
    waiting = 3 * len(layer.all_weights)
    assert sum(captures(cache)) == min(most, waiting)
    layer.backend = "reference"
    want = gradients_of(losses(layer, 1, 2, 3), layer, order)
    close(got, want, atol=EXACT.grad)


def test_calls_that_wait_get_a_graph_each_and_leave_it_to_the_next(cache):
    layer = soft()
    losses(layer, 0)
    assert captures(cache) == [0]
    kept = losses(layer, 1, 2)
    assert captures(cache) == [2]
    del kept
    losses(layer, 1, 2)
    assert captures(cache) == [2], "those whose outputs nobody has are free again"
    kept = losses(layer, 1, 2, 3, 4, 5, 6)
    assert captures(cache) == [4]
    for loss in kept:
        loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        kept[0].backward()


def test_the_least_recently_used_kinds_go(cache):
    layer = soft()

    def call(T: int) -> None:
        layer(torch.randn(T, 1, D, dtype=torch.float64))

    for T in (2, 3, 4, 5, 6):
        call(T), call(T)
    assert captures(cache) == [0, 1, 1, 1, 1], "four graphs are kept here"
    call(3), call(7), call(7)
    assert captures(cache) == [0, 0, 1, 1, 1, 1]
    for captured in (0, 0, 0, 0, 1):
        call(2)
        assert captures(cache)[-1] == captured, "one that went has to come four times as often"
    for T in range(10, 20):
        call(T)
    assert captures(cache) == [0] * 6


def test_what_a_graph_depends_on_makes_another_kind(cache):
    layer = soft(dtype=torch.float32)
    x = torch.randn(3, 2, D)
    state = (torch.randn(1, 2, H), torch.randn(1, 2, H))
    layer(x), layer(x)
    assert captures(cache) == [1]
    layer(x, state)
    assert captures(cache) == [1], "a state of zeros is as good as any"
    calls: tuple[Callable[[], Any], ...] = (
        lambda: layer(x.clone().requires_grad_()),
        lambda: layer.requires_grad_(False)(x),
        torch.no_grad()(lambda: layer(x)),
        torch.inference_mode()(lambda: layer(x)),
    )
    for i, call in enumerate(calls, 2):
        call()
        assert len(captures(cache)) == i
    layer.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert len(captures(cache)) == 6


@pytest.mark.parametrize("frozen", ["none", "all", "weight_gates_l0", "some"])
@pytest.mark.parametrize("input_learns", [False, True])
def test_gradients_are_those_that_are_asked_for(frozen, input_learns, cache):
    layer = soft()
    for i, (name, p) in enumerate(layer.named_parameters()):
        p.requires_grad_(not (frozen in ("all", name) or (frozen == "some" and i % 2)))
    x = torch.randn(3, 2, D, dtype=torch.float64, requires_grad=input_learns)
    leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
    found = []
    for backend in ("compiled", "compiled", "compiled", "reference"):
        layer.backend = backend  # type: ignore[assignment]
        y, (h, c) = layer(x)
        assert y.requires_grad is bool(leaves)
        grads = torch.autograd.grad((y * c).sum() + h.sum(), leaves) if leaves else ()
        found.append([v.detach() for v in (y, h, c, *grads)])
    assert captures(cache) == [1]
    close(found[:-1], [found[-1]] * 3, atol=EXACT.grad)


def test_changed_weights_are_seen_and_results_are_the_callers(cache):
    layer, twin = soft(), soft()
    twin.backend = "reference"
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (layer, twin)]
    kept = []
    for seed in range(5):
        for each, optimizer in zip((layer, twin), optimizers, strict=True):
            (loss,) = losses(each, seed)
            kept.append((loss, loss.item()))
            loss.backward()
            if seed % 2:
                optimizer.step()
                optimizer.zero_grad()
    for (loss, then), (_, want) in zip(kept[::2], kept[1::2], strict=True):
        assert loss.item() == then == pytest.approx(want, rel=1e-12)
    (loss,) = losses(layer, 1)
    optimizers[0].step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_who_watches_sees_the_loop(cache, monkeypatch):
    layer = soft()
    x = torch.randn(3, 2, D, dtype=torch.float64)
    with FlopCounterMode(display=False):
        layer(x)
    checkpoint(layer, x, use_reentrant=False)[0].sum().backward()
    with cuda_graphs.CAPTURING:
        layer(x)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layer(x)
    assert captures(cache) == []


def test_a_loop_that_cannot_be_captured_runs_without_and_says_so(cache, monkeypatch):
    error = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(cuda_graphs, "Graphed", Mock(side_effect=error))
    layer = soft()
    losses(layer, 0)
    with pytest.warns(UserWarning, match="could not be captured as a CUDA graph, .* not permitted"):
        losses(layer, 0)
    (loss,) = losses(layer, 0)
    loss.backward()
    assert captures(cache) == [0]
    assert not cuda_graphs.CAPTURING.locked()


def test_threads_share_graphs(cache):
    layer = soft()
    losses(layer, 0), losses(layer, 0)
    want = [loss.item() for loss in losses(layer, *range(8))]

    def work(seed: int) -> float:
        for _ in range(5):
            (loss,) = losses(layer, seed)
            torch.autograd.grad(loss, list(layer.parameters()))
        return loss.item()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == want


def test_auto_on_a_gpu_is_compiled_where_the_kernels_refuse(monkeypatch):
    gpu, sel = torch.device("cuda", 0), Selection(6, 6, 4, 4, 4, views="soft")
    capability = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability[0], 0))
    monkeypatch.setattr(scan, "_no_triton", lambda _: "an NVIDIA GPU from sm_80 on")
    assert scan.resolve("auto", gpu, sel, 64) == "compiled"
    capability[0] = 6
    assert scan.resolve("auto", gpu, sel, 64) == "batched"
    with pytest.raises(scan.BackendError, match="for a GPU from sm_70 on with Triton, got neither"):
        scan.resolve("compiled", gpu)


@pytest.mark.usefixtures("cache")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_auto_keeps_to_operators_where_compilers_and_modes_watch(monkeypatch):
    ran = []
    plain = scan.BACKENDS["batched"]
    monkeypatch.setattr(scan, "resolve", lambda *_: "compiled")
    monkeypatch.setitem(
        scan.BACKENDS, "batched", lambda *a, **k: (ran.append(1), plain(*a, **k))[1]
    )
    layer = soft()
    layer.backend = "auto"
    x = torch.randn(3, 2, 2, D, dtype=torch.float64)
    layer(x[0])
    assert not ran
    torch.vmap(lambda x: layer(x)[0])(x)
    with FlopCounterMode(display=False):
        layer(x[0])
    torch.jit.trace(layer, (x[0],), check_trace=False)
    assert len(ran) == 3


@marked
@pytest.mark.parametrize("name", ["soft_inputs", "rand_cells", "default"])
def test_the_graphs_of_the_compiled_step_equal_the_reference_on_a_gpu(name, monkeypatch):
    cache = cuda_graphs.Cache()
    monkeypatch.setattr(compiled, "GRAPHS", cache)
    layer = soft(**{"views": "top", **ALL_VARIANTS[name]}).cuda()
    found = []
    for backend in ("compiled", "reference"):
        layer.backend = backend  # type: ignore[assignment]
        for order in ((0, 1, 2), (2, 1, 0)):
            waiting = []
            for seed in range(3):
                torch.manual_seed(seed)
                waiting += losses(layer, seed)
            found.append([*waiting, *gradients_of(waiting, layer, order)])
    assert captures(cache) == [3]
    for got, want in zip(found[:2], found[2:], strict=True):
        for a, b in zip(got, want, strict=True):
            assert_close(a.detach(), b.detach(), EXACT.grad)


@marked
@pytest.mark.parametrize("name", [n for n in MODELS if "compile_step" in options_of(n)])
def test_a_compiled_step_has_gradients_of_float64_at_the_tables_size_on_a_gpu(name):
    still = {"dropout": 0.0} if "dropout" in options_of(name) else {}
    core = build(name, 600, 600, compile_step=True, **still).cuda()
    exact = build(name, 600, 600, **still).cuda().double()
    exact.load_state_dict(core.state_dict())
    x = 0.1 * torch.randn(196, 32, 600, device="cuda")
    found, wanted = (
        torch.cat([g.flatten() for g in torch.autograd.grad(y[-1].sum(), list(model.parameters()))])
        for model, (y, _) in ((core, core(x)), (exact, exact(x.double())))
    )
    # Choices that rounding turns make a difference of a few percent; wrong code made one of 40.
    assert (found.double() - wanted).norm() < 0.05 * wanted.norm()
