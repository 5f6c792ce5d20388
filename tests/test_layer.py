"""`RigLSTM` and `RigLSTMCell` behind the call of `nn.LSTM` and `nn.LSTMCell`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from helpers import close, eager_backends, numbers, python
from riglstm import RigLSTM, RigLSTMCell, checks

State = tuple[Tensor, Tensor]
LENGTHS = (3, 6, 1, 4)
"""Of the sequences in a packed batch; not sorted."""


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


def part(layer: RigLSTM, suffix: str) -> Callable[..., tuple[Tensor, State]]:
    """The call of one layer in one direction, as of a layer of its own, with the same weights."""
    weights = {
        name.removesuffix(suffix) + "_l0": value
        for name, value in layer.named_parameters()
        if name.endswith(suffix)
    }
    D = weights["weight_in_l0"].shape[0]
    single = build(D, layer.hidden_size, layer.num_cells, backend=layer.backend)
    return lambda *given: functional_call(single, weights, given)


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
def test_forms_and_shapes_are_those_of_nn_lstm(form, num_layers, bidirectional, with_state):
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


def test_other_frameworks_find_what_they_read():
    layer = RigLSTM(4, 12, 2, False, True, 0.25, True)
    theirs = nn.LSTM(4, 12, 2, False, True, 0.25, True)
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout")
    for name in (*names, "bidirectional", "proj_size"):
        assert getattr(layer, name) == getattr(theirs, name)
    before = copy.deepcopy(layer.state_dict())
    assert layer.flatten_parameters() is None
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert not isinstance(layer, nn.LSTM | nn.RNNBase)


def test_a_list_serves_as_the_pair_of_states_and_none_as_zeros():
    layer = build(num_layers=2, bidirectional=True)
    x, hx, zero = numbers(3, 2, 4), state(layer, 2), torch.zeros(4, 2, 12, dtype=torch.float64)
    assert torch.equal(layer(x, list(hx))[0], layer(x, hx)[0])
    assert torch.equal(layer(x)[0], layer(x, (zero, zero))[0])


@eager_backends
def test_a_call_changes_neither_input_nor_state(backend):
    layer = build(backend=backend, num_layers=2)
    x, (h, c), reset = numbers(3, 2, 4), state(layer, 2), torch.ones(3, 2, dtype=torch.bool)
    kept = [v.clone() for v in (x, h, c, reset)]
    layer(x, (h, c), reset=reset)
    assert all(map(torch.equal, (x, h, c, reset), kept))


def test_dropout_acts_between_layers_in_training_alone_and_follows_the_seed():
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


def one_by_one(
    layer: RigLSTM, x: Tensor, hx: State, reset: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a call is to give for one sequence (T, D): y, h_n, c_n; y is zero where left out.

    Layer by layer and direction by direction, of the steps that are not left out one at a time. A
    reset starts a piece at the next such step; pieces are run from a state of zero, but for the
    one at which a direction enters the sequence.
    """
    steps, starts, waits = mask.nonzero().flatten().tolist(), set[int](), False
    for t in range(len(x)):
        waits |= bool(reset[t])
        if waits and mask[t]:
            starts.add(t)
            waits = False
    finals: list[State] = []
    for k in range(layer.num_layers):
        outputs = []
        for reverse in (False, True)[: 1 + layer.bidirectional]:
            single = part(layer, f"_l{k}" + "_reverse" * reverse)
            h, c = (s[len(finals) :][:1] for s in hx)
            y, anew = [x.new_zeros(1, layer.hidden_size)] * len(x), False
            for t in steps[::-1] if reverse else steps:
                if anew if reverse else t in starts:
                    h, c = torch.zeros_like(h), torch.zeros_like(c)
                y[t], (h, c) = single(x[t : t + 1], (h, c))
                anew = t in starts
            outputs.append(torch.cat(y))
            finals.append((h, c))
        x = torch.cat(outputs, dim=1)
    return x, *(torch.cat(s) for s in zip(*finals, strict=True))


def called(
    layer: RigLSTM, form: str, x: Tensor, hx: State, reset: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A call with sequences (T, B, D) in one of the forms of input: y, h_n, c_n."""

    def turned(v: Tensor) -> Tensor:
        return v.transpose(0, 1) if layer.batch_first else v

    if form == "unbatched":
        masks = [None] * x.shape[1] if mask is None else mask.unbind(1)
        alone = [
            layer(x[:, b], (hx[0][:, b], hx[1][:, b]), reset=reset[:, b], mask=one)
            for b, one in enumerate(masks)
        ]
        y, h, c = (torch.stack(v, 1) for v in zip(*((y, *s) for y, s in alone), strict=True))
        return y, h, c
    if form == "padded":
        given = None if mask is None else turned(mask)
        y, (h, c) = layer(turned(x), hx, reset=turned(reset), mask=given)
        return turned(y), h, c
    assert mask is not None
    pieces = [x[:n, b] for b, n in enumerate(mask.sum(0).tolist())]
    packed = pack_sequence(pieces, enforce_sorted=form == "packed")
    out, (h, c) = layer(packed, hx, reset=turned(reset))
    return pad_packed_sequence(out)[0], h, c


@eager_backends
@pytest.mark.parametrize("form", ["padded", "unbatched", "packed", "packed_unsorted"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_a_call_is_that_of_each_sequence_and_direction_alone_in_its_pieces(options, form, backend):
    """Packed, masked and reset, in outputs and gradients, whatever stands where it is left out."""
    gen = torch.Generator().manual_seed(4)
    for left_out in (None, 0.0, float("nan"), float("inf")):
        layer = build(backend=backend, batch_first=left_out == 0, **options)
        x, hx = torch.randn(6, 4, 4, generator=gen, dtype=torch.float64), state(layer, 4)
        reset, mask = (torch.rand(6, 4, generator=gen) < share for share in (0.4, 0.6))
        mask[:, 3] = False
        if form.startswith("packed"):
            lengths = sorted(LENGTHS, reverse=True) if form == "packed" else LENGTHS
            mask = torch.arange(6).unsqueeze(1) < torch.tensor(lengths)
        elif left_out is None:
            mask[:] = True
        else:
            x[~mask] = left_out
        leaves = [v.requires_grad_() for v in (x, *hx)]
        alone = [
            one_by_one(layer, x[:, b], (hx[0][:, b], hx[1][:, b]), reset[:, b], mask[:, b])
            for b in range(4)
        ]
        want = [torch.stack(v, 1) for v in zip(*alone, strict=True)]
        got, grads = called(layer, form, x, hx, reset, None if mask.all() else mask), []
        for y, *final in (got, want):
            weigh = numbers(*y.shape, seed=9)
            loss = (y * weigh)[mask].sum() + sum((s * s).sum() for s in final)
            grads.append(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))
        close((got[0][mask], *got[1:]), (want[0][mask], *want[1:]))
        close(*grads, atol=1e-11)


BIT_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_layers": 2, "query": "per_cell", "update_bias": 0.5, "update_scale": 2.0},
    {"cells": "all", "views": "soft", "peers": "soft", "bias": False},
    {"cells": "all", "views": "all", "peers": "all"},
)


@eager_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [1, 3, 64])
@pytest.mark.parametrize("options", BIT_OPTIONS)
def test_pieces_with_carried_state_equal_one_run_bit_for_bit(options, B, dtype, backend):
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


@eager_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [None, 1, 3, 64])
def test_cell_steps_equal_the_layer_bit_for_bit(B, dtype, backend):
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


def test_cell_has_the_call_of_nn_lstm_cell():
    cell, theirs = RigLSTMCell(4, 12, False), nn.LSTMCell(4, 12, False)
    for x in (torch.randn(3, 4), torch.randn(4)):
        expected = [v.shape for v in theirs(x)]
        got = cell(x)
        for state in (got, cell(x, got)):
            assert [v.shape for v in state] == expected
    assert (cell.input_size, cell.hidden_size, cell.bias) == (4, 12, False)
    assert all("bias" not in name for name, _ in cell.named_parameters())


def test_state_dict_has_the_names_of_the_docs_and_only_what_a_layer_needs():
    layer = build(bidirectional=True, num_layers=2, update_bias=0.0)
    names = ("weight_in", "bias_in", "weight_gates", "bias_gates", "weight_query", "update_offset")
    suffixes = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")
    assert list(layer.state_dict()) == [n + s for s in suffixes for n in names]
    shapes = [tuple(v.shape) for v in layer.state_dict().values()]
    assert shapes[:6] == [(4, 12), (12,), (6, 24, 8), (6, 8), (22, 2), (6,)]
    assert shapes[12:18] == [(24, 12), *shapes[1:6]]
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
    options, counts
):
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
def test_the_default_soft_update_has_a_scale_of_one_by_d_and_a_bias_of_four(N, d):
    assert update_of(build(4, N * d, N)) == (True, 1 / d, 4.0)


def test_repr_shows_sizes_backend_and_every_option_that_is_not_the_default():
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
    given, update, said
):
    layer = RigLSTM(4, 12, **given, backend="batched")
    assert update_of(layer) == update
    assert repr(layer).endswith(f"peers_per_cell=4, {said}backend='batched')")
    assert update_of(eval(repr(layer))) == update
    bare = RigLSTM(4, 12, bias=False, **given, backend="batched")
    assert update_of(bare) == (update if "update_bias" in given else (*update[:2], None))
    assert update_of(eval(repr(bare))) == update_of(bare)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_trace_has_an_entry_for_each_row_of_the_state_in_the_order_of_the_input(options):
    layer = build(num_views=5, **options)
    pieces = [numbers(n, 4, seed=n).requires_grad_() for n in LENGTHS]
    x, hx = pack_sequence(pieces, enforce_sorted=False), state(layer, 4)
    traces, (out, (h_n, _)) = layer.trace(x, hx), layer(x, hx)
    y, lengths = pad_packed_sequence(out)
    live = torch.arange(6).unsqueeze(1) < lengths
    assert [(t.layer, t.reverse) for t in traces] == [
        (k, r) for k in range(layer.num_layers) for r in (False, True)[: 1 + layer.bidirectional]
    ]
    for row, trace in enumerate(traces):
        last = torch.zeros_like(lengths) if trace.reverse else lengths - 1
        close(trace.output[last, torch.arange(4)], h_n[row])
        assert trace.active.shape == (6, 4, 6)
        assert not trace.active[~live].any()
        assert not any(v.requires_grad for v in trace if isinstance(v, Tensor))
    top = [t.output for t in traces if t.layer == layer.num_layers - 1]
    close(torch.cat(top, dim=2)[live], y[live])


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


@eager_backends
@pytest.mark.parametrize("input_views", ["linear", "split"])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (3, 3), (3, 2), (2, 5)])
def test_without_selection_and_soft_update_the_layer_is_nn_lstm(N, K, input_views, backend):
    """With one cell and one view the default rules select nothing away, so they stay."""
    d = 5
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
    close(got, expected)
    weigh = numbers(9, 4, N * d, seed=5)
    close(
        *(torch.autograd.grad((y * weigh).sum() + c.sum(), x)[0] for y, (_, c) in (got, expected)),
        atol=1e-11,
    )


def test_under_autocast_a_rounded_state_is_accepted():
    layer = build(dtype=torch.float32)
    hx = tuple(s.to(torch.bfloat16) for s in state(layer, 3))
    with torch.autocast("cpu", torch.bfloat16):
        y, (h_n, c_n) = layer(numbers(5, 3, 4, dtype=torch.float32), (hx[0], hx[1]))
    assert y.dtype == h_n.dtype == c_n.dtype == torch.float32


def test_a_first_call_is_quick_and_reads_no_compiler():
    code = """
import sys, time, torch, riglstm
rnn, x = riglstm.RigLSTM(20, 60), torch.randn(100, 32, 20)
start = time.perf_counter()
rnn(x)[0].sum().backward()
print(time.perf_counter() - start)
print(*({"torch._dynamo", "torch._inductor", "sympy"} & {*sys.modules}))
"""
    seconds, read = python("-c", code, check=True).stdout.split("\n")[:2]
    assert read == ""
    assert float(seconds) < 1, "0.1 s on an idle machine"


def test_functions_are_constant_to_compilers_as_torch_marks_them():
    @torch.compiler.assume_constant_result
    def marked() -> None: ...

    assert vars(marked) == vars(checks.constant_to_compilers(lambda: None))
