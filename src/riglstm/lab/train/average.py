"""A running mean of the weights: steadier than they are, and chosen in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """m ← β m + (1 - β) w after each update; of the parameters alone, buffers stay as they are.

    `decay` None: there is no mean, and nothing is done. Processes that share a run have the same
    weights, and so the same mean.
    """

    def __init__(self, net: nn.Module, decay: float | None) -> None:
        self.net, self.decay = net, decay
        self.weights: list[Tensor] = []
        self.mean: list[Tensor] = []
        """From a checkpoint, or from the start of the training on."""

    def start(self) -> None:
        """Begin with the weights as they are, or go on with what a checkpoint had."""
        if self.decay is None:
            return
        self.weights = list(self.net.parameters())
        mean = self.mean or [w.detach().clone() for w in self.weights]
        self.mean = [m.to(w.device) for m, w in zip(mean, self.weights, strict=True)]

    @torch.no_grad()
    def add(self, updates: int) -> None:
        """The weights after so many updates."""
        if self.decay is not None:
            # Early on the mean is of the last updates, and soon nothing of the start is in it.
            beta = min(self.decay, (1 + updates) / (10 + updates))
            # One launch for all of them, which torch offers by no public name.
            torch._foreach_lerp_(self.mean, self.weights, 1 - beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the network's weights are the mean.

        Values are copied and the tensors stay: captured CUDA graphs know weights by their address.
        """
        if self.decay is None:
            yield
            return
        own = [w.detach().clone() for w in self.weights]
        self._set(self.mean)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self.weights, values)

    def state_dict(self) -> list[Tensor]:
        """For a checkpoint."""
        return [m.cpu() for m in self.mean]

    def load_state_dict(self, state: list[Tensor]) -> None:
        """From a checkpoint."""
        self.mean = state
