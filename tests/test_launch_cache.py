"""Cached launches are those of a call in full, on a machine that has no GPU.

Kernels are not interpreted here: a launch only says what it was given.
"""

from __future__ import annotations

import os

import pytest

from helpers import kernels, python

kernels("launch_cache")

CODE = '''
import copy, dataclasses, pickle, weakref
from types import SimpleNamespace
import pytest, torch
import torch.nn.utils.prune
from torch.autograd import forward_ad
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

import riglstm, riglstm.scan
from riglstm.scan.triton import forward, launch_cache as cache, plan
from riglstm.scan.triton.kernels.tiled import tiled_kernel
from riglstm.scan.triton.kernels.resident import resident_kernel

made = []  # the launches of a call: name, grid, values


class Compiled:
    function, packed_metadata = 42, (8, 1, 0)

    def __init__(self, name, kinds):
        self.name, self.kinds = name, kinds

    def __getitem__(self, grid):
        return lambda *arguments: None

    def run(self, *given):
        assert given[3:9] == (7, 42, (8, 1, 0), None, None, None)
        made.append((self.name, given[:3], given[9 : 9 + self.kinds]))


def compiled(kernel, grid):
    def run(*arguments, **constants):
        # Programs that wait for each other are all there, or none is.
        if kernel.__name__ in ("tiled_kernel", "resident_kernel"):
            assert constants["launch_cooperative_grid"] is True
        values = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in arguments]
        made.append((kernel.__name__, (*grid, 1, 1)[:3], tuple(values)))
        return Compiled(kernel.__name__, len(arguments))
    return run


JITFunction.__getitem__ = compiled
plan.driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
plan.KNOWN = cache.KNOWN = True
plan.chip = lambda device: (132, 232_448)
riglstm.scan._no_triton = lambda device: None
# Of a tensor on a CPU.
torch.cuda.current_device = lambda: -1
torch._C._cuda_getCurrentRawStream = lambda device: 7
forward._refusal = lambda *problem: None
forward.product_on = cache.product_on = lambda *of: product
torch.Tensor.is_cuda = property(lambda tensor: True)
torch.cuda.is_current_stream_capturing = lambda: False
allocated = []  # start and end of each buffer that is made for a call
new_empty = torch.Tensor.new_empty


def spied(self, *given, **options):
    made = new_empty(self, *given, **options)
    allocated.append((made.data_ptr(), made.data_ptr() + made.nbytes))
    return made


torch.Tensor.new_empty = spied
played = []
play = cache.Recording.play


def counted(self, *given):
    out = play(self, *given)
    played.append(True)
    return out


cache.Recording.play = counted
held = []  # nothing is freed: an address is a buffer's for good


worked_with = {}


def launches(layer, x, hx, full=False):
    """Those of a call, with buffers by their names, but for who woke, which may lie apart."""
    made.clear(), allocated.clear()
    if full:
        played.clear()
    y, (h, c) = out = layer._in_full(x, hx, None, None) if full else layer(x, hx)
    held.append((x, hx, out, h))
    names = {y.data_ptr(): "y", c.data_ptr(): "c", x.data_ptr(): "x"}
    names |= {} if hx is None else {hx[0].data_ptr(): "h_0", hx[1].data_ptr(): "c_0"}
    names |= {w.data_ptr(): name for name, w in layer.named_parameters()}
    # The memory that is worked with begins with what packing writes, and lies in one buffer.
    assert made[0][0] == "pack_kernel"
    start = made[0][2][4]
    ((begin, end),) = [(a, b) for a, b in allocated if a <= start < b]
    assert begin == start, (start, allocated)
    last = tiled_kernel if made[-1][0] == "tiled_kernel" else resident_kernel
    at = last.arg_names.index("WOKE")
    woke, (T, B, N), kind = made[-1][2][at], (*x.shape[:2], 2), (x.shape, hx is None, product)
    if played[-1:] == [True]:
        # Behind all that a call in full works with, and whole.
        assert end - woke >= T * B * N and woke - start == worked_with[kind]
    else:
        worked_with[kind] = end - start

    def place(v):
        if not isinstance(v, int) or v <= 2**20 or v in names:
            return names.get(v, v)
        assert any(a <= v < b for a, b in allocated), v
        return v - start

    told = [(name, grid, [*map(place, values)]) for name, grid, values in made]
    del told[-1][2][at]
    return told


def layer_of(**options):
    return riglstm.RigLSTM(64, 64, num_cells=2, num_views=2, backend="triton", **options)


def plays(layer, *shape, calls=4, dtype=torch.float32, **options):
    """Which of some calls are played."""
    outcome = []
    for _ in range(calls):
        played.clear()
        held.append(layer(torch.randn(*shape).to(dtype), **options))
        outcome.append(played == [True])
    return outcome


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
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

        want = launches(layer, *inputs(), full=True)
        told = [launches(layer, *inputs()) for _ in range(4)]
        assert played == [True, True], played
        assert all(one == want for one in told), (want, told)
        # Results are tensors of their own.
        (y, (h, c)), (again, _) = layer(*inputs()), layer(*inputs())
        held.append((y, h, c, again))
        assert y.shape == (T, B, 64) and h.shape == c.shape == (1, B, 64)
        assert len({t.untyped_storage().data_ptr() for t in (y, h, c, again)}) == 4

    product = torch.bfloat16
    layer = layer_of()
    assert plays(layer, 2, 3, 64) == THIRD
    assert plays(layer, 3, 3, 64) == THIRD, "another length is another kind"
    state = (torch.randn(1, 3, 64), torch.randn(1, 3, 64))
    assert plays(layer, 2, 3, 64, hx=state) == THIRD, "so is a call with a state"
    assert plays(layer, 2, 3, 64, hx=list(state), calls=1) == [False], "a pair of another kind"
    product = torch.float32
    assert plays(layer, 2, 3, 64) == THIRD, "so is another precision"
    torch.set_float32_matmul_precision("highest")
    assert plays(layer, 2, 3, 64) == NEVER, "torch maps the input then"
    torch.set_float32_matmul_precision("high")
    product = torch.bfloat16
    forward.product_on = riglstm.checks.product_dtype = lambda *of: product
    assert plays(layer, 2, 3, 64, dtype=torch.float16) == THIRD, "so is another dtype"
    assert plays(layer, 2, 3, 64, calls=1) == [True]
    for bad in (torch.randn(1, 2, 64), torch.randn(1, 3, 64).double(), torch.randn(1, 3, 8)):
        with pytest.raises(ValueError):
            layer(torch.randn(2, 3, 64), (state[0], bad))

    # What two buffers have in common in one call is nothing that they have in all.
    both, x = torch.zeros(1, 3, 64), torch.randn(1, 3, 64)
    for one in ("h and c", "x and h", "x and a weight"):
        other = layer_of()
        given = {
            "h and c": (x, (both, both)),
            "x and h": (x, (x, state[1])),
            "x and a weight": (other.weight_in_l0[:3].detach().unsqueeze(0), state),
        }[one]
        for _ in range(3):
            held.append(other(*given))
        want = launches(other, torch.randn(1, 3, 64), state, full=True)
        told = [launches(other, torch.randn(1, 3, 64), state) for _ in range(4)]
        assert played[-1] and all(one == want for one in told), told

    # Weights and rules.
    layer.weight_gates_l0.mul_(2)
    assert plays(layer, 2, 3, 64) == [True] * 4, "it is packed by each call"
    for change in (
        lambda: setattr(layer, "weight_gates_l0", nn.Parameter(layer.weight_gates_l0.clone())),
        lambda: setattr(layer.weight_gates_l0, "data", layer.weight_gates_l0.data.clone()),
        lambda: setattr(layer, "selection", dataclasses.replace(layer.selection)),
        lambda: layer.double().float(),
    ):
        held.append([w.data for w in layer.parameters()])
        change()
        assert plays(layer, 2, 3, 64, calls=5) == [False, *THIRD], "not what it was"
        # Also between the call that is checked and the one that is written down.
        plays(layer, 4, 3, 64, calls=1)
        held.append([w.data for w in layer.parameters()])
        change()
        assert plays(layer, 4, 3, 64, calls=4) == [False, *THIRD[:3]]
        layer._launch_cache.clear()
        assert plays(layer, 2, 3, 64) == THIRD
    held.append(torch.func.functional_call(
        layer, {name: w.clone() for name, w in layer.named_parameters()}, torch.randn(2, 3, 64)
    ))
    assert played[-1:] != [True] or not plays(layer, 2, 3, 64, calls=1)[0]
    assert plays(layer, 2, 3, 64)[-1]

    # Who is in charge.
    with torch.enable_grad():
        assert plays(layer, 2, 3, 64) == NEVER
    with Mode():
        assert plays(layer, 2, 3, 64, calls=1) == [False]
    assert plays(layer, 2, 3, 64) == [True] * 4
    plan.knobs.runtime.launch_exit_hook.calls.append(lambda metadata: None)
    assert plays(layer, 2, 3, 64) == NEVER
    plan.knobs.runtime.launch_exit_hook.calls.clear()
    assert plays(layer, 2, 3, 64) == [True] * 4
    torch.cuda.current_device = lambda: 5
    assert cache._kind(layer, torch.randn(2, 3, 64), None) is None
    torch.cuda.current_device = lambda: -1
    # A derivative may be asked for.
    refused = pytest.raises(NotImplementedError, match="backend='triton' has backward.. only")
    with forward_ad.dual_level(), refused:
        plays(layer, 2, 3, 64)
    with plan.recorded() as outer:
        with plan.recorded():
            pass
        assert plan._RECORDS.launches is outer
    assert plan._RECORDS.launches is None
    Sub = type("Sub", (riglstm.RigLSTM,), {})
    assert plays(Sub(64, 64, num_cells=2, backend="triton"), 2, 3, 64) == NEVER, "it may differ"
    assert plays(layer_of(cells="random"), 2, 3, 64) == NEVER, "it draws anew"
    own = riglstm.RigLSTM(64, 64, num_cells=2, backend="reference")
    torch.func.vmap(lambda x: own(x)[0])(torch.randn(2, 2, 3, 64)), "has no memory of its own"
    assert plays(own, 2, 3, 64) == NEVER, "no kernels of ours"
    assert plays(layer, 2, 3, 64)[-1]
    assert plays(layer, 2, 3, 64, reset=torch.zeros(2, 3, dtype=torch.bool)) == NEVER
    for x in (torch.randn(3, 2, 64).transpose(0, 1), torch.randn(385)[1:].view(2, 3, 64)):
        played.clear()
        held.append(layer(x))
        assert not played, "gaps, or another address than kernels were compiled for"
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    assert [plays(other, 2, 3, 64) for other in copies] == [THIRD] * 2
    for T in range(1, 2 * cache.MOST):
        plays(layer, T, 3, 64, calls=1)
    assert len(layer._launch_cache) <= cache.MOST
    again = layer_of()
    for _ in range(4):
        _, (h, c) = again(torch.randn(2, 3, 64))
        assert not h._is_view() and not c._is_view(), "whichever way a call goes"
    assert plays(gone := layer_of(), 2, 3, 64) == THIRD
    before = weakref.ref(gone.weight_gates_l0)
    gone.weight_gates_l0 = torch.nn.Parameter(gone.weight_gates_l0.detach().clone())
    held.clear()
    plays(gone, 5, 3, 64, calls=1)
    assert before() is None, "no tape of another kind keeps weights that are the layer's no more"

    class Shared(cache.Cache):
        """Another thread empties it whenever somebody has looked."""

        def __contains__(self, kind):
            return self.and_clear(super().__contains__(kind))

        def get(self, *kind):
            return self.and_clear(super().get(*kind))

        def __len__(self):
            return self.and_clear(super().__len__())

        def and_clear(self, seen):
            self.clear()
            return seen

    shared = layer_of()
    for kept in (0, cache.MOST):
        shared._launch_cache = Shared()
        for T in range(1, 2 * cache.MOST):
            shared._launch_cache.update(dict.fromkeys(range(kept)))
            plays(shared, T, 3, 64)
    resolve = cache.resolve
    cache.resolve = lambda *problem: "batched" if problem[-1] > 3 else resolve(*problem)
    assert [plays(layer_of(), 2, B, 64) for B in (3, 4)] == [THIRD, NEVER], "more than it counts"
    cache.resolve = resolve
    assert plays(layer_of(bias=False), 2, 3, 64) == NEVER, "a bias of zeros is made for each call"
    for options in ({"num_layers": 2}, {"bidirectional": True}, {"batch_first": True}):
        assert plays(layer_of(**options), 2, 3, 64) == NEVER, options
    assert plays(layer_of(), 2, 64) == NEVER, "one sequence"
    pruned = layer_of()
    nn.utils.prune.random_unstructured(pruned, "weight_gates_l0", 0.5)
    assert plays(pruned, 2, 3, 64) == NEVER, "weights that are computed"
'''


@pytest.mark.slow
def test_launches_are_those_of_a_call_in_full():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = python("-c", CODE, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]
