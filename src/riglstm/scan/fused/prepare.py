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
from riglstm.scan.fused.pack import packed
from riglstm.scan.fused.plan import (
    PERSISTENT,
    Saved,
    Sizes,
    columns,
    forward_tiles,
    map_tiles,
    precision,
    programs_on,
    resident_tiles,
    sizes,
)
from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.forward import forward_kernel
from riglstm.scan.kernels.input_map import map_kernel
from riglstm.scan.kernels.products import hold_kernel
from riglstm.scan.kernels.resident import resident_kernel
from riglstm.selection import Selection


class Map(NamedTuple):
    """The map from input to views by a kernel of ours, which writes them to XH."""

    run: Launch
    D: int
    rows: int
    """Of a tile."""
    columns: int
    """Tiles beside each other."""


class Plan(NamedTuple):
    """All that does not depend on a call's numbers or its length."""

    z: Sizes
    tile: dict[str, Any]
    by_gate: bool
    """The order of a tile's columns: that of the resident kernel."""
    grouped: bool
    """The order of what is summed up: that of rows that are read to registers."""
    first: int
    """The first slot that XH has: K, where the views are those of symbols."""
    direct: bool
    """Whether torch's product that gives the views writes them to XH: they have no gaps there."""
    map: Map | None
    """For products in bfloat16; otherwise the map to views is torch's."""
    hold: Launch
    phases: dict[int, Launch]
    """The forward kernel, by PHASE."""
    programs: int
    """Of a launch; in the interpreter, of `gates` alone."""


@functools.lru_cache(256)
def plan_of(
    sel: Selection,
    B: int,
    d: int,
    device: torch.device,
    product: torch.dtype,
    rounded: bool,
    soft_update: bool,
    D: int | None,
    symbols: bool,
    save: bool,
) -> Plan:
    """Kept by all that it depends on; `rounded` is what `rounds(product)` says.

    D are the features that are mapped to views, None: the input is cut into views.
    """
    z = sizes(d, sel, soft_update, product)
    kept = None if symbols else resident_tiles(z, B, device)
    N, tile = z.N, kept or forward_tiles(z, B, device)
    kernel = forward_kernel if kept is None else resident_kernel
    own = z.dtype == z.held and not symbols
    to_views = None
    # It counts the numbers of W_in in 32 bits.
    if own and product == torch.bfloat16 and D is not None and 0 < D * z.K * z.P < 2**31:
        to_views = map_of(z, D, device)
    direct = own and D is not None and to_views is None and z.d == z.P
    placed = direct or to_views is not None
    constants = dict(
        N=N, K=z.K, d=d, P=z.P, G=z.G, SCALE=sel.update_scale,
        X_ROW=z.S * z.P if placed else z.K * d, X_SLOT=z.P if placed else d,
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
    tiles = N * columns(z, tile["BN"]) * -(-B // tile["BM"])
    programs = tiles if interpreted() else programs_on(device, max(tiles, B))
    held = prepare(
        hold_kernel, N=N, K=z.K, S=z.S, d=d, P=z.P, BK=power_of_two(z.K), BP=power_of_two(z.P),
        BH=power_of_two(N * d),
    )  # fmt: skip
    first = z.K if symbols else 0
    grouped = bool(tile.get("AHEAD", 0))
    return Plan(z, tile, kept is not None, grouped, first, direct, to_views, held, phases, programs)


def map_of(z: Sizes, D: int, device: torch.device) -> Map:
    """The map of D features to views."""
    tile = map_tiles(device)
    run = prepare(map_kernel, D=D, K=z.K, S=z.S, d=z.d, P=z.P, WIDE=interpreted(), **tile)
    return Map(run, D, tile["BM"], -(-z.K * z.P // tile["BN"]))


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
    lines: Tensor | Place
    """W_in as our own map takes it."""
    zero: Tensor | Place
    """A state to begin from, where none is given."""
    held: Saved | Passing


def working(T: int, B: int, plan: Plan, like: Tensor, saved: Saved | None, begun: bool) -> Working:
    """Buffers of one call; what is to be saved is given, and so may be the state."""
    D = 0 if plan.map is None else plan.map.D
    layout = _layout(
        *(T, B, plan.z, plan.tile["BN"], plan.first, plan.grouped, plan.direct, D),
        *(saved is None, begun),
    )
    W, w_unit, proposal, counter, lines, zero, *rest = layout.make(like)
    if saved is not None:
        return Working(W, w_unit, proposal, counter, lines, zero, saved)
    act, bits, unit, XH = rest
    z = plan.z
    if plan.direct:
        XH = like.new_empty(T, B, z.S, z.P, dtype=z.held)
    woke = like.new_empty(T, B, z.N, dtype=torch.bool)
    # Gates, c and a are neither written nor read then: any address will do.
    held = Passing(XH, woke, act, bits, XH, XH, XH, unit)
    return Working(W, w_unit, proposal, counter, lines, zero, held)


@functools.lru_cache(256)
def _layout(
    T: int,
    B: int,
    z: Sizes,
    BN: int,
    first: int,
    grouped: bool,
    direct: bool,
    D: int,
    passing: bool,
    begun: bool,
) -> Layout:
    int32, float32 = torch.int32, torch.float32
    wanted = [*packed(z, BN, first, grouped), (float32, (z.G - 3, B, z.N, z.d)), (int32, (1,))]
    wanted += [(z.held, (D, z.K * z.P)), (float32, (0 if begun else B, z.N, z.d))]
    if passing:
        wanted += [(int32, (T, B)), (int32, (T, B, z.N)), (float32, (T, B))]
        wanted += [(z.held, (0 if direct else T, B, z.S - first, z.P))]
    return Layout(*wanted)


def write_views(
    x: Tensor, h: Tensor | Place, weights: Weights, plan: Plan, work: Working
) -> Tensor | Place:
    """Write the views of x (T, B, D) to XH, and each row's unit; where scores find the views."""
    T, B, D = x.shape
    z, held = plan.z, work.held
    XH = held.XH
    if plan.map is not None:
        tiles = plan.map.columns * -(-T * B // plan.map.rows)
        plan.map.run((tiles,), (x, work.lines, weights.b_in, XH, T * B))
        return XH
    views = x
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
            return XH
    hold(views, h, plan, held, T * B, B)
    return views


def _as(dtype: torch.dtype, t: Tensor) -> Tensor:
    """t in a dtype; torch takes its time to find that it is of it already."""
    return t if t.dtype == dtype else t.to(dtype)


def hold(
    views: Tensor | None,
    h: Tensor | Place,
    plan: Plan,
    held: Saved | Passing,
    rows: int,
    B: int,
) -> None:
    """Write views to XH, and the unit of each row; without views, the unit alone."""
    unit = held.unit if plan.z.held == torch.float16 else None
    plan.hold((rows,), (views, h, held.XH, unit, B))
