"""Which calls are captured, replayed and forgotten, with a graph that needs no GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from riglstm.cell import Weights
from riglstm.selection import Selection

pytest.importorskip("triton")
triton_replay = pytest.importorskip(
    "riglstm.scan.fused.replay", reason="the kernels are not in this copy"
)
triton_capture = pytest.importorskip("riglstm.scan.fused.capture")

T, B, D, N, d = 3, 2, 5, 4, 16
SEL = Selection(N, N, 2, 2, 2)


class Graph:
    """Records what `Machine.run` does between begin and end, and does it again."""

    now: Graph | None = None
    fails_at: str | None = None
    slow = 0.0

    def __init__(self) -> None:
        self.recorded: list[Callable[[], None]] = []
        self.shared: Any = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert Graph.now is None
        if Graph.fails_at == "begin":
            raise RuntimeError("begin")
        Graph.now, self.shared = self, pool

    def capture_end(self) -> None:
        Graph.now = None
        if Graph.fails_at == "end":
            raise RuntimeError("end")

    def replay(self) -> None:
        for work in self.recorded:
            work()

    def pool(self) -> int:
        return id(self) if self.shared is None else self.shared


class Stream:
    """A stream that waits for nothing."""

    def __init__(self, device: int = -1) -> None:
        pass

    def wait_stream(self, _: Stream) -> None:
        pass


class Machine:
    """A GPU's part: runs calls, and counts those that were not replayed."""

    def __init__(self) -> None:
        self.direct = 0
        self.stream, self.capturing = 7, False
        self.error: Exception | None = None

    def run(self, *args: Any) -> tuple[Tensor, ...]:
        if self.error is not None:
            raise self.error
        out = self.compute(*args)
        if Graph.now is not None:
            if Graph.fails_at == "work":
                raise RuntimeError("work")
            # By address, as a graph: it does not keep the weights.
            there = Weights(*(None if w is None else w.detach() for w in args[3]))
            same = (*args[:3], there, *args[4:])
            Graph.now.recorded.append(functools.partial(self.into, out, same))
        else:
            self.direct += 1
        return out

    def into(self, out: tuple[Tensor, ...], args: tuple[Any, ...]) -> None:
        results = self.compute(*args)
        time.sleep(Graph.slow)
        for own, new in zip(out, results, strict=True):
            own.copy_(new)

    @staticmethod
    def compute(
        x: Tensor,
        h: Tensor,
        c: Tensor,
        weights: Weights,
        sel: Selection,
        live: Tensor | None,
        reset: Tensor | None,
        product: torch.dtype,
    ) -> tuple[Tensor, ...]:
        assert not torch.is_inference_mode_enabled() or Graph.now is None
        assert weights.W_in is not None
        where = torch.empty(x.shape[0] * x.shape[1], weights.W_in.shape[1])
        torch.mm(x.flatten(0, 1).float(), weights.W_in, out=where)
        y = where.view(*x.shape[:2], *h.shape[1:]) + h * weights.W.sum()
        for flags, factor in ((live, 2.0), (reset, 3.0)):
            if flags is not None:
                y = y + factor * flags[:, :, None, None]
        return y, y[-1].clone(), c + y[-1], y[..., 0] > 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    for name, value in (("now", None), ("fails_at", None), ("slow", 0.0)):
        monkeypatch.setattr(Graph, name, value)
    monkeypatch.setattr(triton_replay, "ON", True)
    monkeypatch.setattr(triton_replay, "interpreted", lambda: False)
    monkeypatch.setattr(triton_replay, "_room", lambda _: 1 << 20)
    for name in ("_KEPT", "_DEAD"):
        monkeypatch.setattr(triton_replay, name, type(getattr(triton_replay, name))())
    unended: list[Any] = []
    monkeypatch.setattr(triton_replay, "UNENDED", unended)
    monkeypatch.setattr(triton_capture, "UNENDED", unended)
    monkeypatch.setattr(triton_capture, "_SIDES", {})
    # That of a tensor on a CPU.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    current = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, current, lambda _: machine.stream, raising=False)
    yield machine
    assert Graph.now is None


def weights_of() -> Weights:
    def new(*shape: int) -> Tensor:
        return nn.Parameter(torch.randn(shape), requires_grad=False)

    return Weights(
        new(D, N * d), new(N * d), new(N, 2 * N * d, 4 * d), new(N, 4 * d), new(7 * d, d), new(N)
    )


def call(machine: Machine, weights: Weights, **changed: Any) -> tuple[Tensor, ...]:
    """A call with new numbers, checked; `changed` says what else is not as usual."""
    usual: dict[str, Any] = {
        **{"x": torch.randn(T, B, D), "h": torch.randn(B, N, d), "c": torch.randn(B, N, d)},
        **{"weights": weights, "sel": SEL, "live": None, "reset": None, "product": torch.float32},
    }
    args = (usual | changed).values()
    out = triton_replay.again(machine.run, *args)
    for got, want in zip(out, machine.compute(*args), strict=True):
        assert torch.equal(got, want)
    return out


def graphs() -> int:
    return sum(kept.replay is not None for kept in triton_replay._KEPT.values())


def test_the_third_call_is_captured_and_later_ones_are_replayed(machine: Machine) -> None:
    weights, seen = weights_of(), []
    for _ in range(5):
        call(machine, weights)
        seen.append((machine.direct, graphs()))
    # The third call's work is done once before it is captured.
    assert seen == [(1, 0), (2, 0), (3, 1), (3, 1), (3, 1)]


@pytest.mark.parametrize("small", [0, 8192])
def test_results_are_the_callers_own(
    machine: Machine, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_capture, "SMALL", small)
    weights, flags = weights_of(), torch.rand(T, B) < 0.5
    outs = [call(machine, weights, live=flags, reset=~flags) for _ in range(5)]
    then = [[t.clone() for t in out] for out in outs]
    call(machine, weights, live=~flags, reset=flags)
    assert graphs() == 1
    for out, copies in zip(outs, then, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(out, copies, strict=True))
    places = [t.untyped_storage().data_ptr() for out in outs for t in out]
    assert len(set(places)) == len(places)


def test_weights_changed_in_place_are_seen(machine: Machine) -> None:
    weights = weights_of()
    for _ in range(5):
        weights.W.data.mul_(0.5)
        call(machine, weights)
    assert machine.direct == 3


def test_an_input_need_not_lie_in_one_piece(machine: Machine) -> None:
    weights = weights_of()
    for _ in range(4):
        call(
            machine,
            weights,
            x=torch.randn(B, T, D).transpose(0, 1),
            h=torch.zeros(d).expand(B, N, d),
        )
    assert machine.direct == 3


FLAGS = torch.ones(T, B, dtype=torch.bool)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(T + 1, B, D)},
        {"x": torch.zeros(T, B, D, dtype=torch.bfloat16)},
        {"x": torch.zeros(T, 1, D), "h": torch.zeros(1, N, d), "c": torch.zeros(1, N, d)},
        {"c": torch.zeros(B, N, d, dtype=torch.float64)},
        {"live": FLAGS},
        {"reset": FLAGS},
        {"live": FLAGS, "reset": FLAGS},
        {"live": FLAGS.to(torch.uint8)},
        {"sel": Selection(N, N, 3, 2, 2)},
        {"product": torch.bfloat16},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_another_call_is_another_kind(machine: Machine, changed: dict[str, Any]) -> None:
    weights = weights_of()
    for _ in range(3):
        call(machine, weights)
    call(machine, weights, **changed)
    assert machine.direct == 4
    assert len(triton_replay._KEPT) == 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in Weights._fields for change in ("moved", "strides")),
        *((name, "gone") for name in ("b_in", "b", "W_q", "update_bias")),
    ],
)
def test_other_weights_are_another_kind(machine: Machine, name: str, change: str) -> None:
    weights = weights_of()
    for _ in range(3):
        call(machine, weights)
    old = getattr(weights, name)
    if change == "moved":
        old.data = old.data.clone()
    elif change == "strides":
        old.data = old.data.as_strided(old.shape, (0,) * old.dim())
    else:
        weights = weights._replace(**{name: None})
    call(machine, weights)
    assert machine.direct == 4


@pytest.mark.parametrize("switch", ["precision", "reduction", "deterministic", "blas", "stream"])
def test_another_switch_is_another_kind(
    machine: Machine, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, matmul = weights_of(), torch.backends.cuda.matmul
    for _ in range(3):
        call(machine, weights)
    if switch == "precision":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
    elif switch == "reduction":
        matmul.allow_bf16_reduced_precision_reduction = False
    elif switch == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif switch == "blas":
        monkeypatch.setattr(torch._C, "_get_blas_preferred_backend", lambda: "another")
    else:
        machine.stream = 8
    try:
        call(machine, weights)
    finally:
        if switch == "precision":
            torch.set_float32_matmul_precision(before)
        matmul.allow_bf16_reduced_precision_reduction = True
        torch.use_deterministic_algorithms(False)
    assert machine.direct == 4


class Own(Tensor):
    """A kind of tensor with ways of its own."""


@pytest.mark.parametrize(
    "why", ["capture", "hook", "off", "subclass", "elsewhere", "dispatch", "function", "func"]
)
def test_nothing_is_replayed_where_someone_else_is_in_charge(
    machine: Machine, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Function(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    weights, given, mode = weights_of(), {}, contextlib.nullcontext()
    for _ in range(4):
        call(machine, weights)
    assert machine.direct == 3
    machine.capturing = why == "capture"
    if why == "hook":
        monkeypatch.setattr("riglstm.scan.fused.launch._watched", lambda: True)
    elif why == "off":
        monkeypatch.setattr(triton_replay, "ON", False)
    elif why == "elsewhere":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    elif why == "subclass":
        given["x"] = torch.randn(T, B, D).as_subclass(Own)
    elif why == "dispatch":
        mode = Dispatch()
    elif why == "function":
        mode = Function()
    if why == "func":

        def inner(x: Tensor) -> Tensor:
            return call_unchecked(machine, weights) + x

        torch.vmap(inner)(torch.zeros(2))
    else:
        with mode:
            call(machine, weights, **given)
    assert machine.direct == 4


def call_unchecked(machine: Machine, weights: Weights) -> Tensor:
    args = (torch.zeros(T, B, D), torch.zeros(B, N, d), torch.zeros(B, N, d), weights, SEL)
    out: Tensor = triton_replay.again(machine.run, *args, None, None, torch.float32)[0]
    return out


def test_of_many_graphs_the_least_recently_used_goes_and_comes_back_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_replay, "MOST", 2)
    first, second, third = (weights_of() for _ in range(3))
    for weights in (first, second):
        for _ in range(3):
            call(machine, weights)
    call(machine, first)
    for _ in range(3):
        call(machine, third)
    assert (machine.direct, graphs()) == (9, 2)
    for weights in (first, third):
        call(machine, weights)
    assert machine.direct == 9
    for _ in range(12):
        call(machine, second)
    assert (machine.direct, graphs()) == (21, 2)
    call(machine, second)
    assert machine.direct == 21


def test_graphs_of_a_stream_share_a_pool_and_those_of_others_do_not(machine: Machine) -> None:
    three = [weights_of() for _ in range(3)]
    for weights, machine.stream in zip(three, (7, 7, 8), strict=True):
        for _ in range(3):
            call(machine, weights)
    one, two, other = (kept.replay.graph for kept in triton_replay._KEPT.values())
    assert two.pool() == one.pool() != other.pool()


def test_what_takes_much_memory_is_not_captured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of()
    x, h = torch.zeros(T, B, D), torch.zeros(B, N, d)
    size = triton_replay._bytes((x, h), weights, SEL, torch.float32)
    monkeypatch.setattr(triton_replay, "_room", lambda _: size - 1)
    for _ in range(4):
        call(machine, weights)
    assert machine.direct == 4
    triton_replay.clear()
    monkeypatch.setattr(triton_replay, "_room", lambda _: size)
    for _ in range(4):
        call(machine, weights)
    assert machine.direct == 7


# In bfloat16 there are neither halves of the input nor views apart from XH.
@pytest.mark.parametrize(
    ("product", "fits", "too_long"), [(torch.float32, 361, 576), (torch.bfloat16, 576, 784)]
)
def test_the_papers_layer_has_room_on_a_large_gpu_up_to_some_length(
    product: torch.dtype, fits: int, too_long: int, tf32: None
) -> None:
    shapes = [(600, 600), (600,), (6, 1200, 400), (6, 400), (1100, 100), (6,)]
    weights = Weights(*(torch.empty(shape, device="meta") for shape in shapes))
    h = torch.empty(64, 6, 100, device="meta")
    room = []
    for steps in (fits, too_long):
        x = torch.empty(steps, 64, 600, device="meta")
        size = triton_replay._bytes((x, h), weights, Selection(6, 6, 4, 4, 4), product)
        room.append(size <= (139 << 30) // triton_replay.SHARE)
    assert room == [True, False]


@pytest.mark.usefixtures("precision_as_before")
def test_of_a_graphs_memory_only_what_is_made_is_counted() -> None:
    # Of a row of d = 18: XH and y, and then the rest by what the map makes.
    low, exact, half = 8 * 24 * 2 + 4 * 18 * 4, 8 * 20 * 4 + 4 * 18 * 4, torch.bfloat16
    for product, precision, features, kind, B, row in (
        (half, "highest", 5, torch.float32, 1, low + 5 * 4),
        (half, "highest", 5, torch.float32, 65, low + 5 * 4),
        (torch.float32, "high", 5, half, 1, low + 5 * 2 + 8 * 2 + 4 * 24 * 4),
        (torch.float32, "high", 8193, torch.float32, 1, low + 8193 * 4 + 4 * 18 * 4),
        (torch.float32, "highest", 5, half, 1, exact + 5 * 2 + 5 * 4 + 4 * 18 * 4),
    ):
        torch.set_float32_matmul_precision(precision)
        W_in, W, h = (torch.empty(s) for s in ((features, 72), (4, 144, 72), (B, 4, 18)))
        weights = Weights(W_in, None, W, None, None, None)
        two, one = (
            triton_replay._bytes(
                (torch.empty(steps, B, features, dtype=kind), h), weights, SEL, product
            )
            for steps in (2, 1)
        )
        assert two - one == B * row, (product, precision, features, B)


def test_with_the_weights_their_graphs_go(machine: Machine) -> None:
    weights, other = weights_of(), weights_of()
    for w in (weights, other):
        for _ in range(3):
            call(machine, w)
    assert graphs() == 2
    del weights, w
    gc.collect()
    call(machine, other)
    assert (graphs(), len(triton_replay._KEPT)) == (1, 1)
    assert machine.direct == 6


def test_weights_made_for_each_call_are_never_captured(machine: Machine) -> None:
    usual = weights_of()
    memory = torch.randn(usual.W.shape)
    for _ in range(6):
        # At the same address each time.
        call(machine, usual._replace(W=memory.view(usual.W.shape)))
    assert (machine.direct, graphs()) == (6, 0)


def test_weights_in_pieces_are_never_captured(machine: Machine) -> None:
    weights = weights_of()
    turned = nn.Parameter(torch.randn(N * d, D), requires_grad=False)
    weights = weights._replace(W_in=turned.T)
    for _ in range(5):
        call(machine, weights)
    assert (machine.direct, graphs()) == (5, 0)


def test_kinds_that_do_not_come_again_are_forgotten(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_replay, "KINDS", 4)
    weights = weights_of()
    for _ in range(3):
        call(machine, weights)
    for steps in range(10, 30):
        call(machine, weights, x=torch.zeros(steps, B, D))
        assert len(triton_replay._KEPT) <= 4
    before = machine.direct
    call(machine, weights)
    assert machine.direct == before


@pytest.mark.parametrize("stage", ["begin", "end"])
def test_a_capture_that_is_not_ended_is_an_error_with_a_way_out(
    machine: Machine, stage: str
) -> None:
    weights, other = weights_of(), weights_of()
    Graph.fails_at = stage
    for _ in range(2):
        call(machine, weights)
    with pytest.raises(
        triton_capture.CaptureError, match=f"got: {stage}.*without RIGLSTM_REPLAY=1"
    ):
        call(machine, weights)
    Graph.fails_at = None
    before = machine.direct
    for _ in range(4):
        call(machine, weights)
        call(machine, other)
    # Nothing more is captured, and the graph that torch may still ask stays.
    assert (machine.direct, graphs()) == (before + 8, 0)
    assert len(triton_capture.UNENDED) == 1


def test_without_its_capture_a_call_goes_on(machine: Machine) -> None:
    weights, other = weights_of(), weights_of()
    Graph.fails_at = "work"
    for _ in range(5):
        call(machine, weights)
    assert (machine.direct, graphs()) == (6, 0)  # one for the capture
    Graph.fails_at = None
    for _ in range(5):
        call(machine, weights)
    assert (machine.direct, graphs()) == (11, 0)
    for _ in range(5):
        call(machine, other)
    assert graphs() == 1
    assert not triton_capture.UNENDED


def test_an_error_of_the_call_itself_is_raised(machine: Machine) -> None:
    weights = weights_of()
    for _ in range(2):
        call(machine, weights)
    machine.error = RuntimeError("of the kernel")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of the kernel"):
            call(machine, weights)
    machine.error = None
    call(machine, weights)
    assert not triton_capture.UNENDED


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_leaves_nothing_behind(machine: Machine, first: bool) -> None:
    weights = weights_of()
    for inference in (first, not first, first):
        for _ in range(4):
            with torch.inference_mode(inference):
                out = call(machine, weights)
            assert all(t.is_inference() == inference for t in out)
    assert machine.direct == 3
    # An input that was made there may be used outside.
    with torch.inference_mode():
        x = torch.randn(T, B, D)
    call(machine, weights, x=x)
    assert machine.direct == 3


def test_weights_made_in_inference_mode_are_captured_too(machine: Machine) -> None:
    with torch.inference_mode():
        weights = Weights(*(nn.Parameter(torch.randn_like(w)) for w in weights_of()))
        for _ in range(4):
            call(machine, weights)
    assert machine.direct == 3


def test_what_needs_a_gradient_elsewhere_is_read_without_one(machine: Machine) -> None:
    weights = weights_of()
    for w in weights:
        assert w is not None
        w.requires_grad_()
    with torch.no_grad():
        for _ in range(4):
            out = call(machine, weights, x=torch.randn(T, B, D, requires_grad=True))
    assert machine.direct == 3
    assert not any(t.requires_grad for t in out)


def test_threads_on_one_stream_do_not_mix_their_calls(machine: Machine) -> None:
    weights, wrong = weights_of(), []
    for _ in range(3):
        call(machine, weights)
    Graph.slow = 0.001

    def work() -> None:
        try:
            for _ in range(20):
                call(machine, weights)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # Who finds another at it calls directly.
    assert 3 <= machine.direct < 63


def test_a_call_in_the_midst_of_a_call_runs_directly(machine: Machine) -> None:
    weights, other = weights_of(), weights_of()
    for _ in range(4):
        call(machine, weights)
        call(machine, other)
    before, compute = machine.direct, machine.compute

    def within(*args: Any) -> tuple[Tensor, ...]:
        machine.compute = compute  # type: ignore[method-assign]
        call(machine, other)
        return compute(*args)

    machine.compute = within  # type: ignore[method-assign]
    call(machine, weights)
    assert machine.direct == before + 1


@pytest.mark.parametrize("went", ["failed", "evicted"])
def test_many_kinds_do_not_make_it_forget_what_not_to_capture(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, went: str
) -> None:
    monkeypatch.setattr(triton_replay, "KINDS", 4)
    monkeypatch.setattr(triton_replay, "MOST", 1)
    weights, other = weights_of(), weights_of()
    Graph.fails_at = "work" if went == "failed" else None
    for _ in range(3):
        call(machine, weights)
    Graph.fails_at = None
    for _ in range(3):
        call(machine, other)
    for steps in range(10, 20):
        call(machine, weights, x=torch.zeros(steps, B, D))
    assert len(triton_replay._KEPT) <= 4
    for _ in range(4):
        call(machine, weights)
    (kept,) = (k for k in triton_replay._KEPT.values() if k.replay is not None)
    assert kept.owner() is other.W


def test_a_fork_leaves_the_graphs_alone(machine: Machine) -> None:
    weights = weights_of()
    for _ in range(3):
        call(machine, weights)
    triton_replay._leave(-1)
    assert graphs() == 1
    triton_replay._leave(os.getpid())
    assert graphs() == 0


def test_nothing_is_collected_within_a_capture(machine: Machine) -> None:
    weights, seen = weights_of(), []
    compute = machine.compute

    def watched(*args: Any) -> tuple[Tensor, ...]:
        seen.append((Graph.now is not None, gc.isenabled()))
        return compute(*args)

    machine.compute = watched  # type: ignore[method-assign]
    for _ in range(3):
        call(machine, weights)
    assert (True, False) in seen
    assert (True, True) not in seen
    assert gc.isenabled()


def test_cleared_everything_starts_anew(machine: Machine) -> None:
    weights = weights_of()
    for _ in range(3):
        call(machine, weights)
    triton_replay.clear()
    assert graphs() == 0
    for _ in range(3):
        call(machine, weights)
    assert (machine.direct, graphs()) == (6, 1)
