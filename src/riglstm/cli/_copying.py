"""The copying problem of the demo: remember digits through a dormant phase, then repeat them.

Shapes: L digits of S kinds, P the dormant phase, B sequences, T = 2L + P steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Batch(NamedTuple):
    """Sequences of tokens: digits 0..S-1, the blank S, the marker S+1."""

    tokens: Tensor
    """(T, B): L digits, P - 1 blanks, the marker, L blanks."""
    targets: Tensor
    """(T, B): L + P blanks, then the digits."""


def copying_batch(L: int, S: int, P: int, B: int, gen: torch.Generator) -> Batch:
    """Draw B sequences; `gen` lives on the CPU, and so do they."""
    blank, marker = S, S + 1
    digits = torch.randint(S, (L, B), generator=gen)
    tokens = torch.full((2 * L + P, B), blank)
    tokens[:L] = digits
    tokens[L + P - 1] = marker
    targets = torch.full((2 * L + P, B), blank)
    targets[-L:] = digits
    return Batch(tokens, targets)


class Copier(nn.Module):
    """A table of token vectors, a recurrent core, and a readout: what both models share."""

    def __init__(self, core: nn.Module, S: int, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(S + 2, input_size)
        self.core = core
        self.readout = nn.Linear(hidden_size, S + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (T, B) to logits (T, B, S+1) over the digits and the blank."""
        y, _ = self.core(self.embedding(tokens))
        logits: Tensor = self.readout(y)
        return logits


def train(
    net: Copier,
    draw: Callable[[], Batch],
    L: int,
    *,
    steps: int,
    lr: float,
    clip_norm: float,
    report: Callable[[float, float], None],
) -> None:
    """Adam on the cross entropy of the last L steps; `report` hears loss and accuracy each step.

    The step size rises over the first 50 steps and falls to zero over the second half.
    """
    device = net.readout.weight.device
    optimiser = torch.optim.Adam(net.parameters(), lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
    )
    for _ in range(steps):
        tokens, targets = (part.to(device) for part in draw())
        logits, digits = net(tokens)[-L:], targets[-L:]
        loss = F.cross_entropy(logits.flatten(0, 1), digits.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimiser.step()
        schedule.step()
        right = (logits.argmax(-1) == digits).float().mean()
        report(loss.item(), right.item())


@torch.no_grad()
def accuracy(net: Copier, batch: Batch, L: int) -> float:
    """Share of the digits that are right, over the last L steps."""
    device = net.readout.weight.device
    answers = net(batch.tokens.to(device))[-L:].argmax(-1)
    return float((answers == batch.targets[-L:].to(device)).float().mean())
