"""Figures of many runs: the metric against the shift, curves of training, trials of a search.

What they share with pictures of one's own traces is in `riglstm.plot.draw`.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import cycle
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from riglstm.lab.report.runs import Group
from riglstm.lab.tables.paper import value
from riglstm.lab.tables.recipes import AT_HOME
from riglstm.lab.tables.result import Series
from riglstm.lab.tables.search import RULES, scored
from riglstm.lab.tables.table import ENOUGH, Table
from riglstm.plot.draw import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    GRID,
    INK,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    new_figure,
    styled,
)

Array: TypeAlias = NDArray[Any]
Line: TypeAlias = Literal["-", "--", ":", "-."]
LINES: tuple[Line, ...] = ("-", "--", ":", "-.")


class Look(NamedTuple):
    """The colour, marker and line of a model in every figure."""

    colour: str
    marker: str
    line: Line = "-"


LOOKS: dict[str, Look] = {
    "riglstm": Look(GREEN, "o"),
    "rim": Look(BLUE, "s"),
    "lstm": Look(INK, "^"),
    "gridlstm": Look(GREY, "v"),
    "brim": Look(SKY, "D"),
    "rmc": Look(ORANGE, "P"),
    "entnet": Look(VERMILION, "X"),
    "transformer": Look(PINK, "*"),
}
"""Green for RigLSTM and blue for RIM, as in the paper's figure of the balls."""


class Picture(NamedTuple):
    """A figure that is ready for a page."""

    title: str
    caption: str
    png: bytes
    """The file."""


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """A look for each label: the model's own, then others of the palette for what has none.

    A label is a model's name, or a longer one that starts with it (`riglstm lr=0.001`): the first
    of a name gets the model's own look, the others dashes, the colour that is used least so far,
    and another marker, as dashes between near points are not seen.
    """
    own = list(LOOKS.values())
    spare = [
        look._replace(marker=other.marker, line=line)
        for k, line in enumerate(LINES[1:], 1)
        for look, other in zip(own, own[-k:] + own[:-k], strict=True)
    ]
    given: dict[str, Look] = {}
    for label in labels:
        look = LOOKS.get(label.split(" ")[0].lower())
        if look is None or look in given.values():
            colours = [look.colour for look in given.values()]
            free = [look for look in spare if look not in given.values()] or spare
            look = min(free, key=lambda look: colours.count(look.colour))
        given[label] = look
    return given


def png(figure: Figure) -> bytes:
    """The figure as a PNG file, the same bytes for the same figure."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def fold(label: str) -> str:
    """A label in lines that leave room for the figure beside it."""
    return textwrap.fill(label, 30)


def plot_axes(axes: Axes, grid: Literal["x", "y"] = "y") -> Axes:
    """Axes for lines: two sides, and a faint grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


HOLLOW: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 9,
    "markerfacecolor": "none",
}
"""How the paper's figures are drawn."""


class Shift(NamedTuple):
    """The metric against the shift, of all models of one setting of a table."""

    title: str
    """Of the table and the setting."""
    conditions: list[str]
    """The trained one first."""
    trained_on: str
    models: dict[str, dict[str, list[float]]]
    """By label and condition a value for each seed."""
    measure: str
    """With its unit: `test accuracy in %`."""
    higher_is_better: bool
    paper: dict[str, dict[str, float]]
    """By label and condition the paper's figure, drawn hollow."""
    yardsticks: dict[str, dict[str, float]]
    """The same for what needs no model, drawn as bars."""


def shift(table: Table, setting: str) -> Shift | None:
    """What a setting's figure shows; None where none of its runs has a figure."""
    lines = [line for line in table.lines if line.setting == setting]
    values = {
        line.label: {c: list(cell.values) for c, cell in line.ours.items() if cell.values}
        for line in lines
    }
    exact = {line.label for line in lines if any(cell.exact for cell in line.ours.values())}
    models = {label: found for label, found in values.items() if found and label not in exact}
    if not models:
        return None
    home = table.trained_on[setting]
    conditions = dict.fromkeys((home, *table.conditions))
    return Shift(
        titled(table, setting),
        [c for c in conditions if any(c in found for found in models.values())],
        *(home, models, table.measure, table.higher_is_better),
        paper={
            line.label: {c: value(text) for c, text in line.paper.items()}
            for line in lines
            if line.paper and line.label in models
        },
        yardsticks={
            line.label: {c: found[0] for c, found in values[line.label].items()}
            for line in lines
            if line.label in exact
        },
    )


@styled()
def draw_shift(what: Shift) -> Figure:
    """Each model's mean and standard deviation over seeds, by condition."""
    conditions, trained_on, models = what.conditions, what.trained_on, what.models
    look = looks(list(models))
    # Steps of one scale are joined (P=100, P=200), kinds of things are not.
    joined = len({re.sub(r"\d+", "", c) for c in conditions}) == 1
    figure = new_figure(max(6.4, 1.7 * len(conditions) + 2.6), 4.4)
    axes = plot_axes(figure.add_subplot())
    dodge = min(0.05 if joined else 0.08, 0.5 / len(models))
    for i, (label, values) in enumerate(models.items()):
        offset = dodge * (i - (len(models) - 1) / 2)
        places = {c: x + offset for x, c in enumerate(conditions)}
        _draw_model(axes, places, values, look[label], joined, label)
        printed = what.paper.get(label, {})
        points = [(x, printed[c]) for c, x in places.items() if c in printed]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                **{**HOLLOW, "marker": look[label].marker},
                markeredgecolor=look[label].colour,
                markeredgewidth=1.3,
                label=f"_{label}, paper",
            )
    handles: list[Any] = list(axes.containers)
    for (label, at), line in zip(what.yardsticks.items(), cycle(LINES)):
        x = np.array([x for x, c in enumerate(conditions) if c in at])
        y = [at[c] for c in conditions if c in at]
        bars = axes.hlines(y, x - 0.42, x + 0.42, colors=FAINT, linestyles=line, linewidth=1.2)
        bars.set_label(fold(label))
        handles.append(bars)
    if what.paper:
        handles.append(Line2D([], [], **HOLLOW, markeredgecolor=FAINT, label="hollow: the paper"))
    axes.set_xlim(-0.5, len(conditions) - 0.5)
    axes.set_xticks(range(len(conditions)), conditions)
    if trained_on in conditions:
        home = conditions.index(trained_on)
        axes.axvspan(home - 0.5, home + 0.5, color=GRID, alpha=0.45, zorder=0, linewidth=0)
        axes.text(
            *(home, 1.01, "trained here"),
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            color=FAINT,
            fontsize=9.5,
        )
    axes.set_xlabel("test condition")
    axes.set_ylabel(what.measure + ("" if what.higher_is_better else "\n(lower is better)"))
    figure.legend(handles=handles, loc="outside right center")
    return figure


def _draw_model(
    axes: Axes,
    places: Mapping[str, float],
    values: Mapping[str, Sequence[float]],
    look: Look,
    joined: bool,
    label: str,
) -> None:
    """One model: a mark at each mean, a dot for each seed, bars of one standard deviation.

    `places`: by condition where it is on the axis. Two runs have no bars: their dots say as much.
    """
    measured = [(x, np.asarray(values[c])) for c, x in places.items() if c in values]
    x = [at for at, _ in measured]
    means = [v.mean() for _, v in measured]
    spreads = [v.std(ddof=1) if len(v) >= ENOUGH else 0.0 for _, v in measured]
    counts = sorted({len(v) for _, v in measured})
    n = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    axes.errorbar(
        *(x, means),
        yerr=spreads if any(spreads) else None,
        color=look.colour,
        marker=look.marker,
        linestyle=look.line if joined else "none",
        markersize=6,
        capsize=3,
        elinewidth=1.2,
        label=fold(f"{label} (n = {n})"),
    )
    for at, v in measured:
        if len(v) > 1:
            axes.plot([at] * len(v), v, ".", color=look.colour, markersize=4, alpha=0.5)


@styled()
def draw_training(
    panels: Mapping[str, Mapping[str, Sequence[Series]]], units: Mapping[str, str] | None = None
) -> Figure:
    """A panel for each quantity by update: thin lines are runs, thick ones their means.

    `panels`: the quantity's name to label to its runs; `units`: what stands beside its axis.
    """
    labels = list(dict.fromkeys(label for runs in panels.values() for label in runs))
    strokes: dict[str, Any] = {
        label: {"color": own.colour, "linestyle": own.line} for label, own in looks(labels).items()
    }
    across = 2 if len(panels) == 4 else min(3, len(panels))
    down = -(-len(panels) // across)
    figure = new_figure(4.2 * across + 0.2, 3.3 * down + 0.5)
    for i, (name, runs) in enumerate(panels.items()):
        axes = plot_axes(figure.add_subplot(down, across, i + 1))
        for label, series in runs.items():
            alone = len(series) == 1
            width, alpha = (1.6, 1.0) if alone else (0.8, 0.45)
            for one in series:
                # A line of one point would not be seen.
                marker = "." if len(one.steps) == 1 else ""
                axes.plot(*one, **strokes[label], marker=marker, linewidth=width, alpha=alpha)
            if not alone:
                axes.plot(*mean(series), **strokes[label], linewidth=2.4)
        axes.set_title(name)
        axes.set_xlabel("update")
        axes.set_ylabel((units or {}).get(name, ""))
        lines = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
        ends = [(v[v > 0].min(), v[v > 0].max()) for v in lines if (v > 0).any()]
        if "loss" in name and ends and max(e[1] for e in ends) > 20 * min(e[0] for e in ends):
            axes.set_yscale("log")
            # The usual one writes formulas, which are not set as such here.
            axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
    handles = [
        Line2D([], [], **strokes[label], linewidth=2.4, label=fold(label)) for label in labels
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(2 + across, len(handles)))
    return figure


def mean(series: Sequence[Series]) -> Series:
    """The mean of several runs, at the updates that all of them have."""
    steps = reduce(np.intersect1d, [one.steps for one in series])
    rows = [one.values[np.isin(one.steps, steps)] for one in series]
    return Series(steps, np.mean(rows, axis=0))


def shift_picture(what: Shift) -> Picture:
    """The metric against the shift, of all models."""
    return Picture(
        title=f"{what.title}: {what.measure} against the shift",
        caption=(
            "Means over runs, bars of one standard deviation of three runs or more, dots for runs; "
            f"trained on {what.trained_on}, which chose the checkpoints."
            + (" Hollow: the paper's figures." if what.paper else "")
            + (" Grey lines need no model." if what.yardsticks else "")
        ),
        png=png(draw_shift(what)),
    )


def training_picture(group: Group, setting: str) -> Picture | None:
    """Loss and validation metric by update; None where nothing was logged."""
    panels: dict[str, dict[str, list[Series]]] = {}
    units = {}
    for (found, label), runs in group.runs.items():
        for record in runs if found == setting else ():
            if "train/loss" in record.metrics:
                panels.setdefault("training loss", {}).setdefault(label, []).append(
                    record.metrics["train/loss"]
                )
            for condition, series in record.validated.items():
                here = " (trained)" if condition == group.table.trained_on[setting] else ""
                name = f"validation, {condition}{here}"
                units[name] = group.table.measure.removeprefix("test ")
                scaled = Series(series.steps, group.scale * series.values)
                panels.setdefault(name, {}).setdefault(label, []).append(scaled)
    if not panels:
        return None
    return Picture(
        title=f"{titled(group.table, setting)}: training",
        caption=(
            "By update. Thin lines are runs, finished or not; thick lines are the means of a "
            "model's runs, as far as all of them go. Loss: of the training batches, means between "
            "two lines of the log. The other panels: validation data, one panel a condition."
        ),
        png=png(draw_training(panels, units)),
    )


def titled(table: Table, setting: str) -> str:
    """The title of a table's figures of a setting."""
    return table.title if table.settings is None else f"{table.title}, {table.settings} {setting}"


COLUMNS = 4
"""Panels in a row."""
FEW = 5
"""Values up to which an option has a place for each; more are a scale, by their logarithm."""


class Trial(NamedTuple):
    """One dot in every panel."""

    model: str
    score: float
    options: dict[str, Any]


class Slices(NamedTuple):
    """The trials of a space that have a score, and the options that were drawn for them."""

    space: str
    """Its name."""
    trials: list[Trial]
    """By model."""
    options: list[str]
    condition: str
    """Of the validation data."""
    metric: str
    higher_is_better: bool
    left_out: int
    """Trials that have no score, or none of the options."""


def slices(space: str, lines: Sequence[Mapping[str, Any]]) -> Slices | None:
    """What is to be drawn of a file of trials; None where no option was drawn in them.

    Trials that have a number are drawn from the space, those that have a name are not.
    """
    drawn = [line["options"] for line in lines if str(line["trial"]).isdecimal()]
    options = [
        name
        for name in dict.fromkeys(name for given in drawn for name in given)
        if len({given[name] for given in drawn if name in given}) > 1
    ]
    found = [
        Trial(line["model"], RULES[AT_HOME](line), line["options"])
        for line in scored(lines)
        if line["options"].keys() & options
    ]
    if not found:
        return None
    some = next(iter(scored(lines)))
    found.sort(key=lambda trial: trial.model)
    # The lines of the first searches do not say it; they are of accuracies.
    measure = (some["trained_on"], some["metric"], some.get("higher_is_better", True))
    return Slices(space, found, options, *measure, left_out=len(lines) - len(found))


def slices_picture(what: Slices) -> Picture:
    """The score of a search's trials against each option."""
    return Picture(
        title=f"Search {what.space}: {len(what.trials)} trials by the options that were drawn",
        caption="A mark is a trial, with its score on validation data of the training "
        "condition; a model's best is large. Trials without a score or these options: "
        f"{what.left_out}.",
        png=png(draw_slices(what)),
    )


@styled()
def draw_slices(what: Slices) -> Figure:
    """A panel for each option, a mark for each trial; each model's best is large."""
    models = list(dict.fromkeys(trial.model for trial in what.trials))
    look, best = looks(models), max if what.higher_is_better else min
    chosen = [
        best((trial for trial in what.trials if trial.model == model), key=lambda own: own.score)
        for model in models
    ]
    rows = math.ceil(len(what.options) / COLUMNS)
    figure = new_figure(2.5 * COLUMNS + 1.4, 1.75 * rows + 0.3)
    panels = figure.subplots(rows, COLUMNS, sharey=True, squeeze=False).ravel()
    for axes, option in zip(panels, what.options, strict=False):
        _draw_panel(plot_axes(axes), option, what.trials, chosen, look)
    for axes in panels[len(what.options) :]:
        axes.set_visible(False)
    marks = [
        Line2D([], [], color=own.colour, marker=own.marker, linestyle="none", label=model)
        for model, own in look.items()
    ]
    figure.legend(handles=marks, loc="outside right center")
    better = "" if what.higher_is_better else ", lower is better"
    figure.supylabel(f"validation {what.metric} at {what.condition}{better}", fontsize=10.5)
    return figure


def _draw_panel(
    axes: Axes,
    option: str,
    trials: Sequence[Trial],
    chosen: Sequence[Trial],
    look: Mapping[str, Look],
) -> None:
    """One option; models stand side by side where it has few values."""
    shown = [trial for trial in trials if option in trial.options]
    models = list(dict.fromkeys(trial.model for trial in shown))
    values = {trial.options[option] for trial in shown}
    places = sorted(values, key=lambda value: (isinstance(value, str), value))
    few = len(places) <= FEW or any(isinstance(value, str) or value <= 0 for value in places)
    for trial in shown:
        x, own, large = trial.options[option], look[trial.model], trial in chosen
        if few:
            aside = (models.index(trial.model) + 0.5) / len(models) - 0.5
            x = places.index(x) + 0.7 * aside
        axes.plot(
            *(x, trial.score, own.marker),
            color=own.colour,
            markersize=9 if large else 5.5,
            markeredgecolor="white",
            markeredgewidth=0.4,
            clip_on=False,
            zorder=3 if large else 2,
        )
    if few:
        words = [f"{value:g}" if type(value) is float else str(value).lower() for value in places]
        axes.set_xticks(range(len(places)), words)
        axes.set_xlim(-0.5, len(places) - 0.5)
    else:
        axes.set_xscale("log")
        axes.set_xticks([places[0], places[-1]], [f"{places[0]:.2g}", f"{places[-1]:.2g}"])
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(option, fontsize=9.5)
