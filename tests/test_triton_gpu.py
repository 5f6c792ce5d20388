"""The `triton` backend on a GPU: against float64 with its own masks, repeatable, never hanging."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from helpers import (
    ON_A_GPU,
    Outcome,
    Problem,
    kernels,
    outputs_and_gradients,
    python,
    random_problem,
    relative,
    seeded,
)
from riglstm import RigLSTM, cell
from riglstm.parameters import initialise
from riglstm.scan import reference
from riglstm.selection import Noise

pytestmark = ON_A_GPU


class Mode(NamedTuple):
    """A precision, and how far from float64 it may be."""

    matmul: str
    autocast: bool
    error: float


MODES = {
    "fp32": Mode("highest", False, 1e-5),
    "tf32": Mode("high", False, 2e-3),
    "bf16": Mode("highest", True, 2e-2),
}
PAPER: dict[str, Any] = {"N": 6, "K": 6, "d": 100, "D": 60, "K_a": 4, "K_x": 4, "K_h": 4}
SIZES: dict[str, dict[str, Any]] = {
    "the paper's": {"B": 64, "T": 24},
    "a hundred sequences": {"B": 100, "T": 12, "live": True},
    "many sequences": {"B": 150, "T": 12, "reset": True, "live": True},
    "more than fit at once": {"B": 270, "T": 6, "reset": True, "live": True},
    "more than programs select": {"B": 600, "T": 5, "live": True},
    "many, no soft update": {"B": 100, "T": 12, "soft_update": False, "live": True},
    "many, of odd cells": {"B": 70, "T": 12, "N": 5, "K": 5, "d": 50, "K_a": 3, "K_x": 3, "K_h": 3},
    "one sequence": {"B": 1, "T": 20, "update_bias": True, "update_scale": 0.1},
    "no soft update": {"B": 10, "T": 20, "soft_update": False, "live": True},
    "balls": {"B": 33, "T": 20, "N": 5, "K": 5, "d": 50, "K_a": 3, "K_x": 3, "K_h": 3},
    "small cells": {"B": 70, "T": 20, "N": 4, "K": 4, "d": 16, "K_a": 3, "K_x": 2, "K_h": 2},
    "large cells": {"B": 20, "T": 12, "N": 8, "K": 8, "d": 128, "query": "per_cell", "reset": True},
    "few, with resets": {
        **{"B": 33, "T": 20, "N": 5, "K": 7, "d": 50, "K_a": 3, "K_x": 3, "K_h": 2},
        **{"query": "per_cell", "reset": True, "live": True},
    },
    "ragged": {"B": 5, "T": 12, "N": 3, "K": 7, "d": 33, "K_a": 2, "K_x": 3, "K_h": 1},
    "everyone": {"B": 7, "T": 12, "N": 4, "K": 2, "cells": "all", "views": "all", "peers": "all"},
    "split views": {"B": 7, "T": 12, "N": 4, "K": 2, "K_x": 1, "K_h": 2, "input_views": "split"},
}

CELLS: dict[str, dict[str, Any]] = {
    "one number": {"N": 1, "K": 1, "d": 1, "K_a": 1, "K_x": 1, "K_h": 0},
    "seven": {"N": 9, "K": 9, "d": 7, "K_a": 5, "K_x": 4, "K_h": 3, "reset": True},
    "ten": {"N": 6, "K": 6, "d": 10, "K_a": 4, "K_x": 4, "K_h": 4},
    "129": {"N": 2, "K": 2, "d": 129, "K_a": 1, "K_x": 1, "K_h": 1, "soft_update": False},
    "200": {"N": 3, "K": 3, "d": 200, "K_a": 2, "K_x": 2, "K_h": 1, "query": "per_cell"},
    "256": {"N": 1, "K": 1, "d": 256, "K_a": 1, "K_x": 1, "K_h": 0, "reset": True},
    "nine cells": {"N": 9, "K": 1, "d": 20, "K_a": 6, "K_x": 1, "K_h": 7, "live": True},
    "sixteen views": {"N": 1, "K": 16, "d": 18, "K_a": 1, "K_x": 10, "K_h": 0, "update_bias": True},
    # The last slot is the sign of a whole number.
    "sixteen of both": {"N": 16, "K": 16, "d": 2, "K_a": 15, "K_x": 9, "K_h": 14, "live": True},
    "as large as can be": {"N": 16, "K": 16, "d": 256, "K_a": 3, "K_x": 2, "K_h": 1},
    "random": {
        **{"N": 3, "K": 3, "d": 18, "K_a": 2, "K_x": 2, "K_h": 1, "live": True, "reset": True},
        **dict.fromkeys(("cells", "views", "peers"), "random"),
    },
}
"""Sizes of cells, and how many: `test_triton.py` runs them in the interpreter."""
for cells in CELLS.values():
    # As in the layer: sums of 256 products would have the soft update double every rounding.
    cells["update_scale"] = 1 / cells["d"]
SIZES |= {
    f"{name}, B={B}": {"B": B, "T": 6, "D": 20, **cells}
    for name, cells in CELLS.items()
    for B in (20, 70)
}


def problem(name: str) -> Problem:
    """With the layer's start values: larger weights make any rounding grow from step to step."""
    p = random_problem(seeded(0), **{**PAPER, **SIZES[name]}).to(torch.float32)
    initialise(p.weights, p.sel.N * p.h.shape[2], None)
    on_gpu = p.with_leaves({n: v.cuda() for n, v in p.leaves().items()})
    flags = {n: None if f is None else f.cuda() for n, f in (("live", p.live), ("reset", p.reset))}
    noise = p.noise and Noise(*(None if n is None else n.cuda() for n in p.noise))
    return replace(on_gpu, noise=noise, **flags)


def in_mode(mode: Mode) -> torch.autocast:
    """Its autocast; products of float32 have its precision from now on."""
    torch.set_float32_matmul_precision(mode.matmul)
    return torch.autocast("cuda", torch.bfloat16, enabled=mode.autocast)


def papers_layer() -> RigLSTM:
    return RigLSTM(60, 600, backend="triton", device="cuda")


def kernel(p: Problem, mode: Mode) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Any]:
    """What a problem's `run` gives, the gradient of every leaf, and what the kernels saved."""
    (backward,) = kernels("backward")
    forward, made = backward.forward, []
    with pytest.MonkeyPatch.context() as patch, in_mode(mode):
        patch.setattr(backward, "forward", lambda *a, **b: made.append(forward(*a, **b)) or made[0])
        out, grads = outputs_and_gradients(p, "triton")
    return out, grads, made[0][3]


def forced(p: Problem, bits: Tensor) -> Outcome:
    """The equations in float64, with the selections that are given as bits (T, B, N)."""
    slots = torch.arange(p.sel.K + p.sel.N, device=bits.device)
    views, peers = ((bits.unsqueeze(-1) >> slots) & 1).bool().split((p.sel.K, p.sel.N), dim=3)
    rules = ("choose_cells", bits != 0), ("weigh_views", views), ("weigh_peers", peers)
    with pytest.MonkeyPatch.context() as patch:
        for name, chosen in rules:
            patch.setattr(cell, name, Mock(side_effect=chosen.unbind()))
        return outputs_and_gradients(p.to(torch.float64), "reference")


def assert_equals_float64(*problems: Problem, mode: Mode, gradients: bool = True) -> None:
    """Outputs, with and without gradients, and these if said so, with the same masks.

    Several problems are compared as one: a gradient of one number is a sum that may nearly cancel.
    """
    compared = defaultdict(list)
    for p in problems:
        out, grads, saved = kernel(p, mode)
        want, want_grads = forced(p, saved.bits)
        calls = [out]
        for _ in range(3):  # the first goes through Triton, the others straight to what it compiled
            with torch.no_grad(), in_mode(mode):
                calls.append(p.run("triton"))
        for at, (what, expected) in enumerate(zip(("y", "h", "c"), want[:3], strict=True)):
            for number, call in enumerate(calls):
                compared[f"{what} of call {number}"].append((call[at], expected))
        for n, expected in want_grads.items() if gradients else ():
            compared[f"d{n}"].append((grads[n], expected))
    for what, pairs in compared.items():
        got, expected = (
            torch.cat([t.flatten() for t in each]) for each in zip(*pairs, strict=True)
        )
        assert relative(got, expected) < mode.error, what


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SIZES)
def test_outputs_and_gradients_equal_float64_with_the_same_masks(name, mode):
    draws = 4 if name.startswith("one number") else 1
    assert_equals_float64(*(problem(name) for _ in range(draws)), mode=MODES[mode])


def test_gates_that_are_nearly_closed_do_not_drift_in_a_long_sequence_in_bf16():
    p = problem("the paper's")
    x = torch.randn(400, *p.x.shape[1:], generator=seeded(3)).cuda()
    b = torch.zeros_like(p.h).repeat(1, 1, 4)[0]  # (N, 4d): f, i, o, g
    b[:, : p.h.shape[2]], b[:, p.h.shape[2] : 2 * p.h.shape[2]] = 8, -8
    p = replace(p, x=x, weights=p.weights._replace(b=b), live=None, reset=None)
    assert_equals_float64(p, mode=MODES["bf16"], gradients=False)


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("multiprocessors", [16, 64, 108])
@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_a_gpu_computes_the_same(mode, multiprocessors, monkeypatch):
    from riglstm.scan.triton import plan

    room = plan.chip(torch.device("cuda"))[1]
    p = problem("the paper's")
    torch.set_float32_matmul_precision(MODES[mode].matmul)
    z = plan.sizes(100, p.sel, True, torch.float32)
    usual = plan.forward_tiles(z, 64, torch.device("cuda"))
    monkeypatch.setattr(plan, "chip", lambda device: (multiprocessors, room))
    if multiprocessors < 96:
        assert plan.forward_tiles(z, 64, torch.device("cuda"))["BN"] > usual["BN"]
    else:
        # As many as an A100 has: in halves programs select and multiply.
        halves = z._replace(held=torch.bfloat16)
        tile = plan.resident_tiles(halves, 64, torch.device("cuda"))
        assert not tile["APART"]
    assert_equals_float64(p, mode=MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("B", [33, 64, 150])
def test_ties_nan_and_infinities_choose_as_the_reference_does(B, mode):
    # Small whole numbers: scores are exact in every precision, and many are equal.
    sizes = {**PAPER, "B": B, "T": 1, "D": 600, "input_views": "split", "update_bias": True}
    p = whole_numbers(random_problem(seeded(1), **sizes).to(torch.float32), "cuda")
    _, _, saved = kernel(p, MODES[mode])
    _, _, seen = reference.trace(*(p.x, p.h, p.c, p.weights, p.sel))
    slots = torch.cat((seen.views, seen.peers), dim=3) & seen.active.unsqueeze(3)
    taken = (slots.int() << torch.arange(12, device="cuda")).sum(3)
    assert torch.equal(saved.bits.long(), taken)
    assert torch.equal(saved.woke, seen.active)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("B", [100, 512])
def test_a_nan_stays_in_its_sequence_whatever_its_bits(B, mode):
    # All set is what stands where a number is waited for.
    layer = papers_layer()
    x = torch.randn(5, B, 60, device="cuda")
    x.view(torch.int32)[2, 5, 3] = -1
    with torch.no_grad(), in_mode(MODES[mode]):
        assert layer(x)[0].isnan().any(2).nonzero().tolist() == [[2, 5], [3, 5], [4, 5]]
        for w in layer.parameters():
            w.view(torch.int32).view(-1)[5] = -1
        assert layer(x)[0].isnan().any(2).all()


def whole_numbers(p: Problem, device: str) -> Problem:
    """Rows 0 and 1 have equal states and views; from 2 on one number each is none, or infinite."""
    numbers = {n: v.sign() * (v.abs() > 0.7) for n, v in p.leaves().items()}
    h, x = numbers["h"], numbers["x"]
    h[0], x[:, 1] = h[0, :1], x[:, 1, :100].repeat(1, 6)
    h[2, 1, 99], h[3, 5, 0], h[4, 0, 7], h[5, 2, 50] = *[float("nan")] * 2, *[float("inf")] * 2
    x[:, 6, 3], x[:, 7, 599], x[:, 8, 250] = float("nan"), float("inf"), -float("inf")
    return p.with_leaves({n: v.to(device) for n, v in numbers.items()})


@pytest.mark.parametrize("mode", ["tf32", "bf16"])
def test_a_sequence_is_the_same_in_tiles_of_every_kind(mode):
    from riglstm.scan import triton

    p = problem("more than fit at once")

    def run(B: int) -> Tensor:
        flags = {"live": p.live[:, :B], "reset": p.reset[:, :B]}
        args = (p.x[:, :B], p.h[:B], p.c[:B], p.weights, p.sel)
        with torch.no_grad(), in_mode(MODES[mode]):
            return triton.scan(*args, **flags)[0]

    every = run(270)
    assert all(torch.equal(run(B), every[:, :B]) for B in (100, 200))


@pytest.mark.parametrize("mode", ["tf32", "bf16"])
@pytest.mark.parametrize("B", [100, 200, 600])
def test_a_step_of_one_barrier_is_one_of_two(B, mode):
    # Where there are resets, even none, `select` waits for all programs.
    layer = papers_layer()
    for T in (1, 2, 12):
        x, none = torch.randn(T, B, 60, device="cuda"), torch.zeros(T, B, dtype=torch.bool).cuda()
        for learns in (False, True):
            with torch.set_grad_enabled(learns), in_mode(MODES[mode]):
                (y, state), (want, last) = layer(x), layer(x, reset=none)
            assert all(map(torch.equal, (y, *state), (want, *last)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("B", [64, 130, 512])
@pytest.mark.parametrize(("learns", "times"), [(False, 1000), (True, 200)])
def test_many_calls_beside_a_busy_stream_give_the_same_bits(learns, times, B, mode):
    layer, x = papers_layer(), torch.randn(6, B, 60, device="cuda", requires_grad=True)

    def work() -> list[Tensor]:
        with torch.set_grad_enabled(learns), in_mode(MODES[mode]):
            y = layer(x)[0]
        leaves = (x, *layer.parameters())
        return [y, *(torch.autograd.grad(y, leaves, torch.ones_like(y)) if learns else ())]

    noise, side = torch.randn(1024, 1024, device="cuda"), torch.cuda.Stream()
    want = work()  # it has the GPU for itself
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        with torch.cuda.stream(side):
            noise = (noise @ noise).tanh()
        for got, right in zip(work(), want, strict=True):
            different += (got != right).sum()
    assert int(different) == 0


STUCK = """
import torch, triton
from riglstm.scan.triton.kernels.common import wait

@triton.jit
def waits_for_nobody(COUNTER):
    wait(COUNTER, 1)

waits_for_nobody[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
torch.cuda.synchronize()
"""


def test_a_barrier_that_nobody_comes_to_ends_in_an_error(tmp_path):
    # In a process of its own: CUDA is of no use in one after that. It takes half a minute.
    (tmp_path / "stuck.py").write_text(STUCK)
    ran = python(str(tmp_path / "stuck.py"), timeout=300)
    assert ran.returncode != 0
    assert "CUDA error: unspecified launch failure" in ran.stderr, ran.stderr


@pytest.mark.parametrize("half", [False, True])
def test_two_layers_on_two_streams_neither_hang_nor_disturb_each_other(half):
    layers = [papers_layer() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in layers]
    x = torch.randn(6, 64, 60, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=half):
        want = [layer(x)[0] for layer in layers]
        different = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in layers]
        torch.cuda.synchronize()
        for _ in range(200):
            for layer, stream, right, wrong in zip(layers, streams, want, different, strict=True):
                with torch.cuda.stream(stream):
                    wrong += (layer(x)[0] != right).sum()
        torch.cuda.synchronize()
    assert [int(wrong) for wrong in different] == [0, 0]


@pytest.mark.parametrize("B", [8, 65])
@pytest.mark.parametrize("halves", [False, True])
def test_what_lies_at_an_odd_address_is_read_after_the_same_at_an_even_one(halves, B):
    layer = RigLSTM(8, 600, backend="triton", device="cuda")
    x, b = torch.randn(3, B, 8, device="cuda"), layer.bias_gates_l0

    def odd(t: Tensor) -> Tensor:
        moved = torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
        assert moved.data_ptr() % 8 == 4
        return moved

    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=halves):
        want = layer(x)[0]
        assert torch.equal(layer(odd(x))[0], want)
        b.data = odd(b)
        assert torch.equal(layer(x)[0], want)


@pytest.mark.parametrize("halves", [False, True])
def test_neither_b_nor_t_compiles_anything_anew(halves):
    from riglstm.scan.triton.kernels.resident import resident_kernel
    from riglstm.scan.triton.kernels.tiled import tiled_kernel

    kernel = resident_kernel if halves else tiled_kernel
    layer = RigLSTM(8, 64, num_cells=4, backend="triton", device="cuda")

    def variants() -> int:
        return sum(len(cache[0]) for cache in kernel.device_caches.values())

    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=halves):
        layer(torch.randn(3, 5, 8, device="cuda"))
        before = variants()
        assert before > 0
        for T, B in ((1, 1), (2, 16), (17, 64), (64, 33)):
            layer(torch.randn(T, B, 8, device="cuda"))
    assert variants() == before


def test_the_layer_composes_it():
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "num_cells": 3}
    layer = RigLSTM(7, 48, **options, device="cuda")
    other = RigLSTM(7, 48, **options, backend="batched", device="cuda")
    other.load_state_dict(layer.state_dict())
    assert "-> 'triton'" in repr(layer)
    packed = pack_sequence([torch.randn(n, 7, device="cuda") for n in (9, 6, 1)])
    (a, (h, c)), (b, (h_b, c_b)) = layer(packed), other(packed)
    for one, two in ((a.data, b.data), (h, h_b), (c, c_b)):
        assert relative(one.detach(), two.detach().double()) < 1e-5
    a.data.sum().backward()
    b.data.sum().backward()
    for one, two in zip(layer.parameters(), other.parameters(), strict=True):
        assert relative(one.grad, two.grad.double()) < 1e-4


# torch leaves weights of bf16 in pieces, and says so; 6 MB of what is compared.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
@pytest.mark.parametrize("half", [False, True])
def test_training_takes_at_most_twice_the_memory_of_an_lstm(half):
    def peak(layer: nn.Module, dtype: torch.dtype) -> int:
        x = torch.randn(1024, 64, 600, device="cuda", dtype=dtype, requires_grad=True)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = layer(x)[0]
        torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))
        return torch.cuda.max_memory_allocated() - held

    torch.set_float32_matmul_precision("high")
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        ours = peak(RigLSTM(600, 600, backend="triton", device="cuda"), torch.float32)
    dtype = torch.bfloat16 if half else torch.float32
    assert ours <= 2 * peak(nn.LSTM(600, 600, device="cuda", dtype=dtype), dtype)


def test_a_batch_of_no_sequences_on_a_gpu():
    layer = RigLSTM(20, 96, backend="triton", device="cuda")
    x = torch.randn(3, 0, 20, device="cuda", requires_grad=True)
    for _ in range(4):
        with torch.no_grad():
            assert layer(x)[0].shape == (3, 0, 96)
    y, (h, c) = layer(x)
    (y.sum() + h.sum() + c.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True for each call that was played from the launch cache."""
    (cache,) = kernels("launch_cache")
    outcome: list[bool] = []
    play = cache.Recording.play
    monkeypatch.setattr(cache.Recording, "play", lambda *a: outcome.append(True) or play(*a))
    return outcome


def same(layer: RigLSTM, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> bool:
    """Whether a call gives the bits of one in full."""
    (y, state), (want, last) = layer(x, hx), layer._in_full(x, hx, None, None)
    return all(map(torch.equal, (y, *state), (want, *last)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("T", "B", "given"), [(1, 1, True), (7, 64, False), (7, 130, True)])
def test_cached_launches_give_the_bits_of_calls_in_full(T, B, given, mode, played):
    layer = papers_layer()
    with torch.no_grad(), in_mode(MODES[mode]):
        for _ in range(5):
            x, (h, c) = torch.randn(T, B, 60).cuda(), torch.randn(2, 1, B, 600).cuda()
            assert same(layer, x, (h, c) if given else None)
    # Without TF32, torch maps the input.
    assert played == ([] if mode == "fp32" else [True] * 3)


def test_weights_of_cached_launches_may_change_and_go(played):
    torch.set_float32_matmul_precision("high")
    layer, x = papers_layer(), torch.randn(3, 5, 60, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            before = layer(x)[0]
        assert played == [True]
        layer.weight_gates_l0.data.mul_(0.5)
        assert same(layer, x)
        assert not torch.equal(layer(x)[0], before)
        layer.cpu()
        with pytest.raises(ValueError, match="cpu"):
            layer(x)
        layer.cuda()
        assert all(same(layer, x) for _ in range(4))
        layer.double()
        with pytest.raises((ValueError, TypeError), match="float64"):
            layer(x)
        layer.float()
        played.clear()
        assert all(same(layer, x) for _ in range(4))
        assert played[-1:] == [True]


def test_a_cached_launch_runs_on_the_stream_of_the_caller_and_is_captured_there(played):
    torch.set_float32_matmul_precision("high")
    layer, x = papers_layer(), torch.randn(5, 70, 60, device="cuda")
    with torch.no_grad():
        want = layer._in_full(x, None, None, None)[0]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                got = layer(x)[0]
        side.synchronize()
        assert torch.equal(got, want)
        assert played == [True, True]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)[0]
        assert played == [True] * 3
        x.mul_(2)
        graph.replay()
        assert torch.equal(y, layer._in_full(x, None, None, None)[0])
