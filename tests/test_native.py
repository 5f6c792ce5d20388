"""The loops in C++, beside oracle, reference and the loops in Python."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from riglstm import RigLSTM
from riglstm.cell import Weights
from riglstm.scan.batched import native

SIZES = {"num_cells": 3, "num_views": 4, "dtype": torch.float64}
EVERYTHING = {"cells": "all", "views": "all", "peers": "all"}

built = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler")


def fits(layer: RigLSTM, product: torch.dtype = torch.float64, backward: bool = False) -> bool:
    """Whether the loops in C++ take a layer for two sequences."""
    weights = layer.weights()
    x = weights.W.new_zeros(3, 2, layer.input_size)
    h = weights.W.new_zeros(2, layer.num_cells, layer.cell_size)
    return native.takes(x, h, h, weights, layer.selection, product, backward=backward)


@built
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        (EVERYTHING, True),
        (dict.fromkeys(("cells", "views", "peers"), "random"), True),
        ({"query": "per_cell", "num_cells": 1, "num_views": 1}, True),
        ({"soft_update": False, "bias": False}, True),
        ({**EVERYTHING, "views": "soft"}, False),
        ({**EVERYTHING, "peers": "soft"}, False),
    ],
)
def test_soft_rules_and_rounded_products_are_left_to_python(options, expected, monkeypatch):
    layer = RigLSTM(20, 15, **{**SIZES, **options})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert fits(layer) is expected
    assert not fits(layer, product=torch.bfloat16)
    for part in ("cells", "views", "peers"):
        layer.selection = replace(layer.selection, **{part: "a rule that it does not know"})
        assert not fits(layer)
        layer.selection = replace(layer.selection, **{part: "top"})
    monkeypatch.setattr(native, "LARGEST", layer.weights().W.numel() - 1)
    assert not fits(layer), "a copy of all weights would be too large"


@built
@pytest.mark.parametrize(
    ("threads", "forward", "backward"), [(1, True, True), (2, True, False), (3, False, False)]
)
def test_torch_s_products_on_more_threads_are_faster_for_large_layers(
    threads, forward, backward, monkeypatch
):
    layer = RigLSTM(20, 15, **SIZES)
    monkeypatch.setattr(native, "SMALL", layer.weights().W.numel())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert fits(layer) is forward
    assert fits(layer, backward=True) is backward
    monkeypatch.setattr(native, "SMALL_CELL", layer.weights().W[0].numel() - 1)
    assert fits(layer) is forward
    assert not fits(layer, backward=True)


@pytest.mark.parametrize("views", ["linear", "split"])
def test_autocast_around_the_backward_pass_alone_changes_nothing(views):
    layer = RigLSTM(12, 12, input_views=views)
    x = torch.randn(5, 2, 12, requires_grad=True)
    found = []
    for on in (False, True):
        loss = layer(x)[0].square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss.backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
        x.grad = None
        layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@built
@pytest.mark.parametrize(
    ("B", "hidden", "options"),
    [(6, 30, {"num_cells": 5}), (131, 136, {"num_cells": 2}), (131, 80, {"soft_update": False})],
)
def test_the_bits_of_a_sample_depend_on_no_other_and_on_no_cut(B, hidden, options):
    layer = RigLSTM(7, hidden, **options)
    x = torch.randn(9, B, 7)
    y, state = layer(x)
    for some in (slice(2, 3), slice(1, 100), slice(64, None)):
        alone, _ = layer(x[:, some])
        assert torch.equal(alone, y[:, some])
    first, carried = layer(x[:4])
    rest, last = layer(x[4:], carried)
    assert torch.equal(torch.cat((first, rest)), y)
    assert all(map(torch.equal, last, state))


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_and_tanh_are_torch_s_to_the_last_bits(dtype):
    """One cell that sees its bias alone: c = sigmoid(i)·tanh(g), at values from 1e-8 to 1e4."""
    values = torch.logspace(-8, 4, 600, dtype=dtype)
    values = torch.cat((values, -values, torch.tensor([0.0, torch.inf, -torch.inf], dtype=dtype)))
    for v in values.split(50):
        d = len(v)
        layer = RigLSTM(1, d, num_cells=1, soft_update=False, dtype=dtype)
        for p in layer.parameters():
            p.data.zero_()
        far = torch.full_like(v, 1e4)  # f, i, o, g: what is open, and what is asked for
        for gates, expected in (
            (torch.cat((v, v, far, far)), v.sigmoid()),
            (torch.cat((v, far, far, v)), v.tanh()),
        ):
            layer.bias_gates_l0.data.copy_(gates.view_as(layer.bias_gates_l0))
            _, (_, c) = layer(torch.zeros(1, 1, 1, dtype=dtype))
            eps = torch.finfo(dtype).eps
            tiny = torch.finfo(dtype).tiny
            torch.testing.assert_close(c.view(-1), expected, rtol=6 * eps, atol=2 * tiny)


@pytest.mark.parametrize("there", [False, True], ids=["no compiler", "a compiler that fails"])
def test_without_a_compiler_the_loops_in_python_run(there, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false" if there else "no-such-compiler")
    monkeypatch.setattr(native, "library", functools.cache(native.library.__wrapped__))
    layer = RigLSTM(3, 12)
    with pytest.warns(UserWarning, match="false could not build") if there else nullcontext():
        assert not fits(layer, torch.float32)
    y, _ = layer(torch.randn(2, 2, 3))
    assert y.isfinite().all()


CALL = """
import torch
from riglstm import RigLSTM

for size in (21, 64, 60):
    layers = [RigLSTM(5, size, backend=b, dtype=torch.float64) for b in ("batched", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(7, 3, 5, dtype=torch.float64)
    found = []
    for layer in layers:
        y, _ = layer(x)
        y.sin().sum().backward()
        found.append([y.detach(), *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*found)
from riglstm.scan.batched import native
assert native.library() is not None
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
def test_clang_builds_loops_that_read_any_address(tmp_path):
    env = {**os.environ, "CXX": "clang++", "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run((sys.executable, "-W", "error", "-c", CALL), env=env, check=True)


@built
def test_what_is_given_must_have_one_dtype_and_the_shape_that_the_weights_say():
    layer = RigLSTM(3, 12)
    weights, sel = layer.weights(), layer.selection
    x, h = torch.zeros(3, 2, 3), torch.zeros(2, 6, 2)
    flags = torch.zeros(3, 2, dtype=torch.bool)

    def taken(x: Tensor, h: Tensor, c: Tensor, *flags: Tensor, given: Weights = weights) -> bool:
        return native.takes(x, h, c, given, sel, torch.float32, *flags)

    assert taken(x, h, h, flags, flags)
    assert not taken(torch.zeros(3, 2, 4), h, h)
    assert not taken(x, h[:1], h[:1])
    assert not taken(x, h, h.half())
    assert not taken(x.double(), h, h)
    assert not taken(x, h, h, flags.long())
    assert not taken(x, h, h, flags[:2])
    for name, weight in weights._asdict().items():
        for other in (weight[:1], weight[..., :1], weight.double()):
            if (other.shape, other.dtype) != (weight.shape, weight.dtype):
                assert not taken(x, h, h, given=weights._replace(**{name: other})), name
    split = weights._replace(W_in=None, b_in=None)
    assert taken(torch.zeros(3, 2, 12), h, h, given=split)
    assert not taken(torch.zeros(3, 2, 13), h, h, given=split)


@built
def test_numbers_that_are_negated_when_read_are_read_so():
    layer, x = RigLSTM(3, 12), torch.randn(2, 2, 3)
    assert torch.equal(layer(torch._neg_view(x))[0], layer(-x)[0])


@built
@pytest.mark.slow
def test_the_loops_are_built_once_and_whole(tmp_path):
    """Four processes that begin at once find one file, and leave nothing else behind."""
    code = "from riglstm.scan.batched import native; assert native.library() is not None"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    begun = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(4)]
    assert [p.wait() for p in begun] == [0] * 4
    assert len(list((tmp_path / "riglstm").iterdir())) == 1
