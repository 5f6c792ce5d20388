"""`riglstm bench --tables harness`: what training by `fit` costs beside a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from riglstm.lab.bench.harness import Overhead, overhead
from riglstm.lab.bench.timing import Spread
from riglstm.lab.cli import text
from riglstm.lab.tasks.base import Task
from riglstm.lab.tasks.copying import Copying
from riglstm.lab.train.config import Fit
from riglstm.models import build

if TYPE_CHECKING:
    from riglstm.lab.cli.bench import Bench

MODELS = ("riglstm", "lstm")
UPDATES = {"cpu": 4, "cuda": 200}
"""In a round, where no other number is asked for: seconds of each."""
ROUNDS = 3
"""At most: on a CPU a round at the paper's size takes the better part of a minute."""

LEGEND = """\
bare: batch, forward, loss, backward, clipping, Adam, in a loop by hand
fit: the same updates by `riglstm train`, its log included; no evaluation, no checkpoint
overhead: of fit over bare in the same round; median over the rounds (10–90 %)"""


def rounds(config: Bench) -> int:
    """Rounds of each model."""
    return min(config.timed, ROUNDS)


def measure(config: Bench, tick: Callable[[str], None]) -> dict[str, Overhead]:
    """By model, on the copying task of the paper: P = 50, L = 10."""
    device = torch.device(config.device)
    L, P = (2, 2) if config.quick else (10, 50)
    task = Copying(L=L, P=P, batch_size=config.batch_size, input_size=config.input_size)
    found = {}
    for model in MODELS:
        found[model] = overhead(
            task.open(device),
            _builder(model, task.open(device), config),
            Fit(device=config.device),
            updates=config.harness_updates or UPDATES[device.type],
            rounds=rounds(config),
            seed=config.seed,
            tick=lambda name, model=model: tick(f"{model}: {name}"),  # type: ignore[misc]
        )
    return found


def _builder(model: str, task: Task, config: Bench) -> Callable[[], nn.Module]:
    options = {"num_cells": config.num_cells} if model == "riglstm" else {}

    def make() -> nn.Module:
        torch.manual_seed(config.seed)
        core = build(model, task.input_size, config.hidden_size, **options)
        return task.network(core).to(task.device)  # type: ignore[arg-type]

    return make


def table(found: dict[str, Overhead], config: Bench) -> str:
    """As it is printed."""
    lines = [
        [model, f"{o.bare.median:.2f}", f"{o.harness.median:.2f}", _percent(o.ratio)]
        for model, o in found.items()
    ]
    any_one = next(iter(found.values()))
    heading = (
        f"harness: copying, width {config.hidden_size}, B = {config.batch_size}, "
        f"{any_one.rounds} rounds of {any_one.updates} updates"
    )
    heads = ("", "bare, ms an update", "fit, ms an update", "overhead")
    return text.table(heading, heads, lines)


def _percent(ratio: Spread) -> str:
    low, middle, high = (100 * (r - 1) for r in (ratio.low, ratio.median, ratio.high))
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def as_json(found: dict[str, Overhead]) -> list[dict[str, Any]]:
    """For the file of rows."""
    return [{"table": "harness", "model": model, **asdict(o)} for model, o in found.items()]
