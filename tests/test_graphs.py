"""Captured training steps: the bookkeeping everywhere, the capture itself where there is a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from riglstm.lab.train import graphs
from riglstm.models import MODELS, build, options_of

Capture = Callable[..., graphs.Graphed]

T, B, D, H = 5, 3, 10, 24


class Repeated:
    """`graphs.Captured` for a CPU: a replay does the work anew, into the memory of the first."""

    def __init__(self, work: Callable[[], tuple[Tensor | None, ...]], pool: Any = None) -> None:
        self.work, self.pool = work, None
        self.results = work()

    def replay(self) -> None:
        for old, new in zip(self.results, self.work(), strict=True):
            if old is not None and new is not None:
                old.copy_(new)


class Stream:
    """A stream that waits for nothing."""

    def wait_stream(self, _: Stream) -> None:
        pass


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """`graphed` without a GPU."""
    monkeypatch.setattr(graphs, "Captured", Repeated)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    return lambda core, x, warmup=1: graphs.Graphed(core, x, warmup)


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


def compare(core: Any, captured: Any, twin: Any, device: str = "cpu") -> None:
    """Two batches, gradients accumulated; the second from the first one's state if it streams."""
    state = twin_state = None
    for seed in (1, 2):
        x, twin_x = batch(seed, device), batch(seed, device)
        y, state = captured(x, state)
        twin_y, twin_state = twin(twin_x, twin_state)
        torch.testing.assert_close(y, twin_y)
        torch.testing.assert_close(state, twin_state)
        for output, last in ((y, state), (twin_y, twin_state)):
            (output.square().sum() + sum(s.sin().sum() for s in last)).backward()
        torch.testing.assert_close(x.grad, twin_x.grad)
        state, twin_state = (
            tuple(s.detach() for s in last) if twin.streaming else None
            for last in (state, twin_state)
        )
    for p, q in zip(core.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_equal_the_cores_own(name: str, capture: Capture) -> None:
    core, twin = models(name)
    compare(core, capture(core, batch(0)), twin)


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
    for mark in on_a_gpu:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_core_equals_the_core_on_a_gpu(name: str) -> None:
    core, twin = (model.cuda() for model in models(name))
    compare(core, graphs.graphed(core, batch(0, "cuda")), twin, "cuda")


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
def test_each_replay_draws_anew_and_a_seed_repeats_it_on_a_gpu(
    name: str, options: dict[str, Any]
) -> None:
    core = models(name, **options)[0].cuda()
    captured = graphs.graphed(core, batch(0, "cuda"))
    first, again, other = (train(captured, core, seed) for seed in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], other[0])
    y = captured(batch(1, "cuda"))[0].detach()
    assert not torch.equal(captured(batch(1, "cuda"))[0], y)


@marked
@pytest.mark.parametrize("name", [n for n in MODELS if "compile_step" in options_of(n)])
def test_a_captured_compiled_step_equals_the_core_on_a_gpu(name: str) -> None:
    core, twin = models(name, compile_step=True)[0].cuda(), models(name)[0].cuda()
    compare(core, graphs.graphed(core, batch(0, "cuda")), twin, "cuda")


@marked
@pytest.mark.parametrize("name", ["lstm", "rmc", "riglstm"])
def test_the_capture_keeps_bf16_autocast_on_a_gpu(name: str) -> None:
    core, twin = (model.cuda() for model in models(name, dtype=torch.float32))
    x = batch(0, "cuda").float().detach()
    with torch.autocast("cuda", torch.bfloat16):
        captured = graphs.graphed(core, x)
    # As in a capture: with remembered casts, the steps' gradients would add up in bf16.
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        expected, _ = twin(x)
    output, _ = captured(x)
    assert torch.equal(output, expected)
    assert not torch.equal(twin(x)[0], expected)
    for y in (output, expected):
        y.float().square().sum().backward()
    for p, q in zip(core.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_new_weights_are_seen_and_earlier_outputs_and_gradients_not_overwritten(
    capture: Capture,
) -> None:
    core, _ = models("rmc")
    captured = capture(core, batch(0))
    kept = []
    for seed in (1, 2):
        core.zero_grad(set_to_none=True)
        y, _ = captured(batch(seed))
        y.sum().backward()
        kept.append((y, core.qkv.weight.grad, y.clone(), core.qkv.weight.grad.clone()))
    for y, grad, y_then, grad_then in kept:
        assert torch.equal(y, y_then)
        assert torch.equal(grad, grad_then)
    with torch.no_grad():
        for p in core.parameters():
            p.mul_(0.5)
    x = batch(2)
    torch.testing.assert_close(captured(x)[0], core(x)[0])
    assert not torch.equal(captured(x)[0], kept[1][2])


def test_what_was_not_captured_is_refused(capture: Capture) -> None:
    lstm: Any = build("lstm", D, H)
    with pytest.raises(ValueError, match="need a CUDA device, got an input on cpu; move core"):
        graphs.graphed(lstm, torch.randn(T, B, D))
    core, _ = models("entnet")
    captured = capture(core, batch(0).detach())
    with pytest.raises(ValueError, match=r"must be as captured, torch.float64 \(5, 3, 10\)"):
        captured(batch(1).detach()[:4])
    with pytest.raises(ValueError, match="must be as captured"):
        captured(batch(1).detach(), ())
    with pytest.raises(ValueError, match="the input requires a gradient, the captured one did not"):
        captured(batch(1))
    core.eval()
    with pytest.raises(ValueError, match="captured in training mode, and is in eval mode now"):
        captured(batch(1).detach())


def test_a_backward_through_an_earlier_pass_or_a_second_through_one_is_refused(
    capture: Capture,
) -> None:
    core, _ = models("entnet")
    captured = capture(core, batch(0))
    first, _ = captured(batch(1))
    captured(batch(2))
    with pytest.raises(RuntimeError, match="last forward pass only: expected backward through"):
        first.sum().backward()
    y, state = captured(batch(1))
    y.sum().backward(retain_graph=True)
    before = core.keys.grad.clone()
    for again in (y, state[0]):
        with pytest.raises(RuntimeError, match=r"expected one backward through pass 3, got a sec"):
            again.sum().backward(retain_graph=True)
    assert torch.equal(core.keys.grad, before)
    captured(batch(1))[0].sum().backward()


def test_what_cannot_be_trained_is_not_captured(capture: Capture) -> None:
    core, _ = models("entnet")
    with pytest.raises(ValueError, match=r"expected a core in training mode, got one in eval"):
        capture(core.eval(), batch(0))
    core.train().requires_grad_(False)
    with pytest.raises(ValueError, match=r"parameters or an input that require a gradient, got no"):
        capture(core, batch(0).detach())
    x = batch(1)
    capture(core, batch(0))(x)[0].sum().backward()
    assert x.grad is not None


def test_parameters_that_moved_or_froze_are_refused(capture: Capture) -> None:
    core, _ = models("entnet")
    captured = capture(core, batch(0))
    for freeze in (core.keys, core.slope):
        freeze.requires_grad_(False)
        with pytest.raises(ValueError, match=r"frozen or unfrozen since; capture the core anew"):
            captured(batch(1))
        freeze.requires_grad_()
    captured(batch(1))
    held, core.bias.data = core.bias.data, core.bias.data.clone()
    with pytest.raises(ValueError, match=r"moved in memory, .*; capture the core anew"):
        captured(batch(1))
    core.bias.data = held
    captured(batch(1))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_the_capture_keeps_the_autocast_that_was_active(capture: Capture) -> None:
    torch.manual_seed(0)
    core: Any = build("rmc", D, H)
    x = batch(0).float().detach()
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(core, x)
        expected, _ = core(x)
    assert torch.equal(captured(x)[0], expected)
    assert not torch.equal(core(x)[0], expected)
