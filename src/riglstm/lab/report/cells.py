"""What trained networks do: their cells on test images, and their roll-outs of bouncing balls.

`riglstm.plot` draws the cells. Shapes: T steps, B images, N cells, s × s pixels, which are the
T = s² steps in the order of lines; F frames of H × W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor, nn

from riglstm import plot
from riglstm.lab.report.curves import TRUTH, Array, Picture, looks, png
from riglstm.lab.tables.plan import RunSpec
from riglstm.lab.tables.result import CHOSEN
from riglstm.lab.tables.run import finished, load
from riglstm.lab.tasks.balls import BallsTask
from riglstm.lab.tasks.base import Task
from riglstm.lab.tasks.common import TokenNetwork
from riglstm.lab.tasks.copying import CopyingTask
from riglstm.lab.tasks.images import ImageTask, read_size
from riglstm.models.base import Trace
from riglstm.plot.draw import new_figure, picture_axes, styled
from riglstm.plot.trace import Layer, correlation, number, percent, read_layers, share_awake

SLEEPING = ("riglstm", "rim", "brim")
"""Models whose cells sleep at times."""
SCORING = (*SLEEPING, "rmc")
"""Models that score both their input and their cells."""

UNABLE = (ValueError, TypeError, RuntimeError, OSError)
"""What a network raises that cannot be built or run as its folder says."""

SLOTS: dict[tuple[str, int], tuple[str, ...]] = {
    ("rim", 0): ("null", "x"),
    ("brim", 0): ("null", "x", "h²"),
    ("brim", 1): ("null", "h¹"),
    ("rmc", 0): ("x",),
}
"""By model and layer, what the cells choose from; RigLSTM's views have numbers."""

LAYERS: dict[str, tuple[str, ...]] = {"brim": ("lower", "upper")}
"""Names of layers; those of other models have numbers."""

EPSILON = 1e-6
"""Probabilities are kept this far from 0 and 1, as in the score of the task."""

EDGE = 0.5
"""Where a predicted ball ends, for its outline."""
OUTLINES: tuple[Literal["solid", "dashed", "dotted"], ...] = ("solid", "dashed", "dotted")
"""Of the models in the overlay, in their order."""
OVERLAID = ("riglstm", "rim")
"""Models whose balls lie over the true ones, as in the paper."""


class Loaded(NamedTuple):
    """A run with its network, the weights chosen on validation data of the training condition."""

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
        return (
            f"{self.label}, seed {self.spec.seed}, trained on {self.task.trained_on}, weights of "
            f"update {chosen['step']:,}, chosen on {CHOSEN}{self.task.trained_on}"
        )


class Look(NamedTuple):
    """Test images, what a model took them for, and what each of its layers did with them."""

    pixels: Tensor
    """(B, s, s) of 0 to 1, or (B, s, s, 3), on the CPU."""
    indices: Sequence[int]
    """Their numbers in the test set."""
    labels: Sequence[str]
    read_as: Sequence[str]
    traces: list[Trace]
    """RigLSTM's own has the same fields and a direction."""


def open_run(
    label: str,
    path: Path,
    device: str,
    data_dir: Path | None,
    show: Callable[[str], None] | None = None,
) -> Loaded:
    """Load a finished run, and its images; `show` gets a line on what takes long."""
    spec, task, net = load(path, device, data_dir, show)
    if isinstance(task, ImageTask):
        task.ready()
    return Loaded(label, path, spec, task, net)


def image_task(run: Loaded) -> ImageTask:
    """The task of a run on images."""
    return cast(ImageTask, run.task)


def first_of_each_class(task: ImageTask) -> tuple[int, ...]:
    """The first three test images that are all of different classes."""
    labels = task.examples(task.trained_on, "test").targets.tolist()
    seen: dict[int, int] = {}
    for index, label in enumerate(labels):
        seen.setdefault(label, index)
    return tuple(seen.values())[:3]


def look(run: Loaded, condition: str, indices: Sequence[int]) -> Look:
    """What the model did with test images at a size such as 24x24."""
    task = image_task(run)
    size, known = read_size(condition), task.size("test")
    for index in indices:
        if not 0 <= index < known:
            raise ValueError(
                f"test images must be numbers from 0 to {known - 1}, the run's test set, "
                f"got {index}"
            )
    batch = task.examples(condition, "test", torch.tensor(list(indices), device=task.device))
    net = run.net
    assert isinstance(net, TokenNetwork)
    with _quiet(run):
        read_as = net(batch.inputs).argmax(-1)
        traces = net.core.trace(net.embed(batch.inputs))  # type: ignore[attr-defined]
    pixels = batch.inputs.permute(1, 0, 2).unflatten(1, size)  # (B, rows, columns, C)
    pixels = pixels.double() / (task.config.values - 1)
    labels, said = ([str(i) for i in classes.tolist()] for classes in (batch.targets, read_as))
    shown = (pixels.squeeze(3) if pixels.shape[3] == 1 else pixels).cpu()
    return Look(shown, list(indices), labels, said, traces)


@contextmanager
def _quiet(run: Loaded) -> Iterator[None]:
    """No gradients, and draws of the run's own seed, which leave no mark elsewhere."""
    devices = [run.task.device] if run.task.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(run.spec.seed)
        yield


def layers(run: Loaded, seen: Look) -> list[Layer]:
    """The layers of a model that has a trace, by their names."""
    return read_layers(seen.traces, LAYERS.get(run.spec.model))


def brightness(pixels: Tensor) -> Tensor:
    """Images (B, s, s), or (B, s, s, 3), as what is read at each step, (T, B)."""
    return (pixels.mean(3) if pixels.dim() == 4 else pixels).flatten(1).T


def activation_picture(run: Loaded, seen: Look) -> Picture:
    """The paper's activation images: when each cell was awake on each image."""
    found = layers(run, seen)
    ink = "brightness" if seen.pixels.dim() == 4 else "the stroke"
    awake = [share_awake(layer.awake) for layer in found]
    r = [correlation(layer.awake, brightness(seen.pixels)) for layer in found]
    figure = plot.cells(
        seen.traces,
        seen.pixels,
        sequences=range(len(seen.pixels)),
        labels=[
            f"“{label}”, read as “{read_as}”\ntest no. {index}"
            for label, read_as, index in zip(seen.labels, seen.read_as, seen.indices, strict=True)
        ],
        names=[layer.name for layer in found],
    )
    return Picture(
        title=f"{run.label}: cells awake at {_size(seen)}",
        caption=(
            f"First column: the test image, fed pixel by pixel, line by line. Then one image for "
            f"each cell: white where the cell was awake at that pixel, black where it slept. Under "
            f"each, the share of steps awake, and r, the correlation over the pixels of being "
            f"awake with {ink} (+1: awake there alone; −1: everywhere else; –: it never changed). "
            f"{run.source}."
        ),
        alt="; ".join(
            f"image of {label}: "
            + ", ".join(
                f"{layer.name} cell {j} awake {percent(share)}, r {number(one)}".strip()
                for i, layer in enumerate(found)
                for j, (share, one) in enumerate(
                    zip(awake[i][b].tolist(), r[i][b].tolist(), strict=True)
                )
            )
            for b, label in enumerate(seen.labels)
        ),
        png=png(figure),
    )


def sequence_picture(run: Loaded) -> Picture:
    """When each cell was awake on the first test sequence of copying, at the furthest condition."""
    task, net = run.task, run.net
    assert isinstance(task, CopyingTask)
    assert isinstance(net, TokenNetwork)
    condition = task.conditions[-1]
    tokens = task.examples(condition, "test", slice(1)).inputs  # (T, 1, M)
    with _quiet(run):
        traces = net.core.trace(net.embed(tokens))  # type: ignore[attr-defined]
    found = read_layers(traces, LAYERS.get(run.spec.model))
    kinds = torch.arange(task.config.digits + 2, device=tokens.device)
    shown = (tokens.unsqueeze(3) == kinds).flatten(2)  # a line for each kind of token
    label = f"{run.label} at {condition}"
    figure = plot.cells(traces, shown, labels=[label], names=[layer.name for layer in found])
    return Picture(
        title=f"{run.label}: cells awake at {condition}",
        caption=(
            "Above: a test sequence, a line for each digit, and one each for a blank and for the "
            "sign to answer. Below: green where a cell was awake, with the share of steps awake. "
            f"{run.source}."
        ),
        alt=", ".join(
            f"{layer.name} cell {j} awake {percent(share)}".strip()
            for layer in found
            for j, share in enumerate(share_awake(layer.awake)[0].tolist())
        ),
        png=png(figure),
    )


def score_pictures(run: Loaded, seen: Look, step: int = 289) -> list[Picture]:
    """Scores of views and of cells at a step, counted from 1; a picture for each layer."""
    pictures = []
    for i, layer in enumerate(layers(run, seen)):
        awake = layer.awake[step - 1]  # (B, N)
        views, peers = (layer.part(name)[step - 1] for name in ("view_scores", "peer_scores"))
        chooses = layer.part("views").dtype == torch.bool
        figure = plot.views(
            layer.trace,
            seen.pixels,
            step=step,
            sequences=range(len(seen.pixels)),
            labels=[
                f"“{label}”, test no. {index}"
                for label, index in zip(seen.labels, seen.indices, strict=True)
            ],
            slots=SLOTS.get((run.spec.model, i)),
        )
        name = f", {layer.name} layer" if layer.name else ""
        pictures.append(
            Picture(
                title=f"{run.label}{name}: scores at step {step} of {_size(seen)}",
                caption=(
                    "Left: the test image and the pixel that the step reads. Middle: each cell's "
                    "scores of the input's views (N×K). Right: its scores of the cells' hidden "
                    "states (N×N); a row is the cell that listens. "
                    + (
                        "Framed: what an awake cell took in; dotted: its own state, which it "
                        "always has. "
                        if chooses
                        else "The model weighs all of them and chooses none. "
                    )
                    + f"{run.source}."
                ),
                alt="; ".join(
                    f"image of {label}: awake cells "
                    + ", ".join(str(j) for j, a in enumerate(awake[b]) if a)
                    + f", input scores from {views[b].min():.2g} to {views[b].max():.2g}, "
                    f"hidden-state scores from {peers[b].min():.2g} to {peers[b].max():.2g}"
                    for b, label in enumerate(seen.labels)
                ),
                png=png(figure),
            )
        )
    return pictures


def _size(seen: Look) -> str:
    side = seen.pixels.shape[1]
    return f"{side}x{side}"


def frame_bce(truth: Array, predicted: Array) -> Array:
    """Binary cross-entropy of each frame in nats per pixel: (F, H, W) to (F,)."""
    p = predicted.astype(np.float64).clip(EPSILON, 1 - EPSILON)
    nats = -np.where(truth > 0.5, np.log(p), np.log1p(-p))
    return np.asarray(nats.mean(axis=(1, 2)))


def overlay(layers: Sequence[tuple[Array, str]]) -> Array:
    """Maps (H, W) of 0 to 1 as inks on white paper, (H, W, 3): where they meet, it is darker."""
    paper = np.ones((*layers[0][0].shape, 3))
    for ink, colour in layers:
        paper -= ink[..., None] * (1 - np.asarray(to_rgb(colour)))
    return paper.clip(0, 1)


@styled()
def draw_rollout(
    truth: Array, models: Mapping[str, Array], first_frame: int, inks: int = 2
) -> Figure:
    """Rows: truth, every model, and the truth with the first `inks` of the models over it.

    `truth` and each model's probabilities are (F, H, W); frames are counted from 0.
    """
    F, look = len(truth), looks(list(models))
    mixed = list(models)[:inks]
    size = 0.95
    figure = new_figure(size * F + 1.1, (size + 0.22) * (len(models) + 2) + 0.35)
    grid = figure.add_gridspec(len(models) + 2, F, wspace=0.03, hspace=0.03)
    rows = [("truth", truth, TRUTH.colour)]
    rows += [(name, frames, look[name].colour) for name, frames in models.items()]
    for i, (name, frames, colour) in enumerate(rows):
        bce = None if i == 0 else frame_bce(truth, frames)
        for f in range(F):
            axes = picture_axes(figure.add_subplot(grid[i, f]))
            axes.imshow(overlay([(frames[f], colour)]), interpolation="nearest")
            if i == 0:
                axes.set_title(f"frame {first_frame + f}", fontsize=9.5)
            if bce is not None:
                axes.set_xlabel(f"{bce[f]:.3f}", fontsize=8.5, labelpad=2)
            if f == 0:
                axes.set_ylabel(name, fontsize=10)
    for f in range(F):
        axes = picture_axes(figure.add_subplot(grid[len(rows), f]))
        tints = [(0.15 * models[m][f], look[m].colour) for m in mixed]
        axes.imshow(overlay([(0.75 * truth[f], TRUTH.colour), *tints]), interpolation="nearest")
        for model, line in zip(mixed, OUTLINES, strict=False):
            if models[model][f].min() < EDGE < models[model][f].max():
                axes.contour(
                    models[model][f],
                    levels=[EDGE],
                    colors=[look[model].colour],
                    linestyles=line,
                    linewidths=1.3,
                )
        if f == 0:
            axes.set_ylabel("overlay", fontsize=10)
    return figure


def rollout_picture(runs: Sequence[Loaded], condition: str, sequence: int = 0) -> Picture:
    """One test sequence rolled out by every model, beside the truth."""
    order = sorted(
        runs, key=lambda run: OVERLAID.index(run.spec.name) if run.spec.name in OVERLAID else 9
    )
    # One task for all, as each would keep the sequences in memory.
    task = cast(BallsTask, order[0].task)
    rolled = {run.label: task.rollout(run.net, condition, "test", sequence) for run in order}
    models = {label: one.prediction.numpy() for label, one in rolled.items()}
    one = next(iter(rolled.values()))
    truth, first = one.truth.numpy(), len(one.seen)
    inks = max(1, sum(run.spec.name in OVERLAID for run in order))
    outlines = " and ".join(
        f"{label} ({line})" for label, line in zip(list(models)[:inks], OUTLINES, strict=False)
    )
    bce = {label: frame_bce(truth, frames) for label, frames in models.items()}
    return Picture(
        title=f"Balls, trained on {order[0].task.trained_on}, tested on {condition}",
        caption=(
            f"Test sequence {sequence}: the models get frames 0 to {first - 1} and then see their "
            f"own predictions. Under each frame, its BCE in nats per pixel. Last row: the truth in "
            f"pink, with the outlines (probability 0.5) of {outlines}. "
            + "; ".join(run.source for run in order)
            + "."
        ),
        alt="; ".join(
            f"{label}: BCE from {v[0]:.3f} in frame {first} to {v[-1]:.3f} in frame "
            f"{first + len(v) - 1}"
            for label, v in bce.items()
        ),
        png=png(draw_rollout(truth, models, first, inks)),
    )
