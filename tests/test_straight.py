"""Calls that go straight make the launches of a call in full, on a machine that has no GPU.

Kernels are not interpreted here: a launch only says what it was given.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("riglstm.scan.fused.tape", reason="the kernels are not in this copy")

CODE = '''
import copy, pickle
import torch
import torch.nn.utils.prune
from torch import nn
from triton.runtime.jit import JITFunction

import riglstm, riglstm.scan
from riglstm import straight
from riglstm.scan.fused import launch, replay, tape, tiles
from riglstm.scan.kernels.forward import forward_kernel
from riglstm.scan.kernels.resident import resident_kernel

made = []  # the launches of a call: name, grid, values


class Compiled:
    function, packed_metadata = 42, (8, 1, 0)

    def __init__(self, name, kinds):
        self.name, self.kinds = name, kinds

    def run(self, *given):
        assert given[3:9] == (7, 42, (8, 1, 0), None, None, None)
        made.append((self.name, given[:3], given[9 : 9 + self.kinds]))


class Driver:
    class active:
        get_current_stream = staticmethod(lambda device: 7)


def compiled(kernel, grid):
    def run(*arguments, **constants):
        values = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in arguments]
        made.append((kernel.__name__, (*grid, 1, 1)[:3], tuple(values)))
        return Compiled(kernel.__name__, len(arguments))
    return run


JITFunction.__getitem__ = compiled
launch.driver, launch.KNOWN, tape.KNOWN = Driver, True, True
tiles.chip = lambda device: (132, 232_448)
riglstm.scan._no_triton = lambda device: None
# Of a tensor on a CPU.
torch.cuda.current_device = lambda: -1
torch._C._cuda_getCurrentRawStream = lambda device: 7
from riglstm.scan import triton as backend
backend._refusal = lambda *problem: None
backend.product_on = tape.product_on = straight.product_on = lambda *of: product
straight.may_be = lambda x: type(x) is torch.Tensor and not torch.is_grad_enabled()
played = []
play = tape.Tape.play


def counted(self, *given):
    out = play(self, *given)
    played.append(out is not None)
    return out


tape.Tape.play = counted
held = []  # nothing is freed: an address is a buffer's for good


def said(layer, x, hx, out):
    """The launches that were made, with buffers by their names."""
    y, (h, c) = out
    held.append((x, hx, out, h))
    names = {y.data_ptr(): "y", c.data_ptr(): "c", x.data_ptr(): "x"}
    names |= {} if hx is None else {hx[0].data_ptr(): "h_0", hx[1].data_ptr(): "c_0"}
    names |= {w.data_ptr(): name for name, w in layer.named_parameters()}
    # The memory that is worked with begins with what packing writes.
    assert made[0][0] == "pack_kernel"
    start = made[0][2][4]
    told = []
    for name, grid, values in made:
        told.append((name, grid, tuple(names.get(v, v - start if v and v > 2**20 else v)
                                       if v is not None else None for v in values)))
    made.clear()
    return told


def full(layer, x, hx):
    made.clear()
    return said(layer, x, hx, layer._in_full(x, hx, None, None))


def short(layer, x, hx):
    made.clear()
    return said(layer, x, hx, layer(x, hx))


def but_woke(told):
    """Who woke lies behind the rest, or is a tensor of its own."""
    name, grid, values = told[-1]
    at = {"forward_kernel": forward_kernel, "resident_kernel": resident_kernel}[name]
    at = at.arg_names.index("WOKE")
    return [*told[:-1], (name, grid, values[:at] + values[at + 1 :])]


def layer_of(**options):
    return riglstm.RigLSTM(64, 64, num_cells=2, num_views=2, backend="triton", **options)


def plays(layer, *shape, calls=4, **options):
    """Which of some calls are played."""
    outcome = []
    for _ in range(calls):
        played.clear()
        held.append(layer(torch.randn(*shape), **options))
        outcome.append(played == [True])
    return outcome


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


NEVER, THIRD = [False] * 4, [False, False, True, True]
torch.set_float32_matmul_precision("high")
with torch.no_grad():
    for product, B, T, given, views in (
        (torch.bfloat16, 3, 1, True, "linear"),
        (torch.bfloat16, 70, 4, False, "linear"),
        (torch.float32, 3, 2, False, "linear"),
        (torch.float32, 70, 2, True, "linear"),
        (torch.bfloat16, 3, 2, False, "split"),
    ):
        layer = layer_of(input_views=views)

        def inputs():
            x = torch.randn(T, B, 64)
            return x, (torch.randn(1, B, 64), torch.randn(1, B, 64)) if given else None

        want = but_woke(full(layer, *inputs()))
        played.clear()
        told = [but_woke(short(layer, *inputs())) for _ in range(4)]
        assert played == [True, True], played
        assert all(launches == want for launches in told), (want, told)
        # Results are tensors of their own.
        (y, (h, c)), (again, _) = layer(*inputs()), layer(*inputs())
        held.append((y, h, c, again))
        assert y.shape == (T, B, 64) and h.shape == c.shape == (1, B, 64)
        assert len({t.untyped_storage().data_ptr() for t in (y, h, c, again)}) == 4

    product = torch.bfloat16
    layer = layer_of()
    assert plays(layer, 2, 3, 64) == THIRD
    assert plays(layer, 3, 3, 64) == THIRD, "another length is another kind"
    layer.weight_gates_l0.mul_(2)
    assert plays(layer, 2, 3, 64) == [True] * 4, "it is packed by each call"
    layer.weight_gates_l0 = nn.Parameter(layer.weight_gates_l0.clone())
    assert plays(layer, 2, 3, 64, calls=5) == [False, *THIRD], "not where it was"
    held.append(layer.weight_gates_l0)
    with torch.enable_grad():
        assert plays(layer, 2, 3, 64) == NEVER
    with Mode():
        assert plays(layer, 2, 3, 64, calls=1) == [False]
    assert plays(layer, 2, 3, 64)[-1]
    assert plays(layer, 2, 3, 64, reset=torch.zeros(2, 3, dtype=torch.bool)) == NEVER
    for x in (torch.randn(3, 2, 64).transpose(0, 1), torch.randn(385)[1:].view(2, 3, 64)):
        played.clear()
        held.append(layer(x))
        assert not played, "gaps, or another address than kernels were compiled for"
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    assert [plays(other, 2, 3, 64) for other in copies] == [THIRD] * 2
    for T in range(1, 2 * straight.MOST):
        plays(layer, T, 3, 64, calls=1)
    assert len(layer._seen) <= straight.MOST
    assert plays(layer_of(bias=False), 2, 3, 64) == NEVER, "a bias of zeros is made for each call"
    assert plays(layer_of(num_layers=2), 2, 3, 64) == NEVER
    assert plays(layer_of(bidirectional=True), 2, 3, 64) == NEVER
    assert plays(layer_of(batch_first=True), 2, 3, 64) == NEVER
    assert plays(layer_of(), 2, 64) == NEVER, "one sequence"
    pruned = layer_of()
    nn.utils.prune.random_unstructured(pruned, "weight_gates_l0", 0.5)
    assert plays(pruned, 2, 3, 64) == NEVER, "weights that are computed"
    replay.ON, replay._place = True, lambda W: None
    assert plays(layer, 2, 3, 64) == NEVER, "graphs do it"
    replay.ON, product = False, torch.float32
    torch.set_float32_matmul_precision("highest")
    assert plays(layer_of(), 2, 3, 64) == NEVER, "torch maps the input then"
'''


def test_launches_are_those_of_a_call_in_full() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
