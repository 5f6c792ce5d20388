"""What the layers of RIM and BRIM did in a step, and over a sequence.

Shapes: B sequences, N cells of size d, K slots of input with null as the first, M heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from riglstm.models.base import State, Trace


class Seen(NamedTuple):
    """What one layer did in one step."""

    output: Tensor
    """(B, N·d)."""
    active: Tensor
    """(B, N) bool."""
    views: Tensor
    """(B, N, M, K)."""
    peers: Tensor
    """(B, N, M, N)."""
    view_scores: Tensor
    """(B, N, M, K)."""
    peer_scores: Tensor
    """(B, N, M, N)."""


Advance: TypeAlias = Callable[[Tensor, State], tuple[State, Sequence[Seen]]]
"""One step: x (B, D) and the state to the next state and what each layer did."""


def trace(advance: Advance, x: Tensor, state: State) -> list[Trace]:
    """What each layer did over a sequence x (T, B, D)."""
    steps = []
    for x_t in x.unbind():
        state, seen = advance(x_t, state)
        steps.append(seen)
    return [_to_trace(seen, layer) for layer, seen in enumerate(zip(*steps, strict=True))]


def _to_trace(seen: Sequence[Seen], layer: int) -> Trace:
    output, active, *by_head = (torch.stack(parts) for parts in zip(*seen, strict=True))
    views, peers, view_scores, peer_scores = (v.mean(dim=3) for v in by_head)
    keep = (~active).to(output.dtype)
    return Trace(output, active, views, peers, view_scores, peer_scores, keep, layer)
