"""Who is timed, and at what: nn.LSTM, our backends, a loop over cells; three kinds of work.

Shapes: T steps, B sequences, D input features, N cells of size d, K views.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from riglstm.cell import Weights, input_views
from riglstm.lab.bench.timing import Job
from riglstm.layer import RigLSTM
from riglstm.scan import Backend, State
from riglstm.selection import Selection, top_mask

Call: TypeAlias = Callable[[Tensor, State | None], tuple[Tensor, State]]

BATCHED, REFERENCE, LOOP = "RigLSTM batched", "RigLSTM reference", "per-cell loop"


def per_cell_loop(
    x: Tensor, h: Tensor, c: Tensor, weights: Weights, sel: Selection
) -> tuple[Tensor, State, Tensor]:
    """Eqs. (13)-(21) cell after cell, as one first writes them; for the `top` rules.

    x (T, B, D), h and c (B, N, d); returns what `riglstm.scan.scan` returns.
    """
    N, K = sel.N, sel.K
    hs, cs = list(h.unbind(1)), list(c.unbind(1))  # (B, d) each
    y, woke = [], []
    for x_t in input_views(x, weights.W_in, weights.b_in, K):
        h_prev = torch.stack(hs, dim=1)  # (B, N, d)
        s = [(h_j.unsqueeze(1) * x_t).sum(-1) for h_j in hs]  # (B, K) each
        active = top_mask(torch.stack([s_j.sum(-1) for s_j in s], dim=1), sel.K_a)
        for j in range(N):
            views = x_t * top_mask(s[j], sel.K_x).unsqueeze(-1)  # (B, K, d)
            r = (h_prev[:, j : j + 1] * h_prev).sum(-1)  # (B, N)
            own = torch.arange(N, device=r.device) == j
            heard = top_mask(r.masked_fill(own, float("-inf")), sel.K_h) | own
            H = torch.cat((views, h_prev * heard.unsqueeze(-1)), dim=1)  # (B, K+N, d)
            gates = H.flatten(1) @ weights.W[j]  # (B, 4·d)
            gates = gates if weights.b is None else gates + weights.b[j]
            f, i, o, g = gates.chunk(4, dim=-1)
            c_j = f.sigmoid() * cs[j] + i.sigmoid() * g.tanh()
            h_j = o.sigmoid() * c_j.tanh()
            if weights.W_q is not None:
                Q = torch.cat((H[:, : K + j], H[:, K + j + 1 :]), dim=1).flatten(1)
                q = Q @ (weights.W_q if weights.W_q.dim() == 2 else weights.W_q[j])
                pair = torch.stack((hs[j], h_j), dim=1)  # (B, 2, d)
                logits = sel.update_scale * (pair * q.unsqueeze(1)).sum(-1)
                if weights.update_bias is not None:
                    bias = weights.update_bias[j]
                    logits = logits + torch.stack((torch.zeros_like(bias), bias))
                h_j = (logits.softmax(-1).unsqueeze(-1) * pair).sum(1)
            wake = active[:, j : j + 1]
            hs[j], cs[j] = torch.where(wake, h_j, hs[j]), torch.where(wake, c_j, cs[j])
        y.append(torch.stack(hs, dim=1))
        woke.append(active)
    return torch.stack(y), (y[-1], torch.stack(cs, dim=1)), torch.stack(woke)


def _as_layer(layer: RigLSTM) -> Call:
    """`per_cell_loop` with the weights of a layer of one direction, behind nn.LSTM's call."""
    cells = (layer.num_cells, layer.cell_size)

    def call(x: Tensor, hx: State | None) -> tuple[Tensor, State]:
        zero = x.new_zeros(1, x.shape[1], layer.hidden_size)
        h, c = (zero, zero) if hx is None else hx
        y, final, _ = per_cell_loop(
            x, h[0].unflatten(1, cells), c[0].unflatten(1, cells), layer.weights(), layer.selection
        )
        h_n, c_n = (state.flatten(1).unsqueeze(0) for state in final)
        return y.flatten(2), (h_n, c_n)

    return call


class Contestant(NamedTuple):
    """Something with the call of nn.LSTM."""

    name: str
    call: Call
    parameters: tuple[Tensor, ...]
    ours: bool = True
    """Whether it must give what the reference gives."""
    onednn: bool | None = None
    """The mode it runs in; None: torch's own choice."""


def contestants(
    D: int, hidden_size: int, num_cells: int, backends: Sequence[Backend], device: str
) -> list[Contestant]:
    """nn.LSTM in each mode it has on the device; our backends and the loop, on equal weights."""
    lstm = nn.LSTM(D, hidden_size, device=device)
    modes: dict[str, bool | None] = {"nn.LSTM": None}
    if device == "cpu" and torch.backends.mkldnn.is_available():
        modes = {"nn.LSTM, oneDNN on": True, "nn.LSTM, oneDNN off": False}
    weights = tuple(lstm.parameters())
    rows = [Contestant(name, lstm, weights, False, onednn) for name, onednn in modes.items()]
    first = RigLSTM(D, hidden_size, num_cells=num_cells, device=device)
    for backend in backends:
        layer = RigLSTM(D, hidden_size, num_cells=num_cells, backend=backend, device=device)
        layer.load_state_dict(first.state_dict())
        rows.append(Contestant(f"RigLSTM {backend}", layer, tuple(layer.parameters())))
    return [*rows, Contestant(LOOP, _as_layer(first), tuple(first.parameters()))]


def in_mode(who: Contestant, work: str) -> Contestant:
    """With its layer in eval mode, but for training.

    Without gradients, too, cuDNN saves all that a backward pass needs while a layer is in training.
    """
    if work == "training" or not isinstance(who.call, nn.Module):
        return who
    layer = copy.copy(who.call)  # with the same weights
    layer.training = False
    return who._replace(call=layer)


def infer(who: Contestant, x: Tensor) -> tuple[Tensor, ...]:
    """One call on the whole sequence, without gradients."""
    with torch.no_grad():
        return who.call(x, None)[:1]


def stream(who: Contestant, x: Tensor) -> tuple[Tensor, ...]:
    """One call for each step, the state carried, without gradients."""
    state, y = None, []
    with torch.no_grad():
        for x_t in x.split(1):
            y_t, state = who.call(x_t, state)
            y.append(y_t)
    return (torch.cat(y),)


def train(who: Contestant, x: Tensor) -> tuple[Tensor, ...]:
    """Forward, and backward to the input and all weights."""
    y, _ = who.call(x, None)
    dx, *_ = torch.autograd.grad(y, (x, *who.parameters), torch.ones_like(y))
    return y.detach(), dx


WORK: dict[str, Callable[[Contestant, Tensor], tuple[Tensor, ...]]] = {
    "inference": infer,
    "training": train,
    "streaming": stream,
}


@contextlib.contextmanager
def onednn(enabled: bool | None) -> Iterator[None]:
    """Switch oneDNN. torch.backends.mkldnn.flags would also set, and warn about, TF32."""
    if enabled is None:
        yield
        return
    before, *_ = torch.backends.mkldnn.set_flags(enabled, None, None, None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before, None, None, None)


def job(who: Contestant, work: str, x: Tensor) -> Job:
    """A contestant's work on x (T, B, D), in the contestant's mode."""
    who = in_mode(who, work)

    def run() -> tuple[Tensor, ...]:
        with onednn(who.onednn):
            return WORK[work](who, x)

    return Job(who.name, run, x.shape[0], who.ours)
