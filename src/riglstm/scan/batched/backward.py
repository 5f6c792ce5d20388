"""Backward pass of the `batched` backend, written by hand.

A hard selection passes no gradient to its scores, so the masks of the forward pass are all that
is needed. W_q counts as a fifth gate: with its own-state block set to zero it takes the same
input H as the others, so one product serves all five.

For small layers the loop in C++ runs (`native.cpp`), from the last step to the first. In Python the
sequence is taken in pieces, from the end: the loop over a piece's steps carries dh and dc, and the
gradients of weights and inputs are large products after it, one cell after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

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
    forward_op,
    run_forward,
    setup_context,
)
from riglstm.selection import Selection

ROWS_AT_ONCE = 8192
"""Rows in a piece of the sequence: 32 steps at the paper's sizes, and about 30 MB."""


def run_backward(
    dy: Tensor, dh: Tensor, dc: Tensor, x: Tensor, active: Tensor, saved: list[Tensor], *given: Any
) -> list[Tensor]:
    """The work of `backward_op`, whose schema says what is given.

    `idle` says that some rows did not update, as `active` tells. Without `for_input` nothing is
    computed for x, W_in and b_in, without `for_gates` nothing for the other weights.
    """
    weights, reset, sel = Weights(*given[:6]), given[6], Selection(*given[7:16])
    product, idle, for_input, for_gates = given[16:]
    kept = Saved(*saved)
    K, (T, B, _, d) = sel.K, kept.V.shape
    dh, dc = (g.clone(memory_format=torch.contiguous_format) for g in (dh, dc))
    dV_x = kept.V.new_empty(T, B, K, d)
    call = (dy, dh, dc, active, kept, weights, sel, reset, dV_x, for_input, for_gates)
    fits = dy.dtype == dh.dtype and native.takes(
        *(x, dh, dc, weights, sel, product, reset), backward=True
    )
    dx = dW_in = db_in = None
    # What rounds was decided in the forward pass.
    cast = torch.is_autocast_enabled(dh.device.type)
    with torch.autocast(dh.device.type, enabled=False) if cast else contextlib.nullcontext():
        dW5, db5, d_bias = native.backward(*call) if fits else _in_pieces(*call, product, idle)
        if for_input:
            dx, dW_in, db_in = input_map_gradients(dV_x.view(T * B, K * d), x, weights, product)
        dW, dW_q = split_gates(dW5, weights.W_q, K)
    db = None if weights.b is None else db5[:, : 4 * d].contiguous()
    wanted = asked(dx, (dW_in, db_in, dW, db, dW_q, d_bias), for_input, for_gates)
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
        setup_context(ctx, args, output)
        return output[:4]

    backward = staticmethod(_apply_backward)


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
    dW5 = torch.zeros_like(W5, dtype=weights.W.dtype)
    db5 = dW5.new_zeros(N, W5.shape[2])
    d_bias = None if weights.update_bias is None else torch.zeros_like(weights.update_bias)
    dh, dc = dh.view(B * N, d), dc.view(B * N, d)
    counts = saved.counts.tolist()
    # Products of few rows are slow with a transposed matrix.
    W5_x, W5_h = W5[:, : K * d].mT, W5[:, K * d :].mT.contiguous()  # (N, 5·d, ·)
    if for_input:
        dV_x.zero_()

    most = max(1, ROWS_AT_ONCE // R)
    for t in reversed(range(0, T, most)):
        now = slice(t, t + most)
        piece = Saved(*(buffer[now] for buffer in saved))
        steps = len(piece.V)
        D5, dz = dh.new_empty(steps, R, W5.shape[2]), dh.new_zeros(steps, R)
        # As in the forward pass: nothing inside is differentiated, and what stays is made here.
        with torch.inference_mode():
            _loop(
                *(dy[now], dh, dc, active[now] if idle else None, piece, counts[now], sel),
                *(None if reset is None else reset[now], W5_x, W5_h, D5, dz, dV_x[now]),
            )
        if not (for_input or for_gates):
            continue
        totals = [sum(n) for n in zip(*counts[now], strict=True)] or [steps * B] * N
        order = piece.pair.remainder(N).view(-1).argsort(stable=True)  # by cell
        start = torch.arange(0, steps * B * N, B * N, device=order.device).unsqueeze(1)
        pairs = (piece.pair + start).view(-1).index_select(0, order)
        V, weights_of = piece.V.reshape(steps * B, S, d), piece.weight.reshape(-1, S)
        for j, (row, pair) in enumerate(zip(order.split(totals), pairs.split(totals), strict=True)):
            sample = pair.div(N, rounding_mode="floor")  # step · B + sample
            weight = weights_of.index_select(0, pair).unsqueeze(-1)  # (rows, K+N, 1)
            D = D5.view(steps * R, -1).index_select(0, row)
            D_low = D.to(product)
            if for_gates:
                H = V.index_select(0, sample).mul_(weight).view(-1, S * d).to(product)
                # The sum may be of a higher precision than the product.
                if product == dW5.dtype:
                    dW5[j].addmm_(H.t(), D_low)
                else:
                    dW5[j].add_(H.t() @ D_low)
                db5[j] += D.sum(0)
                if d_bias is not None:
                    d_bias[j] += dz.view(-1).index_select(0, row).sum()
            if for_input and sel.views != "soft":
                dH = (D_low @ W5_x[j]).to(dh.dtype).view(-1, K, d).mul_(weight[:, :K])
                # A sample has at most one row in a cell.
                dV_x[now].view(steps * B, K, d).index_add_(0, sample, dH)
    return dW5, db5, d_bias


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
    through_sigmoid = torch.ops.aten.sigmoid_backward.grad_input
    through_tanh = torch.ops.aten.tanh_backward.grad_input
    samples = piece.pair.div(N, rounding_mode="floor")
    sample_at, cell_at, pair_at = (
        of.unbind() for of in (samples, piece.pair.remainder(N), piece.pair)
    )
    D_at, D_fio = D5.unbind(), D5[:, :, : 3 * d].unbind()
    D_f, D_i, D_o, D_g, *D_q = (part.unbind() for part in D5.split(d, dim=2))
    fio = piece.gates[:, :, : 3 * d].unbind()
    f_at, i_at, o_at, g_at = (part.unbind() for part in piece.gates.chunk(4, dim=2))
    c_at, tanh_at, q_at, a_at = (
        part.unbind() for part in (piece.c, piece.tanh_c, piece.q, piece.a.unsqueeze(2))
    )
    V_at, own_at = piece.V.view(steps, B * S, d).unbind(), (piece.pair + (samples + 1) * K).unbind()
    dy_at, dz_at = dy.reshape(steps, B * N, d).unbind(), dz.unsqueeze(2).unbind()
    weight_at = piece.weight.view(steps, B * N, S).unbind()
    dh_row, dc_row, d_tilde, ahead, spare = dh.new_empty(5, R, d).unbind()
    dH_row = dh.new_empty(R, N * d)

    for t in reversed(range(steps)):
        rows = Rows(sample_at[t], cell_at[t], pair_at[t], counts[t] if counts else None, N)
        pair, o, tanh_c = rows.pair, o_at[t], tanh_at[t]
        dh += dy_at[t]
        torch.index_select(dh, 0, pair, out=dh_row)
        torch.index_select(dc, 0, pair, out=dc_row)
        asleep = None
        if active is not None:
            asleep = ~active[t].view(-1).index_select(0, pair).unsqueeze(-1)
            through_h, through_c = dh_row.clone(), dc_row.clone()
            dh_row.masked_fill_(asleep, 0)
            dc_row.masked_fill_(asleep, 0)

        if D_q:
            torch.index_select(V_at[t], 0, own_at[t], out=spare)
            torch.mul(o, tanh_c, out=ahead).sub_(spare)  # h~ - h
            dz_t = torch.mul(dh_row, ahead, out=spare).sum(-1, keepdim=True)
            dz_t = through_sigmoid(dz_t, a_at[t], grad_input=dz_at[t])
            if sel.update_scale != 1:
                dz_t = dz_t * sel.update_scale
            torch.mul(ahead, dz_t, out=D_q[0][t])
            torch.mul(dh_row, a_at[t], out=d_tilde).addcmul_(dz_t, q_at[t])
            dh_row -= d_tilde
        else:
            d_tilde.copy_(dh_row)
            dh_row.zero_()
        torch.mul(d_tilde, o, out=spare)
        dc_row += through_tanh(spare, tanh_c, grad_input=spare)
        torch.mul(dc_row, c_at[t], out=D_f[t])
        torch.mul(dc_row, g_at[t], out=D_i[t])
        torch.mul(d_tilde, tanh_c, out=D_o[t])
        through_sigmoid(D_fio[t], fio[t], grad_input=D_fio[t])
        torch.mul(dc_row, i_at[t], out=D_g[t])
        through_tanh(D_g[t], g_at[t], grad_input=D_g[t])
        dc_row *= f_at[t]
        if asleep is not None:
            torch.where(asleep, through_h, dh_row, out=dh_row)
            torch.where(asleep, through_c, dc_row, out=dc_row)
        dh.index_copy_(0, pair, dh_row)
        dc.index_copy_(0, pair, dc_row)

        weight = weight_at[t].index_select(0, pair)  # (R, K+N)
        D_low = D_at[t].to(product)
        dH = rows.times(D_low, W5_h, dH_row).view(R, N, d)
        if sel.peers == "soft":
            dh += soft_peers(dH, weight[:, K:], piece.V[t, :, K:], rows)
        if sel.views == "soft":
            dH_x = rows.times(D_low, W5_x, dh.new_empty(R, K * d)).view(R, K, d)
            dV_x[t], dh_own = soft_views(dH_x, weight[:, :K], piece.V[t], rows)
            dh.index_add_(0, pair, dh_own)
        dH.mul_(weight[:, K:].unsqueeze(-1))
        rows.add_by_sample(dH.view(R, N * d), dh.view(B, N * d))
        if reset is not None:
            reset_row = reset[t].repeat_interleave(N).unsqueeze(-1)
            dh.masked_fill_(reset_row, 0)
            dc.masked_fill_(reset_row, 0)


def soft_views(dH: Tensor, weight: Tensor, V: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Back through x^k · softmax(s)_k: gradients of views (B, K, d) and own states (R, d)."""
    (R, K, d), B = dH.shape, V.shape[0]
    weight = weight.to(dH.dtype)
    x = V[:, :K].index_select(0, rows.sample)  # (R, K, d)
    h = V[:, K:].reshape(-1, d).index_select(0, rows.pair)  # (R, d)
    ds = _softmax_backward(weight, (dH * x).sum(-1)).unsqueeze(-1)  # (R, K, 1)
    d_views = torch.addcmul(dH * weight.unsqueeze(-1), ds, h.unsqueeze(1))
    d_x = rows.add_by_sample(d_views.view(R, K * d), d_views.new_zeros(B, K * d))
    return d_x.view(B, K, d), (ds * x).sum(1)


def soft_peers(dH: Tensor, weight: Tensor, h: Tensor, rows: Rows) -> Tensor:
    """Back through the scores of h^i · softmax(r)_i: gradient of the state (B·N, d)."""
    (R, N, d), B = dH.shape, h.shape[0]
    others_only = weight.to(dH.dtype).scatter(1, rows.cell.unsqueeze(1), 0)
    own = h.reshape(-1, d).index_select(0, rows.pair)  # (R, d)
    h = h.index_select(0, rows.sample)  # (R, N, d)
    ds = _softmax_backward(others_only, (dH * h).sum(-1)).unsqueeze(-1)  # (R, N, 1)
    d_peers = (ds * own.unsqueeze(1)).view(R, N * d)
    d_h = rows.add_by_sample(d_peers, d_peers.new_zeros(B, N * d)).view(B * N, d)
    return d_h.index_add_(0, rows.pair, (ds * h).sum(1))


def _softmax_backward(weight: Tensor, d_weight: Tensor) -> Tensor:
    """From the gradient of a softmax along the last dimension to that of its logits."""
    return weight * (d_weight - (weight * d_weight).sum(-1, keepdim=True))
