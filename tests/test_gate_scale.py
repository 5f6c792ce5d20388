"""Wider gates at the start: `gate_scale` of the models with LSTM gates.

Sizes: D input features, H wide.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from riglstm.lab.cli.train import read_options
from riglstm.models import MODELS, build, options_of

D, H = 5, 24

GATES: dict[str, tuple[str, ...]] = {
    "lstm": ("weight_ih_l0", "weight_hh_l0"),
    "gridlstm": ("stack.weight_ih_l0", "stack.weight_hh_l0"),
    "rim": ("cell.lstm.weight",),
    "brim": ("lower.lstm.weight", "upper.lstm.weight"),
    "riglstm": tuple(
        f"layer.weight_gates_{end}" for end in ("l0", "l0_reverse", "l1", "l1_reverse")
    ),
}
"""The names of each model's gate matrices."""

KINDS: dict[str, dict[str, Any]] = {
    "riglstm": {"num_layers": 2, "bidirectional": True, "steady_start": True}
}

every_model = pytest.mark.parametrize("name", GATES)


def made(name: str, **given: Any) -> Any:
    torch.manual_seed(0)
    return build(name, D, H, **KINDS.get(name, {}), **given)


def assert_twice(scaled: Any, plain: Any, gates: tuple[str, ...]) -> None:
    expected = plain.state_dict()
    assert set(gates) <= expected.keys()
    for name, value in scaled.state_dict().items():
        assert torch.equal(value, expected[name] * (2 if name in gates else 1)), name


@every_model
def test_gate_scale_multiplies_the_gates_matrices_and_nothing_else(name: str) -> None:
    scaled, plain = made(name, gate_scale=2), made(name)
    assert_twice(scaled, plain, GATES[name])
    for model in (scaled, plain, clone := copy.deepcopy(scaled)):
        torch.manual_seed(1)
        model.reset_parameters()
    assert_twice(scaled, plain, GATES[name])
    assert_twice(clone, plain, GATES[name])


@every_model
def test_the_command_line_sets_the_gate_scale(name: str) -> None:
    assert read_options(name, ["gate_scale=2"]) == {"gate_scale": 2.0}


@every_model
def test_repr_shows_a_gate_scale_that_is_not_one(name: str) -> None:
    assert "gate_scale=1.5" in repr(made(name, gate_scale=1.5))
    assert "gate_scale" not in repr(made(name))


@every_model
@pytest.mark.parametrize("value", [0, -1.0, None, "1", True, float("nan"), float("inf")])
def test_a_gate_scale_that_is_no_positive_number_is_refused(name: str, value: Any) -> None:
    message = rf"gate_scale must be a positive finite number, got {value!r}; 1 changes nothing"
    with pytest.raises(ValueError, match=message):
        made(name, gate_scale=value)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - GATES.keys()))
def test_models_without_lstm_gates_take_no_gate_scale(name: str) -> None:
    assert "gate_scale" not in options_of(name)
    with pytest.raises(ValueError, match=f"'gate_scale' is no option of the model '{name}'"):
        build(name, D, H, gate_scale=2.0)
