"""A start that remembers: `forget_bias` of the models whose LSTMs have biases.

Sizes: D input features, H wide, cells of size d.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from riglstm import RigLSTM
from riglstm.lab.cli.train import read_options
from riglstm.models import build
from riglstm.models.blocks import BlockLSTM
from riglstm.models.gridlstm import GridLSTM
from riglstm.models.lstm import LSTM

D, H = 5, 24

FORGET: dict[str, Callable[[Any], list[Tensor]]] = {
    "lstm": lambda m: [m.bias_ih_l0[H : 2 * H]],
    "gridlstm": lambda m: [m.stack.bias_ih_l0[H : 2 * H]],
    "rim": lambda m: [m.cell.lstm.bias_ih[:, 4:8]],
    "brim": lambda m: [m.lower.lstm.bias_ih[:, 4:8], m.upper.lstm.bias_ih[:, 8:16]],
    "riglstm": lambda m: [m.layer.bias_gates_l0[:, :4]],
}
"""Where each model holds the forget gates' biases, of 6 cells of size 4 where it has cells."""

ALL_AWAKE: dict[str, dict[str, Any]] = {
    "rim": {"active_cells": 6},
    "brim": {"active_cells": (6, 3)},
    "riglstm": {"active_cells": 6},
}

every_model = pytest.mark.parametrize("name", FORGET)


def made(name: str, **given: Any) -> Any:
    torch.manual_seed(0)
    return build(name, D, H, **given)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for parameter, value in model.state_dict().items():
        assert torch.equal(value, expected[parameter]), parameter


@every_model
def test_forget_bias_raises_the_start_of_the_forget_gates_and_of_nothing_else(name: str) -> None:
    raised, plain = made(name, forget_bias=1), made(name)
    with torch.no_grad():
        for bias in FORGET[name](plain):
            bias += 1
    assert_equal(raised, plain)


@every_model
def test_a_high_forget_bias_keeps_the_memory_and_a_low_one_drops_it(name: str) -> None:
    for forget_bias, kept in ((100.0, True), (-100.0, False)):
        model = made(name, forget_bias=forget_bias, **ALL_AWAKE.get(name, {})).eval()
        h, c = model.initial_state(3)
        _, (_, c) = model(torch.randn(1, 3, D), (h, c + 50))
        # An input gate and a candidate can change it by 1 at the most.
        assert ((c - (50 if kept else 0)).abs() <= 1).all()


@every_model
def test_the_command_line_sets_the_forget_bias(name: str) -> None:
    assert read_options(name, ["forget_bias=1"]) == {"forget_bias": 1.0}


@every_model
def test_reset_parameters_keeps_the_forget_bias(name: str) -> None:
    raised, plain = made(name, forget_bias=1.0), made(name)
    for model in (raised, plain):
        torch.manual_seed(1)
        model.reset_parameters()
    with torch.no_grad():
        for bias in FORGET[name](plain):
            bias += 1
    assert_equal(raised, plain)


def test_every_layer_and_direction_of_a_riglstm_has_the_forget_bias() -> None:
    size: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
    torch.manual_seed(0)
    raised = RigLSTM(D, H, forget_bias=-2.0, **size)
    torch.manual_seed(0)
    plain = RigLSTM(D, H, **size)
    with torch.no_grad():
        for suffix in ("l0", "l0_reverse", "l1", "l1_reverse"):
            plain.get_parameter(f"bias_gates_{suffix}")[:, :4] -= 2
    assert_equal(raised, plain)
    for paper, expected in zip(
        raised.paper_parameters(1, True).values(),
        plain.paper_parameters(1, True).values(),
        strict=True,
    ):
        assert torch.equal(paper, expected)


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
def test_without_a_forget_bias_every_start_value_is_the_plain_draw(
    module: Any, fan_in: dict[str, int]
) -> None:
    torch.manual_seed(2)
    module.reset_parameters()
    torch.manual_seed(2)
    for name, parameter in module.named_parameters():
        bound = fan_in.get(name.removeprefix("stack.").removesuffix("_l0"), H) ** -0.5
        drawn = torch.empty_like(parameter).uniform_(-bound, bound)
        assert torch.equal(parameter.view(torch.int32), drawn.view(torch.int32)), name


@every_model
def test_copies_draw_with_the_forget_bias_too(name: str) -> None:
    model = made(name, forget_bias=3.0)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(clone, model)
        clone.reset_parameters()
        assert all((bias > 2).all() for bias in FORGET[name](clone))


@every_model
def test_repr_shows_a_forget_bias_that_is_not_zero(name: str) -> None:
    assert "forget_bias=1.5" in repr(made(name, forget_bias=1.5))
    assert "forget_bias" not in repr(made(name))


@every_model
@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf")])
def test_a_forget_bias_that_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"forget_bias must be a finite number, got {value!r}"):
        made(name, forget_bias=value)


def test_gates_without_biases_take_no_forget_bias() -> None:
    message = "forget_bias must be 0 where the gates have no bias, got 0.5; use bias=True"
    with pytest.raises(ValueError, match=message):
        made("riglstm", forget_bias=0.5, bias=False)
    assert_equal(made("riglstm", forget_bias=0.0, bias=False), made("riglstm", bias=False))
