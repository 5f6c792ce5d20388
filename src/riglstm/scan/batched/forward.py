"""Forward pass of the `batched` backend: all cells of a step at once.

Shapes as in `cell.py`; V = [x^1..x^K, h^1..h^N] is what cells choose from; R rows, one for each
pair of a sample and a cell at work. On a CPU only the cells that wake are computed, which saves a
third of the products at the paper's sizes; their rows are ordered by cell, so that each cell's rows
meet its weights in one product. On other devices reading the counts back would stop the queue:
there every pair has a row, and the rows of sleeping cells are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from riglstm.cell import Weights, cell_scores, others
from riglstm.checks import learns, product_dtype, refuse_transforms, watched
from riglstm.inputs import State, begin, flat
from riglstm.scan.base import RULES, WEIGHTS, vmap_by_loop
from riglstm.scan.batched import native
from riglstm.selection import (
    LOWEST,
    Noise,
    Selection,
    choose_cells,
    weigh_peers,
    weigh_views,
    write_top_mask,
)

Steps: TypeAlias = Sequence[Tensor]
"""One tensor for each step."""
PRODUCTS_AT_ONCE = 2**17
"""Numbers multiplied before they are summed to scores: half of what a CPU's core has near it."""


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
) -> tuple[Tensor, State, Tensor]:
    """See `riglstm.scan.scan`."""
    h, c = begin(x, h, c, weights, sel)
    product = product_dtype(x.device, h.dtype)
    save = learns(x, h, c, *weights)
    given = (x, h, c, *weights, *(noise or Noise()), live, reset)
    # An operator's first call reads torch's compiler, for a second; it is for those who look on.
    run: Callable[..., tuple[Tensor, ...]] = run_forward
    if watched(*given):
        run = forward_op
    elif save:
        from riglstm.scan.batched.backward import Eager

        run = Eager.apply
    y, h, c, active, *_ = run(*given, *flat(sel), product, save)
    return y, (h, c), active


def run_forward(x: Tensor, h: Tensor, c: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The work of `forward_op`, whose schema says what is given."""
    weights, drawn, (live, reset) = Weights(*given[:6]), Noise(*given[6:9]), given[9:11]
    sel, (product, save) = Selection(*given[11:20]), given[20:]
    refuse_transforms("batched")  # in a graph nobody has asked before
    x, h = x.contiguous(), h.contiguous()
    noise = drawn if sel.draws else None
    y, h, c, active, saved = forward(x, h, c, weights, sel, noise, live, reset, product, save)
    return y, h, c, active, *saved


forward_op = torch.library.custom_op(
    "riglstm::batched_scan",
    run_forward,
    mutates_args=(),
    schema=f"(Tensor x, Tensor h, Tensor c, {WEIGHTS}, Tensor? noise_cells, Tensor? noise_views, "
    f"Tensor? noise_peers, Tensor? live, Tensor? reset, {RULES}, ScalarType product, "
    f"bool save) -> ({', '.join(['Tensor'] * 13)})",
)


@forward_op.register_fake
def _(x: Tensor, h: Tensor, c: Tensor, *args: Any) -> Any:
    refuse_transforms("batched")
    W_q, sel, save = args[4], Selection(*args[11:20]), args[21]
    saved = empty_saved(x.shape[0] if save else 1, h, sel, W_q is not None)
    y = h.new_empty(x.shape[0], *h.shape)
    active = h.new_empty(x.shape[0], *h.shape[:2], dtype=torch.bool)
    return y, h.new_empty(h.shape), c.new_empty(c.shape), active, *saved


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save a call's inputs, and what it gives beyond y, h and c, for the backward pass."""
    x, *state, W_in, b_in, W, b, W_q, update_bias = inputs[:9]
    *drawn, live, reset = inputs[9:14]
    *rules, product, ctx.saves = inputs[14:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    # A graph that was made without gradients, by torch.export say, saves nothing.
    kept = output[3:] if ctx.saves else (*state, *drawn, live)
    ctx.save_for_backward(x, W_in, b_in, W, b, W_q, update_bias, reset, *kept)
    ctx.idle = some_idle(x.device, Selection(*rules), live)
    ctx.rules, ctx.shape = (*rules, product), output[0].shape


forward_op.register_vmap(vmap_by_loop(forward_op))


def awake_only(device: torch.device, sel: Selection) -> bool:
    """True if rows of sleeping cells are left out on this device."""
    return device.type == "cpu" and sel.awake < sel.N


def some_idle(device: torch.device, sel: Selection, live: Tensor | None) -> bool:
    """True if a row may belong to a cell that does not update: asleep, or not live."""
    return live is not None or (not awake_only(device, sel) and sel.awake < sel.N)


class Saved(NamedTuple):
    """What the backward pass needs of each step; without one, of the last step alone."""

    V: Tensor
    """(T, B, K+N, d): views, and the state before the step."""
    weight: Tensor
    """(T, B, N, K+N): what each vector of V counts for each cell; bool, or floats if soft."""
    pair: Tensor
    """(T, R) int64: the rows of each step."""
    counts: Tensor
    """(T, N) int64: rows of each cell; no steps where every cell has the same."""
    c: Tensor
    """(T, R, d): c before the step."""
    gates: Tensor
    """(T, R, 4·d): f, i, o, g after their non-linearity."""
    tanh_c: Tensor
    """(T, R, d): tanh of c after the step."""
    q: Tensor
    """(T, R, d): W_q Q; no steps without soft update."""
    a: Tensor
    """(T, R): the weight of the new state; no steps without soft update."""


def empty_saved(T: int, h: Tensor, sel: Selection, soft_update: bool) -> Saved:
    """Unwritten buffers for T steps.

    torch.compile keeps graphs between processes by the names and arguments of operators. Whoever
    changes these shapes gives `forward_op` another name, or graphs of older versions fail.
    """
    B, N, d = h.shape
    skip = awake_only(h.device, sel)
    S, R = sel.K + N, B * (sel.awake if skip else N)
    soft = "soft" in (sel.views, sel.peers)
    exact = torch.promote_types(h.dtype, torch.float32)
    T_q = T if soft_update else 0
    return Saved(
        V=h.new_empty(T, B, S, d),
        weight=h.new_empty(T, B, N, S, dtype=exact if soft else torch.bool),
        pair=h.new_empty(T, R, dtype=torch.int64),
        counts=h.new_empty(T if skip else 0, N, dtype=torch.int64),
        c=h.new_empty(T, R, d),
        gates=h.new_empty(T, R, 4 * d),
        tanh_c=h.new_empty(T, R, d),
        q=h.new_empty(T_q, R, d),
        a=h.new_empty(T_q, R),
    )


def forward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise | None,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Saved]:
    """y (T, B, N, d), final h and c, active (T, B, N), and what backward needs.

    Matrix products are taken in the dtype `product`, everything else in the state's. A small
    layer's time goes into the number of operations, not into their size: views of buffers are
    therefore made before the loop, one list for all steps.
    """
    T, (B, N, d), K = x.shape[0], h.shape, sel.K
    S, skip = K + N, awake_only(h.device, sel)
    saved = empty_saved(T if save else 1, h, sel, weights.W_q is not None)
    y = h.new_empty(T, B, N, d)
    active = torch.empty(T, B, N, dtype=torch.bool, device=h.device)
    c = c.clone(memory_format=torch.contiguous_format)
    if native.takes(x, h, c, weights, sel, product, live, reset):
        native.forward(x, h, c, weights, sel, noise, live, reset, y, active, saved, save)
        return y, y[-1].clone(), c, active, saved
    # Nothing inside is differentiated, and without autograd's records an operation costs less;
    # what leaves the loop was made outside, as ordinary tensors.
    with torch.inference_mode():
        W_in, W, W_q = (
            None if w is None else w.to(product) for w in (weights.W_in, weights.W, weights.W_q)
        )
        assert W is not None
        idle = some_idle(h.device, sel, live)
        every_row = None if skip else all_rows(B, N, h.device)

        def steps(buffer: Tensor) -> tuple[Tensor, ...]:
            return buffer.unbind() if save else buffer.unbind() * T

        x_at, y_at = x.unbind(), y.view(T, B * N, d).unbind()
        V_at, weight_at = steps(saved.V), steps(saved.weight.view(-1, B * N, S))
        V_x, V_h = steps(saved.V[:, :, :K].flatten(2)), steps(saved.V[:, :, K:])
        pair_at, c_at, gates_at, tanh_at = map(
            steps, (saved.pair, saved.c, saved.gates, saved.tanh_c)
        )
        fio = steps(saved.gates[:, :, : 3 * d])
        f_at, i_at, o_at, g_at = (steps(part) for part in saved.gates.chunk(4, dim=2))
        q_at, a_at = (steps(saved.q), steps(saved.a)) if W_q is not None else ((), ())
        h_flat, c_flat = h.reshape(B * N, d), c.view(B * N, d)
        R = saved.pair.shape[1]
        H = h.new_empty(R, S, d)
        # New memory is far from the processor, and where it is new to the process, slow.
        h_row, h_new, c_new, change = h.new_empty(4, R, d).unbind()
        query = None if W_q is None else _Query(H, W_q, N, K)
        select = Selector(h, sel, V_at, V_h, active.unbind(), steps(saved.weight))
        counts = []

        for t in range(T):
            if reset is not None:
                reset_row = reset[t].repeat_interleave(N).unsqueeze(-1)
                h_flat = h_flat.masked_fill(reset_row, 0)
                c_flat.masked_fill_(reset_row, 0)
            write_views(x_at[t], W_in, weights.b_in, V_x[t])
            V_h[t].copy_(h_flat.view(B, N, d))

            awake = select(t, noise)
            rows = every_row or awake_rows(awake)
            pair = rows.pair
            if live is not None:
                awake.logical_and_(live[t].unsqueeze(1))
            if save:
                pair_at[t].copy_(pair)
                counts.append(rows.counts)

            torch.index_select(V_at[t], 0, rows.sample, out=H)
            H.mul_(weight_at[t].index_select(0, pair).unsqueeze(-1))
            H_low = H.view(R, S * d).to(product)
            if query is not None:
                query(H_low, rows, q_at[t])
            if weights.b is None:
                gates_at[t].zero_()
            else:
                torch.index_select(weights.b, 0, rows.cell, out=gates_at[t])
            rows.times(H_low, W, gates_at[t], beta=1)
            fio[t].sigmoid_()
            g_at[t].tanh_()
            torch.index_select(h_flat, 0, pair, out=h_row)
            c_row = torch.index_select(c_flat, 0, pair, out=c_at[t])
            torch.mul(f_at[t], c_row, out=c_new).addcmul_(i_at[t], g_at[t])
            tanh_c = torch.tanh(c_new, out=tanh_at[t])
            torch.mul(o_at[t], tanh_c, out=h_new)

            if query is not None:
                torch.sub(h_new, h_row, out=change)
                z = torch.mul(change, q_at[t], out=h_new).sum(-1)
                if sel.update_scale != 1:
                    z *= sel.update_scale
                if weights.update_bias is not None:
                    z += weights.update_bias.index_select(0, rows.cell)
                # Eq. (21): a softmax of two logits is a sigmoid of their difference.
                a = torch.sigmoid(z, out=a_at[t])
                torch.addcmul(h_row, change, a.unsqueeze(-1), out=h_new)
            if idle:
                updates = awake.view(-1).index_select(0, pair).unsqueeze(-1)
                torch.where(updates, h_new, h_row, out=h_new)
                torch.where(updates, c_new, c_row, out=c_new)
            h_flat = y_at[t].copy_(h_flat)
            h_flat.index_copy_(0, pair, h_new)
            c_flat.index_copy_(0, pair, c_new)
        if save and skip:
            saved.counts.copy_(torch.tensor(counts, device="cpu"))
    return y, y[-1].clone(), c, active, saved


class Selector:
    """Eqs. (13)-(16) of every step, between buffers that are made once."""

    def __init__(
        self,
        h: Tensor,
        sel: Selection,
        V: Steps,
        V_h: Steps,
        active: Steps,
        weight: Steps,
    ) -> None:
        (B, N, d), K = h.shape, sel.K
        self.sel, self.V, self.h, self.active = sel, V, V_h, active
        self.exact = torch.promote_types(h.dtype, torch.float32)
        self.s = h.new_empty(B, N, K + N, dtype=self.exact)
        self.samples = B
        if h.device.type == "cpu":
            self.samples = min(B, max(1, PRODUCTS_AT_ONCE // (N * (K + N) * d)))
        self.products = h.new_empty(self.samples, N, K + N, d, dtype=self.exact)
        self.s_views, self.s_peers = self.s[:, :, :K], self.s[:, :, K:]
        self.own_scores = self.s_peers.diagonal(dim1=1, dim2=2)
        self.views = [w[:, :, :K] for w in weight]
        self.peers = [w[:, :, K:] for w in weight]
        self.own = [w.diagonal(dim1=1, dim2=2) for w in self.peers]
        place = torch.arange(max(K, N), device=h.device)
        self.first_a, self.first_x = place[:N] < sel.K_a, place[:K] < sel.K_x
        self.first_h = place[:N] < sel.K_h
        # A mask is written in place; among weights that are floats it would need another dtype.
        self.hard = "soft" not in (sel.views, sel.peers)

    def __call__(self, t: int, noise: Noise | None) -> Tensor:
        """From V (B, K+N, d) and h (B, N, d) of step t, write active (B, N) and weight."""
        sel, s_views, s_peers = self.sel, self.s_views, self.s_peers
        h, V, active = self.h[t], self.V[t], self.active[t]
        if h.dtype != self.exact:
            h, V = h.to(self.exact), V.to(self.exact)
        for h_b, V_b, s_b in zip(*(v.split(self.samples) for v in (h, V, self.s)), strict=True):
            products = self.products[: len(s_b)]
            torch.mul(h_b.unsqueeze(2), V_b.unsqueeze(1), out=products)
            torch.sum(products, -1, out=s_b)
        draw = Noise() if noise is None else noise.at(t)
        if sel.cells == "top":
            write_top_mask(cell_scores(s_views), sel.K_a, self.first_a, active)
        else:
            active.copy_(choose_cells(cell_scores(s_views), sel, draw.cells))
        if self.hard and sel.views == "top":
            write_top_mask(s_views, sel.K_x, self.first_x, self.views[t])
        else:
            self.views[t].copy_(weigh_views(s_views, sel, draw.views))
        if self.hard and sel.peers == "top":
            s_peers.clamp_(min=LOWEST)
            self.own_scores.fill_(float("-inf"))
            write_top_mask(s_peers, sel.K_h, self.first_h, self.peers[t])
            self.own[t].fill_(True)
        else:
            self.peers[t].copy_(weigh_peers(s_peers, sel, draw.peers))
        return active


class _Query:
    """Eq. (19) for the rows of every step: W_q times H without the cell's own state."""

    def __init__(self, H: Tensor, W_q: Tensor, N: int, K: int) -> None:
        R, S, self.d = H.shape
        self.W_q = W_q
        self.slots = others(N, K, H.device)  # (N, K+N-1)
        self.start = torch.arange(0, R * S, S, device=H.device).unsqueeze(1)
        self.Q = W_q.new_empty(R, (S - 1) * self.d)
        self.Q_slots = self.Q.view(-1, self.d)

    def __call__(self, H: Tensor, rows: Rows, out: Tensor) -> None:
        """From H (R, (K+N)·d) to out (R, d)."""
        slots = self.slots.index_select(0, rows.cell).add_(self.start).view(-1)
        torch.index_select(H.view(-1, self.d), 0, slots, out=self.Q_slots)
        if self.W_q.dim() == 3:
            rows.times(self.Q, self.W_q, out)
        elif out.dtype == H.dtype:
            torch.mm(self.Q, self.W_q, out=out)
        else:
            out.copy_(self.Q @ self.W_q)


def write_views(x: Tensor, W_in: Tensor | None, b_in: Tensor | None, out: Tensor) -> None:
    """Write the views of one step's input (B, D) to out (B, K·d).

    Step by step, not for the whole sequence at once: a product's last bits depend on its number
    of rows, and a sequence cut into pieces must give the same bits.
    """
    if W_in is None:
        out.copy_(x)
    elif W_in.dtype != out.dtype:
        out.copy_(x.to(W_in.dtype) @ W_in)
        if b_in is not None:
            out += b_in
    elif b_in is None:
        torch.mm(x, W_in, out=out)
    else:
        out.copy_(b_in).addmm_(x, W_in)


@dataclass(frozen=True)
class Rows:
    """Rows ordered by cell; within a cell, by sample."""

    sample: Tensor
    """(R) int64."""
    cell: Tensor
    """(R) int64."""
    pair: Tensor
    """(R) int64: sample · N + cell."""
    counts: list[int] | None
    """Rows of each cell; None: every cell has the same number."""
    N: int

    def times(self, v: Tensor, W: Tensor, out: Tensor, beta: float = 0) -> Tensor:
        """Each cell's rows v (R, m) times its own matrix W (N, m, n), plus beta · out, to out.

        The product is rounded to the dtype of v and W, the sum to that of out.
        """
        if out.dtype != W.dtype:
            product = self.times(v, W, torch.empty_like(out, dtype=W.dtype))
            return out.add_(product) if beta else out.copy_(product)
        if self.counts is None:
            v, y = (rows.unflatten(0, (self.N, -1)) for rows in (v, out))
            y.baddbmm_(v, W, beta=beta)
            return out
        parts = zip(v.split(self.counts), W.unbind(), out.split(self.counts), strict=True)
        for v_j, W_j, y_j in parts:
            y_j.addmm_(v_j, W_j, beta=beta)
        return out

    def add_by_sample(self, v: Tensor, total: Tensor) -> Tensor:
        """Add the rows v (R, n) to their samples' in total (B, n), in the order of the cells."""
        if self.counts is None:
            return total.add_(v.view(self.N, *total.shape).sum(0))
        return total.index_add_(0, self.sample, v)


def all_rows(samples: int, N: int, device: torch.device) -> Rows:
    """A row for every pair."""
    cell = torch.arange(N, device=device).repeat_interleave(samples)
    sample = torch.arange(samples, device=device).repeat(N)
    return Rows(sample, cell, torch.add(cell, sample, alpha=N), None, N)


def awake_rows(active: Tensor) -> Rows:
    """A row for every cell that is awake, from active (B, N)."""
    N = active.shape[1]
    cell, sample = active.t().nonzero().unbind(1)
    return Rows(sample, cell, torch.add(cell, sample, alpha=N), active.sum(0).tolist(), N)
