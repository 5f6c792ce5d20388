"""What is timed when the harness is timed."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from riglstm.lab.bench.harness import overhead
from riglstm.lab.tasks.base import Batch
from train_task import QUICK, Halves, network


class Counting(Halves):
    """Which batches were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[int] = Counter()

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        self.asked[step] += 1
        return super().batch(seed, step, rows)

    def score(self, *arguments: Any) -> Any:
        raise AssertionError("no evaluation is timed")


def test_both_make_the_same_updates_in_turns() -> None:
    task = Counting()
    nets: list[nn.Module] = []
    turns: list[str] = []

    def build() -> nn.Module:
        net = network(task)
        net.dropout = nn.Identity()
        nets.append(net)
        return net

    found = overhead(task, build, QUICK, updates=4, rounds=2, warmup=2, tick=turns.append)
    assert turns == ["bare", "fit", "bare", "fit"]
    assert task.asked == dict.fromkeys(range(7), 4)
    for other in nets[1:]:
        for got, want in zip(other.parameters(), nets[0].parameters(), strict=True):
            assert torch.equal(got, want)
    assert (found.updates, found.rounds) == (4, 2)


def test_the_time_is_that_of_the_updates_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Counting()
    # The clock says how many batches were asked for; each takes "one second".
    monkeypatch.setattr(time, "perf_counter", lambda: float(task.asked.total()))
    found = overhead(task, lambda: network(task), QUICK, updates=4, rounds=1, warmup=2)
    assert found.bare.median == found.harness.median == 1000.0
    assert found.ratio.median == 1.0
