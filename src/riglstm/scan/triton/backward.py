"""Gradients of the `triton` backend: autograd, custom operators, and the backward pass.

Both passes are custom operators, as in `batched`: torch.compile sees each as one node, and so does
whoever else traces a call. What torch does around an operator takes the host most of a millisecond,
forward and back, so that calls that nobody watches do the operators' work without them.

The backward pass takes the sequence in pieces, from the end. Shapes as in `plan.py`; R rows are
pairs of step and sequence.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import refuse_batched, refuse_second_backward, refuse_transforms
from riglstm.scan.base import (
    RULES,
    WEIGHTS,
    asked,
    handed_out,
    input_map_gradients,
    needed,
    vmap_by_loop,
)
from riglstm.scan.triton.forward import forward, plain, whole
from riglstm.scan.triton.kernels.backward import (
    backward_kernel,
    inputs_kernel,
    lines_kernel,
    split_kernel,
    views_kernel,
)
from riglstm.scan.triton.kernels.common import interpreted, power_of_two
from riglstm.scan.triton.plan import (
    PERSISTENT,
    Launch,
    Layout,
    Saved,
    Sizes,
    backward_tiles,
    empty_saved,
    nth,
    padded,
    precision,
    prepare,
    programs_on,
    rounded,
    sizes,
    sizes_back,
    views_tiles,
    watched,
)
from riglstm.selection import Selection

ROWS_AT_ONCE = 1 << 14
"""Rows (pairs of step and sequence) in a piece of the backward pass: 200 MB at the paper's size."""
PRODUCT_ROWS = 4096
"""Rows of one product for the gradient of weights: what the cells took in is written out for it."""


def run_forward(x: Tensor, h: Tensor, c: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The work of `forward_op`: y, the final h and c, and `Saved`."""
    weights, (wake, take, reset) = Weights(*given[:6]), given[6:9]
    sel, (product, save) = Selection(*given[9:18]), given[18:]
    refuse_transforms("triton")  # in a graph nobody has asked before
    y, h, c, saved = forward(x, h, c, weights, sel, wake, take, reset, product, save, keep=True)
    return y, h, c, *saved


forward_op = torch.library.custom_op(
    "riglstm::triton_forward",
    run_forward,
    mutates_args=(),
    schema=f"(Tensor x, Tensor h, Tensor c, {WEIGHTS}, Tensor? wake, Tensor? take, Tensor? reset, "
    f"{RULES}, ScalarType product, bool save) -> ({', '.join(['Tensor'] * 12)})",
)


@forward_op.register_fake
def _(x: Tensor, h: Tensor, c: Tensor, *args: Any) -> Any:
    refuse_transforms("triton")
    W_in, W_q, (*rules, product, save) = args[0], args[4], args[9:]
    T, (B, _, d) = x.shape[0], h.shape
    z = sizes(d, Selection(*rules), W_q is not None, product)
    y = h.new_empty(T, *h.shape)
    width = 0 if W_in is None else rounded(z, B, x.shape[2], x.dtype, save)
    low = x.new_empty(T * B, width, dtype=z.held) if width else None
    return y, h.new_empty(h.shape), c.new_empty(c.shape), *empty_saved(T, B, z, h, save, x=low)


def run_backward(*given: Any) -> list[Tensor]:
    """The work of `backward_op`, whose schema says what is given."""
    dy, dh, dc, x, h, y, saved = given[:7]
    weights, sel = Weights(*given[7:13]), Selection(*given[13:22])
    product, for_input, for_gates = given[22:]
    needs = Needs(x=for_input, state=True, views=for_input, gates=for_gates)
    dx, *states, grads = backward(dy, dh, dc, x, h, y, Saved(*saved), weights, sel, product, needs)
    return [g for g in (*states, *asked(dx, grads, for_input, for_gates)) if g is not None]


backward_op = torch.library.custom_op(
    "riglstm::triton_backward",
    run_backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor dh, Tensor dc, Tensor x, Tensor h, Tensor y, Tensor[] saved, "
    f"{WEIGHTS}, {RULES}, ScalarType product, bool for_input, bool for_gates) -> Tensor[]",
)


@backward_op.register_fake
def _(dy: Tensor, dh: Tensor, dc: Tensor, x: Tensor, *args: Any) -> list[Tensor]:
    wanted = asked(x, args[3:9], *args[-2:])
    return [t.new_empty(t.shape) for t in (dh, dc, *wanted) if t is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, h, c, *rest = inputs
    weights, masks, (*rules, product, ctx.saves) = rest[:6], rest[6:9], rest[9:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    # As in `batched`: a graph may have been made without gradients.
    kept = output[3:] if ctx.saves else (c, *masks)
    ctx.save_for_backward(x, h, output[0], *weights, *kept)
    ctx.rules, ctx.product = tuple(rules), product


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of every input of `run_forward`, from those of y and the final h and c."""
    refuse_batched("triton", *grads)
    x, h, y, *rest = ctx.saved_tensors
    weights, kept = rest[:6], rest[6:]
    if not ctx.saves:
        c, *masks = kept
        with torch.no_grad():
            again = forward_op(x, h, c, *weights, *masks, *ctx.rules, ctx.product, True)
        kept = again[3:]
    dy, dh, dc = grads[:3]
    dy = y.new_zeros(y.shape) if dy is None else dy
    needs_x, *needs_state = ctx.needs_input_grad[:3]
    wanted = needed(ctx)
    if torch.is_grad_enabled() or watched(dy, dh, dc, x, h, y, *rest):
        # The operator has no derivative of its own, and says why.
        dh, dc = (h.new_zeros(h.shape) if g is None else g.contiguous() for g in (dh, dc))
        dh, dc, *out = backward_op(
            *(dy.contiguous(), dh, dc, x, h, y, kept),
            *(*weights, *ctx.rules, ctx.product, *wanted),
        )
        dx, *dw = handed_out(out, x, weights, *wanted)
    else:
        dh, dc = (None if g is None else plain(g) for g in (dh, dc))
        needs = Needs(needs_x, any(needs_state), *wanted)
        call = (x, h, y, Saved(*kept), Weights(*weights), Selection(*ctx.rules), ctx.product)
        dx, dh, dc, dW = backward(plain(dy), dh, dc, *call, needs)
        dx, *dw = asked(dx, dW, *wanted)
    states = (g if need else None for g, need in zip((dh, dc), needs_state, strict=True))
    return dx, *states, *dw, *(None,) * (3 + len(ctx.rules) + 2)


class Eager(torch.autograd.Function):
    """The forward operator's work and gradients, without torch's work around an operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = run_forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


forward_op.register_autograd(_gradients, setup_context=_setup_context)
backward_op.register_autograd(refuse_second_backward("triton"))
forward_op.register_vmap(vmap_by_loop(forward_op))


def width(z: Sizes) -> tuple[int, int]:
    """Numbers of H in memory, and which of them is a one, for the biases; if none is, -1.

    A product in halves has room for it beside a slot, or behind the last; in bfloat16 it is always
    there. For one in float32, the sum over D5 is exact, and that over rounded numbers is not.
    """
    if z.back.itemsize == 4:
        return z.S * z.P, -1
    beside = z.d < z.P and z.back == torch.float16
    return (z.S * z.P, z.d) if beside else (z.S * z.P + 8, z.S * z.P)


class Total:
    """The gradient of weights as the products give it, and that of biases where it is not in it."""

    def __init__(self, dW: Tensor, z: Sizes, inputs: Launch, one_piece: bool) -> None:
        self.z, self.inputs, self.one_piece = z, inputs, one_piece
        self.dW = dW
        """(N, what H has, L), zero but for a single piece in units."""
        self.top: Tensor | None = None
        """The scale factor of dW; None: one."""
        self.db: Tensor | None = None
        """(N, L)."""

    def add(self, D5: Tensor, d_unit: Tensor | None, saved: Saved, t0: int) -> None:
        """Add Hᵀ D5 of the piece from t0 on to dW, and the sum of D5 to db unless it is in dW."""
        z, (wide, one), B = self.z, width(self.z), D5.shape[1]
        D, first = D5.view(-1, z.N, z.L), t0 * B
        x_unit, total, top = None, self.dW, None
        if z.held == torch.float16:
            x_unit = rows_from(saved.unit, t0, D5.shape[0])
            if d_unit is not None:
                top = (x_unit * d_unit).amax()
                total = self.dW if self.one_piece else torch.empty_like(self.dW)
        for r in range(0, D.shape[0], PRODUCT_ROWS):
            part = rows_from(D, r, PRODUCT_ROWS)
            R = part.shape[0]
            H = D.new_empty(z.N, R, wide)
            V, bits = first_row(saved.XH, first + r), first_row(saved.bits, first + r)
            units = (None if u is None else first_row(u, r) for u in (x_unit, d_unit))
            self.inputs((R,), (V, *units, top, bits, H, R))
            # (N, what H has, R), (N, R, L)
            _add_product(total, H.mT, part.transpose(0, 1), fresh=top is not None and r == 0)
        if self.one_piece:
            self.top = top
        elif top is not None:
            self.dW.addcmul_(total, top)
        if one < 0:
            db = D.sum(0)
            self.db = db if self.db is None else self.db + db

    def split(self, weights: Weights, run: Launch, lines: int) -> tuple[Tensor | None, ...]:
        """The gradients of W, b and W_q; a program of the kernel takes so many lines."""
        z, W, W_q = self.z, weights.W, weights.W_q
        dW, db, dW_q = W.new_empty(W.shape), None, None
        if W_q is not None:
            dW_q = W.new_empty(z.N, (z.S - 1) * z.d, z.d)  # of each cell
        if weights.b is not None and self.db is None:
            db = W.new_empty(weights.b.shape)
        grid = (-(-z.S * z.d // lines), z.N)
        run(grid, (self.dW, self.top, dW, dW_q, db))
        if weights.b is not None and self.db is not None:
            db = self.db[:, : 4 * z.d].clone()
        if W_q is not None and dW_q is not None and W_q.dim() == 2:
            dW_q = dW_q.sum(0)
        return dW, db, dW_q


def rows_from(rows: Tensor, first: int, most: int | None = None) -> Tensor:
    """Rows from `first` on, so many at most; all of them are taken as they are."""
    if first == 0 and (most is None or rows.shape[0] <= most):
        return rows
    return rows[first:] if most is None else rows[first : first + most]


def first_row(steps: Tensor, first: int) -> Tensor:
    """(steps, B, ...), where a kernel is to find its first row."""
    return steps.flatten(0, 1)[first:] if first else steps


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in this dtype; of halves in float32 without a copy."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Add a b, in float32, to `total`; a fresh one is as good as zero."""
    if a.dtype != total.dtype and not a.is_cuda:
        # Only GPUs multiply halves to float32.
        a, b = a.to(total.dtype), b.to(total.dtype)
    if a.dtype == total.dtype:
        torch.baddbmm(total, a, b, beta=0 if fresh else 1, out=total)
    elif fresh:
        torch.bmm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.baddbmm(total, a, b, out_dtype=total.dtype, out=total)


class Needs(NamedTuple):
    """Whose gradients are asked for."""

    x: bool
    state: bool
    """h or c."""
    views: bool
    """x, W_in or b_in."""
    gates: bool
    """Any other weight."""


class BackwardPlan(NamedTuple):
    """All of a backward pass that does not depend on a call's numbers or its length."""

    tile: dict[str, Any]
    phases: dict[int, Launch]
    """The backward kernel, by PHASE."""
    tiles: int
    programs: int
    lines: Launch
    views: Launch
    view_rows: int
    """That a program of `views` takes."""
    view_columns: int
    """Programs for a view's numbers."""
    inputs: Launch
    """Writes out what cells took in, for cuBLAS."""
    split: Launch
    lines_at_once: tuple[int, int]
    """Lines that a program of `lines` takes, and one of `split`."""


@functools.lru_cache(256)
def plan_backward(
    z: Sizes, B: int, device: torch.device, scale: float, per_cell: bool, how: str
) -> BackwardPlan:
    """Cached by everything that it depends on; `how` is what `precision` says."""
    N, K, d, L, G = z.N, z.K, z.d, z.L, z.G
    tile = backward_tiles(z, B, device)
    common: dict[str, Any] = {"N": N, "K": K, "d": d, "L": L}
    rounding: dict[str, Any] = {"PRECISION": how, "WIDE": interpreted()}
    options: dict[int, dict[str, Any]] = {7: PERSISTENT, 8: {}}
    if interpreted():
        options = {1: {}, 2: {}, 8: {}}
    rest = {"G": G, "SCALE": scale, **rounding, **tile}
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
        lines_kernel, **common, G=G, BL=BL, BG=power_of_two(4 * d if G == 5 else L),
        BQ=power_of_two(max(1, L - 4 * d)), PER_CELL=per_cell,
    )  # fmt: skip
    of_views = views_tiles(z, device)
    views = prepare(views_kernel, **common, **rounding, **of_views)
    inputs = prepare(
        inputs_kernel, N=N, S=z.S, P=z.P, BS=power_of_two(z.S), BP=padded(z.P), WIDTH=wide,
        ONE=one,
    )  # fmt: skip
    split = prepare(
        split_kernel, **common, P=z.P, G=G, WIDTH=wide, ONE=one, BL=BS, BG=power_of_two(G * d)
    )
    return BackwardPlan(
        *(tile, phases, tiles, programs, lines, views, of_views["BM"], -(-d // of_views["BP"])),
        *(inputs, split),
        lines_at_once=(BL, BS),
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
) -> tuple[Layout, int]:
    """Buffers of one call, and how many integers at their start must be zero.

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
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Weights]:
    """Gradients of x, h, c and of every weight, from those of y and, if any, the final state.

    Nothing here may be recorded for gradients.
    """
    if h.is_cuda and h.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(h):
            return backward(dy, dh, dc, x, h, y, saved, weights, sel, product, needs)
    # x is read by torch alone, which takes it as it lies.
    h, weights = plain(h), whole(weights)
    T, B, N, d = y.shape
    W, W_q = weights.W, weights.W_q
    z = sizes_back(sizes(d, sel, W_q is not None, product), saved)
    per_cell = W_q is not None and W_q.dim() == 3
    plan = plan_backward(z, B, dy.device, sel.update_scale, per_cell, precision(product))
    steps = min(T, max(1, ROWS_AT_ONCE // B))
    pieces, halves = -(-T // steps), z.back == torch.float16
    summed = needs.gates and not (halves and pieces == 1)
    own = (dh is None and not needs.state, dc is None and not needs.state)
    compact = plan.tile["COMPACT"]
    layout, zeros = _layout(z, T, B, steps, compact, summed, own)
    memory = dy.new_empty(layout.size, dtype=torch.uint8)
    made = layout.cut(memory)
    counters, _, count, own_h, own_c, listed, parts, W_lines, w_unit = made
    # Weights (N, S·d, L), W_q as the fifth gate, and the scale factor (S·d) of each line.
    packed = (W_lines, w_unit if halves else None)
    D5 = dy.new_empty((steps, B, N, z.L), dtype=z.back)
    # First of all: the GPU packs while the host goes on.
    plan.lines(
        (-(-z.S * d // plan.lines_at_once[0]),),
        (W, W if W_q is None else W_q, *packed, D5, counters, steps * B * N, zeros),
    )
    at_h, at_c = own_h if own[0] else _copy(dh, h), own_c if own[1] else _copy(dc, h)
    unit = dy.new_empty((steps, B)) if halves else None  # the scale factor of each row of D5
    dz = dy.new_empty((T if z.G == 5 else 1, B, N))
    dV = dy.new_empty((T, B, z.K, d), dtype=product) if needs.views else None
    row_tiles = -(-steps * B // plan.view_rows)
    of_views = None
    if needs.views and weights.b_in is not None:
        last = -(-(T - (pieces - 1) * steps) * B // plan.view_rows)
        of_views = dy.new_empty(((pieces - 1) * row_tiles + last, z.K * d))
    total = None
    if needs.gates:
        shape, start = (N, width(z)[0], z.L), layout.starts[1][1] // 4
        strides = (shape[1] * z.L, z.L, 1)
        floats = memory.view(torch.float32)
        sums = floats.as_strided(shape, strides, start) if summed else dy.new_empty(shape)
        total = Total(sums, z, plan.inputs, pieces == 1)

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
        piece = rows_from(D5, 0, t1 - t0)
        if dV is not None:
            now = rows_from(dV, t0)
            part = None if of_views is None else rows_from(of_views, i * row_tiles)
            R = (t1 - t0) * B
            grid = (z.K, -(-R // plan.view_rows), plan.view_columns)
            bits = first_row(saved.bits, t0 * B)
            plan.views(grid, (piece, units, *packed, bits, now, part, R))
        if total is not None:
            total.add(piece, units, saved, t0)
    if needs.state:
        run(8, -(-B // plan.tile["RB"]), 0, 0, 1)
    dx = dW_in = db_in = dW = db = dW_q = d_bias = None
    if dV is not None:
        db_in = None if of_views is None else of_views.sum(0)
        dx, dW_in, db_in = input_map_gradients(
            dV.view(T * B, z.K * d), x, weights, product, needs.x, multiply, db_in,
            saved.x[:, : x.shape[2]] if saved.x.numel() else None,
        )  # fmt: skip
    if total is not None:
        dW, db, dW_q = total.split(weights, plan.split, plan.lines_at_once[1])
        d_bias = None if weights.update_bias is None else dz.sum((0, 1))
    grads = Weights(dW_in, db_in, dW, db, dW_q, d_bias)  # type: ignore[arg-type]
    dh, dc = (s if isinstance(s, Tensor) and needs.state else None for s in (at_h, at_c))
    return dx, dh, dc, grads


def _copy(state: Tensor | None, like: Tensor) -> Tensor:
    """The gradient of a final state, to be written to; None is zero."""
    if state is None:
        return like.new_zeros(like.shape)
    return state.clone(memory_format=torch.contiguous_format)
