"""Start values at which the input does not decide who wakes.

Sizes: D input features, H wide, N cells of size d.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from riglstm import RigLSTM

D, H, N = 20, 600, 6


def made(**given: Any) -> RigLSTM:
    torch.manual_seed(0)
    return RigLSTM(D, H, num_cells=N, active_cells=4, **given)


def awake(layer: RigLSTM, x: Tensor) -> Tensor:
    """Who wakes in each step of each sequence, (T, B, N)."""
    trace = layer.trace(x)[0]
    return trace.active


def test_a_steady_start_lets_the_same_cells_wake_whatever_the_input() -> None:
    x = torch.randn(30, 16, D)
    steady, plain = (awake(made(steady_start=s, forget_bias=3.0), x) for s in (True, False))
    # How often a step wakes the cells that most sequences wake in it.
    same = [
        float((a == (a.float().mean(1, keepdim=True) > 0.5)).all(2).float().mean())
        for a in (steady, plain)
    ]
    assert same[0] == 1
    assert same[1] < 0.5


def test_a_steady_start_changes_the_views_and_the_bias_of_g_alone() -> None:
    steady, plain = made(steady_start=True), made()
    views = steady.weight_in_l0.unflatten(1, (N, H // N))
    assert views.sum(1).abs().max() < 1e-6
    assert torch.equal(steady.bias_in_l0, torch.full((H,), 0.2))
    assert torch.allclose(
        steady.weight_in_l0[:, :100] - plain.weight_in_l0[:, :100],
        -plain.weight_in_l0.unflatten(1, (N, 100)).mean(1),
    )
    raised = steady.bias_gates_l0 - plain.bias_gates_l0
    assert torch.equal(raised[:, :300], torch.zeros(N, 300))
    assert torch.allclose(raised[:, 300:], torch.tensor(0.1))
    for name in ("weight_gates_l0", "weight_query_l0"):
        assert torch.equal(steady.get_parameter(name), plain.get_parameter(name))


def test_every_layer_and_direction_starts_steady_and_repr_says_so() -> None:
    layer = made(steady_start=True, num_layers=2, bidirectional=True)
    for suffix in ("l0", "l0_reverse", "l1", "l1_reverse"):
        assert (layer.get_parameter(f"bias_in_{suffix}") == 0.2).all()
    assert "steady_start=True" in repr(layer)
    assert "steady_start" not in repr(made())


@pytest.mark.parametrize(
    "given",
    [
        {"num_views": 1},
        {"bias": False},
        {"cells": "all"},
        {"input_views": "split", "input_size": H},
    ],
)
def test_a_steady_start_without_maps_that_cancel_is_refused(given: dict[str, Any]) -> None:
    size = given.pop("input_size", D)
    with pytest.raises(ValueError, match=r"steady_start must be False without input_views"):
        RigLSTM(size, H, num_cells=N, steady_start=True, **given)
