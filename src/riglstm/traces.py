"""What a layer did in a sequence, step by step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Trace(NamedTuple):
    """What one layer did in one direction; time first, in the order of the input.

    T steps, B sequences, N cells, K views. With `soft` rules `views` and `peers` hold weights,
    else they are bool.
    """

    layer: int
    reverse: bool
    output: Tensor
    """(T, B, hidden_size)."""
    active: Tensor
    """(T, B, N): the cell woke."""
    views: Tensor
    """(T, B, N, K): the views that each cell took in."""
    peers: Tensor
    """(T, B, N, N): [j, i] is true where cell j listened to cell i; the diagonal always is."""
    view_scores: Tensor
    """(T, B, N, K), Eq. (13)."""
    peer_scores: Tensor
    """(T, B, N, N): h^j · h^i."""
    keep: Tensor
    """(T, B, N): the weight of the old state in the soft update; 1 where a cell slept."""
