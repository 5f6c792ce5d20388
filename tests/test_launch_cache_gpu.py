"""Cached launches on a GPU give the bits of calls in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import ON_A_GPU, kernels
from riglstm import RigLSTM
from test_triton_gpu import MODES, in_mode, papers_layer

(cache,) = kernels("launch_cache")
pytestmark = ON_A_GPU
State = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True for each call that was played."""
    outcome: list[bool] = []
    play = cache.Recording.play
    monkeypatch.setattr(cache.Recording, "play", lambda *a: outcome.append(True) or play(*a))
    return outcome


def same(layer: RigLSTM, x: Tensor, hx: State | None = None) -> bool:
    """Whether a call gives the bits of one in full."""
    (y, state), (want, last) = layer(x, hx), layer._in_full(x, hx, None, None)
    return all(map(torch.equal, (y, *state), (want, *last)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("T", "B", "given"), [(1, 1, True), (7, 64, False), (7, 130, True)])
def test_it_gives_the_same_bits(T: int, B: int, given: bool, mode: str, played: list[bool]) -> None:
    layer = papers_layer()
    with torch.no_grad(), in_mode(MODES[mode]):
        for _ in range(5):
            x, (h, c) = torch.randn(T, B, 60).cuda(), torch.randn(2, 1, B, 600).cuda()
            assert same(layer, x, (h, c) if given else None)
    # Without TF32, torch maps the input.
    assert played == ([] if mode == "fp32" else [True] * 3)


def test_a_state_that_was_one_tensor_once_is_two_later(played: list[bool]) -> None:
    torch.set_float32_matmul_precision("high")
    layer, x = papers_layer(), torch.randn(2, 5, 60, device="cuda")
    both, h, c = torch.randn(3, 1, 5, 600, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            assert same(layer, x, (both, both))
        for _ in range(4):
            assert same(layer, x, (h, c))
    assert played[-1:] == [True]


def test_weights_may_change_and_go(played: list[bool]) -> None:
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


def test_it_runs_on_the_stream_of_the_caller_and_is_captured_there(played: list[bool]) -> None:
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
