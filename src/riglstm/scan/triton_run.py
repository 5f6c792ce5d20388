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
from riglstm.scan.triton_forward import forward_kernel
from riglstm.scan.triton_launch import launch
from riglstm.scan.triton_plan import (
    PERSISTENT,
    PRODUCT_ROWS,
    ROWS_AT_ONCE,
    Saved,
    Sizes,
    backward_tiles,
    columns,
    empty_saved,
    forward_tiles,
    hold,
    pack,
    precision,
    programs_on,
    resident_tiles,
    sizes,
    views_tiles,
    write_views,
)
from riglstm.scan.triton_products import inputs_kernel, views_kernel
from riglstm.scan.triton_resident import resident_kernel
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
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """y (T, B, N, d), final h and c, and what backward needs; for symbols there is no backward."""
    T, (B, N, d) = len(x.ids if isinstance(x, Symbols) else x), h.shape
    z = sizes(d, sel, weights.W_q is not None, product)
    kept = None if isinstance(x, Symbols) else resident_tiles(z, B, h.device)
    tile = kept or forward_tiles(z, B, h.device)
    ids = table = None
    first = 0
    if isinstance(x, Symbols):
        first, ids = z.K, x.ids
        saved = empty_saved(T, B, z, h, save, first)
        X, X_ROW, X_SLOT = views_of(x.table, weights, z), z.K * d, d
        table = gates_of(X, weights, z, tile["BN"])
        if z.held == torch.float16:
            hold(None, h, z, saved)
    else:
        saved = empty_saved(T, B, z, h, save)
        X, X_ROW, X_SLOT = write_views(x, h, weights, z, saved)
    bias = h.new_zeros(N, 4 * d) if weights.b is None else weights.b
    bias_update = h.new_zeros(N) if weights.update_bias is None else weights.update_bias
    y, c = h.new_empty(T, B, N, d), c.clone(memory_format=torch.contiguous_format)
    proposal = h.new_empty(z.G - 3, B, N, d)
    if interpreted():
        proposal.zero_()  # a compiled kernel does not mind numbers that it throws away
    W, w_unit = pack(weights, z, tile["BN"], first, by_gate=kept is not None)
    x_unit = None if w_unit is None else saved.unit
    place, count, counter = _counters(T, B, N, h, tile.get("COMPACT", False))
    constants = dict(
        N=N, K=z.K, d=d, P=z.P, G=z.G, SCALE=sel.update_scale, X_ROW=X_ROW, X_SLOT=X_SLOT,
        K_a=N if sel.cells == "all" else sel.K_a, K_x=z.K if sel.views == "all" else sel.K_x,
        K_h=N if sel.peers == "all" else sel.K_h, SAVE=save, PRECISION=precision(product),
        WIDE=interpreted(), **tile,
    )  # fmt: skip
    tiles = N * columns(z, tile["BN"]) * -(-B // tile["BM"])

    def run(phase: int, programs: int, t0: int, t1: int, **options: Any) -> None:
        arguments = (
            h, c, X, saved.XH, x_unit, W, w_unit, bias, bias_update, ids, table, live, reset, y,
            proposal, saved.act, saved.woke, saved.bits, saved.gates, saved.c, saved.a, place,
            count, counter, B, t0, t1,
        )  # fmt: skip
        kernel = forward_kernel if kept is None else resident_kernel
        launch(kernel, (programs,), arguments, **constants, PHASE=phase, **options)

    if interpreted():
        for t in range(T):
            run(1, -(-B // tile["RB"]), t, t + 1)
            run(2, tiles, t, t + 1)
        run(8, B, T, T)
    else:
        # What stays with its tile had better not select, too.
        most = max(tiles, B) if kept is None else tiles + B
        run(15, programs_on(h.device, most), 0, T, **PERSISTENT)
    return y, y[-1], c, saved


def _counters(T: int, B: int, N: int, like: Tensor, compact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For tiles of rows that are awake their numbers and counts, and the counter of the barrier."""
    if not compact:
        zero = like.new_zeros(1, dtype=torch.int32)
        return zero, zero, zero
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
    place, count, _ = _counters(T, B, N, dy, tile["COMPACT"])
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


def _views_gradient(D5: Tensor, bits: Tensor, W: Tensor, dV: Tensor, z: Sizes) -> None:
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
