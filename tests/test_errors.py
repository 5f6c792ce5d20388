"""Every message about a wrong call: expected, got, the way out, and all that before any work.

Those about the paper's parameters are in test_paper_parameters.py.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

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
    "test_ecosystem_torch.py",
)
MODULES = ("checks", "inputs", "layer", "parameters", "scan/__init__")


def raises(message: str, error: type[Exception] = ValueError) -> Any:
    """The whole message, word for word."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that reaches the scan, or a trace that starts, fails the test."""

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("work began before the checks were over")

    monkeypatch.setattr("riglstm.layer.scan", fail)
    monkeypatch.setattr("riglstm.layer.reference.trace", fail)


def build(**options: Any) -> RigLSTM:
    return RigLSTM(4, 6, num_cells=3, **options)


def whole_number(name: str, value: object) -> tuple[dict[str, Any], str]:
    return {name: value}, f"{name} must be a whole number of at least 1, got {value!r}"


def in_range(name: str, value: object, bounds: str) -> tuple[dict[str, Any], str]:
    return {name: value}, f"{name} must be a whole number in {bounds}, got {value!r}"


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
    *(whole_number(name, value) for name in SIZES for value in NO_SIZES),
    *(in_range(name, v, bounds) for name, (bounds, values) in COUNTS.items() for v in values),
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
      for v in (-0.1, 1.5, True, float("nan"))),
    ({"update_bias": 1.0, "soft_update": False},
     "update_bias must be None without the soft update, got 1.0; use soft_update=True"),
    *(({"soft_update": "printed", name: v},
       f"{name} must be 'auto' with soft_update='printed', which has the paper's, got {v}; "
       "use soft_update=True")
      for name, v in (("update_scale", 0.5), ("update_scale", 1.0), ("update_bias", 4.0))),
    *(({"proj_size": v},
       f"proj_size must be 0, got {v!r}: the layer has no projection; put "
       "nn.Linear(hidden_size, proj_size) behind it") for v in (3, None)),
    ({"steady_start": True, "bias": False},
     "steady_start must be False without input_views='linear', bias=True, cells='top' and "
     "two views or more, got True; leave it out"),
    ({"forget_bias": 1.0, "bias": False},
     "forget_bias must be 0 where the gates have no bias, got 1.0; use bias=True"),
    ({"input_views": "split"},
     "input_views='split' cuts the input of layer 0 into num_views pieces of the cell size: "
     "expected 3 x 2 = 6 features, got 4; choose other sizes, or use input_views='linear'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_named_before_any_weight_is_made(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("weights were made before the checks were over")

    monkeypatch.setattr(torch, "empty", fail)
    with raises(message):
        RigLSTM(**{"input_size": 4, "hidden_size": 6, "num_cells": 3} | options)


def test_upper_layers_must_fit_split_views_too() -> None:
    message = (
        "input_views='split' cuts the input of layer 1 into num_views pieces of the cell size: "
        "expected 2 x 2 = 4 features, got 12; choose other sizes, or use input_views='linear'"
    )
    with raises(message):
        build(num_views=2, input_views="split", num_layers=2, bidirectional=True)


def test_dropout_without_layers_between_warns_where_it_was_asked_for() -> None:
    message = re.escape(
        "dropout acts between layers: expected num_layers of at least 2, got 1, so dropout=0.5 "
        "does nothing; use nn.Dropout on the output instead"
    )
    with pytest.warns(UserWarning, match=f"^{message}$") as seen:
        build(dropout=0.5)
    assert seen[0].filename == __file__


def test_triton_says_what_it_misses_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _no_triton.cache_clear()
    with pytest.raises(BackendError) as caught:
        build(backend="triton", device="cpu")
    _no_triton.cache_clear()
    assert str(caught.value).startswith("backend='triton' needs ")
    assert str(caught.value).endswith("; use backend='batched' or 'auto'")


@pytest.mark.parametrize("backend", ["cuda", "Batched", "", None, 3])
def test_unknown_backends_are_named(backend: Any) -> None:
    message = f"backend must be one of auto, reference, batched, compiled, triton, got {backend!r}"
    with raises(message, BackendError):
        build(backend=backend)
    layer = build()
    x, state = torch.zeros(2, 1, 4), torch.zeros(1, 3, 2)
    with raises(message, BackendError):
        scan(x, state, state, layer.weights(), Selection(3, 3, 2, 2, 2), backend=backend)


def test_compiled_backend_without_a_compiler_raises_and_never_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    message = (
        "backend='compiled' needs torch.compile, and for a CPU a C++ compiler on the PATH, "
        "got none; install g++ or clang++, or use backend='batched' or 'auto'"
    )
    with raises(message, BackendError):
        build(backend="compiled")
    layer = build()
    x, state = torch.zeros(2, 1, 4), torch.zeros(1, 3, 2)
    with raises(message, BackendError):
        scan(x, state, state, layer.weights(), Selection(3, 3, 2, 2, 2), backend="compiled")


@pytest.fixture(params=["forward", "trace"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Both ways to run a sequence check it alike."""
    name: str = request.param

    def run(layer: RigLSTM, *args: Any, **kwargs: Any) -> Any:
        return layer(*args, **kwargs) if name == "forward" else layer.trace(*args, **kwargs)

    return run


@pytest.mark.parametrize("shape", [(), (4,), (1, 2, 3, 4)])
def test_wrong_rank_of_the_input(shape: tuple[int, ...], call: Callable[..., Any]) -> None:
    for batch_first, form in ((False, "(T, B, D)"), (True, "(B, T, D)")):
        with raises(
            f"the input must be a sequence (T, D) or a batch {form}, "
            f"got {len(shape)} dimensions: {shape}; add or merge some with reshape"
        ):
            call(build(batch_first=batch_first), torch.zeros(shape))


LAST = "; features come last, as many as the layer is built for"


@pytest.mark.parametrize("features", [0, 3, 5])
def test_wrong_feature_size(features: int, call: Callable[..., Any]) -> None:
    with raises(
        "the input's last dimension must be input_size = 4, "
        f"got an input of shape (5, 2, {features}){LAST}"
    ):
        call(build(), torch.zeros(5, 2, features))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("B", [0, 2])
def test_sequences_without_steps(B: int, batch_first: bool, call: Callable[..., Any]) -> None:
    shape = (B, 0, 4) if batch_first else (0, B, 4)
    with raises(
        f"the input must have at least one step, got an input of shape {shape}; "
        "leave sequences without steps out"
    ):
        call(build(batch_first=batch_first), torch.zeros(shape))


@pytest.mark.parametrize(
    ("batch_first", "shape"), [(False, (5, 3)), (True, (2, 5, 3)), (True, (5, 3))]
)
def test_message_shows_the_shape_as_it_was_given(
    batch_first: bool, shape: tuple[int, ...], call: Callable[..., Any]
) -> None:
    with raises(
        f"the input's last dimension must be input_size = 4, got an input of shape {shape}{LAST}"
    ):
        call(build(batch_first=batch_first), torch.zeros(shape))


def test_empty_sequence_without_a_batch(call: Callable[..., Any]) -> None:
    with raises(
        "the input must have at least one step, got an input of shape (0, 4); "
        "leave sequences without steps out"
    ):
        call(build(), torch.zeros(0, 4))


def test_input_on_another_device(call: Callable[..., Any]) -> None:
    x = torch.zeros(5, 2, 4)
    message = (
        "the input must be on the layer's device {}, got {}; move one of them with .to(device)"
    )
    with raises(message.format("cpu", "meta")):
        call(build(), x.to("meta"))
    with raises(message.format("meta", "cpu")):
        call(build(device="meta"), x)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_input_of_another_dtype(dtype: torch.dtype, packed: bool, call: Callable[..., Any]) -> None:
    x = torch.zeros(5, 2, 4, dtype=dtype)
    with raises(
        f"the input must have the layer's dtype torch.float32, got {dtype}; "
        "convert one of them with .to(dtype), or run under torch.autocast"
    ):
        call(build(), pack_sequence([x[:, 0], x[:2, 1]]) if packed else x)


def test_integers_are_no_input_under_autocast_either() -> None:
    with torch.autocast("cpu", torch.bfloat16), raises(
        "the input must have the layer's dtype torch.float32, got torch.int64; "
        "convert one of them with .to(dtype), or run under torch.autocast"
    ):  # fmt: skip
        build()(torch.zeros(5, 2, 4, dtype=torch.int64))


def packed_zeros(features: int = 4) -> PackedSequence:
    return pack_sequence([torch.zeros(2, features), torch.zeros(5, features)], False)


def test_wrong_feature_size_of_a_packed_sequence(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="last dimension must be input_size = 4, got an input of"):
        call(build(), packed_zeros(3))


FORMS: dict[str, tuple[Tensor | PackedSequence, tuple[int, ...]]] = {
    "batched": (torch.zeros(5, 2, 4), (2, 2, 6)),
    "unbatched": (torch.zeros(5, 4), (2, 6)),
    "packed": (packed_zeros(), (2, 2, 6)),
}
"""Inputs of a bidirectional layer, and the shape of the states that fit them."""


@pytest.mark.parametrize("which", ["h_0", "c_0"])
@pytest.mark.parametrize("form", FORMS)
def test_wrong_shape_of_a_state(form: str, which: str, call: Callable[..., Any]) -> None:
    x, shape = FORMS[form]
    batch = "" if form == "unbatched" else ", batch"
    wrong = [
        (shape[0] + 1, *shape[1:]),
        (*shape[:-1], 5),
        (*shape[:-2], shape[-2] + 1, 6),
        shape[1:],
        (1, *shape),
    ]
    for got in wrong:
        states = [torch.zeros(shape), torch.zeros(shape)]
        states[which == "c_0"] = torch.zeros(got)
        with raises(
            f"{which} must have shape {shape} = (num_layers * directions{batch}, hidden_size), "
            f"got {got}; leave hx out to start from zero"
        ):
            call(build(bidirectional=True), x, tuple(states))


@pytest.mark.parametrize("which", ["h_0", "c_0"])
@pytest.mark.parametrize("form", FORMS)
def test_state_of_another_dtype_or_device(form: str, which: str, call: Callable[..., Any]) -> None:
    x, shape = FORMS[form]
    for got, dtype, device in (
        (torch.zeros(shape, dtype=torch.float64), "torch.float64", "cpu"),
        (torch.zeros(shape, dtype=torch.int64), "torch.int64", "cpu"),
        (torch.zeros(shape, device="meta"), "torch.float32", "meta"),
    ):
        states = [torch.zeros(shape), torch.zeros(shape)]
        states[which == "c_0"] = got
        with raises(
            f"{which} must be torch.float32 on cpu like the layer, got {dtype} on {device}; "
            f"use {which}.to('cpu', torch.float32)"
        ):
            call(build(bidirectional=True), x, tuple(states))


@pytest.mark.parametrize(
    ("hx", "got"),
    [
        (torch.zeros(2, 1, 2, 6), "Tensor"),
        (torch.zeros(1, 2, 6), "Tensor"),
        ((torch.zeros(1, 2, 6),), "tuple"),
        ((torch.zeros(1, 2, 6),) * 3, "tuple"),
        ([], "list"),
        ({"h": torch.zeros(1, 2, 6), "c": torch.zeros(1, 2, 6)}, "dict"),
        (0.0, "float"),
    ],
)
def test_a_state_that_is_not_a_pair(hx: Any, got: str, call: Callable[..., Any]) -> None:
    with raises(f"hx must be a pair (h_0, c_0), got {got}; leave it out to start from zero"):
        call(build(), torch.zeros(5, 2, 4), hx)


FLAGS = pytest.mark.parametrize("name", ["reset", "mask"])


@FLAGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_flags_that_are_not_bool(name: str, dtype: torch.dtype, call: Callable[..., Any]) -> None:
    with raises(f"{name} must be torch.bool, got {dtype}; use {name}.bool()"):
        call(build(), torch.zeros(5, 2, 4), **{name: torch.zeros(5, 2, dtype=dtype)})


@FLAGS
def test_flags_of_another_shape(name: str, call: Callable[..., Any]) -> None:
    for x, shape, wrong in (
        ((5, 2, 4), (5, 2), [(2, 5), (5,), (5, 2, 1), (1, 2), (5, 1)]),
        ((5, 4), (5,), [(4,), (5, 1), (1, 5), ()]),
    ):
        for got in wrong:
            with raises(
                f"{name} must have the input's shape without features, {shape}, got {got}; "
                "give one flag for every step of every sequence"
            ):
                call(build(), torch.zeros(x), **{name: torch.zeros(got, dtype=torch.bool)})


def test_flags_follow_batch_first(call: Callable[..., Any]) -> None:
    with raises(
        "reset must have the input's shape without features, (2, 5), got (5, 2); "
        "give one flag for every step of every sequence"
    ):
        call(
            build(batch_first=True),
            torch.zeros(2, 5, 4),
            reset=torch.zeros(5, 2, dtype=torch.bool),
        )


@pytest.mark.parametrize(("batch_first", "shape"), [(False, (5, 2)), (True, (2, 5))])
def test_reset_of_a_packed_sequence_has_the_padded_shape(
    batch_first: bool, shape: tuple[int, int], call: Callable[..., Any]
) -> None:
    got = shape[::-1]
    with raises(
        f"reset must have the input's shape without features, {shape}, got {got}; "
        "give one flag for every step of every sequence"
    ):
        call(
            build(batch_first=batch_first),
            packed_zeros(),
            reset=torch.zeros(got, dtype=torch.bool),
        )


@FLAGS
def test_flags_on_another_device(name: str, call: Callable[..., Any]) -> None:
    with raises(f"{name} must be on the input's device cpu, got meta; use {name}.to('cpu')"):
        call(
            build(),
            torch.zeros(5, 2, 4),
            **{name: torch.zeros(5, 2, dtype=torch.bool, device="meta")},
        )


def test_mask_beside_a_packed_sequence(call: Callable[..., Any]) -> None:
    with raises(
        "mask must be None with a PackedSequence, which has its own lengths, got a mask; "
        "leave it out, or pass padded sequences"
    ):
        call(build(), packed_zeros(), mask=torch.ones(5, 2, dtype=torch.bool))


@pytest.mark.parametrize("option", ["num_layers", "batch_first", "dropout", "bidirectional"])
def test_cell_names_options_that_only_a_layer_has(option: str) -> None:
    with raises(f"{option} is not an option of a single step; use RigLSTM"):
        RigLSTMCell(4, 6, num_cells=3, **{option: 1})


@pytest.mark.parametrize("shape", [(), (5, 2, 4)])
def test_wrong_rank_of_a_cells_input(shape: tuple[int, ...]) -> None:
    with raises(
        "the input must be one step (D) or a batch of them (B, D), "
        f"got {len(shape)} dimensions: {shape}"
    ):
        RigLSTMCell(4, 6, num_cells=3)(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_cell_shows_the_shape_of_the_input_as_it_was_given(shape: tuple[int, ...]) -> None:
    with raises(
        f"the input's last dimension must be input_size = 4, got an input of shape {shape}{LAST}"
    ):
        RigLSTMCell(4, 6, num_cells=3)(torch.zeros(shape))


@pytest.mark.parametrize(("x", "got"), [((4,), (5,)), ((2, 4), (3, 6)), ((2, 4), (6,))])
def test_cell_shows_the_shape_of_the_state_as_it_was_given(
    x: tuple[int, ...], got: tuple[int, ...]
) -> None:
    message = f"^h_0 must have shape .*, got {re.escape(str(got))}; leave hx out"
    with pytest.raises(ValueError, match=message):
        RigLSTMCell(4, 6, num_cells=3)(torch.zeros(x), (torch.zeros(got), torch.zeros(got)))


def words(node: ast.AST) -> list[str]:
    """The fixed parts of a text, f-string or not."""
    return [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def test_every_message_has_a_test() -> None:
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


X, H = torch.zeros(5, 2, 4), torch.zeros(1, 2, 6)


def small(**options: Any) -> RigLSTM:
    return RigLSTM(**{"input_size": 4, "hidden_size": 6, "num_cells": 3, **options})


def small_cell() -> RigLSTMCell:
    return RigLSTMCell(4, 6, num_cells=3)


INPUT = "the input must be a Tensor or a PackedSequence, got {}; use torch.as_tensor"
BOTH = "{} must be a Tensor, got None; leave hx out to start from zero, or give both"
WRONG_KINDS: list[tuple[Callable[[], Any], str]] = [
    (lambda: small()(X.numpy()), INPUT.format("ndarray")),
    (lambda: small()([[0.0] * 4]), INPUT.format("list")),
    (lambda: small()(None), INPUT.format("NoneType")),
    (lambda: small_cell()(X[0].numpy()), "the input must be a Tensor, got ndarray"),
    (
        lambda: small_cell()(pack_sequence([X[:, 0]])),
        "the input must be a Tensor, got PackedSequence",
    ),
    (lambda: small()(X, (H, None)), BOTH.format("c_0")),
    (lambda: small()(X, (H.numpy(), H)), "h_0 must be a Tensor, got ndarray"),
    (lambda: small_cell()(X[0], (None, None)), BOTH.format("h_0")),
    (lambda: small_cell()(X[0], H[0]), "hx must be a pair (h_0, c_0), got Tensor"),
    (lambda: small_cell()(X[0], (H[0],)), "hx must be a pair (h_0, c_0), got tuple"),
    (lambda: small_cell()(X[0], (H[0], H[0], H[0])), "hx must be a pair (h_0, c_0), got tuple"),
    (lambda: small()(X, reset=[[True] * 2] * 5), "reset must be a bool Tensor, got list"),
    (lambda: small()(X, mask=np.ones((5, 2), bool)), "mask must be a bool Tensor, got ndarray"),
    (
        lambda: small()(pack_padded_sequence(torch.zeros(5, 2, 3, 4), [5, 2])),
        "a packed sequence must hold data of 2 dimensions (steps, D), got 3: (7, 3, 4)",
    ),
    (
        lambda: small(dropout="0.5", num_layers=2),
        "dropout must be a probability in [0, 1], got '0.5'",
    ),
    (lambda: small(dropout=None), "dropout must be a probability in [0, 1], got None"),
    (lambda: small(bidirectional=2), "bidirectional must be True or False, got 2"),
    (lambda: small(bidirectional=None), "bidirectional must be True or False, got None"),
    (lambda: small(bias="no"), "bias must be True or False, got 'no'"),
    (lambda: small(batch_first="no"), "batch_first must be True or False, got 'no'"),
    (lambda: small(soft_update="no"), "soft_update must be True, False or 'printed', got 'no'"),
    (lambda: small(soft_update=1), "soft_update must be True, False or 'printed', got 1"),
    (lambda: small(update_scale="a"), "update_scale must be a finite number or 'auto', got 'a'"),
    (lambda: small(update_scale=None), "update_scale must be a finite number or 'auto', got None"),
    (lambda: small(update_scale=True), "update_scale must be a finite number or 'auto', got True"),
    (
        lambda: small(update_scale=float("nan")),
        "update_scale must be a finite number or 'auto', got nan",
    ),
    (
        lambda: small(update_bias="a"),
        "update_bias must be a finite number, None or 'auto', got 'a'",
    ),
    (
        lambda: small(update_bias=float("nan")),
        "update_bias must be a finite number, None or 'auto', got nan",
    ),
    (lambda: small(forget_bias="a"), "forget_bias must be a finite number, got 'a'"),
    (
        lambda: small(backend=["auto"]),
        "backend must be one of auto, reference, batched, compiled, triton, got ['auto']",
    ),
    (lambda: small(dtype=torch.int64), "dtype must be a floating dtype, got torch.int64"),
    (lambda: small(dtype=torch.complex64), "dtype must be a floating dtype, got torch.complex64"),
    (
        lambda: small().load_paper_parameters(
            {k: v.numpy() for k, v in small().paper_parameters().items()}
        ),
        "W_gates must be a Tensor, got ndarray; use torch.as_tensor",
    ),
    (
        lambda: small().load_paper_parameters(
            {k: v.to("meta") for k, v in small().paper_parameters().items()}
        ),
        "W_gates must hold real numbers, got torch.float32 on meta",
    ),
    (lambda: small().load_paper_parameters(None), "the paper's parameters"),
    (
        lambda: small()(X.to_sparse()),
        "the input must be dense, got torch.sparse_coo; use .to_dense()",
    ),
    (lambda: small().weights(1), "layer must be a whole number in [0, num_layers - 1] = [0, 0]"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_KINDS, ids=[m for _, m in WRONG_KINDS])
def test_wrong_kind_of_thing_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, riglstm.BackendError), match=re.escape(message)):
        call()
