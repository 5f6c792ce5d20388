"""One step after another under weights that stay as they are, as an agent takes them.

The products of a step are small, and half of its time would go into checks and into weights that
lie across: here they are laid out once, for as many steps as follow.
Shapes: B samples, D input features, H the width, N cells.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.models.base import Core, State, Step, Stepping
from riglstm.models.gridlstm import GridLSTM
from riglstm.models.lstm import LSTM
from riglstm.models.rig import Rig
from riglstm.scan import dense
from riglstm.selection import Selection


def stepper(core: Core) -> Step:
    """`core.step` for the weights as they are now; without gradients, and without checks."""
    if isinstance(core, GridLSTM):
        core = core.stack
    if isinstance(core, LSTM):
        return _lstm(core)
    if isinstance(core, Rig) and core.layer.num_layers == 1 and core.streaming:
        weights, sel = core.layer.weights(), core.layer.selection
        if dense.fits(weights.W, sel, False, weights.W.dtype, weights.W.dtype):
            return _rig(weights, sel)
    return cast(Stepping, core).step


def _lstm(core: LSTM) -> Step:
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


def _rig(weights: Weights, sel: Selection) -> Step:
    """Where nothing is selected: see `scan/dense.py`."""
    W, b, W_q = dense.side_by_side(weights, sel.K)
    N, H = sel.N, W.shape[1] // 4
    W5 = W if W_q is None else torch.cat((W, W_q), dim=1)
    b5 = W5.new_zeros(W5.shape[1])
    if b is not None:
        b5[: 4 * H] = b
    if weights.W_in is not None:
        # The views are a product too, and two products are one.
        W_x, W_h = W5.split((W5.shape[0] - H, H))
        W5 = torch.cat((weights.W_in @ W_x, W_h))
        if weights.b_in is not None:
            b5 += weights.b_in @ W_x

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state[0][0], state[1][0]
        gates = torch.addmm(b5, torch.cat((x, h), dim=1), W5)  # (B, 5·H): f, i, o, g, q
        f, i, o = gates[:, : 3 * H].sigmoid_().chunk(3, dim=1)
        c = (f * c).addcmul_(i, gates[:, 3 * H : 4 * H].tanh_())
        y = o * c.tanh()
        if W_q is not None:
            way = y.sub_(h).view(-1, N, H // N)
            z = (way * gates[:, 4 * H :].view_as(way)).sum(-1, keepdim=True)
            if sel.update_scale != 1:
                z *= sel.update_scale
            if weights.update_bias is not None:
                z += weights.update_bias.unsqueeze(-1)
            y = torch.addcmul(h.view_as(way), way, z.sigmoid_()).view_as(h)
        return y, (y.unsqueeze(0), c.unsqueeze(0))

    return step
