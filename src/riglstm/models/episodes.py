"""Models as an agent uses them: step by step, and over sequences in which episodes end and begin.

Shapes: T steps, B sequences, D input features, H the width, N cells, S pieces between two resets.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from riglstm.models.base import Core, Recurrent, State, Step, prepare
from riglstm.models.lstm import LSTM, GridLSTM
from riglstm.models.rig import Rig


def run_with_resets(core: Core, x: Tensor, state: State, reset: Tensor) -> tuple[Tensor, State]:
    """`core(x, state)` where reset (T, B) bool starts a sequence anew before a step.

    x (T, B, D) to outputs (T, B, H) and the last state, each by one call of the model: RigLSTM has
    resets of its own, an LSTM's fused kernel takes the pieces side by side, and a model that is a
    loop over its step has its state replaced within that loop.
    """
    if not core.streaming:
        raise ValueError(
            f"a memory must stream, and {type(core).__name__} does not: each of its outputs looks "
            "at the steps to come; expected a model that carries a state, such as riglstm or lstm"
        )
    if core.batch_first:
        raise ValueError("expected a model with batch_first=False, got True; build it without")
    if isinstance(core, Rig):
        h, c = state
        y, last = core.layer(x, (h, c), reset=reset)
        return y, last
    if isinstance(core, GridLSTM):
        core = core.stack
    if isinstance(core, LSTM):
        return _in_pieces(core, x, state, reset)
    return _in_steps(cast(Recurrent, core), x, state, reset)


def restart(first: State, state: State, reset: Tensor) -> State:
    """The state with the sequences of reset (B) at their start, which is `first`."""
    reset = reset.view(1, -1, 1)
    return tuple(torch.where(reset, a, s) for a, s in zip(first, state, strict=True))


def _in_steps(core: Recurrent, x: Tensor, state: State, reset: Tensor) -> tuple[Tensor, State]:
    x, state = prepare(core, x, state)
    step, first = core.next_step(), core.initial_state(x.shape[1])
    outputs, any_reset = [], reset.any(dim=1).tolist()
    for t, x_t in enumerate(x.unbind()):
        if any_reset[t]:
            state = restart(first, state, reset[t])
        y, state = step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs), state


def _in_pieces(core: LSTM, x: Tensor, state: State, reset: Tensor) -> tuple[Tensor, State]:
    """Every piece between two starts as a sequence of its own, the longest first, packed."""
    x, (h, c) = prepare(core, x, state)
    T, B, _ = x.shape
    starts = reset.clone()
    starts[0] = True
    first = starts.t().reshape(-1).nonzero().view(-1)  # (S): sample · T + step
    length = torch.cat((first[1:], first.new_tensor([T * B]))) - first
    length, order = length.sort(descending=True, stable=True)
    first = first[order]
    step = torch.arange(int(length[0]), device=x.device).unsqueeze(1)
    at = (first + step)[step < length]  # the steps of all pieces, as they are packed
    rows = at % T * B + at // T
    sample = first // T
    goes_on = (first % T == 0) & ~reset[0][sample]
    # Chosen, not multiplied: zero times a state that is not finite is not zero.
    h, c = (s[:, sample].masked_fill(~goes_on.view(1, -1, 1), 0) for s in (h, c))
    sizes = (step < length).sum(1).cpu()
    biases, layers, dropout, bidirectional = True, 1, 0.0, False
    y, h_n, c_n = torch.lstm(
        *(x.reshape(T * B, -1)[rows], sizes, (h, c), core.weights()),  # type: ignore[call-overload]
        *(biases, layers, dropout, core.training, bidirectional),
    )
    back = torch.empty_like(rows).index_copy_(0, rows, torch.arange(T * B, device=x.device))
    ends = (first + length) % T == 0
    last = first.new_empty(B).index_copy_(0, sample[ends], ends.nonzero().view(-1))
    return y[back].view(T, B, -1), (h_n[:, last], c_n[:, last])


def stepper(core: Core) -> Step:
    """`core.step`; an LSTM's has its weights laid out once, as they are now, and has no gradients.

    The products of a step are small, and laying the weights out would take half of its time.
    """
    if isinstance(core, GridLSTM):
        core = core.stack
    if not isinstance(core, LSTM):
        return cast(Recurrent, core).step
    W_x, W_h, b_x, b_h = core.weights()
    H = core.hidden_size
    W, b = torch.cat((W_x, W_h), dim=1).t().contiguous(), b_x + b_h

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        gates = torch.addmm(b, torch.cat((x, h[0]), dim=1), W)  # (B, 4·H): i, f, g, o
        if_, g, o = gates.split((2 * H, H, H), dim=1)
        i, f = if_.sigmoid_().split(H, dim=1)
        c = (f * c[0]).addcmul_(i, g.tanh_())
        y = o.sigmoid_() * c.tanh()
        return y, (y.unsqueeze(0), c.unsqueeze(0))

    return step
