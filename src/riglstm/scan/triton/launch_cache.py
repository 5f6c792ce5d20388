"""Launch cache: inference calls that repeat on a GPU go to their launches without other host work.

Until a call's kernel is launched the GPU is idle, and checks, the choice of a backend, plans and
buffers take 0.3 to 0.45 ms of Python, where a step takes 0.01. Their outcome depends on the kind of
a call, on where the weights lie and on the layer's rules. So the launches of one call are recorded,
and later calls of that kind repeat them.

A kind is the input's shape, dtype and device, whether a state is given, the backend, and the
precision. The first call of a kind is checked; the second one is recorded, if weights and rules are
still those that were checked; later ones are played.

Each argument of a launch is a number, or lies in one of a few buffers: the memory that a call works
with, an output, the input, the state that is given, a weight. A call with any other argument, such
as a copy that torch made, is not recorded: that tensor will not be there at the next call.

Shapes as in `plan.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from riglstm.cell import Weights
from riglstm.checks import product_on
from riglstm.inputs import of_shape
from riglstm.parameters import NAMES
from riglstm.scan import resolve
from riglstm.scan.base import State
from riglstm.scan.triton.forward import forward
from riglstm.scan.triton.kernels.common import KNOWN
from riglstm.scan.triton.plan import Buffer, Launched, recorded, watched
from riglstm.selection import Selection

MOST = 16
"""Kinds that are kept of a layer: as many lengths or sizes of batch as come again and again."""
_OWN = tuple(f"{name}_l0" for name in NAMES)
_NEW: Any = object()

Parameters = Sequence[nn.Parameter | None]
Made = tuple[Tensor, State]
"""y (T, B, N·d), and the final h and c (1, B, N·d)."""
Layer: TypeAlias = Any
"""A `RigLSTM`, whose module imports this one."""


class Checked(NamedTuple):
    """A layer's weights and rules, as they were when a call was checked."""

    own: Parameters
    places: list[tuple[Any, ...] | None]
    """What `_place` said of each."""
    sel: Selection
    recording: Recording | None = None
    """The launches of a call of this kind, if one was recorded since."""

    def holds(self, own: Parameters, sel: Selection) -> bool:
        """True if nothing has changed but numbers."""
        return (
            sel is self.sel
            and all(map(operator.is_, own, self.own))
            and [_place(w) for w in own] == self.places
        )


class Repeat(NamedTuple):
    """A launch, with room for the addresses of another call."""

    launch: Any
    head: tuple[Any, ...]
    """The grid."""
    tail: tuple[Any, ...]
    """What was compiled, and nothing for hooks."""
    values: tuple[Any, ...]
    moving: tuple[tuple[int, int, int], ...]
    """Which value is so many bytes behind the start of which buffer."""
    rest: tuple[Any, ...]


class Recording(NamedTuple):
    """The launches of a call, to be repeated."""

    device: int
    launches: tuple[Repeat, ...]
    size: int
    """Bytes of memory that they work with."""
    shape: tuple[int, int, int]
    """(T, B, N·d)."""

    def play(self, x: Tensor, hx: State | None, checked: Checked) -> Made:
        """Repeat the launches for another input and state."""
        like = Weights(*checked.own).W  # type: ignore[arg-type]
        T, B, H = self.shape
        memory, y = like.new_empty(self.size // 4), like.new_empty(T, B, H)
        c = like.new_empty(1, B, H)
        starts = [memory.data_ptr(), y.data_ptr(), c.data_ptr(), x.data_ptr()]
        starts += (0, 0) if hx is None else (hx[0].data_ptr(), hx[1].data_ptr())
        starts += [0 if place is None else place[0] for place in checked.places]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for launch, head, tail, values, moving, rest in self.launches:
            now = list(values)
            for i, buffer, behind in moving:
                now[i] = starts[buffer] + behind
            launch(*head, stream, *tail, *now, *rest)
        return y, (y[-1:].clone(), c)


class Cache(dict[tuple[Any, ...], Checked | None]):
    """What a layer keeps, by kind; None: its launches cannot be recorded.

    A copy of a layer has an empty one: its weights lie elsewhere.
    """

    def __reduce__(self) -> tuple[type[Cache], tuple[()]]:
        return Cache, ()


def call(layer: Layer, x: Tensor, hx: State | None) -> Any:
    """Call a layer, by cached launches where there are any for this kind of call."""
    own = layer._parameters
    # Weights that are no parameters of the layer's own are computed for the call.
    if watched(x) or not all(name in own for name in _OWN):
        return layer._in_full(x, hx, None, None)
    kind, weights = _kind(layer, x, hx), [own[name] for name in _OWN]
    if kind is None:
        return layer._in_full(x, hx, None, None)
    cache: Cache = layer.__dict__.setdefault("_launch_cache", Cache())
    # One look: another thread may take a kind out at any time.
    kept = cache.get(kind, _NEW)
    if kept is _NEW:
        out = layer._in_full(x, hx, None, None)
        _make_room(cache, weights, layer.selection)
        cache[kind] = _check(layer, x, weights)
        return out
    if kept is None:
        return layer._in_full(x, hx, None, None)
    if not kept.holds(weights, layer.selection):
        # Recordings would keep weights that are the layer's no more.
        cache.clear()
        return layer._in_full(x, hx, None, None)
    if kept.recording is not None:
        return kept.recording.play(x, hx, kept)
    made, recording = record(x, hx, kept)
    if made is None:
        cache.pop(kind, None)
        return layer._in_full(x, hx, None, None)
    cache[kind] = None if recording is None else kept._replace(recording=recording)
    return made


def _make_room(cache: Cache, own: Parameters, sel: Selection) -> None:
    """Forget all kinds if weights or rules have changed, and else the first one of too many."""
    if not all(kept is None or kept.holds(own, sel) for kept in list(cache.values())):
        cache.clear()
    if len(cache) >= MOST:
        for first in list(cache)[:1]:
            cache.pop(first, None)


def _kind(layer: Layer, x: Tensor, hx: State | None) -> tuple[Any, ...] | None:
    """What launches depend on but for weights and rules; None: a call is not cached."""
    if (
        x.dim() != 3
        or x.shape[2] != layer.input_size
        or layer.num_layers != 1
        or layer.bidirectional
        or layer.batch_first
        or not _readable(x)
        or x.get_device() != torch.cuda.current_device()
    ):
        return None
    if hx is not None:
        if type(hx) is not tuple or len(hx) != 2:
            return None
        shape = (1, x.shape[1], layer.hidden_size)
        for state in hx:
            if type(state) is not Tensor or state.shape != shape or not _readable(state):
                return None
            if state.dtype != torch.float32 or state.get_device() != x.get_device():
                return None
    return (
        *(x.shape, x.dtype, x.get_device(), hx is None, layer.backend),
        *(product_on("cuda", torch.float32), torch._C._get_fp32_precision_getter("cuda", "matmul")),
    )


def _readable(t: Tensor) -> bool:
    """True if a tensor lies in memory as kernels want it: they are compiled for such addresses."""
    return t.is_contiguous() and not t.is_neg() and t.data_ptr() % 16 == 0 and t.numel() > 0


def _place(w: Tensor | None) -> tuple[Any, ...] | None:
    """Where a weight lies, and what it is: `to` of a layer changes that, and not the parameter.

    The address comes first. No two devices have one in common.
    """
    return None if w is None else (w.data_ptr(), w.dtype, w.shape, w.is_contiguous(), w.is_neg())


def _check(layer: Layer, x: Tensor, own: Parameters) -> Checked | None:
    """A layer after a call in full; None where its launches cannot be recorded."""
    W, device = Weights(*own).W, x.get_device()  # type: ignore[arg-type]
    problem = (layer.selection, layer.cell_size, W.dtype, x.shape[1])
    # What is drawn is drawn anew for each call.
    if not KNOWN or layer.selection.draws or resolve(layer.backend, x.device, *problem) != "triton":
        return None
    for w in own:
        if w is not None and (
            *(type(w), w.dtype, w.get_device(), w.is_contiguous(), w.is_neg()),
        ) != (nn.Parameter, torch.float32, device, True, False):
            return None
    return Checked(own, [_place(w) for w in own], layer.selection)


def record(x: Tensor, hx: State | None, checked: Checked) -> tuple[Made | None, Recording | None]:
    """What a call gives, if its buffers are apart, and its recording, if there could be one.

    x (T, B, D) and the state (1, B, N·d) are checked, and lie in memory without gaps.
    """
    weights, sel = Weights(*checked.own), checked.sel  # type: ignore[arg-type]
    given = {t.data_ptr() for t in (x, *(hx or ()))}
    taken = {None if place is None else place[0] for place in checked.places}
    # Of two buffers at one address, nobody could say which of them an argument was.
    if len(given) != 1 + len(hx or ()) or given & taken:
        return None, None
    d = weights.W.shape[2] // 4
    T, B, H = (*x.shape[:2], sel.N * d)
    h, c = (None, None) if hx is None else (s.view(B, sel.N, d) for s in hx)
    product = product_on("cuda", torch.float32)
    with recorded() as launches:
        y, h_n, c_n, held = forward(
            *(x, h, c, weights, sel, None, None, None, product), save=False, keep=False
        )
    made = y.flatten(2), (of_shape(h_n, 1, B, H), of_shape(c_n, 1, B, H))
    return made, _recording(launches, (y, c_n, x, h, c, *weights), held.woke, (T, B, H))


def _recording(
    launches: Sequence[Launched],
    buffers: Sequence[Tensor | None],
    woke: Tensor,
    shape: tuple[int, int, int],
) -> Recording | None:
    parts = [a for one in launches for a in one.arguments if isinstance(a, Buffer)]
    memories = {id(part.memory): part.memory for part in parts}
    if len(memories) != 1 or any(one.compiled is None for one in launches):
        return None
    (memory,) = memories.values()
    size, start = memory.nbytes, memory.data_ptr()
    # Who woke is no output here, and may lie behind the rest.
    where = {woke.data_ptr(): (0, size)}
    for i, buffer in enumerate(buffers, 1):
        if buffer is not None:
            where[buffer.data_ptr()] = i, 0
    repeats = []
    for grid, arguments, compiled, rest in launches:
        values, moving = list[Any](), list[tuple[int, int, int]]()
        for i, argument in enumerate(arguments):
            if argument is None or isinstance(argument, int):
                values.append(argument)
                continue
            values.append(0)
            if isinstance(argument, Buffer):
                moving.append((i, 0, argument.address - start))
            elif (place := where.get(argument.data_ptr())) is not None:
                moving.append((i, *place))
            else:
                return None
        head = (*grid, 1, 1)[:3]
        tail = (compiled.function, compiled.packed_metadata, None, None, None)
        repeats.append(Repeat(compiled.run, head, tail, tuple(values), tuple(moving), rest))
    size += -(-woke.nbytes // 128) * 128
    return Recording(torch.cuda.current_device(), tuple(repeats), size, shape)
