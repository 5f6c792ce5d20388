"""Any model that streams: sequences in which episodes begin, and steps with weights laid out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import close, kernels, seeded
from riglstm import RigLSTM
from riglstm.lab.tables.recipes import MEMORIES
from riglstm.models import build
from riglstm.models.episodes import restart, run_with_resets, stepper

T, B, D = 7, 3, 6
every_memory = pytest.mark.parametrize("name", MEMORIES)


def core_of(name: str) -> Any:
    memory = MEMORIES[name]
    return build(memory.model, D, memory.hidden_size, dtype=torch.float64, **memory.options)


def inputs(core: Any) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    gen = seeded(1)
    x = torch.randn(T, B, D, generator=gen, dtype=torch.float64)
    state = tuple(
        s + torch.randn(s.shape, generator=gen, dtype=s.dtype) for s in core.initial_state(B)
    )
    reset = torch.zeros(T, B, dtype=torch.bool)
    # At the start, twice in a row, at the end; and a sequence without any.
    for t, b in ((0, 0), (3, 0), (4, 0), (6, 1)):
        reset[t, b] = True
    return x, state, reset


def by_hand(core: Any, x: Tensor, state: Any, reset: Tensor) -> tuple[Tensor, Any]:
    """Every step and every sequence alone."""
    outputs, ends = [], []
    for b in range(B):
        own, row = tuple(s[:, b : b + 1] for s in state), []
        for t in range(T):
            own = core.initial_state(1) if reset[t, b] else own
            y, own = core(x[t : t + 1, b : b + 1], own)
            row.append(y)
        outputs.append(torch.cat(row))
        ends.append(own)
    return torch.cat(outputs, 1), tuple(torch.cat(s, 1) for s in zip(*ends, strict=True))


@every_memory
def test_resets_equal_separate_sequences(name):
    core = core_of(name)
    results = []
    for run in (run_with_resets, by_hand):
        x, state, reset = inputs(core)
        x.requires_grad_()
        y, end = run(core, x, state, reset)
        gradients = torch.autograd.grad(
            y.square().sum() + sum(s.sum() for s in end), (x, *core.parameters()), allow_unused=True
        )
        results.append([y, *end, *gradients])
    close(*results)


@every_memory
def test_a_reset_clears_a_state_that_is_not_finite(name):
    """Outputs, last state and gradients are those of a sequence that began there."""
    core = core_of(name)
    x, state, reset = inputs(core)
    results = []
    for value in (0.0, float("nan"), float("inf")):
        given = [s.detach().clone() for s in state]
        for s in given:
            s[:, 0] = value  # where reset[0] starts anew
            s.requires_grad_()
        y, end = run_with_resets(core, x, tuple(given), reset)
        leaves = (*given, *core.parameters())
        gradients = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
        results.append([y, *end, *(g for g in gradients if g is not None)])
    for expected, *others in zip(*results, strict=True):
        assert expected.isfinite().all()
        assert all(torch.equal(got, expected) for got in others)


# Triton's interpreter computes, and warns of, what a mask then drops.
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        # "compiled" is the reference's step, compiled.
        *((backend, {"active_cells": 1}) for backend in ("reference", "batched", "triton")),
        ("batched", {"cells": "all", "views": "all", "peers": "all"}),
    ],
)
def test_every_backend_clears_a_state_that_is_not_finite(backend, options):
    if backend == "triton":
        kernels("forward", on_a_gpu=False)
    layer = RigLSTM(D, 32, num_cells=2, backend=backend, **options)
    x, reset = torch.randn(1, 2, D), torch.tensor([[True, False]])
    results = []
    for h_value, c_value in ((0.0, 0.0), (float("nan"), float("inf"))):
        h, c = (torch.randn(1, 2, 32, generator=seeded(3)) for _ in range(2))
        h[0, 0], c[0, 0] = h_value, c_value
        leaves = (h.requires_grad_(), c.requires_grad_(), *layer.parameters())
        y, _ = layer(x, (h, c), reset=reset)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@every_memory
def test_a_step_with_weights_ready_equals_the_step(name):
    core = core_of(name)
    x, state, reset = inputs(core)
    with torch.inference_mode():
        step = stepper(core)
        for t in range(T):
            state = restart(core.initial_state(reset.shape[1]), state, reset[t])
            y, after = step(x[t], state)
            expected, state = core.step(x[t], state)
            close((y, *after), (expected, *state))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("transformer", {"num_heads": 2}, "a memory must stream, and Transformer does not"),
        ("lstm", {"batch_first": True}, "expected a model with batch_first=False, got True"),
    ],
)
def test_models_that_cannot_be_reset_are_refused(name, options, message):
    core, reset = build(name, D, 8, **options), torch.zeros(B, B, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        run_with_resets(core, torch.zeros(B, B, D), core.initial_state(B), reset)
