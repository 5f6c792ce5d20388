"""Pictures of a trace: which cells woke, what they took in, and how much they kept.

>>> from riglstm import RigLSTM, plot
>>> rnn, x = RigLSTM(20, 60), torch.randn(50, 2, 20)
>>> plot.cells(rnn.trace(x), input=x).savefig("cells.png")

Each function takes what `rnn.trace` gives, or one layer of it, and returns matplotlib's Figure.
matplotlib is imported when the first picture is drawn; `save_trace` does without.

Shapes: T steps, B sequences, N cells, K views, C channels of the input.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from riglstm.plot.draw import draw_choices, draw_over_time
from riglstm.plot.reading import Traces, read, read_input, read_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["cells", "keep", "save_trace", "trace_content", "views"]

FORMAT, VERSION = "riglstm-trace", 1
PARTS = ("active", "views", "peers", "view_scores", "peer_scores", "keep")
MOST_BYTES = 32 * 2**20
"""Of the arrays of a saved trace: what a browser opens without a pause."""


def cells(
    trace: Traces,
    input: Any = None,
    *,
    sequences: Iterable[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Figure:
    """When each cell was awake, under the input or beside its picture.

    Args:
        trace: what `rnn.trace(x)` returned, or one layer of it.
        input: what the layer read, to be drawn beside its cells: (T, B, C), (T, B), or (B, T, C)
            from a layer that is `batch_first`; or pictures of T pixels that were read line by line,
            (B, rows, columns) or (B, rows, columns, 3), whose cells are then drawn as pictures.
        sequences: numbers of the sequences to draw; default: the first three.
        labels: what is said of each of these sequences.

    In a picture a cell is white where it was awake, and r is the correlation over time of being
    awake with the input's brightness.
    """
    return draw_over_time("active", *read(trace, input, sequences, labels))


def keep(
    trace: Traces,
    input: Any = None,
    *,
    sequences: Iterable[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Figure:
    """How much of its old state each cell kept in the soft update; grey where it slept.

    Arguments are those of `cells`.
    """
    return draw_over_time("keep", *read(trace, input, sequences, labels))


def views(
    trace: Traces,
    input: Any = None,
    *,
    step: int | None = None,
    sequences: Iterable[int] | None = None,
    labels: Sequence[str] | None = None,
    slots: Sequence[str] | None = None,
) -> Figure:
    """What each cell took in: views of the input, and states of other cells.

    Without `step`: in which share of the steps that a cell was awake it took in each of them, or
    with which mean weight, where a model weighs them. With `step`, counted from 1: the scores at
    that step, framed where an awake cell took them in, and dotted its own state, which it always
    has.

    `slots`: names of the views; `input` is drawn if it is pictures; the other arguments are those
    of `cells`.
    """
    layers, shown, chosen, said = read(trace, input, sequences, labels)
    T = len(layers[0].trace.output)
    if step is not None and not 1 <= step <= T:
        raise ValueError(f"step must be from 1 to {T}, the steps of the trace, got {step}")
    pictures = shown if shown is not None and shown.size else None
    return draw_choices(layers, pictures, chosen, said, step, slots)


def save_trace(
    path: str | os.PathLike[str],
    trace: Traces,
    input: Any = None,
    *,
    probabilities: Any = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write a trace as the JSON file that the second tab of `riglstm explore` reads.

    `input` is that of `cells`; `probabilities` (T, B, classes): what a model made of each step;
    `classes`: their names. All sequences are written.
    """
    content = trace_content(trace, input, probabilities=probabilities, classes=classes)
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def trace_content(
    trace: Traces,
    input: Any = None,
    *,
    probabilities: Any = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What `save_trace` writes: shapes, and arrays as base64 of little-endian float32 or uint8."""
    layers = read_layers(trace)
    T, B = layers[0].trace.output.shape[:2]
    shown = None if input is None else read_input(input, T, B)
    likely = None if probabilities is None else torch.as_tensor(probabilities)
    if likely is not None and (likely.dim() != 3 or likely.shape[:2] != (T, B)):
        raise ValueError(
            f"probabilities must be (T, B, classes) with T = {T} and B = {B}, got "
            f"{tuple(likely.shape)}"
        )
    if classes is not None and (likely is None or len(classes) != likely.shape[2]):
        known = "no probabilities" if likely is None else f"{likely.shape[2]} classes"
        raise ValueError(
            f"classes must name those of the probabilities, got {len(classes)} names for {known}"
        )
    parts = [{part: getattr(layer.trace, part) for part in PARTS} for layer in layers]
    others = {"input": None if shown is None else shown.values, "probabilities": likely}
    tensors = [t for group in (*parts, others) for t in group.values() if t is not None]
    needed = sum(t.numel() * _width(t) for t in tensors)
    if needed > MOST_BYTES:
        raise ValueError(
            f"a saved trace must have arrays of at most {MOST_BYTES / 2**20:.0f} MiB, got "
            f"{needed / 2**20:.1f} MiB for {T} steps of {B} sequences; trace fewer of them, as in "
            "rnn.trace(x[:500, :1])"
        )
    return {
        "format": FORMAT,
        "version": VERSION,
        "steps": T,
        "sequences": B,
        "picture": shown.size if shown is not None and shown.size else None,
        "classes": None if classes is None else list(map(str, classes)),
        **{name: _array(tensor) for name, tensor in others.items()},
        "layers": [
            {"name": layer.name, **{part: _array(tensor) for part, tensor in own.items()}}
            for layer, own in zip(layers, parts, strict=True)
        ],
    }


def _width(tensor: Tensor) -> int:
    """Bytes of an element in a saved trace."""
    return 1 if tensor.dtype in (torch.bool, torch.uint8) else 4


def _array(tensor: Tensor | None) -> dict[str, Any] | None:
    """A tensor for JSON."""
    if tensor is None:
        return None
    dtype = "uint8" if _width(tensor) == 1 else "float32"
    plain = tensor.detach().cpu().to(getattr(torch, dtype)).contiguous()
    # torch's own way to bytes needs NumPy, which a user of the layer may not have.
    raw = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())
    return {"dtype": dtype, "shape": list(plain.shape), "data": base64.b64encode(raw).decode()}
