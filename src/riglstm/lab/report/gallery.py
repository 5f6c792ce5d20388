"""From runs to pictures with titles, captions and words for who cannot see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from riglstm.lab.report import activations, curves, probe, rollouts, scores
from riglstm.lab.report.activations import Summary, number, percent
from riglstm.lab.report.groups import Group
from riglstm.lab.report.probe import Loaded, Look
from riglstm.lab.report.rollouts import OUTLINES
from riglstm.lab.report.style import Picture, png
from riglstm.lab.tables.paper import value
from riglstm.lab.tables.read_run import Series
from riglstm.lab.tables.render import Line
from riglstm.lab.tables.result import CHOSEN
from riglstm.lab.tasks.balls import BallsTask

OVERLAID = ("riglstm", "rim")
"""Models whose balls lie over the true ones, as in the paper."""


def shift(group: Group, setting: str) -> Picture | None:
    """The metric against the shift; None where no run of the setting is done."""
    table, trained_on = group.table, group.table.trained_on[setting]
    lines = [line for line in table.lines if line.setting == setting]
    models = {line.label: _values(line) for line in lines if not _is_yardstick(line)}
    models = {label: values for label, values in models.items() if values}
    if not models:
        return None
    conditions = [trained_on, *(c for c in table.conditions if c != trained_on)]
    conditions = [c for c in conditions if any(c in values for values in models.values())]
    paper = {line.label: {c: value(text) for c, text in line.paper.items()} for line in lines}
    paper = {label: printed for label, printed in paper.items() if printed and label in models}
    yardsticks = {
        line.label: {c: cells[0] for c, cells in _values(line).items()}
        for line in lines
        if _is_yardstick(line)
    }
    figure = curves.draw_shift(conditions, trained_on, models, group.axis, paper, yardsticks)
    low, high = figure.get_axes()[0].get_ylim()
    return Picture(
        title=f"{_titled(group, setting)}: {group.axis.name} against the shift",
        caption=(
            "Marks are means over runs, bars one standard deviation (with n − 1) of three runs or "
            f"more, dots single runs; {_seeds(group, setting)}; weights chosen on "
            f"{CHOSEN}{trained_on}. "
            + (f"The y axis is cut: it goes from {low:.3g} to {high:.3g}. " if low > 0 else "")
            + ("Hollow marks are the paper's figures. " if paper else "")
            + ("Grey lines need no model. " if yardsticks else "")
            + ("" if curves.is_scale(conditions) else "The conditions are kinds, not a scale.")
        ).strip(),
        alt="Means. " + "; ".join(_spoken(label, values) for label, values in models.items()),
        png=png(figure),
    )


def training(group: Group, setting: str) -> Picture | None:
    """Loss and validation metric by update; None where nothing was logged."""
    panels: dict[str, dict[str, list[Series]]] = {}
    units = {"training loss": ""}
    for (found, label), runs in group.runs.items():
        for record in runs if found == setting else ():
            if "train/loss" in record.metrics:
                panels.setdefault("training loss", {}).setdefault(label, []).append(
                    record.metrics["train/loss"]
                )
            for condition, series in record.validated.items():
                here = " (trained)" if condition == group.table.trained_on[setting] else ""
                name = f"validation, {condition}{here}"
                units[name] = group.axis.name.removeprefix("test ")
                scaled = Series(series.steps, group.scale * series.values)
                panels.setdefault(name, {}).setdefault(label, []).append(scaled)
    if not panels:
        return None
    counts = {label: len(runs) for (s, label), runs in group.runs.items() if s == setting}
    return Picture(
        title=f"{_titled(group, setting)}: training",
        caption=(
            "By update. Thin lines are runs, finished or not; thick lines are the means of a "
            "model's runs, as far as all of them go. Loss: of the training batches, means between "
            "two lines of the log. The other panels: validation data, one panel a condition; "
            f"{_seeds(group, setting)}."
        ),
        alt="Curves of "
        + ", ".join(f"{label} ({n} {'run' if n == 1 else 'runs'})" for label, n in counts.items())
        + " in the panels "
        + "; ".join(panels)
        + ".",
        png=png(curves.draw_training(panels, units)),
    )


def cells(run: Loaded, seen: Look) -> Picture:
    """When each cell was awake on each image."""
    layers = probe.layers(run, seen)
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
                for layer in layers
                for j, (share, r) in enumerate(
                    zip(
                        activations.share_awake(layer.active)[b],
                        activations.stroke_correlation(layer.active, seen.images.pixels)[b],
                        strict=True,
                    )
                )
            )
            for b, label in enumerate(seen.images.labels)
        ),
        png=png(activations.draw(seen.images, layers)),
    )


def summaries(run: Loaded, seen: Look) -> list[tuple[str, list[Summary]]]:
    """By layer, each cell over all images."""
    return [
        (layer.name, activations.summarise(layer.active, seen.images.pixels))
        for layer in probe.layers(run, seen)
    ]


def score_maps(run: Loaded, seen: Look, step: int = 289) -> list[Picture]:
    """Scores of views and of cells at a step, counted from 1; a picture for each layer."""
    pictures = []
    for name, found in probe.scores(run, seen, step):
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
                png=png(scores.draw(seen.images, found)),
            )
        )
    return pictures


def balls(runs: Sequence[Loaded], condition: str, sequence: int = 0) -> Picture:
    """One test sequence rolled out by every model, the truth beside them."""
    order = sorted(
        runs, key=lambda run: OVERLAID.index(run.spec.name) if run.spec.name in OVERLAID else 9
    )
    for run in order:
        if not isinstance(run.task, BallsTask):
            raise ValueError(
                f"roll-outs are of bouncing balls: expected a run on balls, got {run.path} "
                f"on {run.spec.task}"
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
    bce = {label: rollouts.frame_bce(truth, frames) for label, frames in models.items()}
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
        png=png(rollouts.draw(truth, models, first, inks)),
    )


def _seeds(group: Group, setting: str) -> str:
    found = {r.spec.seed for (s, _), runs in group.runs.items() for r in runs if s == setting}
    return _listed("seed", sorted(found))


def _listed(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _size(seen: Look) -> str:
    side = seen.images.pixels.shape[1]
    return f"{side}x{side}"


def _is_yardstick(line: Line) -> bool:
    return any(cell.exact for cell in line.ours.values())


def _values(line: Line) -> dict[str, Sequence[float]]:
    return {c: cell.values for c, cell in line.ours.items() if cell.values}


def _titled(group: Group, setting: str) -> str:
    several = group.table.settings
    return group.table.title if several is None else f"{group.table.title}, {several} {setting}"


def _spoken(label: str, values: Mapping[str, Sequence[float]]) -> str:
    return f"{label}: " + ", ".join(f"{c} {np.mean(v):.1f}" for c, v in values.items())
