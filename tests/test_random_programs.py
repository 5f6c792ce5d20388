"""Random programs around the layer: what the fast backends give is what the reference gives.

RIGLSTM_SEED=N draws others. A failure names its program's seed, and `run(seed)` repeats it.
"""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import riglstm.layer
from helpers import TOL, assert_close
from riglstm import RigLSTM

SEED = int(os.environ.get("RIGLSTM_SEED", "31"))
PARTS, EACH = 10, 50


def draw(seed: int) -> SimpleNamespace:
    """A layer's options, what it is called with, and how."""
    r = random.Random(seed)
    N, K, d, layers = r.randint(1, 5), r.randint(1, 4), r.randint(1, 4), r.choice((1, 1, 2, 3))
    slots = ("top", "top", "all", "random", "soft")
    options: dict[str, Any] = {
        "input_size": r.randint(1, 6),
        "hidden_size": N * d,
        "num_layers": layers,
        "bias": r.random() < 0.8,
        "batch_first": r.random() < 0.3,
        "dropout": 0.5 if layers > 1 and r.random() < 0.3 else 0.0,
        "bidirectional": r.random() < 0.3,
        "num_cells": N,
        "num_views": K,
        "active_cells": r.randint(1, N),
        "views_per_cell": r.randint(1, K),
        "peers_per_cell": r.randint(0, N - 1),
        "cells": r.choice(("top", "top", "all", "random")),
        "views": r.choice(slots),
        "peers": r.choice(slots),
        "soft_update": r.choice((True, True, "printed", False)),
        "query": r.choice(("shared", "per_cell")),
    }
    if layers == 1 and r.random() < 0.2:
        options |= {"input_views": "split", "input_size": K * d}
    form = r.choice(("padded", "padded", "packed", "single"))
    given = [name for name in ("state", "reset", "mask") if r.random() < 0.4]
    return SimpleNamespace(
        seed=seed,
        options=options,
        form=form,
        backend=r.choice(("auto", "batched")),
        learns=r.random() < 0.8,
        frozen=r.random() < 0.2,
        training=r.random() < 0.7,
        T=r.randint(1, 8),
        B=1 if form == "single" else r.randint(1, 4),
        given=[name for name in given if not (form == "packed" and name == "mask")],
    )


def arguments(p: SimpleNamespace, gen: torch.Generator) -> dict[str, Tensor]:
    """What the layer is called with, by name."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    T, B = p.T, p.B
    lead = (T,) if p.form == "single" else (B, T) if p.options["batch_first"] else (T, B)
    rows = p.options["num_layers"] * (1 + p.options["bidirectional"])
    state = (rows, *(() if p.form == "single" else (B,)), p.options["hidden_size"])
    args = {"input": numbers(*lead, p.options["input_size"])}
    if "state" in p.given:
        args |= {"h_0": 0.5 * numbers(*state), "c_0": numbers(*state)}
    for name, share in (("reset", 0.2), ("mask", 0.8)):
        if name in p.given:
            args[name] = torch.rand(lead, generator=gen) < share
    return args


def outcome(
    p: SimpleNamespace, layer: RigLSTM, args: dict[str, Tensor], lengths: Tensor | None
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Who woke in each scan, what came out, and the gradients; with `lengths`, of a packed call."""
    leaves = {name: a.clone() for name, a in args.items()}
    learned = {n: a.requires_grad_(p.learns) for n, a in leaves.items() if a.is_floating_point()}
    given, woke, plain = dict(leaves), list[Tensor](), riglstm.layer.scan
    x: Tensor | PackedSequence = given.pop("input")
    if lengths is not None:
        x = pack_padded_sequence(x, lengths, layer.batch_first, enforce_sorted=False)
    hx = (given.pop("h_0"), given.pop("c_0")) if "h_0" in given else None

    def scan(*args: Any, **kwargs: Any) -> Any:
        y, state, active = plain(*args, **kwargs)
        woke.append(active.detach())
        return y, state, active

    torch.manual_seed(p.seed)
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(p.learns):
        patch.setattr(riglstm.layer, "scan", scan)
        y, state = layer(x, hx, **given)
    out = (y if lengths is None else y.data, *state)
    if not p.learns:
        assert not any(o.requires_grad for o in out)
        return woke, list(out), {}
    learned |= {n: w for n, w in layer.named_parameters() if w.requires_grad}
    gen = torch.Generator().manual_seed(p.seed)
    towards = [torch.randn(o.shape, generator=gen, dtype=torch.float64) for o in out]
    loss = sum(((o * t).sum() for o, t in zip(out, towards, strict=True)), torch.zeros(()))
    grads = torch.autograd.grad(
        loss, list(learned.values()), allow_unused=True, materialize_grads=True
    )
    return woke, [o.detach() for o in out], dict(zip(learned, grads, strict=True))


def run(seed: int) -> None:
    p, gen = draw(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layer = RigLSTM(**p.options, backend=p.backend, dtype=torch.float64)
    layer.train(p.training).requires_grad_(not p.frozen)
    args, lengths = arguments(p, gen), None
    if p.form == "packed":
        lengths = torch.randint(1, p.T + 1, (p.B,), generator=gen)
        lengths[0] = p.T
    woke, got, grads = outcome(p, layer, args, lengths)
    layer.backend = "reference"
    woke_want, want, grads_want = outcome(p, layer, args, lengths)
    assert len(woke) == len(woke_want) > 0
    assert all(map(torch.equal, woke, woke_want)), "others woke"
    for one, other, what in zip(got, want, ("output", "h_n", "c_n"), strict=True):
        assert_close(one, other, TOL[torch.float64].value, what)
    assert grads.keys() == grads_want.keys()
    largest = max((float(g.abs().max()) for g in grads_want.values()), default=0.0)
    for name, grad in grads_want.items():
        # A gradient of few numbers, update_bias's say, is a sum that may cancel; what is rounded
        # are its summands, at least a hundredth of the largest gradient.
        scale = max(float(grad.abs().max()), largest / 100)
        error = float((grads[name] - grad).abs().max())
        assert error <= TOL[torch.float64].grad * scale, f"d {name}: off by {error:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_random_program_gives_what_the_reference_gives(part):
    first = SEED * PARTS * EACH + part * EACH
    print(f"programs {first} to {first + EACH - 1}, of RIGLSTM_SEED={SEED}")
    for seed in range(first, first + EACH):
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"{draw(seed)}: {error}") from error
