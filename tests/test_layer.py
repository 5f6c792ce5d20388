"""`RigLSTM` and `RigLSTMCell` behind the call of `nn.LSTM` and `nn.LSTMCell`."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from helpers import close, numbers
from riglstm import RigLSTM, RigLSTMCell, checks

State = tuple[Tensor, Tensor]
BACKENDS = ("reference", "batched")
LENGTHS = (3, 6, 1, 4)
"""Of the sequences in a packed batch; not sorted."""

both_backends = pytest.mark.parametrize("backend", BACKENDS)


def build(
    input_size: int = 4,
    hidden_size: int = 12,
    num_cells: int = 6,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> RigLSTM:
    torch.manual_seed(seed)
    return RigLSTM(input_size, hidden_size, num_cells=num_cells, dtype=dtype, **options)


def state(layer: RigLSTM, B: int | None, seed: int = 2) -> State:
    """A random initial state; B None: of one sequence without a batch."""
    rows = layer.num_layers * (1 + layer.bidirectional)
    shape = (rows, layer.hidden_size) if B is None else (rows, B, layer.hidden_size)
    dtype = layer.weight_gates_l0.dtype
    return numbers(*shape, seed=seed, dtype=dtype), numbers(*shape, seed=seed + 1, dtype=dtype)


def part(layer: RigLSTM, suffix: str) -> RigLSTM:
    """One layer in one direction, made a layer of its own."""
    weights = {
        name.removesuffix(suffix) + "_l0": value
        for name, value in layer.state_dict().items()
        if name.endswith(suffix)
    }
    D = weights["weight_in_l0"].shape[0]
    single = build(D, layer.hidden_size, layer.num_cells, backend=layer.backend)
    single.load_state_dict(weights)
    return single


def forms(layer: nn.LSTM | RigLSTM, form: str) -> tuple[Tensor | PackedSequence, State]:
    """An input of a form and an initial state, float32 as both layers have it."""
    rows = layer.num_layers * (1 + layer.bidirectional)
    lengths = sorted(LENGTHS, reverse=True) if form == "packed" else LENGTHS
    x: Tensor | PackedSequence
    batch = () if form == "unbatched" else (4,)
    if form.startswith("packed"):
        pieces = [torch.randn(n, layer.input_size) for n in lengths]
        x = pack_sequence(pieces, enforce_sorted=form == "packed")
    else:
        lead = {"batched": (6, 4), "batch_first": (4, 6), "unbatched": (6,)}[form]
        x = torch.randn(*lead, layer.input_size)
    size = (rows, *batch, layer.hidden_size)
    return x, (torch.randn(size), torch.randn(size))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(
    "form", ["batched", "batch_first", "unbatched", "packed", "packed_unsorted"]
)
def test_forms_and_shapes_are_those_of_nn_lstm(
    form: str, num_layers: int, bidirectional: bool, with_state: bool
) -> None:
    arguments = (4, 12, num_layers, True, form == "batch_first", 0.0, bidirectional)
    theirs, ours = nn.LSTM(*arguments), RigLSTM(*arguments)
    x, hx = forms(theirs, form)
    call = (x, hx) if with_state else (x,)
    expected, got = theirs(*call), ours(*call)
    assert type(got[0]) is type(expected[0])
    assert isinstance(got[1], tuple)
    if isinstance(x, PackedSequence):
        for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            g, e = getattr(got[0], name), getattr(expected[0], name)
            assert (g is None and e is None) or torch.equal(g, e)
        got, expected = (got[0].data, got[1]), (expected[0].data, expected[1])
    for g, e in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert (g.shape, g.dtype, g.device) == (e.shape, e.dtype, e.device)


def test_other_frameworks_find_what_they_read() -> None:
    layer = RigLSTM(4, 12, 2, False, True, 0.25, True)
    theirs = nn.LSTM(4, 12, 2, False, True, 0.25, True)
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout")
    for name in (*names, "bidirectional", "proj_size"):
        assert getattr(layer, name) == getattr(theirs, name)
    before = copy.deepcopy(layer.state_dict())
    assert layer.flatten_parameters() is None
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert not isinstance(layer, nn.LSTM | nn.RNNBase)


def test_a_list_serves_as_the_pair_of_states_and_none_as_zeros() -> None:
    layer = build(num_layers=2, bidirectional=True)
    x, hx, zero = numbers(3, 2, 4), state(layer, 2), torch.zeros(4, 2, 12, dtype=torch.float64)
    assert torch.equal(layer(x, list(hx))[0], layer(x, hx)[0])
    assert torch.equal(layer(x)[0], layer(x, (zero, zero))[0])


@both_backends
def test_a_call_changes_neither_input_nor_state(backend: str) -> None:
    layer = build(backend=backend, num_layers=2)
    x, (h, c), reset = numbers(3, 2, 4), state(layer, 2), torch.ones(3, 2, dtype=torch.bool)
    kept = [v.clone() for v in (x, h, c, reset)]
    layer(x, (h, c), reset=reset)
    assert all(map(torch.equal, (x, h, c, reset), kept))


@both_backends
def test_bidirectional_layers_feed_both_directions_upwards(backend: str) -> None:
    layer = build(backend=backend, num_layers=2, bidirectional=True)
    x, (h, c) = numbers(5, 3, 4), state(layer, 3)
    y, (h_n, c_n) = layer(x, (h, c))
    row = 0
    for k in range(2):
        outputs = []
        for suffix in ("", "_reverse"):
            single = part(layer, f"_l{k}{suffix}")
            turned = [0] if suffix else []
            z, final = single(x.flip(turned), (h[row : row + 1], c[row : row + 1]))
            close((h_n[row : row + 1], c_n[row : row + 1]), final)
            outputs.append(z.flip(turned))
            row += 1
        x = torch.cat(outputs, dim=2)
    close(y, x)


def test_dropout_acts_between_layers_in_training_alone_and_follows_the_seed() -> None:
    x, layer, plain = numbers(5, 3, 4), build(num_layers=2, dropout=1.0), build(num_layers=2)
    y, (h_n, _) = layer(x)
    below, (h_below, _) = part(layer, "_l0")(x)
    close(h_n[:1], h_below)
    close(y, part(layer, "_l1")(torch.zeros_like(below))[0])
    assert y.any()
    layer.dropout = 0.5
    runs = [(torch.manual_seed(seed), layer(x)[0])[1] for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])


@both_backends
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_packed_equals_each_sequence_alone(
    options: dict[str, Any], sort: bool, backend: str
) -> None:
    layer = build(backend=backend, **options)
    lengths = sorted(LENGTHS, reverse=True) if sort else LENGTHS
    pieces = [numbers(n, 4, seed=n).requires_grad_() for n in lengths]
    hx = tuple(s.requires_grad_() for s in state(layer, len(lengths)))
    packed, (h_n, c_n) = layer(pack_sequence(pieces, enforce_sorted=sort), hx)
    padded, _ = pad_packed_sequence(packed)
    weigh = numbers(*padded.shape, seed=9)
    loss = (padded * weigh).sum() + (h_n * h_n).sum() + (c_n * c_n).sum()
    grads = torch.autograd.grad(loss, [*pieces, *hx, *layer.parameters()])

    alone_loss = torch.zeros((), dtype=torch.float64)
    for b, (n, piece) in enumerate(zip(lengths, pieces, strict=True)):
        y, (h, c) = layer(piece, (hx[0][:, b], hx[1][:, b]))
        close(padded[:n, b], y)
        close((h_n[:, b], c_n[:, b]), (h, c))
        alone_loss = alone_loss + (y * weigh[:n, b]).sum() + (h * h).sum() + (c * c).sum()
    alone_grads = torch.autograd.grad(alone_loss, [*pieces, *hx, *layer.parameters()])
    for got, expected in zip(grads, alone_grads, strict=True):
        close(got, expected, atol=1e-11)


def in_pieces(layer: RigLSTM, x: Tensor, hx: State, reset: Tensor) -> tuple[Tensor, State]:
    """One sequence (T, D), cut where `reset` says, its pieces run one by one.

    A direction starts from hx where it enters the sequence, and from zero in every other piece.
    """
    directions = 1 + layer.bidirectional
    cuts = [0, *(t for t in range(1, len(x)) if reset[t]), len(x)]
    outputs, finals = [], []
    for a, b in itertools.pairwise(cuts):
        start = tuple(s.clone() for s in hx)
        for s in start:
            if a > 0 or reset[0]:
                s[0::directions] = 0
            if directions == 2 and b < len(x):
                s[1::2] = 0
        y, final = layer(x[a:b], start)
        outputs.append(y)
        finals.append(final)
    h, c = (s.clone() for s in finals[-1])
    if directions == 2:
        h[1::2], c[1::2] = finals[0][0][1::2], finals[0][1][1::2]
    return torch.cat(outputs), (h, c)


@both_backends
@pytest.mark.parametrize("form", ["time_first", "batch_first", "unbatched", "packed"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_reset_equals_separate_sequences(bidirectional: bool, form: str, backend: str) -> None:
    options = {"bidirectional": bidirectional, "batch_first": form == "batch_first"}
    layer = build(backend=backend, num_layers=2, **options)
    lengths = (4, 7, 6) if form == "packed" else (7, 7, 7)
    reset = torch.zeros(7, 3, dtype=torch.bool)
    for t, b in ((2, 0), (3, 0), (5, 0), (0, 1), (5, 1), (6, 1)):
        # The third sequence is whole; the first, where it is packed, ends before its last reset.
        reset[t, b] = True
    x, (h, c) = numbers(7, 3, 4), state(layer, 3)
    if form == "packed":
        pieces = [x[:n, b] for b, n in enumerate(lengths)]
        packed, final = layer(pack_sequence(pieces, enforce_sorted=False), (h, c), reset=reset)
        y, _ = pad_packed_sequence(packed)
    elif form == "batch_first":
        y, final = layer(x.transpose(0, 1), (h, c), reset=reset.t())
        y = y.transpose(0, 1)
    elif form == "unbatched":
        alone = [layer(x[:, b], (h[:, b], c[:, b]), reset=reset[:, b]) for b in range(3)]
        y = torch.stack([y for y, _ in alone], 1)
        final = tuple(torch.stack([end[i] for _, end in alone], 1) for i in range(2))
    else:
        y, final = layer(x, (h, c), reset=reset)
    for b, n in enumerate(lengths):
        expected = in_pieces(layer, x[:n, b], (h[:, b], c[:, b]), reset[:n, b])
        close(y[:n, b], expected[0])
        close((final[0][:, b], final[1][:, b]), expected[1])


@both_backends
@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_masked_steps_are_left_out_whatever_stands_in_them(
    options: dict[str, Any], wrong: float, backend: str
) -> None:
    layer = build(backend=backend, batch_first=True, **options)
    mask = torch.tensor(
        [[1, 1, 0, 1, 0, 0], [0, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]
    ).bool()
    x, (h, c) = numbers(4, 6, 4), state(layer, 4)
    x[~mask] = wrong
    y, (h_n, c_n) = layer(x.requires_grad_(), (h, c), mask=mask)
    for b in range(3):
        short, final = layer(x[b][mask[b]], (h[:, b], c[:, b]))
        close(y[b][mask[b]], short)
        close((h_n[:, b], c_n[:, b]), final)
    assert torch.equal(h_n[:, 3], h[:, 3])
    assert torch.equal(c_n[:, 3], c[:, 3])
    grad, *weights = torch.autograd.grad(y[mask].sum() + c_n.sum(), (x, *layer.parameters()))
    assert not grad[~mask].any()
    assert grad[mask].any(dim=-1).all()
    assert all(g.isfinite().all() for g in weights)


BIT_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_layers": 2, "query": "per_cell", "update_bias": 0.5, "update_scale": 2.0},
    {"cells": "all", "views": "soft", "peers": "soft", "bias": False},
    {"cells": "all", "views": "all", "peers": "all"},
)


@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [1, 3, 64])
@pytest.mark.parametrize("options", BIT_OPTIONS)
def test_pieces_with_carried_state_equal_one_run_bit_for_bit(
    options: dict[str, Any], B: int, dtype: torch.dtype, backend: str
) -> None:
    layer = build(5, 42, 6, dtype, backend=backend, **options)
    x, hx = numbers(9, B, 5, dtype=dtype), state(layer, B)
    y, final = layer(x, hx)
    for cuts in ((1,) * 9, (4, 1, 3, 1), (2, 7)):
        carried, outputs = hx, []
        for piece in x.split(cuts):
            out, carried = layer(piece, carried)
            outputs.append(out)
        assert torch.equal(torch.cat(outputs), y)
        assert all(map(torch.equal, carried, final))
    with torch.no_grad():
        assert torch.equal(layer(x, hx)[0], y)


@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [None, 1, 3, 64])
def test_cell_steps_equal_the_layer_bit_for_bit(
    B: int | None, dtype: torch.dtype, backend: str
) -> None:
    layer = build(5, 42, 6, dtype, backend=backend)
    cell = RigLSTMCell(5, 42, num_cells=6, dtype=dtype, backend=backend)
    cell.layer.load_state_dict(layer.state_dict())
    shape = (4, 5) if B is None else (4, B, 5)
    x, hx = numbers(*shape, dtype=dtype), state(layer, B)
    y, (h_n, c_n) = layer(x, hx)
    h, c = hx[0][0], hx[1][0]
    for t in range(4):
        h, c = cell(x[t], (h, c))
        assert torch.equal(h, y[t])
    assert torch.equal(h, h_n[0])
    assert torch.equal(c, c_n[0])
    assert torch.equal(cell(x[0])[0], layer(x[:1])[0][0])


def test_cell_has_the_call_of_nn_lstm_cell() -> None:
    cell, theirs = RigLSTMCell(4, 12, False), nn.LSTMCell(4, 12, False)
    for x in (torch.randn(3, 4), torch.randn(4)):
        expected = [v.shape for v in theirs(x)]
        got = cell(x)
        for state in (got, cell(x, got)):
            assert [v.shape for v in state] == expected
    assert (cell.input_size, cell.hidden_size, cell.bias) == (4, 12, False)
    assert all("bias" not in name for name, _ in cell.named_parameters())


def test_state_dict_has_the_names_of_the_docs_and_only_what_a_layer_needs() -> None:
    layer = build(bidirectional=True, num_layers=2, update_bias=0.0)
    names = ("weight_in", "bias_in", "weight_gates", "bias_gates", "weight_query", "update_offset")
    suffixes = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")
    assert list(layer.state_dict()) == [n + s for s in suffixes for n in names]
    shapes = {name: tuple(v.shape) for name, v in layer.state_dict().items()}
    assert shapes["weight_in_l0"] == (4, 12)
    assert shapes["weight_in_l1"] == (24, 12)
    assert shapes["bias_in_l0"] == (12,)
    assert shapes["weight_gates_l0"] == (6, 24, 8)
    assert shapes["bias_gates_l0"] == (6, 8)
    assert shapes["weight_query_l0"] == (22, 2)
    assert shapes["update_offset_l0"] == (6,)
    per_cell = build(query="per_cell").state_dict()
    assert tuple(per_cell["weight_query_l0"].shape) == (6, 22, 2)
    bare = build(bias=False).state_dict()
    assert set(bare) == {"weight_in_l0", "weight_gates_l0", "weight_query_l0"}
    hard = build(12, input_views="split", soft_update=False).state_dict()
    assert set(hard) == {"weight_gates_l0", "bias_gates_l0"}


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        *(({"hidden_size": 2 * n, "num_cells": n}, (n, n, k, k, min(k, n - 1)))
          for n, k in enumerate((1, 1, 2, 3, 3, 4, 5, 5), 1)),
        ({"num_views": 2}, (6, 2, 4, 2, 4)),
        ({"active_cells": 6, "num_views": 8}, (6, 8, 6, 6, 5)),
        ({"active_cells": 1}, (6, 6, 1, 1, 1)),
        # The number of cells fits any usual width.
        *(({"hidden_size": width, "num_cells": None}, (n, n, k, k, k))
          for n, k, widths in (
              (6, 4, (6, 60, 600)), (8, 5, (32, 64, 128, 256, 512, 1024)), (5, 3, (100, 1000)),
              (4, 3, (8,)), (2, 1, (4, 22)), (7, 5, (14,)), (13, 9, (169,)))
          for width in widths),
    ],
)  # fmt: skip
def test_two_thirds_of_the_cells_wake_by_default_and_counts_follow_them_up_to_their_caps(
    options: dict[str, int], counts: tuple[int, ...]
) -> None:
    sizes = {"hidden_size": 12, "num_cells": 6, **options}
    layer = build(**sizes)
    sel = layer.selection
    assert (layer.num_cells, layer.num_views, sel.K_a, sel.K_x, sel.K_h) == counts
    assert layer.cell_size * layer.num_cells == sizes["hidden_size"]


def update_of(layer: RigLSTM) -> tuple[bool, float, float | None]:
    """What the soft update is, in numbers, after a look at the parameter that has to be there."""
    start = layer.update_bias
    bias = getattr(layer, "update_offset_l0")  # noqa: B009
    assert bias is None if start is None else (bias == start).all()
    return layer.soft_update, layer.selection.update_scale, start


@pytest.mark.parametrize(("N", "d"), [(6, 100), (6, 2), (4, 16), (5, 50), (3, 7), (6, 1)])
def test_the_default_soft_update_has_a_scale_of_one_by_d_and_a_bias_of_four(N: int, d: int) -> None:
    assert update_of(build(4, N * d, N)) == (True, 1 / d, 4.0)


def test_repr_shows_sizes_backend_and_every_option_that_is_not_the_default() -> None:
    assert repr(RigLSTM(4, 12)) == (
        "RigLSTM(4, 12, num_cells=6, num_views=6, active_cells=4, views_per_cell=4, "
        "peers_per_cell=4, backend='auto' -> 'batched')"
    )
    layer = RigLSTM(
        *(10, 20, 2, False, True, 0.5, True),
        **{"num_cells": 4, "num_views": 2, "active_cells": 1},
        **{"views_per_cell": 2, "peers_per_cell": 3},
        **{"cells": "random", "views": "soft", "peers": "all", "query": "per_cell"},
        **{"update_scale": 3.0, "update_bias": -1.0, "backend": "reference"},
    )
    assert repr(layer) == (
        "RigLSTM(10, 20, num_layers=2, bias=False, batch_first=True, dropout=0.5, "
        "bidirectional=True, num_cells=4, num_views=2, active_cells=1, views_per_cell=2, "
        "peers_per_cell=3, cells='random', views='soft', peers='all', query='per_cell', "
        "update_scale=3.0, update_bias=-1.0, backend='reference')"
    )
    split = repr(
        RigLSTM(12, 12, input_views="split", soft_update=False, forget_bias=1, backend="batched")
    )
    assert "input_views='split', soft_update=False, forget_bias=1.0, backend='batched')" in split


@pytest.mark.parametrize(
    ("given", "update", "said"),
    [
        ({}, (True, 0.5, 4.0), ""),
        ({"update_scale": 0.5, "update_bias": 4}, (True, 0.5, 4.0), ""),
        ({"soft_update": "printed", "update_bias": None}, (True, 1.0, None),
         "soft_update='printed', "),
        ({"update_scale": 1.0, "update_bias": None}, (True, 1.0, None), "soft_update='printed', "),
        ({"update_scale": 0.1}, (True, 0.1, 4.0), "update_scale=0.1, "),
        ({"update_scale": 1}, (True, 1.0, 4.0), "update_scale=1.0, "),
        ({"update_bias": None}, (True, 0.5, None), "update_bias=None, "),
        ({"update_bias": -1.0}, (True, 0.5, -1.0), "update_bias=-1.0, "),
        ({"update_scale": 1.0, "update_bias": 0}, (True, 1.0, 0.0),
         "update_scale=1.0, update_bias=0.0, "),
        ({"soft_update": False, "update_scale": 3, "update_bias": None}, (False, 1.0, None),
         "soft_update=False, "),
    ],
)  # fmt: skip
def test_numbers_of_the_soft_update_that_are_given_count_and_repr_makes_them_again(
    given: dict[str, Any], update: tuple[bool, float, float | None], said: str
) -> None:
    layer = RigLSTM(4, 12, **given, backend="batched")
    assert update_of(layer) == update
    assert repr(layer).endswith(f"peers_per_cell=4, {said}backend='batched')")
    assert update_of(eval(repr(layer))) == update
    bare = RigLSTM(4, 12, bias=False, **given, backend="batched")
    assert update_of(bare) == (update if "update_bias" in given else (*update[:2], None))
    assert update_of(eval(repr(bare))) == update_of(bare)


@both_backends
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_trace_has_an_entry_for_each_row_of_the_state(
    options: dict[str, Any], backend: str
) -> None:
    layer = build(backend=backend, num_views=5, **options)
    x, hx = numbers(7, 3, 4), state(layer, 3)
    traces = layer.trace(x, hx)
    y, (h_n, _) = layer(x, hx)
    assert [(t.layer, t.reverse) for t in traces] == [
        (k, r) for k in range(layer.num_layers) for r in (False, True)[: 1 + layer.bidirectional]
    ]
    for row, trace in enumerate(traces):
        close(trace.output[0 if trace.reverse else -1], h_n[row])
        assert trace.active.shape == (7, 3, 6)
    top = [t.output for t in traces if t.layer == layer.num_layers - 1]
    close(torch.cat(top, dim=2), y)


def test_trace_follows_the_order_of_a_packed_batch_and_keeps_no_graph() -> None:
    layer = build()
    pieces = [numbers(n, 4, seed=n).requires_grad_() for n in LENGTHS]
    x, hx = pack_sequence(pieces, enforce_sorted=False), state(layer, 4)
    (trace,) = layer.trace(x, hx)
    assert not any(v.requires_grad for v in trace if isinstance(v, Tensor))
    y, lengths = pad_packed_sequence(layer(x, hx)[0])
    for b, n in enumerate(lengths.tolist()):
        close(trace.output[:n, b], y[:n, b])
        assert not trace.active[n:, b].any()


def lstm_in_papers_notation(lstm: nn.LSTM, N: int, K: int) -> dict[str, Tensor]:
    """nn.LSTM's gates i, f, g, o, cut into N cells, in the order f, i, o, g."""
    d = lstm.hidden_size // N
    order = [1, 0, 3, 2]

    def cut(v: Tensor) -> Tensor:
        return v.detach().unflatten(0, (4, N, d))[order].transpose(0, 1)  # (N, 4, d, …)

    W = torch.cat((cut(lstm.weight_ih_l0), cut(lstm.weight_hh_l0)), dim=-1)
    paper = {"W_gates": W, "b_gates": cut(lstm.bias_ih_l0) + cut(lstm.bias_hh_l0)}
    identity = torch.eye(K * d, dtype=torch.float64).view(K, d, K * d)
    return paper | {"W_in": identity, "b_in": torch.zeros(K, d, dtype=torch.float64)}


@both_backends
@pytest.mark.parametrize("input_views", ["linear", "split"])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (3, 3), (3, 2), (2, 5)])
def test_without_selection_and_soft_update_the_layer_is_nn_lstm(
    N: int, K: int, input_views: Any, backend: str
) -> None:
    """With one cell and one view the default rules select nothing away, so they stay."""
    d = 5
    torch.manual_seed(0)
    theirs = nn.LSTM(K * d, N * d, dtype=torch.float64)
    rules: dict[str, Any] = {} if N == K == 1 else {"cells": "all", "views": "all", "peers": "all"}
    ours = build(
        *(K * d, N * d, N),
        num_views=K,
        input_views=input_views,
        soft_update=False,
        backend=backend,
        **rules,
    )
    paper = lstm_in_papers_notation(theirs, N, K)
    if input_views == "split":
        del paper["W_in"], paper["b_in"]
    ours.load_paper_parameters(paper)
    x, hx = numbers(9, 4, K * d).requires_grad_(), state(ours, 4)
    got, expected = ours(x, hx), theirs(x, hx)
    close(got[0], expected[0])
    close(got[1], expected[1])
    weigh = numbers(9, 4, N * d, seed=5)
    close(
        *(torch.autograd.grad((y * weigh).sum() + c.sum(), x)[0] for y, (_, c) in (got, expected)),
        atol=1e-11,
    )


@both_backends
@pytest.mark.parametrize("bidirectional", [False, True])
def test_mask_and_reset_equal_the_live_steps_run_in_pieces(
    bidirectional: bool, backend: str
) -> None:
    """Leading, inner and trailing steps left out; resets on live steps and on ones left out."""
    layer = build(backend=backend, bidirectional=bidirectional)
    gen = torch.Generator().manual_seed(4)
    for _ in range(20):
        x = torch.randn(7, 1, 4, generator=gen, dtype=torch.float64)
        mask = torch.rand(7, 1, generator=gen) < 0.6
        reset = torch.rand(7, 1, generator=gen) < 0.4
        if not mask.any():
            continue
        hx = state(layer, 1)
        y, final = layer(x, hx, reset=reset, mask=mask)
        pending, starts = False, []
        for live, start in zip(mask[:, 0].tolist(), reset[:, 0].tolist(), strict=True):
            pending = pending or start
            if live:
                starts.append(pending)
                pending = False
        alone, expected = layer(x[mask[:, 0]], hx, reset=torch.tensor(starts).unsqueeze(1))
        close(y[mask[:, 0]], alone)
        close(final, expected)


def test_under_autocast_a_rounded_state_is_accepted() -> None:
    layer = build(dtype=torch.float32)
    hx = tuple(s.to(torch.bfloat16) for s in state(layer, 3))
    with torch.autocast("cpu", torch.bfloat16):
        y, (h_n, c_n) = layer(numbers(5, 3, 4, dtype=torch.float32), (hx[0], hx[1]))
    assert y.dtype == h_n.dtype == c_n.dtype == torch.float32


@pytest.mark.parametrize("hidden_size", [2, 7, 13, 61, 289])
def test_a_width_that_no_number_of_cells_divides_is_refused(hidden_size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of num_cells = 6, got {hidden_size}; take"):
        RigLSTM(20, hidden_size)


def test_a_first_call_is_quick_and_reads_no_compiler() -> None:
    code = """
import sys, time, torch, riglstm
rnn, x = riglstm.RigLSTM(20, 60), torch.randn(100, 32, 20)
start = time.perf_counter()
rnn(x)[0].sum().backward()
print(time.perf_counter() - start)
print(*({"torch._dynamo", "torch._inductor", "sympy"} & {*sys.modules}))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, read = said.stdout.split("\n")[:2]
    assert read == ""
    assert float(seconds) < 1, "0.1 s on an idle machine"


def test_functions_are_constant_to_compilers_as_torch_marks_them() -> None:
    @torch.compiler.assume_constant_result
    def marked() -> None: ...

    assert vars(marked) == vars(checks.constant_to_compilers(lambda: None))
