"""Launches of the `triton` backend's forward pass.

Shapes as in `plan.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.input_map import round_input, rounded, to_pack
from riglstm.scan.fused.launch import Place
from riglstm.scan.fused.pack import Into, pack
from riglstm.scan.fused.plan import Saved, empty_saved, rounds, sizes
from riglstm.scan.fused.prepare import hold, plan_of, working, write_views
from riglstm.scan.fused.symbols import Symbols, gates_of, views_of
from riglstm.scan.kernels.common import interpreted
from riglstm.selection import Selection


def run(
    x: Tensor | Symbols,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward` on the tensors' device, with tensors that lie in memory as the kernels want them.

    The final h is a tensor of its own. Nothing here may be recorded for gradients.
    """
    W = weights.W
    if W.is_cuda and W.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(W):
            return run(x, h, c, weights, sel, live, reset, product, save)
    x = x if isinstance(x, Symbols) else plain(x)
    h, c = None if h is None else plain(h), None if c is None else plain(c)
    live, reset = _whole(live), _whole(reset)
    y, h, c, woke = forward(x, h, c, whole(weights), sel, live, reset, product, save)
    return y, h.clone(), c, woke


def run_saved(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """As `run`, and what it leaves behind: all that the backward pass needs, where SAVE says so."""
    W = weights.W
    if W.is_cuda and W.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(W):
            return run_saved(x, h, c, weights, sel, live, reset, product, save)
    z, x, low = sizes(h.shape[2], sel, weights.W_q is not None, product), plain(x), None
    width = 0 if weights.W_in is None or not save else rounded(z, x.shape[1], x.shape[2])
    if width:
        # First of all: the GPU has something to do while the host goes on.
        low = round_input(x, z, width)
    saved = empty_saved(x.shape[0], x.shape[1], z, h, save, low)
    live, reset = _whole(live), _whole(reset)
    y, h, c, _ = forward(
        x, plain(h), plain(c), whole(weights), sel, live, reset, product, save, saved
    )
    return y, h.clone(), c, saved


def _whole(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous()


def plain(t: Tensor) -> Tensor:
    """As it lies in memory: without gaps, and with no sign that torch keeps apart."""
    t = t.contiguous()
    return t.resolve_neg() if t.is_neg() else t


def whole(weights: Weights) -> Weights:
    """Weights without gaps in memory."""
    for w in weights:
        if w is not None and (not w.is_contiguous() or w.is_neg()):
            return Weights(*(None if w is None else plain(w) for w in weights))  # type: ignore[arg-type]
    return weights


def forward(
    x: Tensor | Symbols,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
    saved: Saved | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (T, B, N, d), final h, a part of y, and c, and who woke; for symbols there is no backward.

    Without h and c they are zero. `saved` is written to where it is given; SAVE is for all of it,
    else some of it is empty.
    """
    like = weights.W if h is None else h
    T, B, *_ = (x.ids if isinstance(x, Symbols) else x).shape
    N, d = sel.N, weights.W.shape[2] // 4
    D = None if weights.W_in is None else weights.W_in.shape[0]
    plan = plan_of(
        *(sel, B, d, like.device, product, rounds(product)),
        *(weights.W_q is not None, D, isinstance(x, Symbols), save),
    )
    z, tile, low = plan.z, plan.tile, None
    if plan.map is not None and plan.map.width and isinstance(x, Tensor):
        known = saved is not None and saved.x.numel() > 0
        low = saved.x if saved is not None and known else round_input(x, z, plan.map.width)
    work = working(T, B, plan, like, saved, h is not None)
    proposal, held = work.proposal, work.held
    if isinstance(proposal, Tensor):
        # In the interpreter, which warns of what a compiled kernel loads and throws away.
        proposal.zero_()
    # Before all else: the GPU packs while the host goes on.
    c_n, h0 = like.new_empty(B, N, d), work.zero if h is None else h
    into = Into(
        *(work.W, work.w_unit, work.counter, work.zeros, *to_pack(plan.map, work.map)),
        c=c_n,
        h=work.zero if h is None else None,
        c_0=c,
    )
    W, w_unit = pack(weights, z, tile["BN"], into, plan.first, plan.by_gate)
    ids = table = None
    X: Tensor | Place
    if isinstance(x, Symbols):
        ids, X = x.ids, views_of(x.table, weights, z)
        table = gates_of(X, weights, z, tile["BN"])
        if z.held == torch.float16:
            hold(None, h0, plan, held, T * B, B)
    else:
        X = write_views(x, low, h, weights, plan, work)
    bias = like.new_zeros(N, 4 * d) if weights.b is None else weights.b
    y = like.new_empty(T, B, N, d)
    x_unit = None if w_unit is None else held.unit

    def run(phase: int, programs: int, t0: int, t1: int) -> None:
        arguments = (
            h0, c_n, X, held.XH, x_unit, W, w_unit, bias, weights.update_bias, ids, table, live,
            reset, y, proposal, held.act, held.woke, held.bits, held.gates, held.c, held.a,
            work.listed, work.counts, work.counter, B, t0, t1,
        )  # fmt: skip
        plan.phases[phase]((programs,), arguments)

    if interpreted() and tile.get("APART"):
        for t in range(T):
            run(7, plan.programs, t, t + 1)
        run(8, plan.programs, T, T)
    elif interpreted():
        for t in range(T):
            run(1, -(-B // tile["RB"]), t, t + 1)
            run(2, plan.programs, t, t + 1)
        run(8, B, T, T)
    else:
        run(15, plan.programs, 0, T)
    return y, y[-1], c_n, held.woke
