"""Launches of the `triton` backend's backward pass: the sequence in pieces, from the end.

Shapes as in `plan.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.batched.backward import input_map
from riglstm.scan.fused.gradients import (
    Lines,
    Piece,
    Products,
    Total,
    multiply,
    products,
    rows_from,
    width,
)
from riglstm.scan.fused.launch import Launch, Layout, nth, prepare
from riglstm.scan.fused.plan import ROWS_AT_ONCE, Saved, Sizes, precision, sizes, sizes_back
from riglstm.scan.fused.tiles import PERSISTENT, backward_tiles, programs_on
from riglstm.scan.fused.views import Views, add_views, sort_views, sum_views, views_of
from riglstm.scan.fused.views import room as room_for_views
from riglstm.scan.kernels.backward import backward_kernel
from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.lines import lines_kernel, split_kernel
from riglstm.scan.kernels.weights import ROWS
from riglstm.selection import Selection


class Wanted(NamedTuple):
    """Whose gradients are asked for."""

    x: bool
    state: bool
    """h or c."""
    views: bool
    """x, W_in or b_in."""
    gates: bool
    """Any other weight."""


class Plan(NamedTuple):
    """All that does not depend on a call's numbers or its length."""

    tile: dict[str, Any]
    phases: dict[int, Launch]
    """The backward kernel, by PHASE."""
    tiles: int
    programs: int
    lines: Launch
    views: Views
    products: Products
    split: Launch
    lines_at_once: tuple[int, int]
    """Lines that a program of `lines` takes, and one of `split`."""


@functools.lru_cache(256)
def plan_back(
    z: Sizes, B: int, device: torch.device, scale: float, per_cell: bool, how: str
) -> Plan:
    """Kept by all that it depends on; `how` is what `precision` says."""
    N, K, d, L, G = z.N, z.K, z.d, z.L, z.G
    tile = backward_tiles(z, B, device)
    common: dict[str, Any] = {"N": N, "K": K, "d": d, "L": L}
    rounding: dict[str, Any] = {"PRECISION": how, "WIDE": interpreted()}
    options: dict[int, dict[str, Any]] = {7: PERSISTENT, 8: {}}
    if interpreted():
        options = {1: {}, 2: {}, 8: {}}
    by = products(z, B, device)
    # cuBLAS and the sum of float32 read all of D5; kernels of ours, what their lists say.
    zeros = by.in_lists is None
    rest = {"G": G, "SCALE": scale, "ZEROS": zeros, **rounding, **tile}
    phases = {
        phase: prepare(backward_kernel, **common, **rest, PHASE=phase, **more)
        for phase, more in options.items()
    }
    tiles = N * -(-N * d // tile["BN"]) * -(-B // tile["BM"])
    programs = 0 if interpreted() else programs_on(device, max(tiles, B))
    wide, one = width(z)
    # In the interpreter each program takes as long, however much it does.
    BL, BS = (8, 64) if interpreted() else (1, 4)
    lines = prepare(
        lines_kernel, **common, G=G, BL=BL, BG=power_of_two(4 * d),
        BQ=power_of_two(max(1, L - 4 * d)), PER_CELL=per_cell,
    )  # fmt: skip
    views = views_of(z, device, how)
    split = prepare(
        split_kernel, **common, P=z.P, G=G, WIDTH=wide, ONE=one, BL=BS, BG=power_of_two(G * d)
    )
    return Plan(
        *(tile, phases, tiles, programs, lines, views, by),
        *(split, (BL, BS)),
    )


@functools.lru_cache(256)
def _layout(
    z: Sizes,
    T: int,
    B: int,
    steps: int,
    compact: bool,
    summed: bool,
    own: tuple[bool, bool],
    in_lists: bool,
    views: bool,
) -> tuple[Layout, int]:
    """Buffers of one call, and how many numbers of four bytes at their start must be zero.

    Those are a counter for each piece, dW if it is `summed` there, counts, and what becomes dh and
    dc where it is not the caller's.
    """
    int32, float32, listed = torch.int32, torch.float32, B if compact else 0
    pieces = -(-T // steps)
    # What cells ask of each other's states is rounded as their gates' gradients are; float16 has
    # not the range for it.
    asked = float32 if z.back == torch.float16 else z.back
    zero = [
        (int32, (pieces, 4)), (float32, (z.N if summed else 0, width(z)[0], z.L)),
        (int32, (T if compact else 0, z.N)), *((float32, (B if o else 0, z.N, z.d)) for o in own),
    ]  # fmt: skip
    rest = [
        (int32, (z.N, listed)), (asked, (B, z.N, z.N, z.d)), (z.back, (z.N, z.S * z.d, z.L)),
        (float32, (z.S * z.d,)),
        *((int32, (pieces if in_lists else 0, z.N, rows)) for rows in (ROWS, 1)),
        (z.back, (8,)), *room_for_views(z, T * B if views else 0, steps * B),
    ]  # fmt: skip
    return Layout(*zero, *rest), Layout(*zero).size // 4


def backward(
    dy: Tensor,
    dh: Tensor | None,
    dc: Tensor | None,
    x: Tensor,
    h: Tensor,
    y: Tensor,
    saved: Saved,
    weights: Weights,
    sel: Selection,
    product: torch.dtype,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Weights]:
    """Gradients of x, h, c and of every weight, from those of y and, if any, the final state."""
    T, B, N, d = y.shape
    W, W_q = weights.W, weights.W_q
    z = sizes_back(sizes(d, sel, W_q is not None, product), saved)
    per_cell = W_q is not None and W_q.dim() == 3
    plan = plan_back(z, B, dy.device, sel.update_scale, per_cell, precision(product))
    steps = min(T, max(1, ROWS_AT_ONCE // B))
    pieces, halves = -(-T // steps), z.back == torch.float16
    summed = wanted.gates and not (halves and pieces == 1)
    own = (dh is None and not wanted.state, dc is None and not wanted.state)
    in_lists = wanted.gates and plan.products.in_lists is not None
    compact = plan.tile["COMPACT"]
    layout, zeros = _layout(z, T, B, steps, compact, summed, own, in_lists, wanted.views)
    memory = dy.new_empty(layout.size, dtype=torch.uint8)
    made = layout.cut(memory)
    counters, _, count, own_h, own_c, listed, parts, W_lines, w_unit, *room, counts, by_kind = made
    packed = Lines(W_lines, w_unit if halves else None)
    D5 = dy.new_empty((steps, B, N, z.L), dtype=z.back)
    # First of all: the GPU packs while the host goes on.
    plan.lines(
        (-(-z.S * d // plan.lines_at_once[0]),),
        (W, W if W_q is None else W_q, *packed, D5, counters, room[2], steps * B * N, zeros),
    )
    if wanted.views:
        sort_views(plan.views, saved.bits, (counts, by_kind), z.K, T * B, steps * B)
    at_h, at_c = own_h if own[0] else _copy(dh, h), own_c if own[1] else _copy(dc, h)
    unit = dy.new_empty((steps, B)) if halves else None
    dz = dy.new_empty((T if z.G == 5 else 1, B, N))
    dV = dy.new_empty((T, B, z.K, d), dtype=product) if wanted.views else None
    row_tiles = -(-steps * B // plan.views.rows)
    of_views = None
    if wanted.views and weights.b_in is not None:
        last = -(-(T - (pieces - 1) * steps) * B // plan.views.rows)
        of_views = dy.new_empty(((pieces - 1) * row_tiles + last, z.K * d))
    total = None
    if wanted.gates:
        shape, start = (N, width(z)[0], z.L), layout.starts[1][1] // 4
        strides = (shape[1] * z.L, z.L, 1)
        floats = memory.view(torch.float32)
        sums = floats.as_strided(shape, strides, start) if summed else dy.new_empty(shape)
        total = Total(sums, z, plan.products, room, pieces == 1)
        total.begin(saved, steps * B)

    def run(phase: int, programs: int, piece: int, t0: int, t1: int) -> None:
        arguments = (
            dy, at_h, at_c, parts, h, y, saved.act, saved.bits, saved.gates, saved.c, saved.a,
            *packed, D5, unit, dz, listed, count, nth(counters, piece, 4), B, T, piece * steps,
            t0, t1,
        )  # fmt: skip
        plan.phases[phase]((programs,), arguments)

    for i in reversed(range(pieces)):
        t0, t1 = i * steps, min(T, (i + 1) * steps)
        if interpreted():
            for t in reversed(range(t0, t1)):
                run(1, -(-B // plan.tile["RB"]), i, t, t + 1)
                run(2, plan.tiles, i, t, t + 1)
        else:
            run(7, plan.programs, i, t0, t1)
        units = None if unit is None else rows_from(unit, 0, t1 - t0)
        piece = Piece(rows_from(D5, 0, t1 - t0), units)
        if dV is not None:
            now = rows_from(dV, t0)
            part = None if of_views is None else rows_from(of_views, i * row_tiles)
            add_views(plan.views, piece, packed, by_kind, i, steps * B, now, part)
        if total is not None:
            total.add(piece, saved, i, t0)
    if wanted.state:
        run(8, -(-B // plan.tile["RB"]), 0, 0, 1)
    dx = dW_in = db_in = dW = db = dW_q = d_bias = None
    if dV is not None:
        db_in = None if of_views is None else sum_views(plan.views, of_views)
        dx, dW_in, db_in = input_map(
            dV.view(T * B, z.K * d), x, weights, product, wanted.x, multiply, db_in,
            saved.x[:, : x.shape[2]] if saved.x.numel() else None,
        )  # fmt: skip
    if total is not None:
        dW, db, dW_q = total.split(weights, plan.split, plan.lines_at_once[1])
        d_bias = None if weights.update_bias is None else dz.sum((0, 1))
    grads = Weights(dW_in, db_in, dW, db, dW_q, d_bias)  # type: ignore[arg-type]
    dh, dc = (s if isinstance(s, Tensor) and wanted.state else None for s in (at_h, at_c))
    return dx, dh, dc, grads


def _copy(state: Tensor | None, like: Tensor) -> Tensor:
    """The gradient of a final state, to be written to; None is zero."""
    if state is None:
        return like.new_zeros(like.shape)
    return state.clone(memory_format=torch.contiguous_format)
