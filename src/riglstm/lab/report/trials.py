"""The trials of a search as a slice plot: the score against each option that was drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from riglstm.lab.report.curves import Look, Picture, looks, plot_axes, png
from riglstm.lab.tables.recipes import AT_HOME
from riglstm.lab.tables.search import RULES, scored
from riglstm.plot.draw import new_figure, styled

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
