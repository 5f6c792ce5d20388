"""What the cells of a trained network did on test images: loading, looking, drawing.

Shapes: T steps, B images, N cells, K views, s × s pixels, which are the T = s² steps in the order
of lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from riglstm.lab.report.style import (
    FAINT,
    INK,
    VERMILION,
    Array,
    Picture,
    new_figure,
    picture_axes,
    png,
    styled,
)
from riglstm.lab.tables.plan import RunSpec
from riglstm.lab.tables.result import CHOSEN
from riglstm.lab.tables.run import build, finished, load
from riglstm.lab.tasks.base import Task
from riglstm.lab.tasks.images import ImageTask, read_size
from riglstm.models.base import Trace

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

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


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


class Layer(NamedTuple):
    """The cells of one layer of a model."""

    name: str
    """Empty where a model has one layer."""
    active: Array
    """(B, N, s, s) bool: the cell was awake at that pixel."""


class Images(NamedTuple):
    """Test images, and the classes that a model took them for."""

    pixels: Array
    """(B, s, s) of 0 to 1, or (B, s, s, 3)."""
    indices: Sequence[int]
    """Their numbers in the test set."""
    labels: Sequence[str]
    read_as: Sequence[str]

    def take(self, rows: slice) -> Images:
        """Some of the images."""
        return Images(self.pixels[rows], self.indices[rows], self.labels[rows], self.read_as[rows])


class Scores(NamedTuple):
    """What each cell of a layer could choose from at one step: views, and other cells."""

    step: int
    """Counted from 1, as the paper does."""
    active: Array
    """(B, N) bool."""
    views: Array
    """(B, N, K)."""
    peers: Array
    """(B, N, N): [j, i] is cell j's score of cell i."""
    views_chosen: Array | None
    """(B, N, K) bool; None: the model weighs and does not choose."""
    peers_chosen: Array | None
    """(B, N, N) bool."""
    view_names: Sequence[str]


class Look(NamedTuple):
    """Images, and what each layer of a model did with them."""

    images: Images
    traces: list[Trace]
    """RigLSTM's own has the same fields and a direction; empty: the model has none."""

    def take(self, rows: slice) -> Look:
        """The same of some of the images."""
        traces = []
        for trace in self.traces:
            cut: dict[str, Any] = {
                name: value[:, rows]
                for name, value in trace._asdict().items()
                if isinstance(value, Tensor)
            }
            traces.append(trace._replace(**cut))
        return Look(self.images.take(rows), traces)


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


def before_training(run: Loaded, data_dir: Path | None) -> Loaded:
    """The same run with the weights that its seed drew, to compare with."""
    _, net = build(run.spec, run.task.device, data_dir)
    return run._replace(net=net.eval())


def image_task(run: Loaded) -> ImageTask:
    """The run's task, if it is one of images."""
    if not isinstance(run.task, ImageTask):
        raise ValueError(
            f"cells are drawn on images: expected a run on mnist, fashion or cifar, got "
            f"{run.path} on {run.spec.task}"
        )
    return run.task


def count_test_images(task: ImageTask) -> int:
    """The number of test images."""
    return len(task.examples(task.trained_on, "test").targets)


def first_of_each_class(task: ImageTask, count: int = 3) -> tuple[int, ...]:
    """The first test images that are all of different classes."""
    labels = task.examples(task.trained_on, "test").targets.tolist()
    seen: dict[int, int] = {}
    for index, label in enumerate(labels):
        seen.setdefault(label, index)
    return tuple(list(seen.values())[:count])


def look(run: Loaded, condition: str, indices: Sequence[int]) -> Look:
    """What the model did with test images at a size such as 24x24."""
    task, core = image_task(run), run.net.core
    assert isinstance(core, nn.Module)
    size, known = read_size(condition), count_test_images(task)
    for index in indices:
        if not 0 <= index < known:
            raise ValueError(
                f"test images must be numbers from 0 to {known - 1}, the run's test set, "
                f"got {index}"
            )
    batch = task.examples(condition, "test", torch.tensor(list(indices), device=task.device))
    with _quiet(run), _inputs_of(core) as seen:
        read_as = run.net(batch.inputs).argmax(-1)
        trace = getattr(core, "trace", None)
        traces = [] if trace is None else trace(seen[0])
    pixels = batch.inputs.permute(1, 0, 2).unflatten(1, size)  # (B, rows, columns, C)
    pixels = pixels.double() / (task.config.values - 1)
    images = Images(
        (pixels.squeeze(3) if pixels.shape[3] == 1 else pixels).cpu().numpy(),
        list(indices),
        *([str(i) for i in classes.tolist()] for classes in (batch.targets, read_as)),
    )
    return Look(images, list(traces))


def layers(run: Loaded, seen: Look) -> list[Layer]:
    """When the cells of each layer were awake, of a model that is in SLEEPING."""
    size = seen.images.pixels.shape[1:3]
    return [
        Layer(
            _layer_name(run, seen.traces, i),
            trace.active.permute(1, 2, 0).unflatten(2, size).cpu().numpy(),
        )
        for i, trace in enumerate(seen.traces)
        if trace.active is not None
    ]


def scores(run: Loaded, seen: Look, step: int) -> list[tuple[str, Scores]]:
    """The scores at a step, counted from 1, of each layer of a model that is in SCORING."""
    found = []
    for i, trace in enumerate(seen.traces):
        if trace.view_scores is None or trace.peer_scores is None:
            continue
        T, B, N, K = trace.view_scores.shape
        at = step - 1
        awake = trace.view_scores.new_ones(T, B, N) if trace.active is None else trace.active
        one = Scores(
            step=step,
            active=awake[at].bool().cpu().numpy(),
            views=trace.view_scores[at].cpu().numpy(),
            peers=trace.peer_scores[at].cpu().numpy(),
            views_chosen=_chosen(trace.views, at),
            peers_chosen=_chosen(trace.peers, at),
            view_names=SLOTS.get((run.spec.model, i), tuple(map(str, range(K)))),
        )
        found.append((_layer_name(run, seen.traces, i), one))
    return found


def _chosen(weights: Tensor | None, at: int) -> Any:
    """The choices at a step; None for a model that only weighs."""
    if weights is None or weights.dtype != torch.bool:
        return None
    return weights[at].cpu().numpy()


def _layer_name(run: Loaded, traces: Sequence[Trace], i: int) -> str:
    if len(traces) == 1:
        return ""
    if run.spec.model == "brim":
        return ("lower", "upper")[i]
    reverse = " reverse" if getattr(traces[i], "reverse", False) else ""
    return f"layer {traces[i].layer}{reverse}"


@contextmanager
def _quiet(run: Loaded) -> Iterator[None]:
    """No gradients, and draws of the run's own seed, which leave no mark elsewhere."""
    devices = [run.task.device] if run.task.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(run.spec.seed)
        yield


@contextmanager
def _inputs_of(core: nn.Module) -> Iterator[list[Tensor]]:
    """What a network gives its core."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        seen.append(given[0])

    handle = core.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


class Summary(NamedTuple):
    """The activity of one cell over many images: means and standard deviations."""

    awake: tuple[float, float]
    """Share of the steps."""
    correlation: tuple[float, float]
    """With the stroke; NaN where the cell never changed on any image."""


def share_awake(active: Array) -> Array:
    """The share of steps at which each cell was awake: (B, N, s, s) to (B, N)."""
    return np.asarray(active.mean(axis=(2, 3)))


def stroke_correlation(active: Array, pixels: Array) -> Array:
    """Pearson's r, over the pixels of an image, of being awake with brightness, (B, N).

    With binarised digits, +1 is a cell that wakes on the stroke and nowhere else, -1 one that wakes
    on the background alone. NaN where a cell was always or never awake, or the image is blank.
    """
    ink = pixels.mean(axis=3) if pixels.ndim == 4 else pixels
    a = active.astype(np.float64) - active.mean(axis=(2, 3), keepdims=True)
    p = (ink - ink.mean(axis=(1, 2), keepdims=True))[:, None]  # (B, 1, s, s)
    scale = np.sqrt((a * a).sum(axis=(2, 3)) * (p * p).sum(axis=(2, 3)))
    return np.where(scale > 0, (a * p).sum(axis=(2, 3)) / np.where(scale > 0, scale, 1), np.nan)


def summarise(active: Array, pixels: Array) -> list[Summary]:
    """A summary of every cell of a layer, over all the images given."""
    awake, r = share_awake(active), stroke_correlation(active, pixels)
    found = []
    for j in range(active.shape[1]):
        known = r[:, j][~np.isnan(r[:, j])]
        mean_sd = (float(known.mean()), float(known.std())) if len(known) else (np.nan, np.nan)
        found.append(Summary((float(awake[:, j].mean()), float(awake[:, j].std())), mean_sd))
    return found


@styled()
def draw_activations(images: Images, layers: Sequence[Layer]) -> Figure:
    """A row for each image: the image, then every cell, white where it was awake."""
    rows, cells = len(images.pixels), [layer.active.shape[1] for layer in layers]
    # A narrow empty column sets layers apart.
    widths = [1.0, *(w for n in cells for w in (0.12, *[1.0] * n))]
    size = 1.25
    figure = new_figure(size * sum(widths) + 0.2, (size + 0.42) * rows + 0.4)
    grid = figure.add_gridspec(rows, len(widths), width_ratios=widths, wspace=0.04, hspace=0.04)
    for b in range(rows):
        axes = picture_axes(figure.add_subplot(grid[b, 0]))
        axes.imshow(images.pixels[b], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xlabel(
            f"“{images.labels[b]}”, read as “{images.read_as[b]}”\ntest no. {images.indices[b]}",
            fontsize=9,
        )
        if b == 0:
            axes.set_title("input")
        column = 1
        for layer in layers:
            column += 1
            awake = share_awake(layer.active)[b]
            r = stroke_correlation(layer.active, images.pixels)[b]
            for j, active in enumerate(layer.active[b]):
                axes = picture_axes(figure.add_subplot(grid[b, column]))
                axes.imshow(active, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axes.set_xlabel(f"awake {percent(awake[j])}\nr = {number(r[j])}", fontsize=9)
                if b == 0:
                    axes.set_title(f"{layer.name} cell {j}".strip())
                column += 1
    return figure


def percent(share: float) -> str:
    """A share without decimals; only exact ones are written 0% and 100%."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def number(r: float) -> str:
    """A correlation with its sign; a dash where there is none."""
    return "–" if np.isnan(r) else f"{r:+.2f}".replace("-", "−")


def activation_picture(run: Loaded, seen: Look) -> Picture:
    """The paper's activation images: when each cell was awake on each image."""
    found = layers(run, seen)
    ink = "brightness" if seen.images.pixels.ndim == 4 else "the stroke"
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
                f"{layer.name} cell {j} awake {percent(share)}, r {number(r)}".strip()
                for layer in found
                for j, (share, r) in enumerate(
                    zip(
                        share_awake(layer.active)[b],
                        stroke_correlation(layer.active, seen.images.pixels)[b],
                        strict=True,
                    )
                )
            )
            for b, label in enumerate(seen.images.labels)
        ),
        png=png(draw_activations(seen.images, found)),
    )


def summaries(run: Loaded, seen: Look) -> list[tuple[str, list[Summary]]]:
    """The name of each layer, and a summary of each of its cells over all images."""
    return [
        (layer.name, summarise(layer.active, seen.images.pixels)) for layer in layers(run, seen)
    ]


@styled()
def draw_scores(images: Images, scores: Scores) -> Figure:
    """A row for each image: where the step is, N×K scores of the views, N×N of the cells."""
    rows, N, K = len(images.pixels), scores.views.shape[1], scores.views.shape[2]
    unit = 0.46
    widths = [1.7, unit * max(K, 2) + 1.5, unit * N + 1.5]
    figure = new_figure(sum(widths) + 0.3, (max(1.7, unit * N) + 0.75) * rows + 0.2)
    grid = figure.add_gridspec(rows, 3, width_ratios=widths, wspace=0.03, hspace=0.05)
    for b in range(rows):
        _draw_step(figure.add_subplot(grid[b, 0]), images, b, scores.step)
        left, right = (figure.add_subplot(grid[b, i]) for i in (1, 2))
        awake = scores.active[b]
        chosen = None if scores.views_chosen is None else scores.views_chosen[b]
        _draw_map(left, scores.views[b], awake, chosen, scores.view_names)
        chosen = None if scores.peers_chosen is None else scores.peers_chosen[b]
        _draw_map(right, scores.peers[b], awake, chosen, [str(i) for i in range(N)], own=True)
        left.set_ylabel("cell")
        left.set_xlabel("view of the input")
        right.set_xlabel("cell listened to")
        if b == 0:
            left.set_title("input scores")
            right.set_title("hidden-state scores")
    return figure


def _draw_step(axes: Axes, images: Images, b: int, step: int) -> None:
    """The image, with the pixel that the step reads."""
    picture_axes(axes).imshow(
        images.pixels[b], cmap="gray", vmin=0, vmax=1, interpolation="nearest"
    )
    line, column = divmod(step - 1, images.pixels.shape[2])
    axes.axhline(line, color=VERMILION, linewidth=0.8, alpha=0.6)
    axes.add_patch(
        Rectangle((column - 0.5, line - 0.5), 1, 1, fill=False, color=VERMILION, linewidth=2)
    )
    axes.set_xlabel(
        f"“{images.labels[b]}”, test no. {images.indices[b]}\n"
        f"step {step}: line {line + 1},\npixel {column + 1}",
        fontsize=9,
    )


def _draw_map(
    axes: Axes,
    scores: Array,
    awake: Array,
    chosen: Array | None,
    columns: Sequence[str],
    own: bool = False,
) -> None:
    """One map with its values; framed is what awake cells took in, dotted a cell's `own` state."""
    power = _power(scores)
    scaled = scores / 10.0**power
    limit = float(np.abs(scaled).max()) or 1.0
    shown = axes.imshow(scaled, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="equal")
    places = max(0, 1 - int(np.floor(np.log10(limit))))
    for (j, k), value in np.ndenumerate(scaled):
        colour = "white" if abs(value) > 0.6 * limit else INK
        # + 0.0: a rounded -0.0 would keep its sign.
        text = f"{round(float(value), places) + 0.0:.{places}f}".replace("-", "−")
        axes.text(k, j, text, ha="center", va="center", fontsize=7.5, color=colour)
        if chosen is not None and awake[j] and chosen[j, k]:
            line = ":" if own and j == k else "-"
            corner, side = (k - 0.44, j - 0.44), 0.88
            axes.add_patch(
                Rectangle(corner, side, side, fill=False, color=colour, lw=1.6, linestyle=line)
            )
    axes.set_xticks(range(scores.shape[1]), columns)
    axes.set_yticks(
        range(len(awake)), [f"{j}" if a else f"{j} asleep" for j, a in enumerate(awake)]
    )
    for label, is_awake in zip(axes.get_yticklabels(), awake, strict=True):
        label.set_color(INK if is_awake else FAINT)
        label.set_fontweight("bold" if is_awake else "normal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(shown, ax=axes, shrink=0.85, pad=0.02)
    bar.outline.set_visible(False)
    if power:
        bar.ax.set_title(f"×10{str(power).translate(RAISED)}", fontsize=9, loc="left")


def _power(scores: Array) -> int:
    """The power of ten to take out of scores, so that four signs are enough for each."""
    largest = float(np.abs(scores).max())
    power = int(np.floor(np.log10(largest))) if largest > 0 else 0
    return power if not -1 <= power <= 2 else 0


def score_pictures(run: Loaded, seen: Look, step: int = 289) -> list[Picture]:
    """Scores of views and of cells at a step, counted from 1; a picture for each layer."""
    pictures = []
    for name, found in scores(run, seen, step):
        chooses = found.views_chosen is not None or found.peers_chosen is not None
        layer = f", {name} layer" if name else ""
        pictures.append(
            Picture(
                title=f"{run.label}{layer}: scores at step {step} of {_size(seen)}",
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
                    + ", ".join(str(j) for j in np.flatnonzero(found.active[b]))
                    + f", input scores from {found.views[b].min():.2g} to "
                    f"{found.views[b].max():.2g}, hidden-state scores from "
                    f"{found.peers[b].min():.2g} to {found.peers[b].max():.2g}"
                    for b, label in enumerate(seen.images.labels)
                ),
                png=png(draw_scores(seen.images, found)),
            )
        )
    return pictures


def _size(seen: Look) -> str:
    side = seen.images.pixels.shape[1]
    return f"{side}x{side}"
