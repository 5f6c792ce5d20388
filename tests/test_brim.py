"""BRIM: against the NumPy version, and who sees what of whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import models_oracle
from riglstm.models.base import State
from riglstm.models.brim import BRIM, PRESETS
from test_rim import (
    TOL,
    a_state,
    check_gradients,
    known_dropout,
    oracle_weights,
    random,
    same,
    scramble,
    seeded,
)

SMALL = {"num_cells": (4, 2), "active_cells": (2, 1), "key_size": 3, "comm_size": 2}


def a_brim(gen: torch.Generator, D: int = 5, H: int = 8, **options: Any) -> BRIM:
    model = BRIM(D, H, dtype=torch.float64, **{**SMALL, **options})
    scramble(model, gen)
    return model.eval()


def run_oracle(
    model: BRIM,
    x: Tensor,
    state: State,
    held: tuple[np.ndarray, np.ndarray] | None = None,
    weights: tuple[models_oracle.Weights, models_oracle.Weights] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    N = model.num_cells
    h, c = (
        (
            s[0].detach().unflatten(1, (N[0], -1)).numpy(),
            s[1].detach().unflatten(1, (N[1], -1)).numpy(),
        )
        for s in state
    )
    p = weights or (oracle_weights(model.lower), oracle_weights(model.upper))
    K_a = model.active_cells[0], model.active_cells[1]
    return models_oracle.brim(x.detach().numpy(), h, c, p, K_a, held)


def check_against_numpy(model: BRIM, x: Tensor, state: State) -> None:
    want = run_oracle(model, x, state)
    output, (h, c) = model(x, state)
    traces = model.trace(x, state)
    T, B = x.shape[:2]
    for layer, (trace, layer_want) in enumerate(zip(traces, want, strict=True)):
        assert trace.layer == layer
        assert np.array_equal(trace.active.numpy(), layer_want["active"])
        same(trace.output, layer_want["h"].reshape(T, B, -1))
        same(trace.views, layer_want["views"])
        same(trace.peers, layer_want["peers"])
        same(h[layer], layer_want["h"][-1].reshape(B, -1))
        same(c[layer], layer_want["c"][-1].reshape(B, -1))
    same(output, want[1]["h"].reshape(T, B, -1))


@pytest.mark.parametrize("seed", range(5))
def test_equals_numpy(seed: int) -> None:
    gen = seeded(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=gen))

    N = (1, 2, 3, 4, 6)[draw(0, 4)], (1, 2, 3, 4, 6)[draw(0, 4)]
    options = {
        "num_cells": N,
        "active_cells": (draw(1, N[0]), draw(1, N[1])),
        "input_heads": (1, 2, 4)[draw(0, 2)],
        "key_size": draw(1, 4),
        "comm_heads": draw(1, 3),
        "comm_size": draw(1, 3),
    }
    model = a_brim(gen, D=draw(1, 6), H=12, **options)
    B = draw(1, 3)
    check_against_numpy(model, random(gen, 4, B, model.input_size), a_state(gen, model, B))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_equal_numpy_from_the_zero_state(preset: str) -> None:
    gen = seeded(9)
    model = a_brim(gen, H=12, **PRESETS[preset])
    # All scores of the first step tie.
    check_against_numpy(model, random(gen, 4, 2, 5), model.initial_state(2))


def test_gradients_equal_central_differences_with_sleeping_candidates_held() -> None:
    """As for RIM: the candidates of sleeping cells are constants of the backward pass."""
    gen = seeded(10)
    model = a_brim(gen, input_heads=2, comm_heads=2)
    x = random(gen, 3, 2, 5).requires_grad_()
    state = tuple(s.requires_grad_() for s in a_state(gen, model, 2))
    first = run_oracle(model, x, state)
    held = first[0]["candidates"], first[1]["candidates"]
    weight = random(gen, *first[1]["h"].shape)

    def loss() -> Tensor:
        y, (_, c) = model(x, state)
        return (y * weight.flatten(2)).sum() + c.sum()

    def oracle_loss() -> float:
        now = run_oracle(model, x, state, held)
        for layer in range(2):
            assert np.array_equal(now[layer]["active"], first[layer]["active"])
        memory = now[0]["c"][-1].sum() + now[1]["c"][-1].sum()
        return float((now[1]["h"] * weight.numpy()).sum() + memory)

    assert abs(loss().item() - oracle_loss()) < TOL
    check_gradients([x, *state, *model.parameters()], loss, oracle_loss)


def test_dropout_falls_on_what_cells_take_in_and_before_the_tanh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gen = seeded(17)
    model = a_brim(gen, dropout=0.3, num_cells=(4, 2)).train()
    mask = known_dropout(monkeypatch)
    x, state = random(gen, 3, 2, 5), a_state(gen, model, 2)
    layers = []
    for layer, (N, d) in ((model.lower, (4, 2)), (model.upper, (2, 4))):
        p = oracle_weights(layer)
        layers.append(p | {"drop_u": mask(N, 4 * d), "drop_update": mask(N, d)})
    want = run_oracle(model, x, state, weights=(layers[0], layers[1]))
    same(model(x, state)[0], want[1]["h"].reshape(3, 2, -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 9}, r"multiple of num_cells = 6, got 9; take hidden_size=6 or 12"),
        ({"num_cells": (6, 5)}, r"multiple of num_cells = 5, got 12; take hidden_size=10 or 15"),
        ({"num_cells": 6}, r"num_cells must be a pair, .* got 6; give it as \(6, 3\)"),
        ({"num_cells": (6, 3, 2)}, r"num_cells must be a pair, .* got \(6, 3, 2\)"),
        ({"active_cells": (4,)}, r"active_cells must be a pair, .* got \(4,\)"),
        ({"active_cells": (4, 4)}, r"active_cells must be .* = \[1, 3\], got 4"),
        ({"input_heads": 3}, r"input_heads must divide .* = 8 .* num_cells = 6, got 3; take 1, 2"),
        ({"input_heads": 0}, "input_heads must be a whole number of at least 1, got 0"),
    ],
)
def test_errors_say_expected_got_and_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BRIM(**{"input_size": 5, "hidden_size": 12, **options})
