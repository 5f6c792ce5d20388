"""The layer learns, by the code that `riglstm train` runs; single seeds, with a margin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from riglstm.lab.tasks.base import Task
from riglstm.lab.tasks.copying import Copying
from riglstm.lab.tasks.images import MNIST
from riglstm.lab.train.config import Fit, score
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.loop import fit
from riglstm.models import build

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[2] / "shared" / "data" / "mnist"
CPU = torch.device("cpu")


def learner(task: Task, num_cells: int, seed: int) -> nn.Module:
    """RigLSTM of width 96, its soft update started at the new state."""
    torch.manual_seed(seed)
    core = build(
        "riglstm",
        task.input_size,
        96,
        num_cells=num_cells,
        update_scale=(96 / num_cells) ** -0.5,
        update_bias=4.0,
    )
    return task.network(core)  # type: ignore[arg-type]


def after_training(
    net: nn.Module, task: Task, updates: int, lr: float, path: Path
) -> dict[str, float]:
    """Train, then score on data that chose nothing."""
    config = Fit(
        updates=updates,
        lr=lr,
        warmup=updates // 10,
        decay="linear",
        evaluate_every=updates,
        checkpoint_every=updates,
        device="cpu",
        tensorboard=False,
    )
    fit(net, task, config, 0, RunFolder(path))
    totals = score(net, task, task.trained_on, "test")
    return {name: float(total / totals["count"]) for name, total in totals.items()}


def test_a_small_riglstm_learns_to_copy(tmp_path: Path) -> None:
    task = Copying(
        L=3, P=5, digits=4, conditions=(), batch_size=32, input_size=16, loss_on="answer"
    ).open(CPU)
    net = learner(task, num_cells=4, seed=0)
    before = score(net, task, "P=5", "test")
    assert before["accuracy"] / before["count"] < 0.4
    # 0.25 is guessing; who remembers two digits of three gets 0.75.
    assert after_training(net, task, 360, 1e-2, tmp_path)["accuracy"] > 0.95


@pytest.mark.skipif(not DATA.exists(), reason=f"needs MNIST's files in {DATA}")
def test_a_small_riglstm_learns_from_a_thousand_digits(tmp_path: Path) -> None:
    task = MNIST(
        size=7,
        # Lower than usual, so that thin strokes survive at this size.
        threshold=40,
        conditions=(),
        train_size=1000,
        validation_size=100,
        test_size=1000,
        batch_size=32,
        input_size=16,
    ).open(CPU, DATA)
    net = learner(task, num_cells=3, seed=0)
    # What ignores the picture cannot get below the entropy of the classes.
    shares = torch.bincount(task.examples("7x7", "test").targets, minlength=10) / 1000
    assert -(shares * shares.log()).sum() > 2.29
    assert after_training(net, task, 160, 5e-3, tmp_path)["loss"] < 2.15
