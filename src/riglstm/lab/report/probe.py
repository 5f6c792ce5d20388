"""Trained networks looked at from outside: test images in, what every cell did out.

Shapes: T steps, B images, N cells, s × s pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from riglstm.lab.report.activations import Images, Layer
from riglstm.lab.report.scores import Scores
from riglstm.lab.tables.finished import finished, load
from riglstm.lab.tables.result import CHOSEN
from riglstm.lab.tables.run import build
from riglstm.lab.tables.spec import RunSpec
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
    """Images, and what each layer of a model did with them."""

    images: Images
    traces: list[Trace]
    """Or RigLSTM's own, which has the same fields and a direction; empty: the model has none."""

    def take(self, rows: slice) -> Look:
        """Some of the images."""
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
    """A finished run; `show` hears in a line what takes long."""
    return Loaded(label, path, *load(path, device, data_dir, show))


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


def test_size(task: ImageTask) -> int:
    """How many test images there are."""
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
    size, known = read_size(condition), test_size(task)
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
    """When the cells of each layer were awake; raises ValueError where a model's never sleep."""
    size = seen.images.pixels.shape[1:3]
    found = [
        Layer(
            _layer_name(run, seen.traces, i),
            trace.active.permute(1, 2, 0).unflatten(2, size).cpu().numpy(),
        )
        for i, trace in enumerate(seen.traces)
        if trace.active is not None
    ]
    if not found:
        raise ValueError(
            f"activation images need a model with cells that sleep: expected one of "
            f"{', '.join(SLEEPING)}, got {run.spec.model} in {run.path}"
        )
    return found


def scores(run: Loaded, seen: Look, step: int) -> list[tuple[str, Scores]]:
    """The scores at a step, counted from 1, of each layer that has both kinds."""
    found = []
    for i, trace in enumerate(seen.traces):
        if trace.view_scores is None or trace.peer_scores is None:
            continue
        T, _, N, K = trace.view_scores.shape
        if not 1 <= step <= T:
            raise ValueError(
                f"the step must be from 1 to {T}, the pixels of an image, got {step}; "
                "give another step, or a larger size"
            )
        at, B = step - 1, len(seen.images.labels)
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
    if not found:
        raise ValueError(
            "score maps need a model that scores its input and its cells: expected one of "
            f"{', '.join(SCORING)}, got {run.spec.model} in {run.path}"
        )
    return found


def _chosen(weights: Tensor | None, at: int) -> Any:
    """What was chosen, where a model chooses: weights are no choice."""
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
