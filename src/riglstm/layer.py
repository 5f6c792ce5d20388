"""`RigLSTM` and `RigLSTMCell`, with the calls of `nn.LSTM` and `nn.LSTMCell`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from riglstm import checks
from riglstm.cell import Weights
from riglstm.inputs import (
    Input,
    Sequences,
    State,
    States,
    join,
    of_shape,
    reverse_resets,
    split,
    time_first,
)
from riglstm.parameters import (
    NAMES,
    from_paper,
    initialise,
    parameter_of,
    shapes,
    suffix,
    to_paper,
    weights_of,
)
from riglstm.scan import (
    Backend,
    BackendError,
    check_possible,
    reference,
    repeatable,
    resolve,
    scan,
)
from riglstm.selection import (
    CELL_RULES,
    SLOT_RULES,
    CellRule,
    Selection,
    SlotRule,
    SoftUpdate,
    Update,
    draw_noise,
    said_update,
    settle_update,
    two_thirds,
)

InputT = TypeVar("InputT", Tensor, PackedSequence)

VARIANTS: dict[str, dict[str, Any]] = {
    "no_input_trans": {"input_views": "split"},
    "all_cells": {"cells": "all"},
    "rand_cells": {"cells": "random"},
    "all_inputs": {"views": "all"},
    "rand_inputs": {"views": "random"},
    "soft_inputs": {"views": "soft"},
    "all_h": {"peers": "all"},
    "rand_h": {"peers": "random"},
    "soft_h": {"peers": "soft"},
    "no_soft_state_updating": {"soft_update": False},
}
"""Arguments of `RigLSTM` for the paper's ten ablations, by the paper's names.

`no_input_trans` needs input_size = num_views · cell size.
"""


class Trace(NamedTuple):
    """What one layer did in one direction; time first, in the order of the input.

    T steps, B sequences, N cells, K views. With `soft` rules `views` and `peers` hold weights,
    else they are bool.
    """

    layer: int
    reverse: bool
    output: Tensor
    """(T, B, hidden_size)."""
    active: Tensor
    """(T, B, N): the cell woke."""
    views: Tensor
    """(T, B, N, K): the views that each cell took in."""
    peers: Tensor
    """(T, B, N, N): [j, i] is true where cell j listened to cell i; the diagonal always is."""
    view_scores: Tensor
    """(T, B, N, K), Eq. (13)."""
    peer_scores: Tensor
    """(T, B, N, N): h^j · h^i."""
    keep: Tensor
    """(T, B, N): the weight of the old state in the soft update; 1 where a cell slept."""


class RigLSTM(nn.Module):
    r"""Recurrent Independent Grid LSTM, with the call of `nn.LSTM`.

    A group of N LSTM cells. In each step the K_a cells that fit the input best wake; each takes
    in K_x of K views of the input and the states of K_h other cells, and decides how much of its
    old state to keep:

    .. math::
        s_{k,j} = x^k_t \cdot h^j_{t-1} \quad s_j = \sum_k s_{k,j} \qquad (13), (14)

        \tilde h^j_t, c^j_t = \mathrm{LSTM}(H^j_t, c^j_{t-1}; W^j) \qquad (18)

        h^j_t = K^j_t \, \mathrm{softmax}((K^j_t)^\top W_q Q^j_t), \quad
        K^j_t = [h^j_{t-1}; \tilde h^j_t] \qquad (20), (21)

    Args:
        input_size: features of the input.
        hidden_size: the whole width N·d; 600 = 6 x 100 in the paper.
        num_layers, bias, batch_first, dropout, bidirectional: as in `nn.LSTM`.
        proj_size: 0, as there is no projection.
        num_cells: N; default: the paper's 6 where it divides hidden_size, else the divisor
            nearest to 6 from 2 to 16, of two as near the larger: 8 for 64 to 1,024, 5 for 100.
        num_views: K; default: num_cells.
        active_cells: K_a; default: two thirds of the cells, rounded.
        views_per_cell: K_x; default: active_cells, at most K.
        peers_per_cell: K_h; default: active_cells, at most N - 1.
        cells, views, peers: how each is selected: `top` scores, `all`, or at `random`; views and
            peers also `soft`, weighted by the softmax of their scores.
        input_views: `linear` maps of the input, or `split`: K pieces of it.
        soft_update: Eqs. (19)-(21), with a scale and a bias that are not in the paper; without them
            (`printed`) it learned late, or never, at d = 100; False: no soft update.
        query: W_q `shared` by the cells, as printed, or one `per_cell`.
        update_scale: factor on the two logits of Eq. (21); `auto`: 1/d, as printed 1.
        update_bias: start value of a learned bias towards the new state; None: no bias; `auto`: 4,
            as printed None, and None with `bias=False`.
        forget_bias: added to the start values of the forget gate's bias; 0 as in `nn.LSTM`.
        steady_start: start values at which large cells (d = 100) are not woken by the input: the
            first K_a wake at every step, the others at first never. See `docs/choosing.md`.
        backend: `reference`, `batched`, `compiled`, `triton`, or `auto`; `repr` says which runs.

    Inputs: input, hx
        * input (T, B, D), (B, T, D) with `batch_first`, (T, D), or a `PackedSequence`.
        * hx = (h_0, c_0), each (layers · directions, B, hidden_size); zero if not given.
        * reset (keyword), bool (T, B), (B, T) with `batch_first`: True starts a sequence anew
          before that step. In the reverse direction the same pieces are run from their ends.
        * mask (keyword), bool, same shape: False leaves a step out: the state stays as it is. A
          reset on such a step acts on the next one that is not left out.

    Outputs: output, (h_n, c_n)
        * output (T, B, directions · hidden_size), or in the form of the input.
        * h_n, c_n (layers · directions, B, hidden_size).

    Parameters, per layer `_l{k}` and direction (`_reverse`), all for row vectors:
        weight_in (D, K·d), bias_in (K·d), weight_gates (N, (K+N)·d, 4·d) with gates f, i, o, g,
        bias_gates (N, 4·d), weight_query ((K+N-1)·d, d) or (N, (K+N-1)·d, d), update_offset (N).
    """

    proj_size = 0
    """Part of nn.LSTM's interface that frameworks read; there is no projection."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_cells: int | None = None,
        num_views: int | None = None,
        active_cells: int | None = None,
        views_per_cell: int | None = None,
        peers_per_cell: int | None = None,
        cells: CellRule = "top",
        views: SlotRule = "top",
        peers: SlotRule = "top",
        input_views: Literal["linear", "split"] = "linear",
        soft_update: SoftUpdate = True,
        query: Literal["shared", "per_cell"] = "shared",
        update_scale: float | Literal["auto"] = "auto",
        update_bias: float | Literal["auto"] | None = "auto",
        forget_bias: float = 0.0,
        steady_start: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        # Checks return Python's own numbers: 1 for True and NumPy's are accepted, and not stored.
        input_size = checks.check_positive("input_size", input_size)
        hidden_size = checks.check_positive("hidden_size", hidden_size)
        num_layers = checks.check_positive("num_layers", num_layers)
        num_cells = checks.fitting_cells(hidden_size) if num_cells is None else num_cells
        num_cells = checks.check_positive("num_cells", num_cells)
        checks.check_divides(hidden_size, num_cells)
        bias = checks.check_switch("bias", bias)
        batch_first = checks.check_switch("batch_first", batch_first)
        bidirectional = checks.check_switch("bidirectional", bidirectional)
        steady_start = checks.check_switch("steady_start", steady_start)
        checks.check_projection(proj_size)
        dropout = checks.check_dropout(dropout, num_layers)
        said = checks.check_update(soft_update, update_scale, update_bias)
        forget_bias = checks.check_forget_bias(forget_bias, needs=None if bias else "bias=True")
        if dtype is not None:
            checks.check_dtype(dtype)
        num_views = num_cells if num_views is None else num_views
        num_views = checks.check_positive("num_views", num_views)
        N, K, d = num_cells, num_views, hidden_size // num_cells
        K_a = two_thirds(N) if active_cells is None else active_cells
        K_a = checks.check_count("active_cells", K_a, 1, N, "[1, num_cells]")
        K_x = min(K_a, K) if views_per_cell is None else views_per_cell
        K_x = checks.check_count("views_per_cell", K_x, 1, K, "[1, num_views]")
        K_h = min(K_a, N - 1) if peers_per_cell is None else peers_per_cell
        K_h = checks.check_count("peers_per_cell", K_h, 0, N - 1, "[0, num_cells - 1]")
        checks.check_choice("cells", cells, CELL_RULES)
        checks.check_choice("views", views, SLOT_RULES)
        checks.check_choice("peers", peers, SLOT_RULES)
        checks.check_choice("input_views", input_views, ("linear", "split"))
        checks.check_choice("query", query, ("shared", "per_cell"))
        checks.check_steady_start(steady_start, bias and input_views == "linear", K, cells)
        check_possible(backend, device)
        update = settle_update(*said, d, bias)

        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, dropout
        self.bidirectional, self.backend, self.steady_start = bidirectional, backend, steady_start
        self.num_cells, self.num_views, self.cell_size = N, K, d
        self.input_views, self.soft_update, self.query = input_views, update.soft_update, query
        self.update_bias, self.forget_bias = update.update_bias, forget_bias
        self.selection = Selection(N, K, K_a, K_x, K_h, cells, views, peers, update.update_scale)

        widths = [input_size] + [hidden_size * (1 + bidirectional)] * (num_layers - 1)
        if input_views == "split":
            for layer, D in enumerate(widths):
                checks.check_split(layer, D, K, d)
        for layer, reverse in self._directions():
            all_shapes = shapes(
                *(widths[layer], N, K, d),
                linear=input_views == "linear",
                bias=bias,
                query=query if update.soft_update else None,
                learned=update.update_bias is not None,
            )
            for name, shape in zip(NAMES, all_shapes, strict=True):
                empty = None if shape is None else torch.empty(shape, device=device, dtype=dtype)
                parameter = None if empty is None else nn.Parameter(empty)
                self.register_parameter(name + suffix(layer, reverse), parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new start values (P10)."""
        for layer, reverse in self._directions():
            start = (self.update_bias, self.forget_bias, self.steady_start)
            initialise(self.weights(layer, reverse), self.hidden_size, *start)

    def flatten_parameters(self) -> None:
        """Nothing to do; there because callers of nn.LSTM call it."""

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each layer in each direction, in the order of h_n, as in nn.LSTM."""
        rows = (self.weights(layer, reverse) for layer, reverse in self._directions())
        return [[w for w in weights if w is not None] for weights in rows]

    def weights(self, layer: int = 0, reverse: bool = False) -> Weights:
        """The parameters of one layer in one direction, as the scans take them."""
        checks.check_count("layer", layer, 0, self.num_layers - 1, "[0, num_layers - 1]")
        if reverse and not self.bidirectional:
            raise ValueError("reverse must be False, got True; the layer is not bidirectional")
        return weights_of(self, suffix(layer, reverse))

    def paper_parameters(self, layer: int = 0, reverse: bool = False) -> dict[str, Tensor]:
        """Copies of the weights in the paper's notation, for column vectors, gates f, i, o, g.

        W_in (K, d, D), b_in (K, d), W_gates (N, 4, d, (K+N)·d), b_gates (N, 4, d),
        W_q (N, d, (K+N)·d) with the own-state block zero, update_bias (N); those that exist.
        """
        return to_paper(self.weights(layer, reverse), self.num_cells, self.num_views)

    def load_paper_parameters(
        self, parameters: Mapping[str, Tensor], layer: int = 0, reverse: bool = False
    ) -> None:
        """The inverse of `paper_parameters`."""
        from_paper(self.weights(layer, reverse), parameters, self.num_cells, self.num_views)

    def forward(
        self,
        input: InputT,
        hx: State | None = None,
        *,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[InputT, State]:
        """See the class."""
        plain = type(self) is RigLSTM and reset is None and mask is None
        if plain and self.backend in ("auto", "triton") and repeatable(input):
            from riglstm.scan.triton import launch_cache

            return launch_cache.call(self, input, hx)  # type: ignore[no-any-return]
        return self._in_full(input, hx, reset, mask)

    def _in_full(
        self, input: Input, hx: State | None, reset: Tensor | None, mask: Tensor | None
    ) -> tuple[Any, State]:
        """`forward` with all its checks, whatever came before."""
        sequences, h, c = self._prepare(input, hx, reset, mask)
        y, h_n, c_n = self._run(sequences, h, c)
        return sequences.restore(y), sequences.state_out(h_n, c_n)

    @torch.no_grad()
    def trace(
        self,
        input: Input,
        hx: State | None = None,
        *,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> list[Trace]:
        """What each layer did in each direction, in the order of h_n."""
        traces: list[Trace] = []
        self._run(*self._prepare(input, hx, reset, mask), traces)
        return traces

    def _prepare(
        self, input: Input, hx: State | None, reset: Tensor | None, mask: Tensor | None
    ) -> tuple[Sequences, States, States]:
        """Check a call: its input as (T, B, D), its state as (B, N, d) for each row."""
        like = parameter_of(self, "weight_gates_l0")
        sequences = time_first(input, self.input_size, like, self.batch_first, reset, mask)
        rows = self.num_layers * (1 + self.bidirectional)
        if hx is None:
            return sequences, (None,) * rows, (None,) * rows
        hx = sequences.state_in(hx, rows, self.hidden_size, like)
        h, c = (split(state, rows, self.num_cells, self.cell_size) for state in hx)
        return sequences, h, c

    def _run(
        self, sequences: Sequences, h: States, c: States, traces: list[Trace] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run all layers and directions: output (T, B, H), h_n, c_n; with `traces`, fill them."""
        x = sequences.x
        finals: list[State] = []
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for reverse in (False, True)[: 1 + self.bidirectional]:
                row = len(finals)
                y, final = self._run_direction(x, h[row], c[row], sequences, layer, reverse, traces)
                outputs.append(y)
                finals.append(final)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        h_n, c_n = (join(s, self.hidden_size) for s in zip(*finals, strict=True))
        return x, h_n, c_n

    def _run_direction(
        self,
        x: Tensor,
        h: Tensor | None,
        c: Tensor | None,
        sequences: Sequences,
        layer: int,
        reverse: bool,
        traces: list[Trace] | None,
    ) -> tuple[Tensor, State]:
        """One layer in one direction: output (T, B, hidden_size), and the final state."""
        live, reset = sequences.live, sequences.reset
        if reverse:
            # Padding comes first then, and changes nothing.
            x = x.flip(0)
            live = None if live is None else live.flip(0)
            reset = reverse_resets(reset, live)
        weights, sel = weights_of(self, suffix(layer, reverse)), self.selection
        noise = draw_noise(sel, x.shape[0], x.shape[1], x.device)
        if traces is None:
            y, final, _ = scan(
                x, h, c, weights, sel, noise=noise, live=live, reset=reset, backend=self.backend
            )
            y = y.flatten(2)
            return y.flip(0) if reverse else y, final
        y, final, seen = reference.trace(x, h, c, weights, sel, noise=noise, live=live, reset=reset)
        y, *decisions = (v.flip(0) if reverse else v for v in (y.flatten(2), *seen))
        traces.append(Trace(layer, reverse, *map(sequences.in_order, (y, *decisions))))
        return y, final

    def _directions(self) -> list[tuple[int, bool]]:
        both = (False, True)[: 1 + self.bidirectional]
        return [(layer, reverse) for layer in range(self.num_layers) for reverse in both]

    def extra_repr(self) -> str:
        """The sizes, what differs from the defaults, and the backend that runs."""
        sel = self.selection
        update = Update(self.soft_update, sel.update_scale, self.update_bias)
        parts = [f"{self.input_size}, {self.hidden_size}"]
        for name, value, default in (
            ("num_layers", self.num_layers, 1),
            ("bias", self.bias, True),
            ("batch_first", self.batch_first, False),
            ("dropout", self.dropout, 0.0),
            ("bidirectional", self.bidirectional, False),
            ("num_cells", sel.N, None),
            ("num_views", sel.K, None),
            ("active_cells", sel.K_a, None),
            ("views_per_cell", sel.K_x, None),
            ("peers_per_cell", sel.K_h, None),
            ("cells", sel.cells, "top"),
            ("views", sel.views, "top"),
            ("peers", sel.peers, "top"),
            ("input_views", self.input_views, "linear"),
            ("query", self.query, "shared"),
            *said_update(update, self.cell_size, self.bias),
            ("forget_bias", self.forget_bias, 0.0),
            ("steady_start", self.steady_start, False),
        ):
            if value != default:
                parts.append(f"{name}={value!r}")
        like = parameter_of(self, "weight_gates_l0")
        try:
            runs = resolve(self.backend, like.device, sel, self.cell_size, like.dtype)
            chosen = "" if runs == self.backend else f" -> {runs!r}"
        except BackendError:
            chosen = " (cannot run here)"
        return ", ".join([*parts, f"backend={self.backend!r}{chosen}"])


class RigLSTMCell(nn.Module):
    """One step of `RigLSTM`, with the call of `nn.LSTMCell`: `h, c = cell(input, (h, c))`.

    input (B, D) or (D), states (B, hidden_size) or (hidden_size), zero if not given. Options are
    RigLSTM's own; `layer` holds the weights.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name in ("num_layers", "batch_first", "dropout", "bidirectional", "proj_size"):
            if name in options:
                raise ValueError(f"{name} is not an option of a single step; use RigLSTM")
        self.layer = RigLSTM(
            input_size, hidden_size, bias=bias, device=device, dtype=dtype, **options
        )
        own = self.layer
        self.input_size, self.hidden_size, self.bias = own.input_size, own.hidden_size, own.bias

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """See the class."""
        checks.check_tensor("the input", input)
        if input.dim() not in (1, 2):
            raise ValueError(
                "the input must be one step (D) or a batch of them (B, D), "
                f"got {input.dim()} dimensions: {tuple(input.shape)}"
            )
        like = self.layer.weights().W
        checks.check_input(input.unsqueeze(0), self.input_size, like, tuple(input.shape))
        state = None
        if hx is not None:
            shape = (*input.shape[:-1], self.hidden_size)
            meaning = "batch, hidden_size" if input.dim() == 2 else "hidden_size"
            checks.check_pair(hx, shape, meaning, like)
            state = (hx[0].unsqueeze(0), hx[1].unsqueeze(0))
        _, (h, c) = self.layer(input.unsqueeze(0), state)
        shape = (-1, self.hidden_size)[2 - input.dim() :]
        return of_shape(h, *shape), of_shape(c, *shape)
