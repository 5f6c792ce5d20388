"""`riglstm.onnx.export`: the file says in onnxruntime what the layer says in torch."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import riglstm.onnx
from helpers import GUIDE, guide_blocks
from riglstm import RigLSTM, RigLSTMCell
from riglstm.onnx import export

pytestmark = pytest.mark.slow

onnx = pytest.importorskip("onnx", reason="needs the extra riglstm[onnx]")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra riglstm[onnx]")
pytest.importorskip("onnxscript", reason="needs the extra riglstm[onnx]")

LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "deep": {
        **{"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5},
        **{"num_views": 3, "active_cells": 2, "peers_per_cell": 1, "query": "per_cell"},
        **{"bias": False, "dtype": torch.float64},
    },
    "soft": {
        **{"input_size": 1, "views": "soft", "peers": "soft"},
        **{"update_scale": 2.0, "update_bias": 0.5, "backend": "batched"},
    },
    "all": {
        **{"input_size": 12, "num_layers": 2, "input_views": "split", "soft_update": False},
        **{"cells": "all", "views": "all", "peers": "all"},
    },
}
"""Few layers that have every option between them: an export takes seconds."""
Exported = tuple[RigLSTM, Path, Any]
TOL = {torch.float32: 1e-5, torch.float64: 1e-12}


def build(input_size: int = 5, **options: Any) -> RigLSTM:
    torch.manual_seed(0)
    return RigLSTM(input_size, 12, **options)


@pytest.fixture(scope="module", params=LAYERS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A layer, its file, and what runs the file."""
    layer = build(**LAYERS[request.param])
    path = tmp_path_factory.mktemp("onnx") / "layer.onnx"
    export(layer, path)
    options = onnxruntime.SessionOptions()
    # One thread, and no remark about the default values of h_0 and c_0.
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return layer.eval(), path, onnxruntime.InferenceSession(str(path), options)


def numbers(layer: RigLSTM, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=layer.weight_gates_l0.dtype)


def sequence(layer: RigLSTM, T: int, B: int) -> Tensor:
    return numbers(layer, *((B, T) if layer.batch_first else (T, B)), layer.input_size)


def state(layer: RigLSTM, B: int) -> tuple[Tensor, Tensor]:
    rows = layer.num_layers * (1 + layer.bidirectional)
    h, c = numbers(layer, 2, rows, B, layer.hidden_size)
    return h, c


def assert_equal(session: Any, layer: RigLSTM, x: Tensor, hx: tuple[Tensor, Tensor] | None) -> None:
    feed = {"input": x.numpy()}
    if hx is not None:
        feed |= {"h_0": hx[0].numpy(), "c_0": hx[1].numpy()}
    with torch.no_grad():
        output, (h_n, c_n) = layer(x, hx)
    got = session.run(["output", "h_n", "c_n"], feed)
    for value, expected in zip(got, (output, h_n, c_n), strict=True):
        assert value.shape == expected.shape
        assert value.dtype == expected.numpy().dtype
        tol = TOL[expected.dtype]
        np.testing.assert_allclose(value, expected.numpy(), rtol=0, atol=tol)


@pytest.mark.parametrize(("T", "B"), [(13, 4), (7, 3), (1, 1), (1, 3), (6, 1)])
def test_any_length_and_batch_size_equal_the_layer(exported, T, B):
    """From any state; from a zero one, which is that of no state, all scores tie."""
    layer, _, session = exported
    x, hx = sequence(layer, T, B), state(layer, B)
    zero = torch.zeros_like(hx[0])
    for given in (hx, (zero, zero), None):
        assert_equal(session, layer, x, given)


def test_carried_state_continues_a_sequence(exported):
    layer, _, session = exported
    if layer.bidirectional:
        pytest.skip("the reverse direction needs the end of the sequence first")
    x = sequence(layer, 9, 2).numpy()
    whole, *last = session.run(None, {"input": x})
    first, h, c = session.run(None, {"input": x[:5]})
    second, *final = session.run(None, {"input": x[5:], "h_0": h, "c_0": c})
    np.testing.assert_array_equal(np.concatenate((first, second)), whole)
    np.testing.assert_array_equal(final, last)


def test_nan_passes_through(exported):
    layer, _, session = exported
    x = sequence(layer, 4, 2)
    clean = x.clone()
    (x[0] if layer.batch_first else x[:, 0])[2].fill_(float("nan"))
    with torch.no_grad():
        expected, _ = layer(x)
    output = session.run(["output"], {"input": x.numpy()})[0]
    np.testing.assert_array_equal(np.isnan(output), expected.isnan().numpy())
    assert np.isnan(output).any()
    assert not np.isnan(session.run(["output"], {"input": clean.numpy()})[0]).any()


def test_file_is_valid_and_its_sizes_are_open(exported):
    layer, path, session = exported
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    rows = layer.num_layers * (1 + layer.bidirectional)
    assert Counter(node.op_type for node in model.graph.node)["Scan"] == rows
    axes = ["batch", "time"] if layer.batch_first else ["time", "batch"]
    hidden = (1 + layer.bidirectional) * layer.hidden_size
    given = {v.name: v.shape for v in session.get_inputs()}
    assert given == {"input": [*axes, layer.input_size]}
    state = [rows, "batch", layer.hidden_size]
    optional = {v.name: v.shape for v in session.get_overridable_initializers()}
    assert optional == {"h_0": state, "c_0": state}
    results = {v.name: v.shape for v in session.get_outputs()}
    assert results == {"output": [*axes, hidden], "h_n": state, "c_n": state}


def test_file_holds_each_weight_once_and_no_path(exported):
    layer, path, _ = exported
    tensors = [onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer]
    count = sum(t.size for t in tensors if t.dtype.kind == "f")
    weights = sum(p.numel() for p in layer.parameters())
    state = 2 * layer.num_layers * (1 + layer.bidirectional) * layer.hidden_size
    # Beside them constants of a step, the same for all rows: fewer numbers than one cell's gates.
    assert weights + state <= count < weights + state + 100
    for folder in (Path(riglstm.onnx.__file__).parent, Path(torch.__file__).parent):
        assert str(folder).encode() not in path.read_bytes()


LOW = r"expects a layer in float32 or float64, got {}; export copy\.deepcopy"
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "random rules": (lambda: build(cells="random", peers="random"), ValueError,
     "expects rules that choose by score.*got cells='random', peers='random'; use 'top'"),
    "float16": (lambda: build(dtype=torch.float16), ValueError, LOW.format("torch.float16")),
    "bfloat16": (lambda: build(dtype=torch.bfloat16), ValueError, LOW.format("torch.bfloat16")),
    "a cell": (lambda: RigLSTMCell(5, 12), TypeError,
     r"a RigLSTM, got RigLSTMCell; of a RigLSTMCell .* \.layer"),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(layer, error, message, tmp_path):
    with pytest.raises(error, match=message):
        export(layer(), tmp_path / "layer.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_missing_packages_are_named_by_a_call_and_not_by_an_import(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    module = importlib.reload(riglstm.onnx)
    with pytest.raises(ImportError, match=r"onnx and onnxscript.*pip install 'riglstm\[onnx\]'"):
        module.export(build(), tmp_path / "layer.onnx")


def test_docstring_has_the_guides_example():
    code = re.findall(r"^ +>>> (.*)$", export.__doc__ or "", re.M)
    (block,) = guide_blocks(GUIDE / "deploying.md", "ONNX")
    assert sorted(code) == sorted(filter(None, block.splitlines()))
