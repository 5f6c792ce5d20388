"""MiniGrid on the page: success rates, RigLSTM's beside RIM's, training, and an episode's cells.

Shapes: T steps, N cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from riglstm.lab.minigrid.envs import solved
from riglstm.lab.minigrid.levels import FAMILIES, Level
from riglstm.lab.minigrid.network import ActorCritic
from riglstm.lab.minigrid.runs import load
from riglstm.lab.minigrid.spec import TEST_SEED
from riglstm.lab.minigrid.table import GridRun, comparable, label, tables
from riglstm.lab.report.cells import UNABLE
from riglstm.lab.report.curves import LOOKS, Array, Picture, draw_training, plot_axes, png
from riglstm.lab.tables.result import Series
from riglstm.lab.tables.table import Table
from riglstm.lab.train.folder import differences
from riglstm.plot.draw import FAINT, GRID, new_figure, picture_axes, styled

OURS, THEIRS = "riglstm", "rim"
TRACED = (OURS, THEIRS)
"""Models that say which of their cells were awake."""

SHOWN = 12
"""Frames of an episode in a picture, at most."""
TILE = 24
"""Pixels of a tile."""

Bar = tuple[str, str, float, float]
"""Family, level, mean difference in points, its standard deviation."""


def results(
    runs: Sequence[GridRun],
    models: Sequence[str] | None,
    device: str,
    show: Callable[[str], None],
    missing: list[str],
) -> tuple[list[Table], list[str], list[Picture]]:
    """Tables, notes and pictures of runs on MiniGrid; adds to `missing` what they lack."""
    done, left = comparable([run for run in runs if run.state == "done"])
    missing += left
    missing += [
        f"{run.path}: a run on MiniGrid that failed: {run.reason}"
        if run.state == "failed"
        else f"{run.path}: a run on MiniGrid that is not finished; go on with --resume"
        for run in runs
        if run.state != "done"
    ]
    pictures: list[Picture] = []
    bars = relative(done)
    if bars:
        missing += unequal_training(done)
        pictures.append(_relative_picture(bars))
    elif done:
        missing.append(
            "MiniGrid: RigLSTM relative to RIM needs finished runs of both on a family, "
            f"got {', '.join(sorted({f'{d.spec.name} on {d.spec.family}' for d in done}))}"
        )
    for name in dict.fromkeys(d.spec.family for d in done):
        pictures += _training(name, done)
    for run in _first_seeds(done):
        if models is not None and run.spec.name not in models and run.spec.model not in models:
            continue
        show(f"playing an episode: {run.spec.name} on {run.spec.family}")
        try:
            spec, net = load(run.path, device)
            level = FAMILIES[spec.family].levels[0]
            pictures.append(_episode(spec.name, play(net, level)))
        except UNABLE as error:
            missing.append(f"an episode of {run.path}: {error}")
    return *(tables(done) if done else ([], [])), pictures


def relative(done: Sequence[GridRun]) -> list[Bar]:
    """The points of success by which RigLSTM is above RIM, on every level where both have runs.

    The runs of a model are those of one training; see `comparable`. The spread is that of the
    difference of two independent runs: √(sd² + sd²).
    """
    bars: list[Bar] = []
    for key, of in FAMILIES.items():
        for level in of.levels:
            ours, theirs = (
                [
                    100 * d.rates()[level.name]
                    for d in done
                    if (d.spec.family, d.spec.name) == (key, name) and level.name in d.rates()
                ]
                for name in (OURS, THEIRS)
            )
            if ours and theirs:
                spread = sum(np.var(v, ddof=1) for v in (ours, theirs) if len(v) > 1) ** 0.5
                mean = float(np.mean(ours) - np.mean(theirs))
                bars.append((of.title, level.name, mean, float(spread)))
    return bars


def unequal_training(done: Sequence[GridRun]) -> list[str]:
    """A line on each family on which RigLSTM and RIM were trained with other options."""
    found: dict[str, dict[str, GridRun]] = {}
    for run in done:
        found.setdefault(run.spec.family, {}).setdefault(run.spec.name, run)
    said = []
    for family, runs in found.items():
        if OURS in runs and THEIRS in runs:
            theirs, ours = (runs[name].spec.training()["fit"] for name in (THEIRS, OURS))
            if words := differences(theirs, ours, "fit"):
                said.append(
                    f"MiniGrid, {FAMILIES[family].title}: RIM (there) and RigLSTM (here) were "
                    f"trained otherwise: {'; '.join(words)}"
                )
    return said


@styled()
def draw_relative(bars: Sequence[Bar]) -> Figure:
    """A bar for each level, families set apart."""
    families = list(dict.fromkeys(bar[0] for bar in bars))
    at = [i + 1.2 * families.index(bar[0]) for i, bar in enumerate(bars)]
    figure = new_figure(max(6.4, 0.34 * at[-1] + 2.0), 4.6)
    axes = plot_axes(figure.add_subplot())
    axes.bar(
        *(at, [bar[2] for bar in bars]),
        yerr=[bar[3] for bar in bars] if any(bar[3] for bar in bars) else None,
        color=[LOOKS[OURS if bar[2] >= 0 else THEIRS].colour for bar in bars],
        ecolor=FAINT,
        capsize=2.5,
        width=0.8,
    )
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.set_xticks(at, [bar[1] for bar in bars], rotation=90)
    axes.set_ylabel("RigLSTM − RIM\nin points of success")
    for i, name in enumerate(families):
        own = [x for x, bar in zip(at, bars, strict=True) if bar[0] == name]
        if i % 2 == 0:
            axes.axvspan(own[0] - 0.9, own[-1] + 0.9, color=GRID, alpha=0.35, zorder=0, linewidth=0)
        axes.text(
            *(sum(own) / len(own), 1.02, name),
            transform=axes.get_xaxis_transform(),
            ha="center" if len(own) > 2 else "left",
            rotation=0 if len(own) > 3 else 30,
            fontsize=8.5,
            color=FAINT,
        )
    return figure


def _relative_picture(bars: Sequence[Bar]) -> Picture:
    said = "; ".join(f"{family} {level} {mean:+.0f}" for family, level, mean, _ in bars)
    return Picture(
        title="MiniGrid: RigLSTM's success relative to RIM's",
        caption=(
            "Differences of mean success rates with drawn actions, in points, by family and level, "
            "the trained level first in each. Bars show one standard deviation of the difference, "
            "over seeds. Green: RigLSTM is ahead; blue: RIM is."
        ),
        alt=f"Points ahead: {said}.",
        png=png(draw_relative(bars)),
    )


def _training(family: str, done: Sequence[GridRun]) -> list[Picture]:
    """Success in training, by frame; nothing where no episode has ended."""
    runs: dict[str, list[Series]] = {}
    for d in done:
        if d.spec.family == family and "success" in d.metrics:
            runs.setdefault(label(d.spec.name), []).append(d.metrics["success"])
    if not runs:
        return []
    title = FAMILIES[family].title
    figure = draw_training({f"{title} {FAMILIES[family].levels[0].name}: success": runs})
    for axes in figure.axes:
        axes.set_xlabel("frame")
    return [
        Picture(
            title=f"MiniGrid, {title}: success while training",
            caption="Share of the last 100 episodes that were solved, by frames acted in.",
            alt=f"Curves of {', '.join(runs)}.",
            png=png(figure),
        )
    ]


def _first_seeds(done: Sequence[GridRun]) -> list[GridRun]:
    found: dict[tuple[str, str], GridRun] = {}
    for run in sorted(done, key=lambda d: d.spec.seed):
        found.setdefault((run.spec.family, run.spec.name), run)
    return [run for run in found.values() if run.spec.model in TRACED]


def _episode(name: str, episode: Episode) -> Picture:
    ending = "solved" if episode.solved else "not solved"
    awake = ", ".join(f"{share:.0%}" for share in episode.strength.mean(0))
    return Picture(
        title=f"MiniGrid, {label(name)}: an episode of {episode.level}",
        caption=(
            f"{len(episode.frames)} steps, {ending}: the first test episode, by the most probable "
            "actions. Below the frames: what each cell took in of the new state at each step, from "
            "nothing (white) to all of it (dark); a cell that slept took in nothing."
        ),
        alt=f"Mean by cell: {awake}.",
        png=draw_episode(episode),
    )


class Episode(NamedTuple):
    """The frames of an episode, and what the cells of an agent did in it."""

    level: str
    frames: list[Array]
    """T images of the world, with what the agent sees lit up."""
    strength: Array
    """(T, N): what each cell took in of its new state, 0 to 1; 0 where it slept."""
    solved: bool


@torch.inference_mode()
def play(net: ActorCritic, level: Level) -> Episode:
    """Play the first test episode by the most probable actions."""
    import gymnasium
    import minigrid  # noqa: F401  registers the levels

    device = next(net.parameters()).device
    env: Any = gymnasium.make(level.id, render_mode="rgb_array", tile_size=TILE)
    start = np.random.SeedSequence((TEST_SEED, 0, 0)).generate_state(1)
    seen, _ = env.reset(seed=int(start[0]))
    state = net.core.initial_state(1)
    frames, inputs, reward, done = [], [], 0.0, False
    while not done:
        frames.append(env.render())
        inputs.append(net.encode(torch.from_numpy(seen["image"]).to(device).unsqueeze(0)))
        y, state = net.core(inputs[-1].unsqueeze(0), state)
        action = int(net.logits(y[0, 0]).argmax())
        seen, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
    env.close()
    core: Any = net.core
    trace = core.trace(torch.stack(inputs))[0]
    strength = trace.active[:, 0].float() * (1 - trace.keep[:, 0])
    return Episode(level.id, frames, strength.cpu().numpy(), bool(solved(reward)))


@styled()
def draw_episode(episode: Episode) -> bytes:
    """Some of the frames in a row, and the cells of all steps below them; a PNG file."""
    T, N = episode.strength.shape
    picked = np.unique(np.linspace(0, T - 1, min(T, SHOWN)).round().astype(int))
    figure = new_figure(max(6.4, 1.05 * len(picked)), 1.6 + 0.28 * N)
    rows = figure.add_gridspec(2, len(picked), height_ratios=[1.0, 0.24 * N])
    for i, t in enumerate(picked):
        axes = picture_axes(figure.add_subplot(rows[0, i]))
        axes.imshow(episode.frames[t])
        axes.set_title(f"{t + 1}", fontsize=9)
    below = figure.add_subplot(rows[1, :])
    below.imshow(
        *(episode.strength.T,),
        aspect="auto",
        cmap="Greens",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(0.5, T + 0.5, N - 0.5, -0.5),
    )
    below.set_yticks(range(N), [f"cell {j}" for j in range(N)])
    below.set_xlabel("step")
    return png(figure)
