"""Calls without gradients that come again, as captured CUDA graphs.

Of a short call most of the time is the host's: a dozen calls of torch and three launches. A graph
starts them all at once; what is left are copies, in to its own tensors and out to the caller's.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from riglstm.cell import Weights
from riglstm.scan.base import begin
from riglstm.scan.fused.capture import UNENDED, CaptureError, Place, Replay, Results, Run
from riglstm.scan.fused.input_map import has_map
from riglstm.scan.fused.launch import undisturbed
from riglstm.scan.fused.plan import aligned, sizes
from riglstm.scan.kernels.common import interpreted
from riglstm.selection import Selection

# Without torch's cache of memory no capture can allocate any.
_CACHED = not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
ON = _CACHED and os.environ.get("RIGLSTM_REPLAY") == "1"
"""Whether calls are replayed at all; the variables are read once, at import. Asked for, as what a
capture demands of other threads (docs/kernels.md) only the caller can know."""
CALLS = 3
"""The call of a kind that is captured: what comes once or twice is not worth it."""
MOST = 8
"""Graphs that are kept: layers and directions of a model, in one or two sizes of batch."""
SHARE = 512
"""Of a GPU's memory a graph may hold one part in so many. On an H200 that is the paper's layer at
B = 64, T = 361 with TF32 and 576 in bf16. The copies of a call would pay at twice that, but the
memory is others' too."""
KINDS = 256
"""Kinds of calls that are counted at a time."""


@dataclass(slots=True)
class Kept:
    """What is known of a kind of calls."""

    owner: weakref.ref[Tensor]
    """The weights W: once they are gone, the graph goes at the next call of any."""
    due: int
    """The call to capture at; 0: never."""
    calls: int = 0
    """Without a graph, so far."""
    replay: Replay | None = None


_LOCK = threading.Lock()
"""For all below, and from copying in to copying out: threads may share a stream. Nobody waits for
it: who does not get it, a finalizer in the midst of a call perhaps, calls directly."""
_KEPT: dict[tuple[Any, ...], Kept] = {}
"""Those with a graph in the order in which they were last used."""
_DEAD: list[tuple[Any, ...]] = []
"""Kinds whose weights are gone. Python may say so in any thread, so this is all it does there."""


def again(
    run: Run,
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    live: Tensor | None,
    reset: Tensor | None,
    product: torch.dtype,
) -> Results:
    """`run` of all that, without gradients; a kind that comes again is replayed.

    Results are to the last bit those of `run`, and belong to the caller.
    """
    place = _place(weights.W)
    if place is not None:
        h, c = begin(x, h, c, weights, sel)
    given = (x, h, c, live, reset)
    key = None if place is None else _key(place, given, weights, sel, product)
    if place is not None and key is not None and _LOCK.acquire(blocking=False):
        try:
            kept = _known(key, place, given, weights, sel, product)
            if kept.replay is None:
                kept.calls += 1
                if kept.calls == kept.due and not UNENDED:
                    _keep(kept, run, given, (weights, sel, product), place)
            if kept.replay is not None:
                _KEPT[key] = _KEPT.pop(key)
                return kept.replay(given)
        finally:
            _LOCK.release()
    return run(x, h, c, weights, sel, live, reset, product)


def clear() -> None:
    """Forget all graphs, and what was counted."""
    with _LOCK:
        _KEPT.clear()
        _DEAD.clear()


def _leave(process: int) -> None:
    # A fork has copies of graphs that are not its own.
    if os.getpid() == process:
        clear()


# Graphs must not outlive CUDA.
atexit.register(_leave, os.getpid())


def _place(W: Tensor) -> Place | None:
    """Device and stream of a call; None where nothing may be captured or replayed.

    A capture of the caller's has to hold the work itself. Off the current device, `run` changes it,
    and is left to do so.
    """
    if not ON or interpreted():
        return None
    device = W.get_device()
    if (
        device != torch.cuda.current_device()
        or not undisturbed()
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    return device, torch._C._cuda_getCurrentRawStream(device)


def _key(
    place: Place,
    given: Sequence[Tensor | None],
    weights: Weights,
    sel: Selection,
    product: torch.dtype,
) -> tuple[Any, ...] | None:
    """All that the captured work depends on; None: tensors of some other kind than torch's own."""
    parts: list[Any] = [
        *(place, sel, product, torch._C._get_fp32_precision_getter("cuda", "matmul")),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_blas_preferred_backend(),
        torch._C._get_deterministic_algorithms(),
    ]
    for t in given:
        if t is None:
            parts.append(None)
        elif type(t) not in _PLAIN:
            return None
        else:
            parts += (t.shape, t.dtype, t.get_device())
    for w in weights:
        if w is None:
            parts.append(None)
        elif type(w) not in _PLAIN:
            return None
        else:
            parts.append(whereabouts(w))
    return tuple(parts)


def whereabouts(w: Tensor | None) -> tuple[Any, ...] | None:
    """Where a weight is, and what: `to` of a layer changes that, and leaves it the parameter.

    The address comes first. No two devices have one in common.
    """
    return None if w is None else (w.data_ptr(), w.dtype, w.shape, w.is_contiguous(), w.is_neg())


_PLAIN = (Tensor, nn.Parameter)


def _known(
    key: tuple[Any, ...],
    place: Place,
    given: Sequence[Tensor | None],
    weights: Weights,
    sel: Selection,
    product: torch.dtype,
) -> Kept:
    """What is known of a kind: of weights that are made for each call, never more than one call."""
    while _DEAD:
        gone = _KEPT.get(dead := _DEAD.pop())
        if gone is not None and gone.owner() is None:
            del _KEPT[dead]
    kept = _KEPT.get(key)
    if kept is None:
        if len(_KEPT) >= KINDS:
            # What failed, or went once, is not forgotten: it would be tried again and again.
            for other in [k for k, v in _KEPT.items() if v.replay is None and v.due == CALLS]:
                del _KEPT[other]
        together = all(t is None or t.get_device() == place[0] for t in (*given, *weights))
        whole = all(w is None or w.is_contiguous() for w in weights)
        fits = together and whole and _bytes(given, weights, sel, product) <= _room(place[0])
        owner = weakref.ref(weights.W, lambda _: _DEAD.append(key))
        kept = Kept(owner, CALLS if fits else 0)
        if len(_KEPT) < KINDS:
            _KEPT[key] = kept
    return kept


@functools.cache
def _room(device: int) -> int:
    """Bytes that a graph may hold there."""
    return int(torch.cuda.get_device_properties(device).total_memory) // SHARE


def _bytes(
    given: Sequence[Tensor | None], weights: Weights, sel: Selection, product: torch.dtype
) -> int:
    """About the most a graph would hold: input, given and multiplied, views, XH, y, weights."""
    x, h = given[:2]
    assert x is not None
    assert h is not None
    T, B, D = x.shape
    z = sizes(h.shape[2], sel, weights.W_q is not None, product)
    row = D * x.dtype.itemsize + z.S * z.P * z.held.itemsize + z.N * z.d * h.dtype.itemsize
    if weights.W_in is not None:
        if not has_map(z, D):
            row += (x.dtype != product) * D * product.itemsize + z.K * z.d * product.itemsize
        elif z.held == torch.float16:
            row += aligned(D, z.held) * z.held.itemsize + z.K * z.P * torch.float32.itemsize
    return T * B * row + z.N * z.S * z.P * z.G * z.d * z.held.itemsize


def _keep(
    kept: Kept, run: Run, given: Sequence[Tensor | None], rest: Sequence[Any], place: Place
) -> None:
    """Capture a kind, if that can be done; of too many graphs the one least recently used goes."""
    graphs = [k for k in _KEPT.values() if k.replay is not None]
    # Graphs of one stream never run at once, so they may share what they work in.
    shared = (k.replay.graph.pool() for k in graphs if k.replay and k.replay.place == place)
    try:
        kept.replay = Replay(run, given, rest, place, next(shared, None))
    except CaptureError:
        raise
    except Exception:
        # No room, say. What is wrong with the call itself, `run` says again right after.
        kept.due = 0
        return
    if len(graphs) >= MOST:
        oldest = graphs[0]
        # Where more kinds come in turn than are kept, captures must not come in turn, too.
        oldest.replay, oldest.calls, oldest.due = None, 0, 4 * oldest.due
