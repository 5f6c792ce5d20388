"""Every message about a wrong call: expected, got, the way out, and all that before any work.

Those about the paper's parameters are in test_paper_parameters.py.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import riglstm
from riglstm import BackendError, RigLSTM, RigLSTMCell
from riglstm.scan import _no_triton, scan
from riglstm.selection import Selection

OTHERS = (
    *("test_paper_parameters.py", "test_start_values.py", "test_deploy.py"),
    *("test_ecosystem_torch.py", "test_graphs.py"),
)
MODULES = ("checks", "inputs", "layer", "parameters", "scan/__init__")


def raises(message: str, error: type[Exception] = ValueError) -> Any:
    """The whole message, word for word."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


fail = Mock(side_effect=AssertionError("work began before the checks were over"))


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that reaches the scan, or a trace that starts, fails the test."""
    monkeypatch.setattr("riglstm.layer.scan", fail)
    monkeypatch.setattr("riglstm.layer.reference.trace", fail)


def build(**options: Any) -> RigLSTM:
    return RigLSTM(4, 6, num_cells=3, **options)


def small_cell() -> RigLSTMCell:
    return RigLSTMCell(4, 6, num_cells=3)


def one_of(name: str, value: object, choices: str) -> tuple[dict[str, Any], str]:
    return {name: value}, f"{name} must be one of {choices}, got {value!r}"


SIZES = ("input_size", "hidden_size", "num_layers", "num_cells", "num_views")
NO_SIZES: tuple[object, ...] = (0, -2, 6.0, "6", True)
COUNTS: dict[str, tuple[str, tuple[object, ...]]] = {
    "active_cells": ("[1, num_cells] = [1, 3]", (0, 4, -1, 2.0, True, "2")),
    "views_per_cell": ("[1, num_views] = [1, 3]", (0, 4, -1, 2.0, True)),
    "peers_per_cell": ("[0, num_cells - 1] = [0, 2]", (-1, 3, 2.0, False)),
}
WRONG_OPTIONS = [
    *(({name: v}, f"{name} must be a whole number of at least 1, got {v!r}")
      for name in SIZES for v in NO_SIZES),
    *(({name: v}, f"{name} must be a whole number in {bounds}, got {v!r}")
      for name, (bounds, values) in COUNTS.items() for v in values),
    ({"num_views": 2, "views_per_cell": 3},
     "views_per_cell must be a whole number in [1, num_views] = [1, 2], got 3"),
    *(one_of("cells", v, "top, all, random") for v in ("soft", "Top", None, 3)),
    *(one_of(name, v, "top, all, random, soft") for name in ("views", "peers")
      for v in ("best", None)),
    one_of("input_views", "cut", "linear, split"),
    one_of("query", "own", "shared, per_cell"),
    ({"hidden_size": 7},
     "hidden_size must be a multiple of num_cells = 3, got 7; take hidden_size=6 or 9, "
     "or another num_cells, 1 say"),
    ({"hidden_size": 64, "num_cells": 6},
     "hidden_size must be a multiple of num_cells = 6, got 64; take hidden_size=60 or 66, "
     "or another num_cells, 4 say"),
    ({"hidden_size": 2},
     "hidden_size must be a multiple of num_cells = 3, got 2; take hidden_size=3, "
     "or another num_cells, 2 say"),
    *(({"dropout": v, "num_layers": 2}, f"dropout must be a probability in [0, 1], got {v!r}")
      for v in (-0.1, 1.5, True, float("nan"), "0.5", None)),
    *(({name: v}, f"{name} must be True or False, got {v!r}")
      for name in ("bidirectional", "bias", "batch_first") for v in (2, None, "no")),
    *(({"soft_update": v}, f"soft_update must be True, False or 'printed', got {v!r}")
      for v in ("no", 1)),
    *(({"update_scale": v}, f"update_scale must be a finite number or 'auto', got {v!r}")
      for v in ("a", None, True, float("nan"))),
    *(({"update_bias": v}, f"update_bias must be a finite number, None or 'auto', got {v!r}")
      for v in ("a", float("nan"))),
    ({"forget_bias": "a"}, "forget_bias must be a finite number, got 'a'"),
    *(({"dtype": v}, f"dtype must be a floating dtype, got {v}; use one of torch.float32, "
       "torch.bfloat16, torch.float16, torch.float64") for v in (torch.int64, torch.complex64)),
    ({"update_bias": 1.0, "soft_update": False},
     "update_bias must be None without the soft update, got 1.0; use soft_update=True"),
    *(({"soft_update": "printed", name: v},
       f"{name} must be 'auto' with soft_update='printed', which has the paper's, got {v}; "
       "use soft_update=True")
      for name, v in (("update_scale", 0.5), ("update_scale", 1.0), ("update_bias", 4.0))),
    *(({"proj_size": v},
       f"proj_size must be 0, got {v!r}: the layer has no projection; put "
       "nn.Linear(hidden_size, proj_size) behind it") for v in (3, None)),
    *(({"steady_start": True, **given},
       "steady_start must be False without input_views='linear', bias=True, cells='top' and "
       "two views or more, got True; leave it out")
      for given in ({"num_views": 1}, {"bias": False}, {"cells": "all"},
                    {"input_views": "split", "input_size": 6})),
    ({"forget_bias": 1.0, "bias": False},
     "forget_bias must be 0 where the gates have no bias, got 1.0; use bias=True"),
    ({"input_views": "split"},
     "input_views='split' cuts the input of layer 0 into num_views pieces of the cell size: "
     "expected 3 x 2 = 6 features, got 4; choose other sizes, or use input_views='linear'"),
    ({"num_views": 2, "input_views": "split", "num_layers": 2, "bidirectional": True},
     "input_views='split' cuts the input of layer 1 into num_views pieces of the cell size: "
     "expected 2 x 2 = 4 features, got 12; choose other sizes, or use input_views='linear'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_named_before_any_weight_is_made(options, message, monkeypatch):
    monkeypatch.setattr(torch, "empty", fail)
    with raises(message):
        RigLSTM(**{"input_size": 4, "hidden_size": 6, "num_cells": 3} | options)


def test_dropout_without_layers_between_warns_where_it_was_asked_for():
    message = re.escape(
        "dropout acts between layers: expected num_layers of at least 2, got 1, so dropout=0.5 "
        "does nothing; use nn.Dropout on the output instead"
    )
    with pytest.warns(UserWarning, match=f"^{message}$") as seen:
        build(dropout=0.5)
    assert seen[0].filename == __file__


def test_triton_says_what_it_misses_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _no_triton.cache_clear()
    with pytest.raises(BackendError) as caught:
        build(backend="triton", device="cpu")
    _no_triton.cache_clear()
    needs = "a CUDA device, got 'cpu'" if find_spec("triton") else ""
    assert str(caught.value).startswith(f"backend='triton' needs {needs}")
    assert str(caught.value).endswith("; use backend='batched' or 'auto'")


def assert_refused(backend: Any, message: str) -> None:
    """By the layer, and by the scan below it."""
    state, rules = torch.zeros(1, 3, 2), Selection(3, 3, 2, 2, 2)
    with raises(message, BackendError):
        build(backend=backend)
    with raises(message, BackendError):
        scan(torch.zeros(2, 1, 4), state, state, build().weights(), rules, backend=backend)


@pytest.mark.parametrize("backend", ["cuda", "Batched", "", None, 3, ["auto"]])
def test_unknown_backends_are_named(backend):
    known = "auto, reference, batched, compiled, triton"
    assert_refused(backend, f"backend must be one of {known}, got {backend!r}")


def test_compiled_backend_without_a_compiler_raises_and_never_falls_back(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    assert_refused(
        "compiled",
        "backend='compiled' needs torch.compile, for a CPU with a C++ compiler on the PATH, for a "
        "GPU from sm_70 on with Triton, got neither; install g++ or clang++, or use "
        "backend='batched' or 'auto'",
    )


def packed_zeros(features: int = 4, dtype: torch.dtype = torch.float32) -> PackedSequence:
    return pack_sequence([torch.zeros(n, features, dtype=dtype) for n in (2, 5)], False)


RANK = (
    "the input must be a sequence (T, D) or a batch {}, got {} dimensions: {}; "
    "add or merge some with reshape"
)
FEATURES = (
    "the input's last dimension must be input_size = 4, got an input of shape {}; "
    "features come last, as many as the layer is built for"
)
STEPS = (
    "the input must have at least one step, got an input of shape {}; "
    "leave sequences without steps out"
)
DEVICE = "the input must be on the layer's device {}, got {}; move one of them with .to(device)"
DTYPE = (
    "the input must have the layer's dtype torch.float32, got {}; "
    "convert one of them with .to(dtype), or run under torch.autocast"
)
PAIR = "hx must be a pair (h_0, c_0), got {}; leave it out to start from zero"
FLAGS = (
    "{} must have the input's shape without features, {}, got {}; "
    "give one flag for every step of every sequence"
)
OTHER_DTYPES = (torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64)
FIRST = {"batch_first": True}
X, H = torch.zeros(5, 2, 4), torch.zeros(1, 2, 6)


def flags(*shape: int, dtype: torch.dtype = torch.bool, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


WRONG_CALLS: list[tuple[dict[str, Any], Any, dict[str, Any], str]] = [
    *((options, torch.zeros(shape), {}, RANK.format(form, len(shape), shape))
      for options, form in (({}, "(T, B, D)"), (FIRST, "(B, T, D)"))
      for shape in ((), (4,), (1, 2, 3, 4))),
    *((options, torch.zeros(shape), {}, FEATURES.format(shape))
      for options, shape in (({}, (5, 2, 0)), ({}, (5, 2, 3)), ({}, (5, 2, 5)), ({}, (5, 3)),
                             (FIRST, (2, 5, 3)), (FIRST, (5, 3)))),
    ({}, packed_zeros(3), {}, FEATURES.format((7, 3))),
    *((options, torch.zeros(shape), {}, STEPS.format(shape))
      for options, shape in (({}, (0, 0, 4)), ({}, (0, 2, 4)), (FIRST, (2, 0, 4)), ({}, (0, 4)))),
    ({}, X.to("meta"), {}, DEVICE.format("cpu", "meta")),
    ({"device": "meta"}, X, {}, DEVICE.format("meta", "cpu")),
    *(({}, x, {}, DTYPE.format(dtype)) for dtype in OTHER_DTYPES
      for x in (X.to(dtype), packed_zeros(dtype=dtype))),
    *(({}, X, {"hx": hx}, PAIR.format(got)) for hx, got in (
        (torch.zeros(2, 1, 2, 6), "Tensor"), ((H,), "tuple"), ((H, H, H), "tuple"), ([], "list"),
        ({"h": H, "c": H}, "dict"), (0.0, "float"))),
    *(({}, X, {name: flags(5, 2, dtype=dtype)},
       f"{name} must be torch.bool, got {dtype}; use {name}.bool()")
      for name in ("reset", "mask") for dtype in (torch.float32, torch.int64, torch.uint8)),
    *(({}, torch.zeros(x), {name: flags(*got)}, FLAGS.format(name, x[:-1], got))
      for name in ("reset", "mask")
      for x, wrong in (((5, 2, 4), [(2, 5), (5,), (5, 2, 1), (1, 2), (5, 1)]),
                       ((5, 4), [(4,), (5, 1), (1, 5), ()]))
      for got in wrong),
    (FIRST, torch.zeros(2, 5, 4), {"reset": flags(5, 2)}, FLAGS.format("reset", (2, 5), (5, 2))),
    ({}, packed_zeros(), {"reset": flags(2, 5)}, FLAGS.format("reset", (5, 2), (2, 5))),
    (FIRST, packed_zeros(), {"reset": flags(5, 2)}, FLAGS.format("reset", (2, 5), (5, 2))),
    *(({}, X, {name: flags(5, 2, device="meta")},
       f"{name} must be on the input's device cpu, got meta; use {name}.to('cpu')")
      for name in ("reset", "mask")),
    ({}, packed_zeros(), {"mask": flags(5, 2)},
     "mask must be None with a PackedSequence, which has its own lengths, got a mask; "
     "leave it out, or pass padded sequences"),
]  # fmt: skip


@pytest.mark.parametrize("way", ["forward", "trace"])
@pytest.mark.parametrize(("options", "x", "given", "message"), WRONG_CALLS)
def test_wrong_calls_are_named(options, x, given, message, way):
    layer = build(**options)
    with raises(message):
        (layer if way == "forward" else layer.trace)(x, **given)


FORMS: dict[str, tuple[Tensor | PackedSequence, tuple[int, ...]]] = {
    "batched": (torch.zeros(5, 2, 4), (2, 2, 6)),
    "unbatched": (torch.zeros(5, 4), (2, 6)),
    "packed": (packed_zeros(), (2, 2, 6)),
}
"""Inputs of a bidirectional layer, and the shape of the states that fit them."""


@pytest.mark.parametrize("which", ["h_0", "c_0"])
@pytest.mark.parametrize("form", FORMS)
def test_wrong_states_are_named(form, which):
    x, shape = FORMS[form]
    rows, *batch, _ = shape
    names = "" if form == "unbatched" else ", batch"
    other_shapes = [(rows + 1, *batch, 6), (*shape[:-1], 5), shape[1:], (1, *shape)]
    other_shapes.append((*shape[:-2], shape[-2] + 1, 6))
    wrong = {
        f"{which} must have shape {shape} = (num_layers * directions{names}, hidden_size), "
        f"got {got}; leave hx out to start from zero": torch.zeros(got)
        for got in other_shapes
    }
    for dtype, device in ((torch.float64, "cpu"), (torch.int64, "cpu"), (torch.float32, "meta")):
        wrong[
            f"{which} must be torch.float32 on cpu like the layer, got {dtype} on {device}; "
            f"use {which}.to('cpu', torch.float32)"
        ] = torch.zeros(shape, dtype=dtype, device=device)
    for message, state in wrong.items():
        states = (state, torch.zeros(shape)) if which == "h_0" else (torch.zeros(shape), state)
        with raises(message):
            build(bidirectional=True)(x, states)


def words(node: ast.AST) -> list[str]:
    """The fixed parts of a text, f-string or not."""
    return [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def test_every_message_has_a_test():
    """The longest fixed part of each message stands in a text of these tests."""
    here = Path(__file__)
    texts = "\n".join(
        text
        for file in (here, *map(here.with_name, OTHERS))
        for text in words(ast.parse(file.read_text()))
    )
    package = Path(riglstm.__file__).parent
    missing = []
    for module in MODULES:
        for node in ast.walk(ast.parse((package / f"{module}.py").read_text())):
            said = isinstance(node, ast.Raise) or (
                isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
            )
            if said and (parts := words(node)):
                longest = max(parts, key=len)
                if longest.strip() not in texts:
                    missing.append(f"{module}: {longest}")
    assert not missing


def paper(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in build().paper_parameters().items()}


INPUT = "the input must be a Tensor or a PackedSequence, got {}; use torch.as_tensor"
BOTH = "{} must be a Tensor, got None; leave hx out to start from zero, or give both"
LONE, CELL_PAIR = "the input must be a Tensor, got ", "hx must be a pair (h_0, c_0), got "
STEP = "the input must be one step (D) or a batch of them (B, D), got {} dimensions: {}"
CELL_STATE = "h_0 must have shape {}, got {}; leave hx out"
ONE, TWO = "(6,) = (hidden_size)", "(2, 6) = (batch, hidden_size)"


def cell_state(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape), torch.zeros(shape)


WRONG_KINDS: list[tuple[Callable[[], Any], str]] = [
    *((lambda size=size: RigLSTM(20, size), f"multiple of num_cells = 6, got {size}; take")
      for size in (2, 7, 13, 61, 289)),
    (lambda: build()(X.numpy()), INPUT.format("ndarray")),
    (lambda: build()([[0.0] * 4]), INPUT.format("list")),
    (lambda: build()(None), INPUT.format("NoneType")),
    (lambda: small_cell()(X[0].numpy()), LONE + "ndarray"),
    (lambda: small_cell()(pack_sequence([X[:, 0]])), LONE + "PackedSequence"),
    (lambda: build()(X, (H, None)), BOTH.format("c_0")),
    (lambda: build()(X, (H.numpy(), H)), "h_0 must be a Tensor, got ndarray"),
    (lambda: small_cell()(X[0], (None, None)), BOTH.format("h_0")),
    (lambda: small_cell()(X[0], H[0]), CELL_PAIR + "Tensor"),
    (lambda: small_cell()(X[0], (H[0],)), CELL_PAIR + "tuple"),
    (lambda: small_cell()(X[0], (H[0], H[0], H[0])), CELL_PAIR + "tuple"),
    (lambda: small_cell()(torch.zeros(())), STEP.format(0, ())),
    (lambda: small_cell()(X), STEP.format(3, (5, 2, 4))),
    (lambda: small_cell()(torch.zeros(3)), FEATURES.format((3,))),
    (lambda: small_cell()(torch.zeros(2, 3)), FEATURES.format((2, 3))),
    (lambda: small_cell()(X[0, 0], cell_state(5)), CELL_STATE.format(ONE, (5,))),
    (lambda: small_cell()(X[0], cell_state(3, 6)), CELL_STATE.format(TWO, (3, 6))),
    (lambda: small_cell()(X[0], cell_state(6)), CELL_STATE.format(TWO, (6,))),
    *((lambda option=option: RigLSTMCell(4, 6, num_cells=3, **{option: 1}),
       f"{option} is not an option of a single step; use RigLSTM")
      for option in ("num_layers", "batch_first", "dropout", "bidirectional")),
    (lambda: build()(X, reset=[[True] * 2] * 5), "reset must be a bool Tensor, got list"),
    (lambda: build()(X, mask=np.ones((5, 2), bool)), "mask must be a bool Tensor, got ndarray"),
    (lambda: build()(pack_padded_sequence(torch.zeros(5, 2, 3, 4), [5, 2])),
     "a packed sequence must hold data of 2 dimensions (steps, D), got 3: (7, 3, 4)"),
    (lambda: build().load_paper_parameters(paper(Tensor.numpy)),
     "W_gates must be a Tensor, got ndarray; use torch.as_tensor"),
    (lambda: build().load_paper_parameters(paper(lambda v: v.to("meta"))),
     "W_gates must hold real numbers, got torch.float32 on meta"),
    (lambda: build().load_paper_parameters(None), "the paper's parameters"),
    (lambda: build()(X.to_sparse()),
     "the input must be dense, got torch.sparse_coo; use .to_dense()"),
    (lambda: torch.autocast("cpu", torch.bfloat16)(build())(X.long()), DTYPE.format(torch.int64)),
    (lambda: build().weights(1), "layer must be a whole number in [0, num_layers - 1] = [0, 0]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG_KINDS, ids=[m for _, m in WRONG_KINDS])
def test_wrong_kind_of_thing_is_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
