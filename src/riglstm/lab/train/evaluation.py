"""Scoring a network on data that no update has seen."""

from __future__ import annotations

import torch
from torch import nn

from riglstm.lab.tasks.base import Split, Task, Totals
from riglstm.lab.train.config import Precision
from riglstm.lab.train.devices import autocast, products


def score(
    net: nn.Module,
    task: Task,
    condition: str,
    split: Split,
    *,
    precision: Precision = "fp32",
    share: tuple[int, int] = (0, 1),
) -> Totals:
    """`task.score` in eval mode, without gradients, in the precision of the training.

    Training and the tests after it come here, so that both give the same figures.
    """
    training = net.training
    net.eval()
    try:
        with torch.no_grad(), products(precision, task.device), autocast(precision, task.device):
            return task.score(net, condition, split, share)
    finally:
        net.train(training)
