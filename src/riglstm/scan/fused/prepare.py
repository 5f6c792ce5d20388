"""What a call of the forward kernel needs: found out once for its sizes, and made for each call.

Shapes as in `plan.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.input_map import (
    Map,
    Mapped,
    has_map,
    inner_map,
    inside,
    map_of,
    mapped,
    to_views,
)
from riglstm.scan.fused.launch import Launch, Layout, Place, prepare
from riglstm.scan.fused.pack import packed
from riglstm.scan.fused.plan import Sizes, empty_unit, precision, sizes
from riglstm.scan.fused.tiles import (
    PERSISTENT,
    columns,
    forward_tiles,
    programs_on,
    resident_tiles,
)
from riglstm.scan.kernels.common import LINE, interpreted, power_of_two
from riglstm.scan.kernels.forward import forward_kernel
from riglstm.scan.kernels.products import hold_kernel
from riglstm.scan.kernels.resident import resident_kernel
from riglstm.selection import Selection


class Plan(NamedTuple):
    """All that does not depend on a call's numbers or its length."""

    z: Sizes
    tile: dict[str, Any]
    by_gate: bool
    """Which columns a tile has, and so how many tiles there are: those of the resident kernel."""
    direct: bool
    """Whether torch's product that gives the views writes them to XH: they have no gaps there."""
    map: Map | None
    """For products in bfloat16 and in halves; otherwise the map to views is torch's."""
    hold: Launch
    inside: bool
    """Whether the forward kernel maps the input of all steps but the first two."""
    phases: dict[int, Launch]
    """The forward kernel, by PHASE."""
    programs: int
    """Of a launch; in the interpreter, where programs do both, of `gates` alone."""
    layouts: dict[tuple[int, bool, bool], tuple[Layout, int]]
    """What `_layout` says, by T, and whether a call keeps what it works with and has a state."""


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
    save: bool,
) -> Plan:
    """Kept by all that it depends on; `rounded` is what `rounds(product)` says.

    D are the features that are mapped to views, None: the input is cut into views.
    """
    z = sizes(d, sel, soft_update, product)
    kept = resident_tiles(z, B, device)
    N, tile = z.N, kept or forward_tiles(z, B, device)
    kernel = forward_kernel if kept is None else resident_kernel
    own = z.dtype == z.held
    ours = None if D is None or not has_map(z, D) else map_of(z, D, device)
    direct = own and D is not None and z.d == z.P and ours is None
    # Where scores find views: a row has so many slots of P numbers.
    if direct or (own and ours is not None):
        slots, P = z.S, z.P  # in XH
    elif ours is not None:
        slots, P = z.K, z.P  # apart, with the gaps of XH
    else:
        slots, P = z.K, d
    constants = dict(
        N=N, K=z.K, d=d, P=z.P, G=z.G, SCALE=sel.update_scale,
        X_ROW=slots * P, X_SLOT=P,
        K_a=N if sel.cells == "all" else sel.K_a, K_x=z.K if sel.views == "all" else sel.K_x,
        K_h=N if sel.peers == "all" else sel.K_h, SAVE=save, PRECISION=precision(product),
        WIDE=interpreted(), **tile,
    )  # fmt: skip
    mapping = ours is not None and inside(z, B, ours.D)
    if kept is None:
        constants |= inner_map(ours if mapping else None, z, tile, device)
    apart = tile.get("APART", False)
    options: dict[int, dict[str, Any]] = {15: PERSISTENT}
    if interpreted():
        options = {7: {}, 8: {}} if apart else {1: {}, 2: {}, 8: {}}
    phases = {
        phase: prepare(kernel, **constants, PHASE=phase, **more) for phase, more in options.items()
    }
    tiles = N * columns(z, tile["BN"], kept is not None) * -(-B // tile["BM"])
    if apart:
        # Not one less than that: sequences would have nobody to select for them.
        programs = tiles + -(-B // tile["RB"])
    else:
        # Where the kernel maps its input, those without a tile do it.
        most = None if mapping else max(tiles, B)
        programs = tiles if interpreted() else programs_on(device, most)
    held = prepare(
        hold_kernel, N=N, K=z.K, S=z.S, d=d, P=z.P, BK=power_of_two(z.K), BP=power_of_two(z.P),
        BH=power_of_two(N * d),
    )  # fmt: skip
    rest = (direct, ours, held, mapping, phases, programs)
    return Plan(z, tile, kept is not None, *rest, layouts={})


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
    """Of the kernel's barrier, and a line of memory behind it a second one: of another barrier, or
    of tiles that are about to end."""
    counts: Tensor | Place
    """(T, N): how many a list of the step has; empty where there are no lists."""
    zeros: int
    """Whole numbers from the counter on that must be zero: the counts lie behind it."""
    listed: Tensor | Place
    """(2, N, B, 2): for tiles of rows that are awake a sequence, and what its cell takes in; one
    for even steps, and one for odd ones."""
    map: Mapped
    """For our own map."""
    zero: Tensor | Place
    """A state to begin from, where none is given."""
    XH: Tensor | Place
    unit: Tensor | Place
    passing: Passing | None
    """The rest of it, but where it is kept: that is made after the map is launched."""


def working(T: int, B: int, plan: Plan, like: Tensor, keep: bool, begun: bool) -> Working:
    """Buffers of one call. What it is to keep is left out but for what the map writes to."""
    if (known := plan.layouts.get((T, keep, begun))) is None:
        if len(plan.layouts) >= 16:
            plan.layouts.clear()
        known = plan.layouts[T, keep, begun] = _layout(T, B, plan, not keep, begun)
    layout, zeros = known
    W, w_unit, proposal, counter, counts, listed, zero, *rest = layout.make(like)
    count, z = len(Mapped._fields), plan.z
    ours = Mapped(*rest[:count])
    if keep and not begun:
        # The backward pass begins from it, too.
        zero = like.new_empty(B, z.N, z.d)
    made = W, w_unit, proposal, counter, counts, zeros, listed, ours, zero
    XH = None
    if keep or plan.direct:
        XH = like.new_empty(T, B, z.S, z.P, dtype=z.held)
    if keep:
        assert XH is not None
        return Working(*made, XH, empty_unit(T, B, z, like), None)
    act, bits, unit, at = rest[count:]
    at = at if XH is None else XH
    woke = like.new_empty(T, B, z.N, dtype=torch.bool)
    # Gates, c and a are neither written nor read then: any address will do.
    return Working(*made, at, unit, Passing(at, woke, act, bits, at, at, at, unit))


def _layout(T: int, B: int, plan: Plan, passing: bool, begun: bool) -> tuple[Layout, int]:
    """Buffers of one call, and how many numbers of four bytes from its counter on must be zero."""
    z, compact = plan.z, plan.tile.get("COMPACT", False)
    int32, float32 = torch.int32, torch.float32
    zero = [(int32, (2 * LINE,)), (int32, (T if compact else 0, z.N))]
    wanted = packed(z, plan.tile["BN"], plan.by_gate)
    wanted += [(float32, (z.G - 3, B, z.N, z.d)), *zero, (int32, (2, z.N, B if compact else 0, 2))]
    wanted += [(float32, (B if passing and not begun else 0, z.N, z.d))]
    wanted += mapped(z, T, B, plan.map)
    if passing:
        wanted += [(int32, (T, B)), (int32, (T, B, z.N)), (float32, (T, B))]
        wanted += [(z.held, (0 if plan.direct else T, B, z.S, z.P))]
    return Layout(*wanted), Layout(*zero).size // 4


def write_views(
    x: Tensor, h: Tensor | None, weights: Weights, plan: Plan, work: Working
) -> Tensor | Place:
    """Write the views of x (T, B, D) to XH, and each row's unit; where scores find the views.

    Where the kernel maps its input, those of the first two steps alone. h is the state that is
    given, if any.
    """
    T, B, D = x.shape
    z, XH = plan.z, work.XH
    if plan.map is not None:
        rows = min(2, T) * B if plan.inside else T * B
        return to_views(plan.map, work.map, x, h, weights, XH, work.unit, rows)
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
    unit = work.unit if z.held == torch.float16 else None
    plan.hold((T * B,), (views, work.zero if h is None else h, XH, unit, B))
    return views


def _as(dtype: torch.dtype, t: Tensor) -> Tensor:
    """t in a dtype; torch takes its time to find that it is of it already."""
    return t if t.dtype == dtype else t.to(dtype)
