"""The layer learns, by the code that `riglstm train` runs; a single seed, with a margin."""

from __future__ import annotations

import pytest
import torch

from riglstm.lab.tasks.base import means
from riglstm.lab.tasks.copying import Copying
from riglstm.lab.train.config import Fit, score
from riglstm.models import build
from train_task import train

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def test_a_small_riglstm_learns_to_copy(tmp_path):
    task = Copying(
        L=3, P=5, digits=4, conditions=(), batch_size=32, input_size=16, loss_on="answer"
    ).open(CPU)
    torch.manual_seed(0)
    # Its soft update starts at the new state.
    options = {"num_cells": 4, "update_scale": 24**-0.5, "update_bias": 4.0}
    net = task.network(build("riglstm", task.input_size, 96, **options))  # type: ignore[arg-type]
    before = means(score(net, task, "P=5", "test"))
    assert before["accuracy"] < 0.4
    config = Fit(
        updates=360,
        lr=1e-2,
        warmup=36,
        decay="linear",
        evaluate_every=360,
        checkpoint_every=360,
        device="cpu",
        tensorboard=False,
    )
    train(tmp_path, config, task=task, net=net)
    # On data that chose nothing. 0.25 is guessing; who remembers two digits of three gets 0.75.
    assert means(score(net, task, "P=5", "test"))["accuracy"] > 0.95
