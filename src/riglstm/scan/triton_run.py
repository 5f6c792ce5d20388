"""Launches of the `triton` backend: a whole sequence forward, and back in pieces.

Shapes as in `triton_plan.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.batched_backward import input_map, split_gates
from riglstm.scan.triton_backward import backward_kernel
from riglstm.scan.triton_common import interpreted
from riglstm.scan.triton_gradients import (
    Piece,
    add_weights_gradient,
    cut,
    empty_gradient,
    lines,
    views_gradient,
)
from riglstm.scan.triton_launch import launch
from riglstm.scan.triton_plan import (
    PERSISTENT,
    ROWS_AT_ONCE,
    Saved,
    backward_tiles,
    pack,
    precision,
    programs_on,
    rounds,
    sizes,
    sizes_back,
)
from riglstm.scan.triton_prepare import hold, plan_of, working, write_views
from riglstm.scan.triton_symbols import Symbols, gates_of, views_of
from riglstm.selection import Selection


def forward(
    x: Tensor | Symbols,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
    saved: Saved | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (T, B, N, d), final h, a part of y, and c, and who woke; for symbols there is no backward.

    `saved` is written to where it is given; SAVE is for all of it, else some of it is empty.
    """
    T, (B, N, d) = (x.ids if isinstance(x, Symbols) else x).shape[0], h.shape
    plan = plan_of(
        *(sel, B, d, h.device, product, rounds(product)),
        soft_update=weights.W_q is not None,
        linear=weights.W_in is not None,
        symbols=isinstance(x, Symbols),
        save=save,
    )
    z, tile = plan.z, plan.tile
    work = working(T, B, plan, h, saved)
    proposal, counter, held = work.proposal, work.counter, work.held
    if isinstance(proposal, Tensor):
        # In the interpreter, which warns of what a compiled kernel loads and throws away.
        proposal.zero_()
    place = count = counter
    if tile.get("COMPACT", False):
        place, count, counter = _lists(T, B, N, h, 2)
    # First of all: the GPU packs while the host goes on.
    into = (work.W, work.w_unit)
    W, w_unit = pack(weights, z, tile["BN"], plan.first, into, counter, plan.by_gate)
    ids = table = None
    if isinstance(x, Symbols):
        ids, X = x.ids, views_of(x.table, weights, z)
        table = gates_of(X, weights, z, tile["BN"])
        if z.held == torch.float16:
            hold(None, h, plan, held, T)
    else:
        X = write_views(x, h, weights, plan, held)
    bias = h.new_zeros(N, 4 * d) if weights.b is None else weights.b
    y, c = h.new_empty(T, B, N, d), c.clone(memory_format=torch.contiguous_format)
    x_unit = None if w_unit is None else held.unit

    def run(phase: int, programs: int, t0: int, t1: int) -> None:
        arguments = (
            h, c, X, held.XH, x_unit, W, w_unit, bias, weights.update_bias, ids, table, live, reset,
            y, proposal, held.act, held.woke, held.bits, held.gates, held.c, held.a, place, count,
            counter, B, t0, t1,
        )  # fmt: skip
        plan.phases[phase]((programs,), arguments)

    if interpreted():
        for t in range(T):
            run(1, -(-B // tile["RB"]), t, t + 1)
            run(2, plan.programs, t, t + 1)
        run(8, B, T, T)
    else:
        run(15, plan.programs, 0, T)
    return y, y[-1], c, held.woke


def _lists(T: int, B: int, N: int, like: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For tiles of rows that are awake a list and its counts, and the counter of the barrier.

    An entry is the number of a sequence, and with a size of two what its cell takes in.
    """
    zeros = like.new_zeros(T * N + 1, dtype=torch.int32)
    return like.new_empty(size * N * B, dtype=torch.int32), zeros[1:], zeros[:1]


def backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor,
    saved: Saved,
    weights: Weights,
    sel: Selection,
    product: torch.dtype,
    for_input: bool,
    for_gates: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Weights]:
    """Gradients of x, h, c and of every weight, from those of y and the final state."""
    T, B, N, d = y.shape
    z = sizes_back(sizes(d, sel, weights.W_q is not None, product), saved)
    packed = lines(weights, z)
    dh, dc = (s.clone(memory_format=torch.contiguous_format) for s in (dh, dc))
    tile = backward_tiles(z, B, dy.device)
    steps = min(T, max(1, ROWS_AT_ONCE // B))
    D5 = dy.new_empty(steps, B, N, z.L, dtype=z.back)
    D5[..., z.G * d :].zero_()
    unit = dy.new_empty(steps, B) if z.back == torch.float16 else None
    dz = dy.new_empty(T if z.G == 5 else 1, B, N)
    parts = dy.new_empty(B, N, N, d)
    place = count = dy.new_empty(1, dtype=torch.int32)
    if tile["COMPACT"]:
        place, count, _ = _lists(T, B, N, dy, 1)
    dV = dy.new_empty(T, B, z.K, d, dtype=product) if for_input else None
    dW = empty_gradient(dy, z) if for_gates else None
    db = dy.new_zeros(N, z.L)
    constants = dict(
        N=N, K=z.K, d=d, L=z.L, G=z.G, SCALE=sel.update_scale, PRECISION=precision(product),
        WIDE=interpreted(), **tile,
    )  # fmt: skip
    tiles = N * -(-N * d // tile["BN"]) * -(-B // tile["BM"])

    def run(phase: int, programs: int, first: int, t0: int, t1: int, **options: Any) -> None:
        arguments = (
            dy, dh, dc, parts, h, y, saved.act, saved.bits, saved.gates, saved.c, saved.a, *packed,
            D5, unit, dz, place, count, dy.new_zeros(1, dtype=torch.int32), B, T, first, t0, t1,
        )  # fmt: skip
        launch(backward_kernel, (programs,), arguments, **constants, PHASE=phase, **options)

    for t0 in reversed(range(0, T, steps)):
        t1 = min(T, t0 + steps)
        if interpreted():
            for t in reversed(range(t0, t1)):
                run(1, -(-B // tile["RB"]), t0, t, t + 1)
                run(2, tiles, t0, t, t + 1)
        else:
            run(7, programs_on(dy.device, max(tiles, B)), t0, t0, t1, **PERSISTENT)
        piece = Piece(D5[: t1 - t0], None if unit is None else unit[: t1 - t0])
        if dV is not None:
            views_gradient(piece, saved.bits[t0:t1], packed, dV[t0:t1], z)
        if dW is not None:
            add_weights_gradient(piece, saved, t0, t1, dW, db, z)
    run(8, B, 0, 0, 1)
    dx = dW_in = db_in = None
    if dV is not None:
        dx, dW_in, db_in = input_map(dV.view(T * B, z.K * d), x, weights, product)
    if dW is None:
        return dx, dh, dc, Weights(dW_in, db_in, None, None, None, None)  # type: ignore[arg-type]
    dW, db = cut(dW, db, z)
    d_gates, d_query = split_gates(dW, weights.W_q, z.K)
    # A copy: of one cell it would be a part of dW.
    db_gates = None if weights.b is None else db[:, : 4 * d].clone()
    d_bias = None if weights.update_bias is None else dz.sum((0, 1))
    return dx, dh, dc, Weights(dW_in, db_in, d_gates, db_gates, d_query, d_bias)
