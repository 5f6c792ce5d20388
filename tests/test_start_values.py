"""Start values: `forget_bias` and `gate_scale` of the models with LSTM gates, `steady_start`.

Sizes: D input features, H wide, cells of size d.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import close
from riglstm import RigLSTM
from riglstm.lab.cli.train import read_options
from riglstm.models import build
from riglstm.models.lstm import LSTM, GridLSTM
from riglstm.models.rim import BlockLSTM

D, H = 5, 24
ENDS = ("l0", "l0_reverse", "l1", "l1_reverse")

FORGET: dict[str, Callable[[Any], list[Tensor]]] = {
    "lstm": lambda m: [m.bias_ih_l0[H : 2 * H]],
    "gridlstm": lambda m: [m.stack.bias_ih_l0[H : 2 * H]],
    "rim": lambda m: [m.cell.lstm.bias_ih[:, 4:8]],
    "brim": lambda m: [m.lower.lstm.bias_ih[:, 4:8], m.upper.lstm.bias_ih[:, 8:16]],
    "riglstm": lambda m: [m.layer.get_parameter(f"bias_gates_{end}")[:, :4] for end in ENDS],
}
"""Where each model holds the forget gates' biases, of 6 cells of size 4 where it has cells."""

GATES: dict[str, tuple[str, ...]] = {
    "lstm": ("weight_ih_l0", "weight_hh_l0"),
    "gridlstm": ("stack.weight_ih_l0", "stack.weight_hh_l0"),
    "rim": ("cell.lstm.weight",),
    "brim": ("lower.lstm.weight", "upper.lstm.weight"),
    "riglstm": tuple(f"layer.weight_gates_{end}" for end in ENDS),
}
"""The names of each model's gate matrices."""

ALL_AWAKE: dict[str, dict[str, Any]] = {
    "rim": {"active_cells": 6},
    "brim": {"active_cells": (6, 3)},
    "riglstm": {"active_cells": 6},
}

every_model = pytest.mark.parametrize("name", GATES)


def made(name: str, **given: Any) -> Any:
    """A model; a RigLSTM has two layers and two directions, and may start steady."""
    torch.manual_seed(0)
    if name == "riglstm":
        given = {"num_layers": 2, "bidirectional": True, **given}
    return build(name, D, H, **given)


@every_model
@pytest.mark.parametrize("option", ["forget_bias", "gate_scale"])
def test_an_option_changes_its_own_start_values_whenever_they_are_drawn(name, option):
    changed, plain = made(name, **{option: 2}), made(name)
    clone = copy.deepcopy(changed)
    for again in (False, True):
        if again:
            for model in (changed, plain, clone):
                torch.manual_seed(1)
                model.reset_parameters()
        want = copy.deepcopy(plain)
        with torch.no_grad():
            for bias in FORGET[name](want) if option == "forget_bias" else ():
                bias += 2
            for gate in GATES[name] if option == "gate_scale" else ():
                want.get_parameter(gate).mul_(2)
        for model in (changed, clone):
            close(model.state_dict(), want.state_dict(), atol=0)


@every_model
def test_a_high_forget_bias_keeps_the_memory_and_a_low_one_drops_it(name):
    given = ALL_AWAKE.get(name, {})
    if name == "riglstm":
        given = {**given, "num_layers": 1, "bidirectional": False}
    for forget_bias, kept in ((100.0, True), (-100.0, False)):
        model = made(name, forget_bias=forget_bias, **given).eval()
        h, c = model.initial_state(3)
        _, (_, c) = model(torch.randn(1, 3, D), (h, c + 50))
        # An input gate and a candidate can change it by 1 at the most.
        assert ((c - (50 if kept else 0)).abs() <= 1).all()


@every_model
@pytest.mark.parametrize("option", ["forget_bias", "gate_scale"])
def test_the_command_line_sets_an_option_and_repr_shows_it(name, option):
    assert read_options(name, [f"{option}=2"]) == {option: 2.0}
    assert f"{option}=1.5" in repr(made(name, **{option: 1.5}))
    assert option not in repr(made(name))


@pytest.mark.parametrize(
    ("module", "fan_in"),
    [
        (LSTM(D, H), {}),
        (GridLSTM(D, H), dict.fromkeys(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), 4)),
        (BlockLSTM(6, 8, 4, bound=H**-0.5, device=None, dtype=None), {}),
        (RigLSTM(D, H, update_bias=None), {"weight_in": D, "bias_in": D, "weight_query": 44}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_without_options_every_start_value_is_the_plain_draw(module, fan_in):
    torch.manual_seed(2)
    module.reset_parameters()
    torch.manual_seed(2)
    for name, parameter in module.named_parameters():
        bound = fan_in.get(name.removeprefix("stack.").removesuffix("_l0"), H) ** -0.5
        drawn = torch.empty_like(parameter).uniform_(-bound, bound)
        assert torch.equal(parameter.view(torch.int32), drawn.view(torch.int32)), name


@every_model
@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"forget_bias must be a finite number, got {value!r}"):
        made(name, forget_bias=value)
    for scale in (value, 0, -1.0):
        message = rf"gate_scale must be a positive finite number, got {scale!r}; 1 changes nothing"
        with pytest.raises(ValueError, match=message):
            made(name, gate_scale=scale)


def wide(**given: Any) -> RigLSTM:
    torch.manual_seed(0)
    return RigLSTM(20, 600, active_cells=4, **given)


def test_a_steady_start_lets_the_same_cells_wake_whatever_the_input():
    x = torch.randn(30, 16, 20)
    same = []
    for steady in (True, False):
        active = wide(steady_start=steady, forget_bias=3.0).trace(x)[0].active  # (T, B, N)
        # How often a step wakes the cells that most sequences wake in it.
        most = active.float().mean(1, keepdim=True) > 0.5
        same.append(float((active == most).all(2).float().mean()))
    assert same[0] == 1
    assert same[1] < 0.5


def test_a_steady_start_changes_the_views_and_the_bias_of_g_alone():
    steady, plain = wide(steady_start=True), wide()
    views = steady.weight_in_l0.unflatten(1, (6, 100))
    assert views.sum(1).abs().max() < 1e-6
    assert torch.equal(steady.bias_in_l0, torch.full((600,), 0.2))
    assert torch.allclose(
        steady.weight_in_l0[:, :100] - plain.weight_in_l0[:, :100],
        -plain.weight_in_l0.unflatten(1, (6, 100)).mean(1),
    )
    raised = steady.bias_gates_l0 - plain.bias_gates_l0
    assert torch.equal(raised[:, :300], torch.zeros(6, 300))
    assert torch.allclose(raised[:, 300:], torch.tensor(0.1))
    for name in ("weight_gates_l0", "weight_query_l0"):
        assert torch.equal(steady.get_parameter(name), plain.get_parameter(name))
    deep = wide(steady_start=True, num_layers=2, bidirectional=True)
    for end in ENDS:
        assert (deep.get_parameter(f"bias_in_{end}") == 0.2).all()
    assert "steady_start=True" in repr(deep)
    assert "steady_start" not in repr(plain)
