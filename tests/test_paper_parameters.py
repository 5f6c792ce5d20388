"""The weights in the paper's notation: out, in, and back."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import close
from riglstm import VARIANTS, RigLSTM

N, K, D, d = 4, 3, 6, 2
"""Cells, views, input features (K · d, so that the input can also be split) and the cell size."""

FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "per_cell": {"query": "per_cell"},
    "no_bias": {"bias": False},
    "printed": {"soft_update": "printed"},
    "update_bias": {"update_bias": 0.5},
    "per_cell_update_bias": {"query": "per_cell", "update_bias": -1.0},
    **VARIANTS,
}


def build(seed: int = 0, **options: Any) -> RigLSTM:
    torch.manual_seed(seed)
    return RigLSTM(D, N * d, num_cells=N, num_views=K, dtype=torch.float64, **options)


def output(layer: RigLSTM) -> Tensor:
    """What a layer does with one fixed input, and one fixed draw where it draws."""
    x = torch.randn(5, 3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    y: Tensor = layer(x)[0]
    return y


@pytest.mark.parametrize("form", FORMS)
def test_loading_gives_another_layer_the_same_weights_and_outputs(form):
    layer, other = build(0, **FORMS[form]), build(1, **FORMS[form])
    assert not torch.equal(output(other), output(layer))
    other.load_paper_parameters(layer.paper_parameters())
    close(other.state_dict(), layer.state_dict(), atol=0)
    assert torch.equal(output(other), output(layer))


def test_each_layer_and_direction_has_its_own():
    layer = build(0, num_layers=3, bidirectional=True, query="per_cell", update_bias=0.0)
    other = build(1, num_layers=3, bidirectional=True, query="per_cell", update_bias=0.0)
    for k in range(3):
        for reverse in (False, True):
            before = {name: v.clone() for name, v in other.state_dict().items()}
            paper = layer.paper_parameters(k, reverse)
            assert tuple(paper["W_in"].shape) == (K, d, D if k == 0 else 2 * N * d)
            other.load_paper_parameters(paper, layer=k, reverse=reverse)
            suffix = f"_l{k}" + "_reverse" * reverse
            loaded = {n: v for n, v in layer.state_dict().items() if n.endswith(suffix)}
            close(other.state_dict(), before | loaded, atol=0)
    assert torch.equal(output(other), output(layer))


def test_parameters_are_copies_and_loading_keeps_the_layers_own_tensors():
    layer, other = build(0), build(1)
    before = output(layer)
    for value in layer.paper_parameters().values():
        assert not value.requires_grad
        value.fill_(1.0)
    assert torch.equal(output(layer), before)
    held = dict(other.named_parameters())
    paper = layer.paper_parameters()
    other.load_paper_parameters(paper)
    for value in paper.values():
        value.zero_()
    assert torch.equal(output(other), before)
    assert all(p is held[name] and p.requires_grad for name, p in other.named_parameters())


def test_shared_query_can_be_loaded_into_a_layer_with_one_per_cell():
    layer, other = build(0), build(1, query="per_cell")
    other.load_paper_parameters(layer.paper_parameters())
    close(output(other), output(layer))


def own_state_block() -> Tensor:
    W_q = build(1).paper_parameters()["W_q"]
    W_q[2, 1, (K + 2) * d] = 1e-9
    return W_q


SHAPES = {
    **{"W_in": (K, d, D), "b_in": (K, d), "W_gates": (N, 4, d, (K + N) * d)},
    **{"b_gates": (N, 4, d), "W_q": (N, d, (K + N) * d)},
}
REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "unknown keys": (
        {"W_out": torch.zeros(1)},
        "the paper's parameters of this layer are W_gates, W_in, W_q, b_gates, b_in, update_bias, "
        "got W_gates, W_in, W_out, W_q, b_gates, b_in, update_bias; paper_parameters() shows the "
        "form",
    ),
    "numbers in the own state's block": (
        {"W_q": own_state_block()},
        "W_q must be zero in the block of each cell's own state, which Q leaves out (Eq. 19), "
        "got other values there; set them to zero",
    ),
    "a query per cell": (
        {"W_q": build(1, query="per_cell").paper_parameters()["W_q"]},
        "W_q must be the same for every cell with query='shared', got different ones; "
        "use query='per_cell'",
    ),
}
for name, shape in SHAPES.items():
    wrong = (*shape[:-1], shape[-1] + 1)
    message = f"{name} must have shape {shape}, got {wrong}"
    REFUSED[f"another shape of {name}"] = ({name: torch.zeros(wrong).double()}, message)


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_the_weights_are_as_they_were(what):
    changes, message = REFUSED[what]
    layer = build(0)
    before = {name: v.clone() for name, v in layer.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.load_paper_parameters(build(1).paper_parameters() | changes)
    close(layer.state_dict(), before, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"layer": k}, f"layer must be a whole number in [0, num_layers - 1] = [0, 1], got {k}")
            for k in (-1, 2, 1.0, True)
        ),
        ({"reverse": True}, "reverse must be False, got True; the layer is not bidirectional"),
    ],
)
def test_layers_and_directions_that_do_not_exist_are_refused(given, message):
    rig = build(num_layers=2)
    with pytest.raises(ValueError, match=re.escape(message)):
        rig.paper_parameters(**given)
    with pytest.raises(ValueError, match=re.escape(message)):
        rig.load_paper_parameters({}, **given)
