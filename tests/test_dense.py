"""RigLSTM where nothing is selected: one product for all cells, held to the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from riglstm import RigLSTM
from riglstm.scan.batched import dense, forward

SIZES = {"num_cells": 3, "num_views": 4, "dtype": torch.float64}
EVERYTHING = {"cells": "all", "views": "all", "peers": "all"}

OPTIONS: dict[str, dict[str, Any]] = {
    "counts": {"active_cells": 3, "views_per_cell": 4, "peers_per_cell": 2},
    "rules": EVERYTHING,
    "own query": {**EVERYTHING, "query": "per_cell", "update_scale": 0.5, "update_bias": 0.3},
    "no soft update": {**EVERYTHING, "soft_update": False, "bias": False},
    "pieces of the input": {**EVERYTHING, "input_views": "split"},
    "drawn, but all": {
        **{"cells": "random", "views": "random", "peers": "random"},
        **{"active_cells": 3, "views_per_cell": 4, "peers_per_cell": 2},
    },
    "one cell": {"num_cells": 1, "num_views": 1},
}


def fits(layer: RigLSTM, idle: bool = False, product: torch.dtype = torch.float64) -> bool:
    return forward.is_dense(layer.weights().W, layer.selection, idle, product, torch.float64)


def pair(options: dict[str, Any]) -> tuple[RigLSTM, RigLSTM]:
    """The same layer on the reference and on the batched backend."""
    torch.manual_seed(0)
    reference = RigLSTM(20, 15, backend="reference", **{**SIZES, **options})
    batched = RigLSTM(20, 15, backend="batched", **{**SIZES, **options})
    batched.load_state_dict(reference.state_dict())
    return reference, batched


def everything(layer: RigLSTM, T: int, reset: Tensor | None) -> list[Tensor]:
    """Outputs, final state and all gradients."""
    gen = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    x, h, c = (draw(*shape).requires_grad_() for shape in ((T, 3, 20), (1, 3, 15), (1, 3, 15)))
    y, state = layer(x, (h, c), reset=reset)
    loss = sum((v * draw(*v.shape)).sum() for v in (y, *state))
    return [y, *state, *torch.autograd.grad(loss, (x, h, c, *layer.parameters()))]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("T", [1, 9])
def test_nothing_selected_equals_the_reference(
    name: str, T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With episodes that start inside, and the sequence taken in pieces."""
    monkeypatch.setattr(dense, "ROWS_AT_ONCE", 12)
    reference, batched = pair(OPTIONS[name])
    assert fits(batched)
    reset = torch.rand(T, 3, generator=torch.Generator().manual_seed(2)) < 0.3
    for flags in (None, reset):
        for got, expected in zip(
            everything(batched, T, flags), everything(reference, T, flags), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"active_cells": 2}, False),
        ({"active_cells": 3, "views_per_cell": 3}, False),
        ({"active_cells": 3, "views_per_cell": 4, "peers_per_cell": 1}, False),
        ({**EVERYTHING, "views": "soft"}, False),
        ({**EVERYTHING, "peers": "soft"}, False),
        (EVERYTHING, True),
    ],
)
def test_any_selection_and_large_cells_are_left_to_the_general_path(
    options: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = RigLSTM(20, 15, **SIZES, **options)
    assert fits(layer) is expected
    assert not fits(layer, idle=True)
    assert not fits(layer, product=torch.bfloat16)
    monkeypatch.setattr(forward, "LARGEST_DENSE", layer.weights().W.numel())
    assert fits(layer) is expected
    monkeypatch.setattr(forward, "LARGEST_DENSE", layer.weights().W.numel() - 1)
    assert not fits(layer), "large cells"


@pytest.mark.parametrize("wanted", ["x", "weight_in_l0", "weight_gates_l0", "weight_query_l0"])
def test_a_gradient_alone_is_the_same_as_among_all(wanted: str) -> None:
    _, layer = pair(OPTIONS["counts"])
    x = torch.randn(5, 3, 20, dtype=torch.float64, requires_grad=True)
    weights = dict(layer.named_parameters())
    leaf = x if wanted == "x" else weights[wanted]
    (among_all,) = torch.autograd.grad(layer(x)[0].square().sum(), leaf)
    for other in (x, *weights.values()):
        other.requires_grad_(other is leaf)
    (alone,) = torch.autograd.grad(layer(x)[0].square().sum(), leaf)
    assert torch.equal(alone, among_all)
