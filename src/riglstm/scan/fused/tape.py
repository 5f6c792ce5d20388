"""The launches of one call, written down to be made again for another.

Each argument is one of a few buffers, or lies in one, or is a number: a place in the memory that a
call works with, an output, the input, the state that is given, a weight. What is anything else, a
copy that torch made say, was not there before the call and will not be at the next one: such a call
is not written down. Nor is one in which torch computes: none does where all launches are ours.

Shapes as in `plan.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from riglstm.cell import Weights
from riglstm.checks import product_on
from riglstm.inputs import of_shape
from riglstm.scan.base import State
from riglstm.scan.fused import replay
from riglstm.scan.fused.launch import Launched, Place, heard, undisturbed
from riglstm.scan.fused.run import run
from riglstm.scan.kernels.common import KNOWN
from riglstm.selection import Selection

Parameters = Sequence[nn.Parameter | None]
Made = tuple[Tensor, State]
"""y (T, B, N·d), and the final h and c (1, B, N·d)."""


class Standing(NamedTuple):
    """A layer's weights and rules, as they were when a call was checked."""

    own: Parameters
    were: list[tuple[Any, ...] | None]
    """What `replay.whereabouts` said of each."""
    sel: Selection

    def holds(self, own: Parameters, sel: Selection) -> bool:
        """Whether nothing has changed but numbers."""
        return (
            sel is self.sel
            and all(map(operator.is_, own, self.own))
            and [replay.whereabouts(w) for w in own] == self.were
        )

    def next(self, x: Tensor, hx: State | None) -> tuple[Made | None, Tape | None]:
        """What a call gives, if it could be written down, and its tape, if it was."""
        return write(x, hx, self)


class Again(NamedTuple):
    """A launch, with room for the addresses that are another call's."""

    launch: Any
    head: tuple[Any, ...]
    """The grid."""
    tail: tuple[Any, ...]
    """What was compiled, and nothing for hooks."""
    values: tuple[Any, ...]
    moving: tuple[tuple[int, int, int], ...]
    """Which value is so many bytes behind the start of which buffer."""
    rest: tuple[Any, ...]


class Tape(NamedTuple):
    """Launches, and what they need to be made again."""

    standing: Standing
    device: int
    launches: tuple[Again, ...]
    size: int
    """Bytes of memory that they work with."""
    shape: tuple[int, int, int]
    """(T, B, N·d)."""

    def holds(self, own: Parameters, sel: Selection) -> bool:
        """Whether weights and rules are what they were."""
        return self.standing.holds(own, sel)

    def next(self, x: Tensor, hx: State | None) -> tuple[Made | None, Tape]:
        """What a call gives, unless someone watches."""
        return self.play(x, hx), self

    def play(self, x: Tensor, hx: State | None) -> Made | None:
        """What a call gives; None where launches are not to be made so."""
        if not _alone(self.device):
            return None
        like = Weights(*self.standing.own).W  # type: ignore[arg-type]
        T, B, H = self.shape
        memory, y = like.new_empty(self.size // 4), like.new_empty(T, B, H)
        c = like.new_empty(1, B, H)
        starts = [memory.data_ptr(), y.data_ptr(), c.data_ptr(), x.data_ptr()]
        starts += (0, 0) if hx is None else (hx[0].data_ptr(), hx[1].data_ptr())
        starts += [0 if was is None else was[0] for was in self.standing.were]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for launch, head, tail, values, moving, rest in self.launches:
            now = list(values)
            for i, buffer, behind in moving:
                now[i] = starts[buffer] + behind
            launch(*head, stream, *tail, *now, *rest)
        return y, (y[-1:].clone(), c)


def _alone(device: int) -> bool:
    """Whether calls on this device may be made by launches alone."""
    # What is replayed by graphs is counted there.
    return not replay.ON and torch.cuda.current_device() == device and undisturbed()


def stands(own: Parameters, sel: Selection, device: int) -> Standing | None:
    """How things stand; None where weights are not as kernels read them."""
    for w in own:
        if w is not None and (
            *(type(w), w.dtype, w.get_device(), w.is_contiguous(), w.is_neg()),
        ) != (nn.Parameter, torch.float32, device, True, False):
            return None
    return Standing(own, [replay.whereabouts(w) for w in own], sel)


def write(x: Tensor, hx: State | None, standing: Standing) -> tuple[Made | None, Tape | None]:
    """What a call gives, if it could be written down, and its tape, if it was.

    x (T, B, D) and the state (1, B, N·d) are checked, and lie in memory without gaps.
    """
    weights, sel = Weights(*standing.own), standing.sel  # type: ignore[arg-type]
    given = {t.data_ptr() for t in (x, *(hx or ()))}
    apart = len(given) == 1 + len(hx or ()) and not given & {
        None if was is None else was[0] for was in standing.were
    }
    # Of two buffers at one address, nobody could say which of them an argument was.
    if not apart or not KNOWN or not _alone(x.get_device()):
        return None, None
    d = weights.W.shape[2] // 4
    T, B, H = (*x.shape[:2], sel.N * d)
    h, c = (None, None) if hx is None else (s.view(B, sel.N, d) for s in hx)
    product = product_on("cuda", torch.float32)
    with heard() as launches:
        y, h_n, c_n, woke = run(x, h, c, weights, sel, None, None, product)
    made = y.flatten(2), (of_shape(h_n, 1, B, H), of_shape(c_n, 1, B, H))
    return made, _tape(launches, (y, c_n, x, h, c, *weights), woke, (T, B, H), standing)


def _tape(
    launches: Sequence[Launched],
    buffers: Sequence[Tensor | None],
    woke: Tensor,
    shape: tuple[int, int, int],
    standing: Standing,
) -> Tape | None:
    places = [a for one in launches for a in one.arguments if isinstance(a, Place)]
    memories = {id(place.memory): place.memory for place in places}
    if len(memories) != 1 or any(one.compiled is None for one in launches):
        return None
    (memory,) = memories.values()
    size, start = memory.nbytes, memory.data_ptr()
    # Who woke is nobody's output here, and may lie behind the rest.
    where = {woke.data_ptr(): (0, size)}
    for i, buffer in enumerate(buffers, 1):
        if buffer is not None:
            where[buffer.data_ptr()] = i, 0
    again = []
    for grid, arguments, compiled, rest in launches:
        values, moving = list[Any](), list[tuple[int, int, int]]()
        for i, argument in enumerate(arguments):
            if argument is None or isinstance(argument, int):
                values.append(argument)
                continue
            values.append(0)
            if isinstance(argument, Place):
                moving.append((i, 0, argument.address - start))
            elif (place := where.get(argument.data_ptr())) is not None:
                moving.append((i, *place))
            else:
                return None
        head = (*grid, 1, 1)[:3]
        tail = (compiled.function, compiled.packed_metadata, None, None, None)
        again.append(Again(compiled.run, head, tail, tuple(values), tuple(moving), rest))
    size += -(-woke.nbytes // 128) * 128
    return Tape(standing, torch.cuda.current_device(), tuple(again), size, shape)
