"""What trained networks do: their cells on test images, and their roll-outs of bouncing balls.

`riglstm.plot` draws the cells. Shapes: T steps, B images, N cells, s × s pixels, which are the
T = s² steps in the order of lines; F frames of H × W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor, nn

from riglstm import plot
from riglstm.lab.report.curves import Array, Picture, looks, png
from riglstm.lab.tables.plan import RunSpec
from riglstm.lab.tables.result import CHOSEN
from riglstm.lab.tables.run import finished
from riglstm.lab.tasks.balls import BallsTask
from riglstm.lab.tasks.base import Task
from riglstm.lab.tasks.common import TokenNetwork
from riglstm.lab.tasks.copying import CopyingTask
from riglstm.lab.tasks.images import ImageTask, read_size
from riglstm.lab.train.config import fork_rng
from riglstm.plot.draw import PINK, new_figure, picture_axes, styled

SLEEPING = ("riglstm", "rim", "brim")
"""Models whose cells sleep at times."""
SLOTS: dict[str, tuple[str, ...]] = {"rim": ("null", "x"), "rmc": ("x",)}
"""What the cells of a model choose from; RigLSTM's views have numbers."""

EPSILON = 1e-6
"""Probabilities are kept this far from 0 and 1, as in the score of the task."""

EDGE = 0.5
"""Where a predicted ball ends, for its outline."""
OUTLINED = ("riglstm", "rim")
"""Models whose balls lie over the true ones, as in the paper."""
Stroke: TypeAlias = Literal["solid", "dashed"]
STROKES: tuple[Stroke, Stroke] = ("solid", "dashed")


class Loaded(NamedTuple):
    """A run that is done, and what `riglstm.lab.tables.run.load` makes of it."""

    label: str
    path: Path
    """Its folder, or an exported file."""
    spec: RunSpec
    task: Task
    net: nn.Module

    @property
    def source(self) -> str:
        """Seed, checkpoint and what chose it, for a caption."""
        chosen = finished(self.path).result["chosen"][self.task.trained_on]
        average = self.spec.fit.average
        averaged = "" if average is None else f", averaged over updates by {average:g}"
        return (
            f"{self.label}, seed {self.spec.seed}, trained on {self.task.trained_on}, weights of "
            f"update {chosen['step']:,}{averaged}, chosen on {CHOSEN}{self.task.trained_on}"
        )


class Reading(NamedTuple):
    """Test images, and what a model did with them."""

    size: str
    """Of each image, as conditions are named: 24x24."""
    pixels: Tensor
    """(B, s, s, C) of 0 to 1, on the CPU."""
    labels: Sequence[str]
    """Class, answer and number of each image."""
    traces: Any
    """A layer each, as `riglstm.plot` takes them."""


def read_images(run: Loaded, condition: str, indices: Sequence[int] | None = None) -> Reading:
    """What the model did with test images at a size such as 24x24.

    `indices`: their numbers; None: the first three that are all of different classes.
    """
    task = cast(ImageTask, run.task)
    size, known = read_size(condition), task.size("test")
    if indices is None:
        classes = task.examples(task.trained_on, "test").targets.tolist()
        indices = sorted(map(classes.index, set(classes)))[:3]
    for index in indices:
        if not 0 <= index < known:
            raise ValueError(
                f"test images must be numbers from 0 to {known - 1}, the run's test set, "
                f"got {index}"
            )
    batch = task.examples(condition, "test", torch.tensor(indices, device=task.device))
    answers, traces = _read(run, batch.inputs)
    pixels = batch.inputs.permute(1, 0, 2).unflatten(1, size)  # (B, rows, columns, C)
    pixels = pixels.double() / (task.config.values - 1)
    labels = [
        f"“{label}”, read as “{said}”\ntest no. {index}"
        for label, said, index in zip(batch.targets.tolist(), answers, indices, strict=True)
    ]
    return Reading(condition, pixels.cpu(), labels, traces)


def _read(run: Loaded, tokens: Tensor) -> tuple[list[Any], Any]:
    """The network's answers to tokens, and its trace."""
    net = run.net
    assert isinstance(net, TokenNetwork)
    # Draws are of the run's own seed, and leave no mark elsewhere.
    with torch.no_grad(), fork_rng(run.task.device):
        torch.manual_seed(run.spec.seed)
        answers = net(tokens).argmax(-1).tolist()
        return answers, net.core.trace(net.embed(tokens))  # type: ignore[attr-defined]


def pictures(model: str, step: int) -> dict[str, Callable[[Loaded, Reading], Picture]]:
    """What is drawn of a model that has read images, by a name for each kind."""
    kinds: dict[str, Callable[[Loaded, Reading], Picture]] = {}
    if model in SLEEPING:
        kinds["cells"] = activation_picture
    if model in (*SLEEPING, "rmc"):
        kinds["scores"] = partial(score_picture, step=step)
    return kinds


def activation_picture(run: Loaded, seen: Reading) -> Picture:
    """The paper's activation images: when each cell was awake on each image."""
    everyone = range(len(seen.pixels))
    figure = plot.cells(seen.traces, seen.pixels, sequences=everyone, labels=seen.labels)
    return Picture(
        title=f"{run.label}: cells awake at {seen.size}",
        caption=(
            "First column: the test image, fed pixel by pixel, line by line. Then one image for "
            "each cell: white where the cell was awake at that pixel, black where it slept. Under "
            "each, the share of steps awake, and r, the correlation over the pixels of being "
            "awake with the brightness (+1: awake there alone; −1: everywhere else; –: it never "
            f"changed). {run.source}."
        ),
        png=png(figure),
    )


def sequence_picture(run: Loaded) -> Picture:
    """When each cell was awake on the first test sequence of copying, at the furthest condition."""
    task = cast(CopyingTask, run.task)
    condition = task.conditions[-1]
    tokens = task.examples(condition, "test", slice(1)).inputs  # (T, 1, M)
    _, traces = _read(run, tokens)
    kinds = torch.arange(task.config.digits + 2, device=tokens.device)
    shown = (tokens.unsqueeze(3) == kinds).flatten(2)  # a line for each kind of token
    figure = plot.cells(traces, shown, labels=[f"{run.label} at {condition}"])
    return Picture(
        title=f"{run.label}: cells awake at {condition}",
        caption=(
            "Above: a test sequence, a line for each digit, and one each for a blank and for the "
            "sign to answer. Below: green where a cell was awake, with the share of steps awake. "
            f"{run.source}."
        ),
        png=png(figure),
    )


def score_picture(run: Loaded, seen: Reading, step: int) -> Picture:
    """Scores of views and of cells at a step, counted from 1."""
    figure = plot.views(
        seen.traces,
        seen.pixels,
        step=step,
        sequences=range(len(seen.pixels)),
        labels=seen.labels,
        slots=SLOTS.get(run.spec.model),
    )
    return Picture(
        title=f"{run.label}: scores at step {step} of {seen.size}",
        caption=(
            "Left: the test image and the pixel that the step reads. Middle: each cell's "
            "scores of the input's views (N×K). Right: its scores of the cells' hidden "
            "states (N×N); a row is the cell that listens. Framed, where a model chooses: what an "
            "awake cell took in; dotted: its own state, which it always has. "
            f"{run.source}."
        ),
        png=png(figure),
    )


def frame_bce(truth: Array, predicted: Array) -> Array:
    """Binary cross-entropy of each frame in nats per pixel: (F, H, W) to (F,)."""
    p = predicted.astype(np.float64).clip(EPSILON, 1 - EPSILON)
    nats = -np.where(truth > 0.5, np.log(p), np.log1p(-p))
    return np.asarray(nats.mean(axis=(1, 2)))


@styled()
def draw_rollout(
    truth: Array, models: Mapping[str, Array], first_frame: int, outlined: Mapping[str, Stroke]
) -> Figure:
    """Rows: truth, every model, and the truth with the outlines of some models' balls.

    `truth` and each model's probabilities are (F, H, W); frames are counted from 0.
    """
    F = len(truth)
    colours = {label: look.colour for label, look in looks(list(models)).items()}
    size = 0.95
    figure = new_figure(size * F + 1.1, (size + 0.22) * (len(models) + 2) + 0.35)
    spaces = {"wspace": 0.03, "hspace": 0.03}
    panels = figure.subplots(len(models) + 2, F, squeeze=False, gridspec_kw=spaces)
    rows = {"truth": truth, **models, "overlay": truth}
    for line, (name, frames) in zip(panels, rows.items(), strict=True):
        line[0].set_ylabel(name, fontsize=10)
        bce = frame_bce(truth, frames)
        # Balls are of the model's colour, on white.
        tinted = 1 - frames[..., None] * (1 - np.asarray(to_rgb(colours.get(name, PINK))))
        for f in range(F):
            picture_axes(line[f]).imshow(tinted[f], interpolation="nearest")
            if name in models:
                line[f].set_xlabel(f"{bce[f]:.3f}", fontsize=8.5, labelpad=2)
    for f in range(F):
        panels[0, f].set_title(f"frame {first_frame + f}", fontsize=9.5)
        for name, stroke in outlined.items():
            frame, stroked = models[name][f], {"linestyles": stroke, "linewidths": 1.3}
            if frame.min() < EDGE < frame.max():
                panels[-1, f].contour(frame, [EDGE], colors=[colours[name]], **stroked)
    return figure


def rollout_picture(runs: Sequence[Loaded], condition: str, sequence: int = 0) -> Picture:
    """One test sequence rolled out by every model, beside the truth."""
    # One task for all, as each would keep the sequences in memory.
    task = cast(BallsTask, runs[0].task)
    rolled = {run.label: task.rollout(run.net, condition, "test", sequence) for run in runs}
    models = {label: one.prediction.numpy() for label, one in rolled.items()}
    one = rolled[runs[0].label]
    paper = [run.label for name in OUTLINED for run in runs if run.spec.name == name]
    outlined = dict(zip(paper or [runs[0].label], STROKES, strict=False))
    outlines = " and ".join(f"{label} ({stroke})" for label, stroke in outlined.items())
    return Picture(
        title=f"Balls, trained on {task.trained_on}, tested on {condition}",
        caption=(
            f"Test sequence {sequence}: the models get frames 0 to {len(one.seen) - 1} and then "
            "see their own predictions. Under each frame, its BCE in nats per pixel. Last row: the "
            f"truth, with the outlines (probability 0.5) of {outlines}. "
            f"{'; '.join(run.source for run in runs)}."
        ),
        png=png(draw_rollout(one.truth.numpy(), models, len(one.seen), outlined)),
    )
