"""MiniGrid on the page: success rates, RigLSTM's beside RIM's, training, and an episode's cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.reproduce import load
from riglstm.lab.minigrid.runs import GridRun, comparable
from riglstm.lab.minigrid.table import label, tables
from riglstm.lab.report import curves, page
from riglstm.lab.report.episode import Episode, draw_episode, gif, play
from riglstm.lab.report.page import Html, Section
from riglstm.lab.report.probe import UNABLE
from riglstm.lab.report.style import FAINT, GRID, LOOKS, Picture, new_figure, plot_axes, png, styled
from riglstm.lab.tables.read_run import Series
from riglstm.lab.tables.render import text_table
from riglstm.lab.train.folder import differences

OURS, THEIRS = "riglstm", "rim"
TRACED = (OURS, THEIRS)
"""Models that say which of their cells were awake."""

Bar = tuple[str, str, float, float]
"""Family, level, mean difference in points, its standard deviation."""


def once(runs: Sequence[GridRun], missing: list[str]) -> list[GridRun]:
    """The runs, each once; says what is left out."""
    kept: dict[str, GridRun] = {}
    for found in runs:
        first = kept.setdefault(found.spec.digest(), found)
        if first is not found:
            stays, left = (found, first) if first.state != "done" else (first, found)
            kept[found.spec.digest()] = stays
            missing.append(
                f"{left.path}: left out, the same run as {stays.path} (configuration and seed)"
            )
    return list(kept.values())


def section(
    runs: Sequence[GridRun],
    models: Sequence[str] | None,
    device: str,
    show: Callable[[str], None],
    missing: list[str],
) -> tuple[Section, list[Picture]]:
    """What runs on MiniGrid have to show, and its pictures; says what is missing."""
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
    body: list[Html] = []
    if done:
        found, notes = tables(done)
        for shown in map(text_table, found):
            body.append(page.table(shown.title, shown.heads, shown.lines, shown.best))
            body += [page.paragraph(note) for note in shown.notes]
        body += [page.paragraph(note) for note in notes]
    bars = relative(done)
    if bars:
        missing += unlike(done)
        pictures.append(_relative_picture(bars))
    elif done:
        missing.append(
            "MiniGrid: RigLSTM relative to RIM needs finished runs of both on a family, "
            f"got {', '.join(sorted({f'{d.spec.name} on {d.spec.family}' for d in done}))}"
        )
    pictures += [_training(name, done) for name in dict.fromkeys(d.spec.family for d in done)]
    for run in _first_seeds(done):
        if models is not None and run.spec.name not in models and run.spec.model not in models:
            continue
        show(f"playing an episode: {run.spec.name} on {run.spec.family}")
        try:
            spec, net = load(run.path, device)
            level = FAMILIES[spec.family].levels[0]
            pictures += _episode(spec.name, play(net, level))
        except UNABLE as error:
            missing.append(f"an episode of {run.path}: {error}")
    body += [page.figure(picture) for picture in pictures]
    return Section("MiniGrid", body), pictures


def relative(done: Sequence[GridRun]) -> list[Bar]:
    """How many points of success RigLSTM is above RIM, on every level where both have runs.

    Of each, those of one training; see `comparable`.
    The spread is that of the difference of two independent runs: √(sd² + sd²).
    """
    bars: list[Bar] = []
    done, _ = comparable(done)
    for key, of in FAMILIES.items():
        for level in of.levels:
            found = {
                name: [
                    100 * d.rates()[level.name]
                    for d in done
                    if (d.spec.family, d.spec.name) == (key, name) and level.name in d.rates()
                ]
                for name in (OURS, THEIRS)
            }
            ours, theirs = found[OURS], found[THEIRS]
            if ours and theirs:
                spread = sum(np.var(v, ddof=1) for v in (ours, theirs) if len(v) > 1) ** 0.5
                mean = float(np.mean(ours) - np.mean(theirs))
                bars.append((of.title, level.name, mean, float(spread)))
    return bars


def unlike(done: Sequence[GridRun]) -> list[str]:
    """Families on which RigLSTM and RIM were trained otherwise, in words: no fair comparison."""
    found: dict[str, dict[str, GridRun]] = {}
    for run in comparable(done)[0]:
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


def _training(family: str, done: Sequence[GridRun]) -> Picture:
    """Success in training, by frame."""
    runs: dict[str, list[Series]] = {}
    for d in done:
        if d.spec.family == family and "success" in d.metrics:
            runs.setdefault(label(d.spec.name), []).append(d.metrics["success"])
    title = FAMILIES[family].title
    figure = curves.draw_training({f"{title} {FAMILIES[family].levels[0].name}: success": runs})
    for axes in figure.axes:
        axes.set_xlabel("frame")
    return Picture(
        title=f"MiniGrid, {title}: success while training",
        caption="Share of the last 100 episodes that were solved, by frames acted in.",
        alt=f"Curves of {', '.join(runs)}.",
        png=png(figure),
    )


def _first_seeds(done: Sequence[GridRun]) -> list[GridRun]:
    found: dict[tuple[str, str], GridRun] = {}
    for run in sorted(done, key=lambda d: d.spec.seed):
        found.setdefault((run.spec.family, run.spec.name), run)
    return [run for run in found.values() if run.spec.model in TRACED]


def _episode(name: str, episode: Episode) -> list[Picture]:
    ending = "solved" if episode.solved else "not solved"
    awake = ", ".join(f"{share:.0%}" for share in episode.strength.mean(0))
    title = f"MiniGrid, {label(name)}: an episode of {episode.level}"
    caption = (
        f"{len(episode.frames)} steps, {ending}: the first test episode, by the most probable "
        "actions. {} the frame{}: what each cell took in of the new state at each step, from "
        "nothing (white) to all of it (dark); a cell that slept took in nothing."
    )
    alt = f"Mean by cell: {awake}."
    return [
        Picture(title, caption.format("Below", "s"), alt, draw_episode(episode)),
        Picture(f"{title}, moving", caption.format("Beside", ""), alt, gif(episode), "gif"),
    ]
