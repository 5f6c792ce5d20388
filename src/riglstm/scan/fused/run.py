"""Launches of the `triton` backend's forward pass.

Shapes as in `plan.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.input_map import rounded, to_map, to_pack
from riglstm.scan.fused.launch import Argument, Place
from riglstm.scan.fused.pack import Into, pack
from riglstm.scan.fused.plan import Saved, Sizes, empty_saved, rounds
from riglstm.scan.fused.prepare import Passing, Working, plan_of, working, write_views
from riglstm.scan.kernels.common import interpreted
from riglstm.selection import Selection


def run(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (T, B, N, d), final h and c, and who woke: `on_device`, with nothing kept."""
    given = (x, h, c, weights, sel, live, reset, product)
    y, h, c, held, _ = on_device(*given, save=False, keep=False)
    return y, h, c, held.woke


def on_device(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Saved | Passing, Tensor | Place]:
    """`forward` on the tensors' device, with tensors that lie in memory as the kernels want them.

    The final h is a tensor of its own. Nothing here may be recorded for gradients.
    """
    W = weights.W
    if W.is_cuda and W.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(W):
            return on_device(x, h, c, weights, sel, live, reset, product, save, keep)
    x = plain(x)
    h, c = None if h is None else plain(h), None if c is None else plain(c)
    live = None if live is None else live.contiguous()
    reset = None if reset is None else reset.contiguous()
    given = (x, h, c, whole(weights), sel, live, reset, product)
    y, h, c, held, h0 = forward(*given, save, keep)
    return y, h.clone(), c, held, h0


def _saved(T: int, B: int, z: Sizes, like: Tensor, save: bool, work: Working, width: int) -> Saved:
    """What a call keeps, with what the map wrote to."""
    low = like.new_empty(T * B, width, dtype=z.held) if width else None
    assert isinstance(work.XH, Tensor)
    assert isinstance(work.unit, Tensor)
    return empty_saved(T, B, z, like, save, work.XH, work.unit, low)


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
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Saved | Passing, Tensor | Place]:
    """y (T, B, N, d), final h, a part of y, and c; what kernels left, and the h they began from.

    Without h and c they are zero. It is `Saved` if it is to `keep` it; SAVE is for all of it, else
    some of it is empty.
    """
    like = weights.W if h is None else h
    T, B, _ = x.shape
    N, d = sel.N, weights.W.shape[2] // 4
    D = None if weights.W_in is None else weights.W_in.shape[0]
    plan = plan_of(
        *(sel, B, d, like.device, product, rounds(product)),
        *(weights.W_q is not None, D, save),
    )
    z, tile = plan.z, plan.tile
    work = working(T, B, plan, like, keep, h is not None)
    proposal = work.proposal
    if isinstance(proposal, Tensor):
        # In the interpreter, which warns of what a compiled kernel loads and throws away.
        proposal.zero_()
    c_n, h0 = like.new_empty(B, N, d), work.zero if h is None else h
    into = Into(
        *(work.W, work.w_unit, work.counter, work.zeros, *to_pack(plan.map, work.map)),
        c=c_n,
        h=work.zero if h is None else None,
        c_0=c,
    )
    # What is launched early the GPU does while the host goes on: until the forward kernel is
    # launched, the host is what a call waits for.
    W, w_unit = pack(weights, z, tile["BN"], into, plan.by_gate)
    X = write_views(x, h, weights, plan, work)
    # Of the input, numbers of a row that are kept.
    width = rounded(z, B, D, x.dtype, save) if D else 0
    held = work.passing or _saved(T, B, z, like, save, work, width)
    bias = like.new_zeros(N, 4 * d) if weights.b is None else weights.b
    y = like.new_empty(T, B, N, d)
    x_unit = None if w_unit is None else held.unit
    # The resident kernel maps nothing.
    source: tuple[Argument, ...] = () if plan.by_gate else (*(None,) * 5, T)
    if plan.inside and plan.map is not None:
        kept = held.x if isinstance(held, Saved) and held.x.numel() else None
        assert keep or not save, "the kernel keeps all steps of what it rounds"
        source = (*to_map(plan.map, work.map, x, weights, kept), T)

    def run(phase: int, programs: int, t0: int, t1: int) -> None:
        arguments = (
            h0, c_n, X, held.XH, x_unit, W, w_unit, bias, weights.update_bias, live, reset, y,
            proposal, held.act, held.woke, held.bits, held.gates, held.c, held.a, work.listed,
            work.counts, work.counter, *source, B, t0, t1,
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
    return y, y[-1], c_n, held, h0
