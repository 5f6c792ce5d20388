"""Backward pass of the `batched` backend, written by hand.

A hard selection passes no gradient to its scores, so the masks of the forward pass are all that
is needed. W_q counts as a fifth gate: with its own-state block set to zero it takes the same
input H as the others, so one product serves all five.

The loops in C++ go from the last step to the first. In Python the sequence is taken in pieces, from
the end. Within a piece everything that does not depend on the gradient is computed for all steps
at once; the loop over steps carries only dh and dc; the gradients of weights and inputs are large
products after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import refuse_batched, refuse_second_backward, watched
from riglstm.scan.base import (
    RULES,
    WEIGHTS,
    asked,
    five_gates,
    handed_out,
    input_map_gradients,
    needed,
    split_gates,
)
from riglstm.scan.batched import native
from riglstm.scan.batched.forward import (
    Rows,
    Saved,
    all_rows,
    forward_op,
    keep,
    rows_of,
    run_forward,
    setup_context,
)
from riglstm.selection import Selection

ROWS_AT_ONCE = 8192
"""Rows in a piece of the sequence: 32 steps at the paper's sizes, and about 100 MB."""


def run_backward(
    dy: Tensor, dh: Tensor, dc: Tensor, x: Tensor, active: Tensor, saved: list[Tensor], *given: Any
) -> list[Tensor]:
    """The work of `backward_op`, whose schema says what is given."""
    weights, reset, sel = Weights(*given[:6]), given[6], Selection(*given[7:16])
    product, idle, for_input, for_gates = given[16:]
    call = (dy, dh, dc, x, active, Saved(*saved), weights, sel, reset)
    # What rounds was decided in the forward pass.
    cast = torch.is_autocast_enabled(dh.device.type)
    with torch.autocast(dh.device.type, enabled=False) if cast else contextlib.nullcontext():
        dx, dh, dc, grads = backward(*call, product, idle, for_input, for_gates)
    wanted = asked(dx, grads, for_input, for_gates)
    return [dh, dc, *(g for g in wanted if g is not None)]


backward_op = torch.library.custom_op(
    "riglstm::batched_backward",
    run_backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor dh, Tensor dc, Tensor x, Tensor active, Tensor[] saved, "
    f"{WEIGHTS}, Tensor? reset, {RULES}, ScalarType product, bool idle, "
    "bool for_input, bool for_gates) -> Tensor[]",
)


@backward_op.register_fake
def _(dy: Tensor, dh: Tensor, dc: Tensor, x: Tensor, *args: Any) -> list[Tensor]:
    wanted = asked(x, args[2:8], *args[-2:])
    return [t.new_empty(t.shape) for t in (dh, dc, *wanted) if t is not None]


def _apply_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_batched("batched", *grads)
    x, *rest = ctx.saved_tensors
    weights, reset, kept = rest[:6], rest[6], rest[7:]
    if not ctx.saves:
        with torch.no_grad():
            h, c, *others = kept
            again = forward_op(x, h, c, *weights, *others, reset, *ctx.rules, True)
        kept = again[3:]
    active, *saved = kept
    like = saved[0]

    def whole(grad: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return like.new_zeros(shape) if grad is None else grad.contiguous()

    dy = whole(grads[0], ctx.shape)
    dh, dc = (whole(g, ctx.shape[1:]) for g in grads[1:3])
    wanted = needed(ctx)
    # Where this is to be differentiated again, the operator says that it cannot be.
    operator = torch.is_grad_enabled() or watched(*grads)
    run: Callable[..., list[Tensor]] = backward_op if operator else run_backward
    dh, dc, *out = run(
        *(dy, dh, dc, x, active, saved, *weights, reset, *ctx.rules, ctx.idle),
        *wanted,
    )
    dx, *dw = handed_out(out, x, weights, *wanted)
    nothing = (None,) * (3 + 2 + len(ctx.rules) + 1)
    return dx, dh, dc, *dw, *nothing


forward_op.register_autograd(_apply_backward, setup_context=setup_context)
backward_op.register_autograd(refuse_second_backward("batched"))


class Eager(torch.autograd.Function):
    """The operators' passes for a call that nobody watches, without torch's layers around."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        output = run_forward(*args)
        keep(ctx, args, output)
        ctx.mark_non_differentiable(output[3])
        return output[:4]

    backward = staticmethod(_apply_backward)


def backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    active: Tensor,
    saved: Saved,
    weights: Weights,
    sel: Selection,
    reset: Tensor | None,
    product: torch.dtype,
    idle: bool,
    for_input: bool,
    for_gates: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Weights]:
    """Gradients of x, h, c and every weight, from those of y and the final state.

    `idle` says that some rows did not update, as `active` tells. Without `for_input` nothing is
    computed for x, W_in and b_in, without `for_gates` nothing for the other weights.
    """
    K, (T, B, _, d) = sel.K, saved.V.shape
    dh, dc = (g.clone(memory_format=torch.contiguous_format) for g in (dh, dc))
    dV_x = saved.V.new_empty(T, B, K, d)
    call = (dy, dh, dc, active, saved, weights, sel, reset, dV_x, for_input, for_gates)
    if native.takes(x, dh, dc, weights, sel, product, reset) and dy.dtype == dh.dtype:
        dW5, db5, d_bias = native.backward(*call)
    else:
        dW5, db5, d_bias = _in_pieces(*call, product, idle)
    dx = dW_in = db_in = None
    if for_input:
        dx, dW_in, db_in = input_map_gradients(dV_x.view(T * B, K * d), x, weights, product)
    dW, dW_q = split_gates(dW5, weights.W_q, K)
    db = None if weights.b is None else db5[:, : 4 * d].contiguous()
    return dx, dh, dc, Weights(dW_in, db_in, dW, db, dW_q, d_bias)


def _in_pieces(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    active: Tensor,
    saved: Saved,
    weights: Weights,
    sel: Selection,
    reset: Tensor | None,
    dV_x: Tensor,
    for_input: bool,
    for_gates: bool,
    product: torch.dtype,
    idle: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write dh, dc, dV_x in place; gradients of `five_gates`, their biases, and update_bias."""
    T, B, S, d = saved.V.shape
    K, N, R = sel.K, sel.N, saved.pair.shape[1]
    W5 = five_gates(weights.W, weights.W_q, K).to(product)  # (N, (K+N)·d, 5·d)
    W5_x, W5_h = (w.contiguous() for w in W5.mT.split((K * d, N * d), dim=2))  # (N, 5·d, ·)
    dW5 = torch.zeros_like(W5, dtype=weights.W.dtype)
    db5 = dW5.new_zeros(N, W5.shape[2])
    d_bias = None if weights.update_bias is None else torch.zeros_like(weights.update_bias)
    dh, dc = dh.view(B * N, d), dc.view(B * N, d)
    counts = saved.counts.tolist()

    for t, steps in reversed(_pieces(T, R)):
        now = slice(t, t + steps)
        piece = Saved(*(buffer[now] for buffer in saved))
        D5, dz = dh.new_empty(steps, R, W5.shape[2]), dh.new_zeros(steps, R)
        # As in the forward pass: nothing inside is differentiated, and what stays is made here.
        with torch.inference_mode():
            _loop(
                *(dy[now], dh, dc, active[now] if idle else None, piece, counts[now], sel),
                *(None if reset is None else reset[now], W5_x, W5_h, D5, dz, dV_x[now]),
            )
        if not (for_input or for_gates):
            continue
        rows, order = _rows_of_steps(piece, counts[now], N)
        D = D5.view(steps * R, -1).index_select(0, order)
        weight = piece.weight.reshape(-1, S).index_select(0, rows.pair)
        D_low = D.to(product)
        if for_gates:
            H = piece.V.reshape(steps * B, S, d).index_select(0, rows.sample)
            H.mul_(weight.unsqueeze(-1))
            rows.outer(H.view(-1, S * d).to(product), D_low, dW5)
            db5 += rows.sum_by_cell(D)
            if d_bias is not None:
                d_bias += rows.sum_by_cell(dz.view(-1, 1).index_select(0, order)).view(-1)
        if for_input and sel.views != "soft":
            dH = rows.times(D_low, W5_x).to(dh.dtype).view(-1, K, d)
            dH.mul_(weight[:, :K].unsqueeze(-1))
            dH = rows.sum_by_sample(dH.view(-1, K * d), steps * B)
            dV_x[now] = dH.view(steps, B, K, d)
    return dW5, db5, d_bias


class _Factors(NamedTuple):
    """What multiplies the gradients of one step."""

    fi: Tensor
    """(R, 2, d): from c to the arguments of f and i."""
    o: Tensor
    """(R, d): from h~ to the argument of o."""
    g: Tensor
    """(R, d): from c to the argument of g."""
    c: Tensor
    """(R, d): from h~ to c."""
    f: Tensor
    """(R, d): from c to the c before."""
    ahead: Tensor
    """(R, d): h~ - h."""
    a: Tensor
    """(R, 1): the weight of h~."""
    da: Tensor
    """(R, 1): the derivative of that weight by its logit."""
    q: Tensor
    """(R, d): W_q Q."""


def _factors(piece: Saved, K: int) -> list[_Factors]:
    """The factors of each step of a piece."""
    steps, d = piece.V.shape[0], piece.V.shape[3]
    f, i, o, g = piece.gates.chunk(4, dim=2)  # (steps, R, d) each
    to_f = piece.c * f * (1 - f)
    to_c = o * (1 - piece.tanh_c.square())
    parts = [
        torch.stack((to_f, g * i * (1 - i)), dim=2),
        piece.tanh_c * o * (1 - o),
        i * (1 - g.square()),
        to_c,
        f,
    ]
    if len(piece.q):
        h = piece.V[:, :, K:].reshape(steps, -1, d)
        h_row = h.gather(1, piece.pair.unsqueeze(2).expand(-1, -1, d))
        a = piece.a.unsqueeze(2)
        parts += [torch.addcmul(-h_row, o, piece.tanh_c), a, a * (1 - a), piece.q]
    else:
        parts += [f, f, f, f]
    return [_Factors(*at) for at in zip(*(part.unbind() for part in parts), strict=True)]


def _loop(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    active: Tensor | None,
    piece: Saved,
    counts: list[list[int]],
    sel: Selection,
    reset: Tensor | None,
    W5_x: Tensor,
    W5_h: Tensor,
    D5: Tensor,
    dz: Tensor,
    dV_x: Tensor,
) -> None:
    """Run the steps of a piece from the last: update dh, dc (B·N, d), fill D5, dz, dV_x.

    D5 (steps, R, 5·d) are the gradients of the gates' arguments and of W_q Q; dz (steps, R) those
    of the logit of the new state; dV_x, of the views, is filled here for the soft rule only.
    """
    steps, B, S, d = piece.V.shape
    K, N, R, product = sel.K, sel.N, D5.shape[1], W5_h.dtype
    soft_update = bool(len(piece.q))
    every_row = None if counts else all_rows(B, N, dh.device)
    factors = _factors(piece, K)
    D_at, fi_at, o_at, g_at, q_at = (
        part.unbind()
        for part in (
            D5,
            D5[:, :, : 2 * d].unflatten(2, (2, d)),
            D5[:, :, 2 * d : 3 * d],
            D5[:, :, 3 * d : 4 * d],
            D5[:, :, 4 * d :],
        )
    )
    dy_at, dz_at = dy.reshape(steps, B * N, d).unbind(), dz.unsqueeze(2).unbind()
    pair_at, weight_at = piece.pair.unbind(), piece.weight.view(steps, B * N, S).unbind()

    for t in reversed(range(steps)):
        rows = every_row or rows_of(pair_at[t], counts[t], N)
        k, pair = factors[t], rows.pair
        dh += dy_at[t]
        dh_row, dc_row = dh.index_select(0, pair), dc.index_select(0, pair)
        asleep = None
        if active is not None:
            asleep = ~active[t].view(-1).index_select(0, pair).unsqueeze(-1)
            through_h, through_c = dh_row, dc_row
            dh_row, dc_row = dh_row.masked_fill(asleep, 0), dc_row.masked_fill(asleep, 0)

        if soft_update:
            dz_t = torch.mul((dh_row * k.ahead).sum(-1, keepdim=True), k.da, out=dz_at[t])
            if sel.update_scale != 1:
                dz_t = dz_t * sel.update_scale
            torch.mul(k.ahead, dz_t, out=q_at[t])
            d_tilde = torch.addcmul(dh_row * k.a, dz_t, k.q)
            d_old = dh_row - d_tilde
        else:
            d_tilde, d_old = dh_row, torch.zeros_like(dh_row)
        dc_new = torch.addcmul(dc_row, d_tilde, k.c)
        torch.mul(dc_new.unsqueeze(1), k.fi, out=fi_at[t])
        torch.mul(d_tilde, k.o, out=o_at[t])
        torch.mul(dc_new, k.g, out=g_at[t])
        dc_old = dc_new * k.f
        if asleep is not None:
            d_old = torch.where(asleep, through_h, d_old)
            dc_old = torch.where(asleep, through_c, dc_old)
        dh.index_copy_(0, pair, d_old)
        dc.index_copy_(0, pair, dc_old)

        weight = weight_at[t].index_select(0, pair)  # (R, K+N)
        D_low = D_at[t].to(product)
        dH = rows.times(D_low, W5_h).to(dh.dtype).view(R, N, d)
        if sel.peers == "soft":
            dh += soft_peers(dH, weight[:, K:], piece.V[t, :, K:], rows)
        if sel.views == "soft":
            dH_x = rows.times(D_low, W5_x).to(dh.dtype).view(R, K, d)
            dV_x[t], dh_own = soft_views(dH_x, weight[:, :K], piece.V[t], rows)
            dh.index_add_(0, pair, dh_own)
        dH.mul_(weight[:, K:].unsqueeze(-1))
        dh += rows.sum_by_sample(dH.view(R, N * d), B).view(B * N, d)
        if reset is not None:
            reset_row = reset[t].repeat_interleave(N).unsqueeze(-1)
            dh.masked_fill_(reset_row, 0)
            dc.masked_fill_(reset_row, 0)


def _pieces(T: int, R: int) -> list[tuple[int, int]]:
    """First step and number of steps of each piece of the sequence."""
    most = max(1, ROWS_AT_ONCE // R)
    return [(t, min(most, T - t)) for t in range(0, T, most)]


def _rows_of_steps(piece: Saved, counts: list[list[int]], N: int) -> tuple[Rows, Tensor]:
    """The rows of several steps as one set, and their places in the steps' order.

    A sample of this set is a pair of step and sample.
    """
    steps, B, R = *piece.V.shape[:2], piece.pair.shape[1]
    start = torch.arange(steps, device=piece.pair.device).unsqueeze(1) * (B * N)
    pair = (piece.pair + start).view(-1)
    if counts:
        order = pair.remainder(N).argsort(stable=True)
        total = [sum(n) for n in zip(*counts, strict=True)]
        return rows_of(pair.index_select(0, order), total, N), order
    order = torch.arange(steps * R, device=pair.device).view(steps, N, B)
    order = order.transpose(0, 1).reshape(-1)
    return rows_of(pair.index_select(0, order), None, N), order


def soft_views(dH: Tensor, weight: Tensor, V: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Back through x^k · softmax(s)_k: gradients of views (B, K, d) and own states (R, d)."""
    (R, K, d), B = dH.shape, V.shape[0]
    weight = weight.to(dH.dtype)
    x = V[:, :K].index_select(0, rows.sample)  # (R, K, d)
    h = V[:, K:].reshape(-1, d).index_select(0, rows.pair)  # (R, d)
    ds = _softmax_backward(weight, (dH * x).sum(-1)).unsqueeze(-1)  # (R, K, 1)
    d_views = torch.addcmul(dH * weight.unsqueeze(-1), ds, h.unsqueeze(1))
    return rows.sum_by_sample(d_views.view(R, K * d), B).view(B, K, d), (ds * x).sum(1)


def soft_peers(dH: Tensor, weight: Tensor, h: Tensor, rows: Rows) -> Tensor:
    """Back through the scores of h^i · softmax(r)_i: gradient of the state (B·N, d)."""
    (R, N, d), B = dH.shape, h.shape[0]
    others_only = weight.to(dH.dtype).scatter(1, rows.cell.unsqueeze(1), 0)
    own = h.reshape(-1, d).index_select(0, rows.pair)  # (R, d)
    h = h.index_select(0, rows.sample)  # (R, N, d)
    ds = _softmax_backward(others_only, (dH * h).sum(-1)).unsqueeze(-1)  # (R, N, 1)
    d_peers = rows.sum_by_sample((ds * own.unsqueeze(1)).view(R, N * d), B).view(B * N, d)
    return d_peers.index_add_(0, rows.pair, (ds * h).sum(1))


def _softmax_backward(weight: Tensor, d_weight: Tensor) -> Tensor:
    """From the gradient of a softmax along the last dimension to that of its logits."""
    return weight * (d_weight - (weight * d_weight).sum(-1, keepdim=True))
