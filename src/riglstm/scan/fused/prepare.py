"""What a call of the forward kernel needs: found out once for its sizes, and made for each call.

Shapes as in `plan.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.launch import Launch, Layout, Place, prepare
from riglstm.scan.fused.plan import (
    PERSISTENT,
    Saved,
    Sizes,
    columns,
    forward_tiles,
    packed,
    precision,
    programs_on,
    resident_tiles,
    sizes,
)
from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.forward import forward_kernel
from riglstm.scan.kernels.products import hold_kernel
from riglstm.scan.kernels.resident import resident_kernel
from riglstm.selection import Selection


class Plan(NamedTuple):
    """All that does not depend on a call's numbers or its length."""

    z: Sizes
    tile: dict[str, Any]
    by_gate: bool
    """The order of a tile's columns: that of the resident kernel."""
    first: int
    """The first slot that XH has: K, where the views are those of symbols."""
    direct: bool
    """Whether the product that gives the views writes them to XH: they have no gaps there."""
    hold: Launch
    phases: dict[int, Launch]
    """The forward kernel, by PHASE."""
    programs: int
    """Of a launch; in the interpreter, of `gates` alone."""
    chunks: int
    """Programs of the row-wise phases in the interpreter."""


@functools.lru_cache(256)
def plan_of(
    sel: Selection,
    B: int,
    d: int,
    device: torch.device,
    product: torch.dtype,
    rounded: bool,
    *,
    soft_update: bool,
    linear: bool,
    symbols: bool,
    save: bool,
) -> Plan:
    """Kept by all that it depends on; `rounded` is what `rounds(product)` says."""
    z = sizes(d, sel, soft_update, product)
    kept = None if symbols else resident_tiles(z, B, device)
    N, tile = z.N, kept or forward_tiles(z, B, device)
    kernel = forward_kernel if kept is None else resident_kernel
    direct = linear and not symbols and z.dtype == z.held and z.d == z.P
    constants = dict(
        N=N, K=z.K, d=d, P=z.P, G=z.G, SCALE=sel.update_scale,
        X_ROW=z.S * z.P if direct else z.K * d, X_SLOT=z.P if direct else d,
        K_a=N if sel.cells == "all" else sel.K_a, K_x=z.K if sel.views == "all" else sel.K_x,
        K_h=N if sel.peers == "all" else sel.K_h, SAVE=save, PRECISION=precision(product),
        WIDE=interpreted(), **tile,
    )  # fmt: skip
    options: dict[int, dict[str, Any]] = {15: PERSISTENT}
    if interpreted():
        options = {1: {}, 2: {}, 8: {}}
    phases = {
        phase: prepare(kernel, **constants, PHASE=phase, **more) for phase, more in options.items()
    }
    groups = tile.get("GROUPS", 1)
    chunks = -(-B // (groups * tile["RB"]))
    tiles = N * columns(z, tile["BN"]) * -(-chunks * tile["RB"] // tile["BM"])
    programs = groups * (tiles if interpreted() else programs_on(device, max(tiles, B)))
    held = prepare(
        hold_kernel, N=N, K=z.K, S=z.S, d=d, P=z.P, BK=power_of_two(z.K), BP=power_of_two(z.P),
        BH=power_of_two(N * d),
    )  # fmt: skip
    of_kernel = (held, phases, programs, groups * chunks)
    return Plan(z, tile, kept is not None, z.K if symbols else 0, direct, *of_kernel)


class Passing(NamedTuple):
    """`Saved` for a call without a backward pass: buffers that only kernels see, and woke."""

    XH: Tensor | Place
    woke: Tensor
    act: Tensor | Place
    bits: Tensor | Place
    gates: Tensor | Place
    c: Tensor | Place
    a: Tensor | Place
    unit: Tensor | Place


class Working(NamedTuple):
    """What a call works with, all of it unwritten."""

    W: Tensor | Place
    w_unit: Tensor | Place
    proposal: Tensor | Place
    counter: Tensor | Place
    held: Saved | Passing


def working(T: int, B: int, plan: Plan, like: Tensor, saved: Saved | None) -> Working:
    """Buffers of one call; what is to be saved is given."""
    made = _layout(T, B, plan.z, plan.tile["BN"], plan.first, plan.direct, saved is None).make(like)
    W, w_unit, proposal, counter, *rest = made
    if saved is not None:
        return Working(W, w_unit, proposal, counter, saved)
    act, bits, unit, XH = rest
    z = plan.z
    if plan.direct:
        XH = like.new_empty((T, B, z.S, z.P), dtype=z.held)
    woke = like.new_empty((T, B, z.N), dtype=torch.bool)
    # Gates, c and a are neither written nor read then: any address will do.
    held = Passing(XH, woke, act, bits, XH, XH, XH, unit)
    return Working(W, w_unit, proposal, counter, held)


@functools.lru_cache(256)
def _layout(T: int, B: int, z: Sizes, BN: int, first: int, direct: bool, passing: bool) -> Layout:
    int32, float32 = torch.int32, torch.float32
    wanted = [*packed(z, BN, first), (float32, (z.G - 3, B, z.N, z.d)), (int32, (1,))]
    if passing:
        wanted += [(int32, (T, B)), (int32, (T, B, z.N)), (float32, (T, B))]
        wanted += [(z.held, (0 if direct else T, B, z.S - first, z.P))]
    return Layout(*wanted)


def write_views(
    x: Tensor, h: Tensor, weights: Weights, plan: Plan, held: Saved | Passing
) -> Tensor:
    """Write the views of x (T, B, D) to XH, and each row's unit; where scores find the views."""
    T, B, D = x.shape
    z, XH, views = plan.z, held.XH, x
    if weights.W_in is not None:
        x, W = _as(z.dtype, x.view(T * B, D)), _as(z.dtype, weights.W_in)
        where = None
        if plan.direct:
            assert isinstance(XH, Tensor)
            where = XH.view(T * B, z.S * z.P)[:, : z.K * z.d]
        if weights.b_in is None:
            views = torch.mm(x, W, out=where)
        else:
            views = torch.addmm(_as(z.dtype, weights.b_in), x, W, out=where)
        if where is not None:
            assert isinstance(XH, Tensor)
            return XH
    hold(views, h, plan, held, T)
    return views


def _as(dtype: torch.dtype, t: Tensor) -> Tensor:
    """t in a dtype; torch takes its time to find that it is of it already."""
    return t if t.dtype == dtype else t.to(dtype)


def hold(views: Tensor | None, h: Tensor, plan: Plan, held: Saved | Passing, T: int) -> None:
    """Write views to XH, and the unit of each row; without views, the unit alone."""
    B, unit = h.shape[0], held.unit if plan.z.held == torch.float16 else None
    plan.hold((T * B,), (views, h, held.XH, unit, B))
