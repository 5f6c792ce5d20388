"""Forms of input and state: each brought to (T, B, D), and results brought back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from riglstm.cell import Weights
from riglstm.checks import (
    check_flags,
    check_input,
    check_pair,
    check_rank,
    check_tensor,
    tracing,
)
from riglstm.selection import Selection

Input: TypeAlias = Tensor | PackedSequence
State: TypeAlias = tuple[Tensor, Tensor]
"""h and c."""
Rules: TypeAlias = tuple[int, int, int, int, int, str, str, str, float]
"""A selection as an operator takes it."""
States: TypeAlias = Sequence[Tensor | None]
"""(B, N, d) for each layer and direction; None: zero."""


class Sequences(NamedTuple):
    """A batch in time-first form, and the form in which it came."""

    x: Tensor
    """(T, B, D)."""
    live: Tensor | None
    """(T, B) bool: False where a sequence is over or a step is masked; None: all steps count."""
    reset: Tensor | None
    """(T, B) bool: True where the state is zero before the step."""
    batch_first: bool
    batched: bool
    packed: PackedSequence | None = None
    filled: Tensor | None = None
    """Where in T·B the rows of a packed sequence lie."""

    def restore(self, y: Tensor) -> Input:
        """An output (T, B, H) in the form of the input."""
        if self.packed is not None and self.filled is not None:
            data = y.flatten(0, 1).index_select(0, self.filled)
            p = self.packed
            return PackedSequence(data, p.batch_sizes, p.sorted_indices, p.unsorted_indices)
        if not self.batched:
            return y.squeeze(1)
        return y.transpose(0, 1) if self.batch_first else y

    def in_order(self, v: Tensor) -> Tensor:
        """A record (T, B, ...) with the sequences in the order in which they came."""
        order = None if self.packed is None else self.packed.unsorted_indices
        return v if order is None else v.index_select(1, order)

    def state_in(self, hx: State, rows: int, hidden: int, like: Tensor) -> State:
        """A checked initial state as (rows, B, hidden), in the order of x's batch."""
        meaning = "num_layers * directions, batch, hidden_size"
        shape: tuple[int, ...] = (rows, self.x.shape[1], hidden)
        if not self.batched:
            meaning, shape = "num_layers * directions, hidden_size", (rows, hidden)
        check_pair(hx, shape, meaning, like)
        h, c = hx
        if h.dtype != like.dtype or c.dtype != like.dtype:  # under autocast it may come rounded
            h, c = h.to(like.dtype), c.to(like.dtype)
        if not self.batched:
            return h.unsqueeze(1), c.unsqueeze(1)
        order = None if self.packed is None else self.packed.sorted_indices
        return (h, c) if order is None else (h.index_select(1, order), c.index_select(1, order))

    def state_out(self, h: Tensor, c: Tensor) -> State:
        """A final state (rows, B, hidden) in the form of the input."""
        if not self.batched:
            return h.squeeze(1), c.squeeze(1)
        return self.in_order(h), self.in_order(c)


def time_first(
    input: Input,
    input_size: int,
    like: Tensor,
    batch_first: bool,
    reset: Tensor | None,
    mask: Tensor | None,
) -> Sequences:
    """Check an input of any form against a layer's weights `like`; return it as (T, B, D)."""
    if isinstance(input, PackedSequence):
        sequences = _unpack(input, batch_first, reset, mask)
        check_input(sequences.x, input_size, like, tuple(input.data.shape))
        return sequences
    check_tensor("the input", input, "a Tensor or a PackedSequence")
    check_rank(input, batch_first)
    for name, flags in (("reset", reset), ("mask", mask)):
        if flags is not None:
            check_flags(name, flags, tuple(input.shape[:-1]), input.device)
    batched = input.dim() == 3

    def turned(v: Tensor) -> Tensor:
        if not batched:
            return v.unsqueeze(1)
        return v.transpose(0, 1) if batch_first else v

    x = turned(input)
    check_input(x, input_size, like, tuple(input.shape))
    live = None if mask is None else turned(mask)
    if live is not None:
        # What stands in a step that is left out, NaN as well, must not reach a gradient either.
        x = x.masked_fill(~live.unsqueeze(-1), 0)
    reset = None if reset is None else move_resets(turned(reset), live)
    return Sequences(x, live, reset, batch_first, batched)


def _unpack(
    packed: PackedSequence, batch_first: bool, reset: Tensor | None, mask: Tensor | None
) -> Sequences:
    """Pad a packed batch; the padding is not `live`, so it changes no state."""
    if tracing():
        raise ValueError(
            "torch.jit.trace needs padded sequences, got a PackedSequence, whose lengths the trace "
            "would fix; pass a padded Tensor with mask, True where a sequence has steps"
        )
    data, sizes = packed.data, packed.batch_sizes
    T, B = len(sizes), int(sizes[0])
    if data.dim() != 2:
        raise ValueError(
            "a packed sequence must hold data of 2 dimensions (steps, D), "
            f"got {data.dim()}: {tuple(data.shape)}"
        )
    if mask is not None:
        raise ValueError(
            "mask must be None with a PackedSequence, which has its own lengths, got a mask; "
            "leave it out, or pass padded sequences"
        )
    if reset is not None:
        shape = (B, T) if batch_first else (T, B)
        check_flags("reset", reset, shape, data.device)
        reset = reset.t() if batch_first else reset
        if packed.sorted_indices is not None:
            reset = reset.index_select(1, packed.sorted_indices)
    # Lengths are on the CPU, whatever torch's default device is.
    live = torch.arange(B, device=sizes.device) < sizes.unsqueeze(1)  # (T, B), known to the host
    filled = live.view(-1).nonzero().view(-1).to(data.device)
    x = data.new_zeros(T * B, data.shape[-1]).index_copy(0, filled, data).view(T, B, -1)
    live = live.to(data.device)
    reset = None if reset is None else move_resets(reset, live)
    return Sequences(x, live, reset, batch_first, True, packed, filled)


def move_resets(reset: Tensor, live: Tensor | None) -> Tensor:
    """Move each reset (T, B) on a step that is not live to the next live one (P19)."""
    if live is None:
        return reset
    so_far = reset.cumsum(0)
    at_live = so_far.masked_fill(~live, 0).cummax(0).values
    before = torch.cat((torch.zeros_like(at_live[:1]), at_live[:-1]))  # at the live step before
    return live & (so_far > before)


def reverse_resets(reset: Tensor | None, live: Tensor | None) -> Tensor | None:
    """The resets of the reverse direction, for flipped time and flipped `live`.

    A piece that starts at step t ends, seen from the end, after it: the next step is reset.
    """
    if reset is None:
        return None
    after = torch.cat((torch.zeros_like(reset[:1]), reset.flip(0)[:-1]))
    return move_resets(after, live)


def begin(x: Tensor, h: Tensor | None, c: Tensor | None, weights: Weights, sel: Selection) -> State:
    """The state before x (T, B, D), each (B, N, d): as given, or zero."""
    if h is None or c is None:
        zero = weights.W.new_zeros(x.shape[1], sel.N, weights.W.shape[2] // 4)
        h, c = zero if h is None else h, zero if c is None else c
    return h, c


def split(state: Tensor, rows: int, N: int, d: int) -> tuple[Tensor, ...]:
    """A state (rows, B, N·d) of all layers and directions as one (B, N, d) for each."""
    if rows == 1:
        return (state.reshape(-1, N, d),)  # to take it apart would be another call of torch
    states = state.reshape(rows, -1, N, d).unbind()
    # ONNX export refuses states that share memory.
    return tuple(s.clone() for s in states) if torch.compiler.is_exporting() else states


def join(states: tuple[Tensor, ...], hidden_size: int) -> Tensor:
    """Final states (B, N, d) of all layers and directions as (rows, B, hidden_size)."""
    if len(states) > 1:
        return torch.stack([state.flatten(1) for state in states])
    # A single one is a tensor of its own already: nothing is copied.
    return of_shape(states[0], 1, -1, hidden_size)


def of_shape(own: Tensor, *shape: int) -> Tensor:
    """Reshape a tensor that nothing else holds, neither a caller nor a backward pass.

    To autograd it is no view: those cannot be detached in place, and nn.LSTM's states can.
    """
    return cast(Tensor, torch.ops.aten._unsafe_view.default(own, shape))


def flat(sel: Selection) -> Rules:
    """A selection as arguments of an operator, which takes no objects."""
    return (
        *(sel.N, sel.K, sel.K_a, sel.K_x, sel.K_h),
        *(sel.cells, sel.views, sel.peers),
        sel.update_scale,
    )
