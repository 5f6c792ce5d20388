"""The `triton` backend's `scan`, and its forward pass: packing, the map to views, and the kernel.

Shapes as in `plan.py`; R = T · B rows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import learns, product_on, untraced
from riglstm.inputs import begin, flat
from riglstm.scan.base import BackendError
from riglstm.scan.triton.kernels.common import LINE, MOST, interpreted, power_of_two
from riglstm.scan.triton.kernels.pack import (
    PACKED_COLUMNS,
    hold_kernel,
    lines_at_once,
    pack_kernel,
)
from riglstm.scan.triton.kernels.resident import resident_kernel
from riglstm.scan.triton.kernels.tiled import tiled_kernel
from riglstm.scan.triton.plan import (
    PERSISTENT,
    Argument,
    Buffer,
    Launch,
    Layout,
    Map,
    Saved,
    Sizes,
    aligned,
    columns,
    empty_saved,
    empty_unit,
    forward_tiles,
    has_map,
    inner_map,
    inside,
    map_of,
    padded,
    precision,
    prepare,
    programs_on,
    resident_tiles,
    rounded,
    rounds,
    sizes,
    watched,
)
from riglstm.selection import Noise, Selection, choose_cells, weigh_peers, weigh_views

LARGEST = 256
"""Numbers of a cell."""
Memory: TypeAlias = Tensor | Buffer


def scan(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    *,
    noise: Noise | None = None,
    live: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """See `riglstm.scan.scan`."""
    product = _checked(x.shape[1], h, c, weights, sel)
    save = learns(x, h, c, *weights)
    wake = None if live is None else -live.int()  # every bit, or none
    take = None
    if noise is not None:
        sel, wake, take = drawn(sel, noise, wake)
    masks = (wake, take, reset)
    if save or watched(x, h, c, *weights):
        from riglstm.scan.triton.backward import Eager, forward_op

        h, c = begin(x, h, c, weights, sel)
        given = (x, h, c, *weights, *masks)
        run: Any = forward_op if not save or watched(*given) else Eager.apply
        y, h, c, *kept = run(*given, *flat(sel), product, save)
        return y, (h, c), Saved(*kept).woke
    y, h, c, held = forward(x, h, c, weights, sel, *masks, product, save=False, keep=False)
    return y, (h, c), held.woke


def refusal(
    sel: Selection, d: int, dtype: torch.dtype, device: torch.device, B: int = 1
) -> str | None:
    """What the kernels do not support about a problem; None: they run it."""
    return _refusal(sel, d, dtype, product_on(device.type, dtype), device.type, B)


def _refusal(
    sel: Selection, d: int, dtype: torch.dtype, product: torch.dtype, kind: str, B: int
) -> str | None:
    """`refusal` on a kind of device, for products of this dtype."""
    if kind != "cuda" and not interpreted():
        return f"a CUDA device, got {kind!r}"
    if not {sel.cells, sel.views, sel.peers} <= {"top", "all", "random"}:
        got = f"cells={sel.cells!r}, views={sel.views!r}, peers={sel.peers!r}"
        return f"cells, views and peers that are 'top', 'all' or 'random', got {got}"
    if max(sel.N, sel.K) > MOST:
        return f"at most {MOST} cells and {MOST} views, got {sel.N} and {sel.K}"
    if d > LARGEST:
        return f"cells of size {LARGEST} at most, got {d}"
    if dtype != torch.float32 or product not in (torch.float32, torch.bfloat16):
        return f"float32, or bfloat16 under autocast, got {dtype} and products in {product}"
    # Numbers of a step are of 32 bits: gates, what cells give each other, and slots.
    most = (2**31 - 1) // max(sel.N * max(sel.N, 5) * d, (sel.K + sel.N) * (d + 7))
    if most < B:
        return f"at most {most} sequences of {sel.N} cells of size {d}, got {B}"
    return None


@untraced
def _checked(
    B: int, h: Tensor | None, c: Tensor | None, weights: Weights, sel: Selection
) -> torch.dtype:
    """The dtype of products; raises for what the kernels do not support."""
    like, N, d = weights.W if h is None else h, sel.N, weights.W.shape[2] // 4
    kind = "cuda" if like.is_cuda else like.device.type
    product = product_on(kind, like.dtype)
    why = _refusal(sel, d, like.dtype, product, kind, B)
    if why is not None:
        fewer = _refusal(sel, d, like.dtype, product, kind, 1) is None
        way = "run them in parts, or use" if fewer else "use"
        raise BackendError(f"backend='triton' needs {why}; {way} backend='batched' or 'auto'")
    for name, state in (("h", h), ("c", c)):
        # Kernels would read what lies behind it.
        if state is not None and state.shape != (B, N, d):
            got = tuple(state.shape)
            raise ValueError(f"{name} must be (B, N, d) = {(B, N, d)}, got {got}; give all of it")
    return product


def drawn(
    sel: Selection, noise: Noise, wake: Tensor | None
) -> tuple[Selection, Tensor | None, Tensor | None]:
    """What `random` rules choose, as masks under which the rules that are left take everything.

    They rank the noise, which is there before the first step. The masks have a bit for each cell
    that may wake, (T, B), of those in `wake`, and one for each slot that a cell may take in,
    (T, B, N); None: all.
    """
    rules: dict[str, Any] = {n: "all" for n, draw in noise._asdict().items() if draw is not None}
    take = None
    if noise.cells is not None:
        chosen = _bits(choose_cells(noise.cells, sel, noise.cells))
        wake = chosen if wake is None else wake & chosen
    if noise.views is not None:
        take = _bits(weigh_views(noise.views, sel, noise.views)) | -1 << sel.K
    if noise.peers is not None:
        heard = _bits(weigh_peers(noise.peers, sel, noise.peers)) << sel.K | (1 << sel.K) - 1
        take = heard if take is None else take & heard
    return replace(sel, **rules), wake, take


def _bits(chosen: Tensor) -> Tensor:
    """A mask (..., n) as whole numbers (...), a bit each."""
    n = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    return (chosen.int() << n).sum(-1, dtype=torch.int32)


class ForwardPlan(NamedTuple):
    """All of a forward pass that does not depend on a call's numbers or its length."""

    z: Sizes
    tile: dict[str, Any]
    by_gate: bool
    """True for the resident kernel, whose tiles have other columns, and so another number."""
    direct: bool
    """True if torch's product that gives the views writes them to XH: they have no gaps there."""
    map: Map | None
    """For products in bfloat16 and in halves; otherwise the map to views is torch's."""
    hold: Launch
    pack: Launch
    pack_programs: int
    inside: bool
    """True if the forward kernel maps the input of all steps but the first two."""
    phases: dict[int, Launch]
    """The forward kernel, by PHASE."""
    programs: int
    """Of a launch; in the interpreter, where programs do both, of `gates` alone."""
    layouts: dict[tuple[int, bool, bool], tuple[Layout, int]]
    """Buffers by T, and whether a call keeps what it works with and is given a state."""


@functools.lru_cache(256)
def plan_forward(
    sel: Selection,
    B: int,
    d: int,
    device: torch.device,
    product: torch.dtype,
    rounded: bool,
    query: int,
    D: int | None,
    save: bool,
) -> ForwardPlan:
    """Cached by everything that it depends on; `rounded` is what `rounds(product)` says.

    `query` are the dimensions of W_q, 0 where there is none. D are the features that are mapped to
    views, None: the input is cut into views.
    """
    z = sizes(d, sel, query > 0, product)
    kept = resident_tiles(z, B, device)
    N, tile = z.N, kept or forward_tiles(z, B, device)
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
    kernel = tiled_kernel if kept is None else resident_kernel
    phases = {
        phase: prepare(kernel, **constants, PHASE=phase, **more) for phase, more in options.items()
    }
    by_gate, BN, features = kept is not None, tile["BN"], 0 if ours is None else ours.D
    per_cell = columns(z, BN, by_gate)
    tiles = N * per_cell * -(-B // tile["BM"])
    if apart:
        # Not one less than that: sequences would have nobody to select for them.
        programs = tiles + -(-B // tile["RB"])
    else:
        # Where the kernel maps its input, those without a tile do it.
        most = None if mapping else max(tiles, B)
        programs = tiles if interpreted() else programs_on(device, most)
    hold = prepare(
        hold_kernel, N=N, K=z.K, S=z.S, d=d, P=z.P, BK=power_of_two(z.K), BP=padded(z.P),
        BH=power_of_two(N * d),
    )  # fmt: skip
    BW = power_of_two(z.K * z.P)
    pack = prepare(
        pack_kernel, N=N, K=z.K, d=d, P=z.P, G=z.G, D=features, BN=BN, BP=padded(z.P), BW=BW,
        TILES=per_cell, PER_CELL=query == 3, BY_GATE=by_gate,
    )  # fmt: skip
    packing = N * per_cell * (BN // PACKED_COLUMNS) + -(-features // lines_at_once(BW))
    return ForwardPlan(
        *(z, tile, by_gate, direct, ours, hold, pack, packing, mapping, phases, programs),
        layouts={},
    )


class Working(NamedTuple):
    """What a call works with, all of it unwritten."""

    XH: Memory
    unit: Memory
    passing: Saved | None
    """The rest of it, and buffers that only kernels see; None where it is kept: that is made after
    the map is launched."""
    zeros: int
    """Integers from the counter on that must be zero: the counts lie behind it."""
    W: Memory
    """(N, tiles, BN, S·P): the weights of the gates, as tiles read them."""
    w_unit: Memory
    """(N, tiles, BN): the scale factor of each column."""
    proposal: Memory
    """(1 or 2, B, N, d): h~, and W_q Q."""
    counter: Memory
    """Of the kernel's barrier, and a line of memory behind it a second one: of another barrier, or
    of tiles that are about to end."""
    counts: Memory
    """(T, N): how many a list of the step has; empty where there are no lists."""
    listed: Memory
    """(2, N, B, 2): for tiles of rows that are awake a sequence, and what its cell takes in; one
    for even steps, and one for odd ones."""
    zero: Memory
    """A state to begin from, where none is given."""
    lines: Memory
    """(D, K·P): W_in for the map to views."""
    sizes: Memory
    """(D,): the power of two at or below the largest number of a line; for TF32 in halves."""
    x: Memory
    """(R, width): the input in halves. In bfloat16 what the tiled kernel rounds of it before it
    maps it, (2 B, width): of two steps."""
    x_size: Memory
    """(R,): what a row of x is to be multiplied by; for TF32 in halves."""
    views: Memory
    """(R, K, P) float32, which scores read; for TF32 in halves."""


def working(T: int, B: int, plan: ForwardPlan, like: Tensor, keep: bool, begun: bool) -> Working:
    """Buffers of one call; of those that it is to keep, the ones that the map writes to."""
    if (known := plan.layouts.get((T, keep, begun))) is None:
        if len(plan.layouts) >= 16:
            plan.layouts.clear()
        known = plan.layouts[T, keep, begun] = _layout(T, B, plan, keep, begun)
    (layout, zeros), z = known, plan.z
    *made, act, bits, unit, XH = layout.make(like)
    if keep or plan.direct:
        XH = like.new_empty(T, B, z.S, z.P, dtype=z.held)
    if keep:
        unit = empty_unit(T, B, z, like)
        return Working(XH, unit, None, zeros, *made)
    woke = like.new_empty(T, B, z.N, dtype=torch.bool)
    # Gates, c, a and x are neither written nor read then: any address will do.
    passing = Saved(XH, woke, act, bits, XH, XH, XH, unit, XH)  # type: ignore[arg-type]
    return Working(XH, unit, passing, zeros, *made)


def _layout(T: int, B: int, plan: ForwardPlan, keep: bool, begun: bool) -> tuple[Layout, int]:
    """Buffers of one call, and how many integers from its counter on must be zero."""
    z, of, BN, int32, float32 = plan.z, plan.map, plan.tile["BN"], torch.int32, torch.float32
    tiles = (z.N, columns(z, BN, plan.by_gate), BN)
    listed, passing = B if plan.tile.get("COMPACT") else 0, 0 if keep else T
    zero = [(int32, (2 * LINE,)), (int32, (T if listed else 0, z.N))]
    D = 0 if of is None else of.D
    halved = T * B if of and of.halve else 0
    rows = halved or (2 * B if plan.inside else 0)
    wanted = [
        (z.held, (*tiles, z.S * z.P)), (float32, tiles), (float32, (z.G - 3, B, z.N, z.d)), *zero,
        (int32, (2, z.N, listed, 2)), (float32, (0 if begun else B, z.N, z.d)),
        (z.held, (D, z.K * z.P)), (float32, (D if halved else 0,)),
        (z.held, (rows, aligned(D, z.held))), (float32, (halved,)), (float32, (halved, z.K, z.P)),
        (int32, (passing, B)), (int32, (passing, B, z.N)), (float32, (passing, B)),
        (z.held, (0 if plan.direct else passing, B, z.S, z.P)),
    ]  # fmt: skip
    return Layout(*wanted), Layout(*zero).size // 4


def pack(
    weights: Weights, plan: ForwardPlan, work: Working, c: Tensor, h: Argument, c_0: Argument
) -> None:
    """Pack the weights for the forward kernel and the map, in the first launch of a call.

    It also writes what else there is to write, which saves launches: zeros to the counters and to
    h (B, N, d), if there is one, and to c a copy of c_0, or zeros.
    """
    W, W_q, of = weights.W, weights.W_q, plan.map
    arguments = (
        W, W if W_q is None else W_q, None if of is None else weights.W_in, c_0, work.W,
        work.w_unit if plan.z.held == torch.float16 else None, None if of is None else work.lines,
        None if of is None or of.halve is None else work.sizes, work.counter, c, h, work.zeros,
        c.numel(),
    )  # fmt: skip
    plan.pack((plan.pack_programs,), arguments)


def write_views(
    x: Tensor, h: Tensor | None, weights: Weights, plan: ForwardPlan, work: Working
) -> Memory:
    """Write the views of x (T, B, D) to XH, and each row's unit; where scores find the views.

    Where the kernel maps its input, those of the first two steps alone. h is the state that is
    given, if any.
    """
    T, B, D = x.shape
    z, of, XH, R = plan.z, plan.map, work.XH, T * B
    if of is not None:
        first, bias = min(2, T) * B if plan.inside else R, weights.b_in
        grid = (of.columns * -(-first // of.rows),)
        if of.halve is None:
            of.run(grid, (x, None, work.lines, bias, XH, None, None, first))
            return XH
        rows = (x, work.sizes, bias, h, work.x, work.x_size, work.unit, B, R)
        of.halve((-(-R // of.halve_rows),), rows)
        of.run(grid, (work.x, work.x_size, work.lines, bias, XH, work.unit, work.views, first))
        return work.views
    views = x
    if weights.W_in is not None:
        x, W = _as(z.dtype, x.view(R, D)), _as(z.dtype, weights.W_in)
        where = None
        if plan.direct:
            assert isinstance(XH, Tensor)
            where = XH.view(R, z.S * z.P)[:, : z.K * z.d]
        if weights.b_in is None:
            views = torch.mm(x, W, out=where)
        else:
            views = torch.addmm(_as(z.dtype, weights.b_in), x, W, out=where)
        if where is not None:
            return XH
    unit = work.unit if z.held == torch.float16 else None
    plan.hold((R,), (views, work.zero if h is None else h, XH, unit, B))
    return views


def _as(dtype: torch.dtype, t: Tensor) -> Tensor:
    """t in a dtype; torch takes its time to find that it is of it already."""
    return t if t.dtype == dtype else t.to(dtype)


def plain(t: Tensor) -> Tensor:
    """t as kernels read it: without gaps in memory, and with no sign that torch keeps apart."""
    t = t.contiguous()
    return t.resolve_neg() if t.is_neg() else t


def whole(weights: Weights) -> Weights:
    """Weights as kernels read them."""
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
    wake: Tensor | None,
    take: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """y (T, B, N, d), the final h and c, and what kernels left.

    Without h and c they are zero. `wake` and `take` are those of `drawn`: bits of cells that may
    wake, and of slots that each may take in. What is left has with `save` all that a backward pass
    needs; otherwise some of it is empty, and without `keep` it is buffers that only kernels see.
    Nothing here may be recorded for gradients.
    """
    W = weights.W
    if W.is_cuda and W.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(W):
            return forward(x, h, c, weights, sel, wake, take, reset, product, save, keep)
    x, weights = plain(x), whole(weights)
    h, c = None if h is None else plain(h), None if c is None else plain(c)
    wake, take, reset = (None if m is None else m.contiguous() for m in (wake, take, reset))
    like = weights.W if h is None else h
    T, B, _ = x.shape
    N, d, W_q = sel.N, weights.W.shape[2] // 4, weights.W_q
    D = None if weights.W_in is None else weights.W_in.shape[0]
    plan = plan_forward(
        *(sel, B, d, like.device, product, rounds(product)),
        *(0 if W_q is None else W_q.dim(), D, save),
    )
    z, tile = plan.z, plan.tile
    work = working(T, B, plan, like, keep, h is not None)
    proposal = work.proposal
    if isinstance(proposal, Tensor):
        # In the interpreter, which warns of what a compiled kernel loads and throws away.
        proposal.zero_()
    c_n, h0 = like.new_empty(B, N, d), work.zero if h is None else h
    # What is launched early the GPU does while the host goes on: until the forward kernel is
    # launched, the host is what a call waits for.
    pack(weights, plan, work, c_n, work.zero if h is None else None, c)
    X = write_views(x, h, weights, plan, work)
    held = work.passing
    if held is None:
        # Of the input, numbers of a row that are kept.
        width = rounded(z, B, D, x.dtype, save) if D else 0
        low = like.new_empty(T * B, width, dtype=z.held) if width else None
        assert isinstance(work.XH, Tensor)
        assert isinstance(work.unit, Tensor)
        held = empty_saved(T, B, z, like, save, work.XH, work.unit, low)
    bias = like.new_zeros(N, 4 * d) if weights.b is None else weights.b
    y = like.new_empty(T, B, N, d)
    x_unit, w_unit = (held.unit, work.w_unit) if z.held == torch.float16 else (None, None)
    # The resident kernel maps nothing.
    source: tuple[Argument, ...] = () if plan.by_gate else (*(None,) * 5, T)
    if plan.inside and plan.map is not None:
        assert keep or not save, "the kernel keeps all steps of what it rounds"
        kept = held.x if keep and held.x.numel() else work.x
        halves, same = plan.map.halve is not None, x.dtype == work.lines.dtype
        of_input = (work.x, work.x_size) if halves else (x, None)
        source = (*of_input, work.lines, weights.b_in, None if halves or same else kept, T)

    def run(phase: int, programs: int, t0: int, t1: int) -> None:
        arguments = (
            h0, c_n, X, held.XH, x_unit, work.W, w_unit, bias, weights.update_bias, wake, take,
            reset, y, proposal, held.act, held.woke, held.bits, held.gates, held.c, held.a,
            work.listed, work.counts, work.counter, *source, B, t0, t1,
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
    return y, y[-1].clone(), c_n, held
