"""Training data in an order that is new in every epoch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from riglstm.lab.tasks.base import generator

CPU = torch.device("cpu")


class Shuffled:
    """Which of `length` sequences an update learns from, as a function of (seed, step).

    Each epoch is an order of all of them. Where one ends within a batch, the next one begins, so
    all batches have one size.
    """

    def __init__(self, length: int, batch_size: int, device: torch.device) -> None:
        self.length, self.batch_size, self.device = length, batch_size, device
        self.updates_per_epoch = math.ceil(length / batch_size)
        self._orders: dict[tuple[int, int], Tensor] = {}

    def batch(self, seed: int, step: int) -> Tensor:
        """(B,): numbers of sequences, on the device; nothing waits for it within an epoch."""
        first, last = step * self.batch_size, (step + 1) * self.batch_size
        pieces = []
        while first < last:
            epoch, start = divmod(first, self.length)
            pieces.append(self._order(seed, epoch)[start : start + last - first])
            first += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _order(self, seed: int, epoch: int) -> Tensor:
        if (seed, epoch) not in self._orders:
            # The epoch before is needed still, where several devices share a batch of both.
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            # Drawn on the CPU, so that every device has the same order.
            order = torch.randperm(self.length, generator=generator(CPU, seed, epoch))
            self._orders[seed, epoch] = order.to(self.device)
        return self._orders[seed, epoch]
