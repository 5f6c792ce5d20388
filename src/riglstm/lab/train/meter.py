"""Loss, metric and gradient of the updates since the last line of the log."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Figures(NamedTuple):
    """What some updates come to."""

    loss: float
    """Its mean, as that of the next two."""
    metric: float
    norm: float
    """Of the gradient, before it is clipped."""
    largest: float
    """Of the norms."""


class Meter:
    """Keeps tensors as they are: nothing waits for the device before they are read."""

    def __init__(self) -> None:
        self.updates: list[tuple[Tensor, Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self.updates)

    def add(self, loss: Tensor, metric: Tensor, norm: Tensor) -> None:
        """The figures of one update, 0-d."""
        self.updates.append((loss.detach(), metric, norm))

    def rows(self) -> Tensor:
        """(updates, 3): loss, metric and norm, on the device."""
        columns = [torch.stack(column).float() for column in zip(*self.updates, strict=True)]
        return torch.stack(columns, dim=1)

    def replace(self, rows: Tensor) -> None:
        """Hold these (updates, 3) instead; with 2, of a checkpoint before there were norms."""
        rows = F.pad(rows, (0, 3 - rows.shape[1]), value=math.nan)
        losses, metrics, norms = (column.unbind() for column in rows.unbind(1))
        self.updates = list(zip(losses, metrics, norms, strict=True))

    def take(self) -> Figures:
        """What they come to; the next ones begin anew."""
        rows = self.rows().double()
        self.updates = []
        loss, metric, norm = rows.mean(dim=0).tolist()
        return Figures(loss, metric, norm, rows[:, 2].max().item())


def first_bad(rows: Tensor) -> int | None:
    """The first row whose loss is infinite or not a number; None: there is none."""
    losses: list[float] = rows[:, 0].tolist()
    return next((row for row, loss in enumerate(losses) if not math.isfinite(loss)), None)
