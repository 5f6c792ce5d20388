"""Loss and metric of the updates since the last line of the log."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Meter:
    """Keeps tensors as they are: nothing waits for the device before they are read."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.metrics: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.losses)

    def add(self, loss: Tensor, metric: Tensor) -> None:
        """The figures of one update, 0-d."""
        self.losses.append(loss.detach())
        self.metrics.append(metric)

    def rows(self) -> Tensor:
        """(updates, 2): loss and metric, on the device."""
        losses, metrics = torch.stack(self.losses), torch.stack(self.metrics)
        return torch.stack((losses.float(), metrics.float()), dim=1)

    def replace(self, rows: Tensor) -> None:
        """Hold these (updates, 2) instead."""
        self.losses, self.metrics = list(rows[:, 0].unbind()), list(rows[:, 1].unbind())

    def take(self) -> tuple[float, float]:
        """The means of loss and metric; the next ones begin anew."""
        loss, metric = self.rows().double().mean(dim=0).tolist()
        self.losses, self.metrics = [], []
        return loss, metric


def first_bad(rows: Tensor) -> int | None:
    """The first row whose loss is infinite or not a number; None: there is none."""
    losses: list[float] = rows[:, 0].tolist()
    return next((row for row, loss in enumerate(losses) if not math.isfinite(loss)), None)
