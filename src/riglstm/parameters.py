"""The weights of one layer in one direction: shapes, start values, the paper's notation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from riglstm.cell import Weights, gather_query, spread_query
from riglstm.checks import check_tensor

NAMES = ("weight_in", "bias_in", "weight_gates", "bias_gates", "weight_query", "update_offset")
"""Parameter names, in the order of `Weights`.

Code written for nn.LSTM zeroes whatever has "bias" in its name. `Weights.update_bias` must not
start at zero, so it has another name here.
"""


def suffix(layer: int, reverse: bool) -> str:
    """The suffix of the names of one layer's parameters in one direction."""
    return f"_l{layer}" + ("_reverse" if reverse else "")


def parameter_of(module: nn.Module, name: str) -> Any:
    """A parameter, or where there is none what took its place: a parametrization, say.

    nn.Module finds a parameter by microseconds of Python, and each call of a layer needs seven.
    """
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


def weights_of(module: nn.Module, ending: str) -> Weights:
    """The parameters whose names have that suffix, as the scans take them."""
    return Weights(*[parameter_of(module, name + ending) for name in NAMES])


def shapes(
    D: int, N: int, K: int, d: int, *, linear: bool, bias: bool, query: str | None, learned: bool
) -> tuple[tuple[int, ...] | None, ...]:
    """Shape of each parameter, None for one that the layer does not have."""
    rows = (K + N - 1) * d
    return (
        (D, K * d) if linear else None,
        (K * d,) if linear and bias else None,
        (N, (K + N) * d, 4 * d),
        (N, 4 * d) if bias else None,
        None if query is None else (rows, d) if query == "shared" else (N, rows, d),
        (N,) if learned else None,
    )


def no_decay_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that weight decay should leave alone.

    These are biases, of any number of dimensions, and all that has at most one dimension, such as
    the scales of a norm: in RigLSTM `bias_in`, `bias_gates` (N, 4·d) and `update_offset`.

    >>> free = no_decay_parameters(model)
    >>> rest = [p for p in model.parameters() if p not in set(free)]
    >>> torch.optim.AdamW([{"params": rest}, {"params": free, "weight_decay": 0}])
    """

    def is_free(name: str, parameter: nn.Parameter) -> bool:
        # A parametrized bias is `parametrizations.bias.original`.
        own = re.sub(r"\.original\d*$", "", name).rpartition(".")[2]
        return parameter.dim() < 2 or re.search(r"(^|_)bias(_|$)", own) is not None

    return [p for name, p in model.named_parameters() if is_free(name, p)]


@torch.no_grad()
def initialise(
    weights: Weights,
    hidden_size: int,
    update_bias: float | None,
    forget_bias: float = 0.0,
    steady_start: bool = False,
) -> None:
    """Start values (P10): nn.LSTM's for the gates, nn.Linear's for the view and query maps.

    `forget_bias` is added to those of the forget gate's bias; `steady_start`: see `_steady`.
    """
    for tensor, fan_in in (
        (weights.W_in, weights.W_in.shape[0] if weights.W_in is not None else 1),
        (weights.b_in, weights.W_in.shape[0] if weights.W_in is not None else 1),
        (weights.W, hidden_size),
        (weights.b, hidden_size),
        (weights.W_q, weights.W_q.shape[-2] if weights.W_q is not None else 1),
    ):
        # Without any slot in Q (one cell, no view) the query is empty, and so is its range.
        if tensor is not None and tensor.numel():
            nn.init.uniform_(tensor, -(fan_in**-0.5), fan_in**-0.5)
    if weights.b is not None:
        weights.b.chunk(4, dim=1)[0].add_(forget_bias)
    if weights.update_bias is not None and update_bias is not None:
        nn.init.constant_(weights.update_bias, update_bias)
    if steady_start:
        _steady(weights)


def _steady(weights: Weights) -> None:
    """A start at which the input does not decide who wakes, Eq. (14): cells that woke go on.

    The maps to views cancel in their sum, its biases do not, and states lean towards these.
    """
    assert weights.W_in is not None
    assert weights.b_in is not None
    assert weights.b is not None
    d = weights.b.shape[1] // 4
    views = weights.W_in.unflatten(1, (-1, d))
    views -= views.mean(1, keepdim=True)
    weights.b_in.fill_(0.2)
    weights.b.chunk(4, dim=1)[3].add_(0.1)


def to_paper(weights: Weights, N: int, K: int) -> dict[str, Tensor]:
    """The weights in the paper's notation: for column vectors, gates in the order f, i, o, g."""
    d = weights.W.shape[2] // 4
    paper = {"W_gates": weights.W.detach().unflatten(2, (4, d)).permute(0, 2, 3, 1).clone()}
    if weights.W_in is not None:
        paper["W_in"] = weights.W_in.detach().t().unflatten(0, (K, d)).clone()
    if weights.b_in is not None:
        paper["b_in"] = weights.b_in.detach().view(K, d).clone()
    if weights.b is not None:
        paper["b_gates"] = weights.b.detach().view(N, 4, d).clone()
    if weights.W_q is not None:
        blocks = spread_query(weights.W_q.detach(), N, K)
        paper["W_q"] = blocks.flatten(1, 2).mT.clone()  # (N, d, (K+N)·d)
    if weights.update_bias is not None:
        paper["update_bias"] = weights.update_bias.detach().clone()
    return paper


@torch.no_grad()
def from_paper(weights: Weights, paper: Mapping[str, Tensor], N: int, K: int) -> None:
    """The inverse of `to_paper`: overwrite the weights in place."""
    expected = to_paper(weights, N, K)
    names = sorted(paper) if isinstance(paper, Mapping) else [type(paper).__name__]
    if names != sorted(expected):
        raise ValueError(
            f"the paper's parameters of this layer are {', '.join(sorted(expected))}, "
            f"got {', '.join(names)}; paper_parameters() shows the form"
        )
    for name, tensor in expected.items():
        check_tensor(name, paper[name])
        if not paper[name].is_floating_point() or paper[name].is_meta:
            raise ValueError(
                f"{name} must hold real numbers, got {paper[name].dtype} on {paper[name].device}"
            )
        if paper[name].shape != tensor.shape:
            raise ValueError(
                f"{name} must have shape {tuple(tensor.shape)}, got {tuple(paper[name].shape)}"
            )
    d = weights.W.shape[2] // 4
    # Everything is checked before the first weight changes.
    W_q = None if weights.W_q is None else _query_rows(paper["W_q"], weights.W_q, N, K, d)
    weights.W.copy_(paper["W_gates"].permute(0, 3, 1, 2).flatten(2))
    if weights.W_in is not None:
        weights.W_in.copy_(paper["W_in"].flatten(0, 1).t())
    if weights.b_in is not None:
        weights.b_in.copy_(paper["b_in"].flatten())
    if weights.b is not None:
        weights.b.copy_(paper["b_gates"].flatten(1))
    if weights.W_q is not None and W_q is not None:
        weights.W_q.copy_(W_q)
    if weights.update_bias is not None:
        weights.update_bias.copy_(paper["update_bias"])


def _query_rows(paper: Tensor, W_q: Tensor, N: int, K: int, d: int) -> Tensor:
    """W_q (N, d, (K+N)·d) of the paper as the layer stores it."""
    blocks: Tensor = paper.mT.unflatten(1, (K + N, d))  # (N, K+N, d, d)
    j = torch.arange(N, device=paper.device)
    if blocks[j, K + j].any():
        raise ValueError(
            "W_q must be zero in the block of each cell's own state, which Q leaves out (Eq. 19), "
            "got other values there; set them to zero"
        )
    rows = gather_query(blocks, K)
    if W_q.dim() == 3:
        return rows
    if not torch.equal(rows.nan_to_num(), rows[:1].nan_to_num().expand_as(rows)):
        raise ValueError(
            "W_q must be the same for every cell with query='shared', got different ones; "
            "use query='per_cell'"
        )
    return rows[0]
