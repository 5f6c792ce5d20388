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
from riglstm.scan.triton_common import interpreted, power_of_two
from riglstm.scan.triton_launch import Argument, launch
from riglstm.scan.triton_plan import (
    PERSISTENT,
    PRODUCT_ROWS,
    ROWS_AT_ONCE,
    Saved,
    Sizes,
    backward_tiles,
    pack,
    precision,
    programs_on,
    rounds,
    sizes,
    views_tiles,
)
from riglstm.scan.triton_prepare import hold, plan_of, working, write_views
from riglstm.scan.triton_products import inputs_kernel, views_kernel
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
        place, count, counter = _lists(T, B, N, h)
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


def _lists(T: int, B: int, N: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For tiles of rows that are awake their numbers and counts, and the counter of the barrier."""
    zeros = like.new_zeros(T * N + 1, dtype=torch.int32)
    return like.new_empty(N * B, dtype=torch.int32), zeros[1:], zeros[:1]


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
    z = sizes(d, sel, weights.W_q is not None, product)
    z = z._replace(P=saved.XH.shape[3], held=saved.XH.dtype)
    W, _ = pack(weights, z)
    dh, dc = (s.clone(memory_format=torch.contiguous_format) for s in (dh, dc))
    tile = backward_tiles(z, B, dy.device)
    steps = min(T, max(1, ROWS_AT_ONCE // B))
    D5 = dy.new_zeros(steps, B, N, z.L, dtype=product)
    dz = dy.new_empty(T if z.G == 5 else 1, B, N)
    parts = dy.new_empty(B, N, N, d)
    place = count = dy.new_empty(1, dtype=torch.int32)
    if tile["COMPACT"]:
        place, count, _ = _lists(T, B, N, dy)
    dV = dy.new_empty(T, B, z.K, d, dtype=product) if for_input else None
    dW = dy.new_zeros(N, z.S * z.P, z.L) if for_gates else None
    db = dy.new_zeros(N, z.L)
    constants = dict(
        N=N, K=z.K, d=d, L=z.L, G=z.G, SCALE=sel.update_scale, PRECISION=precision(product),
        WIDE=interpreted(), **tile,
    )  # fmt: skip
    tiles = N * -(-N * d // tile["BN"]) * -(-B // tile["BM"])

    def run(phase: int, programs: int, first: int, t0: int, t1: int, **options: Any) -> None:
        arguments = (
            dy, dh, dc, parts, h, y, saved.act, saved.bits, saved.gates, saved.c, saved.a, W, D5,
            dz, place, count, dy.new_zeros(1, dtype=torch.int32), B, T, first, t0, t1,
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
        piece = D5[: t1 - t0]
        if dV is not None:
            _views_gradient(piece, saved.bits[t0:t1], W, dV[t0:t1], z)
        if dW is not None:
            _add_weights_gradient(piece, saved, t0, t1, dW, z)
            db += piece.sum((0, 1), dtype=torch.float32)
    run(8, B, 0, 0, 1)
    dx = dW_in = db_in = None
    if dV is not None:
        dx, dW_in, db_in = input_map(dV.view(T * B, z.K * d), x, weights, product)
    if dW is None:
        return dx, dh, dc, Weights(dW_in, db_in, None, None, None, None)  # type: ignore[arg-type]
    d_gates, d_query = split_gates(_cut(dW, z), weights.W_q, z.K)
    db_gates = None if weights.b is None else db[:, : 4 * d].contiguous()
    d_bias = None if weights.update_bias is None else dz.sum((0, 1))
    return dx, dh, dc, Weights(dW_in, db_in, d_gates, db_gates, d_query, d_bias)


def _cut(dW: Tensor, z: Sizes) -> Tensor:
    """dW (N, S·P, L) without what memory is rounded up by, (N, S·d, G·d)."""
    return dW.view(z.N, z.S, z.P, z.L)[:, :, : z.d, : z.G * z.d].flatten(1, 2)


def _views_gradient(D5: Tensor, bits: Tensor, W: Argument, dV: Tensor, z: Sizes) -> None:
    """Write the gradient of the views of one piece of the sequence."""
    R, tile = D5.shape[0] * D5.shape[1], views_tiles(z, D5.device)
    launch(
        views_kernel, (z.K, -(-R // tile["BM"])), (D5, W, bits, dV, R), N=z.N, K=z.K, d=z.d, L=z.L,
        PRECISION=precision(z.dtype), WIDE=interpreted(), **tile,
    )  # fmt: skip


def _add_weights_gradient(D5: Tensor, saved: Saved, t0: int, t1: int, dW: Tensor, z: Sizes) -> None:
    """Add Hᵀ D5 of steps t0 to t1 to dW (N, S·P, L)."""
    D = D5.flatten(0, 1)
    V, bits = saved.XH[t0:t1].flatten(0, 1), saved.bits[t0:t1].flatten(0, 1)
    unit = saved.unit[t0:t1].flatten() if z.held == torch.float16 else None
    for r in range(0, D.shape[0], PRODUCT_ROWS):
        now = slice(r, r + PRODUCT_ROWS)
        R = D[now].shape[0]
        H = D.new_empty(z.N, R, z.S * z.P)
        tile = {"BS": power_of_two(z.S), "BP": power_of_two(z.P)}
        arguments = (V[now], None if unit is None else unit[now], bits[now], H, R)
        launch(inputs_kernel, (R,), arguments, N=z.N, S=z.S, P=z.P, **tile)
        a, b = H.mT, D[now].transpose(0, 1)  # (N, S·P, R), (N, R, L)
        if z.dtype == dW.dtype:
            torch.baddbmm(dW, a, b, out=dW)
        else:
            dW += torch.bmm(a, b, out_dtype=dW.dtype)
