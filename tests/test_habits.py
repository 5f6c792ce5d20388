"""What code written for nn.LSTM does with a layer: its options, its parameters, by name or size."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from riglstm import RigLSTM, RigLSTMCell, no_decay_parameters


def test_positional_arguments_are_those_of_nn_lstm() -> None:
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
def test_numbers_of_numpy_and_switches_by_1_and_0_become_pythons_own(
    options: dict[str, Any],
) -> None:
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
def test_all_weights_are_one_list_for_each_layer_and_direction(bias: bool) -> None:
    layer = RigLSTM(4, 12, 2, bias, bidirectional=True)
    listed = layer.all_weights
    assert [len(row) for row in listed] == [6 if bias else 3] * 4
    flat = [w for row in listed for w in row]
    assert all(a is b for a, b in zip(flat, layer.parameters(), strict=True))


def test_a_loop_that_fills_biases_by_name_leaves_the_soft_update_alone() -> None:
    layer = RigLSTM(4, 12, 2, bidirectional=True)
    for name, p in layer.named_parameters():
        if "bias" in name:
            p.data.fill_(0)
    filled = {name for name, p in layer.named_parameters() if not p.any()}
    assert {name.partition("_l")[0] for name in filled} == {"bias_in", "bias_gates"}
    assert len(filled) == 8
    assert all((layer.weights(k, r).update_bias == 4).all() for k in (0, 1) for r in (False, True))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_weight_decay_leaves_biases_and_vectors_of_a_whole_model_alone() -> None:
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
