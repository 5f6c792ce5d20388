"""Random search for a recipe: a space as data, its trials as runs, a line of JSON for each.

A space is a TOML file (`docs/protocol.md` has the rules, `protocol/` the spaces):

    table = "mnist"           # a table of the paper, with the models, sizes and task of its rows
    setting = "14x14"         # what is trained on
    budget = "tuned"          # the recipe that trial 0 repeats
    trials = 16               # trial 0, and 15 that are drawn
    models = ["riglstm"]      # rows of the table; all that it trains where this is left out
    seeds = [0]               # of each trial
    evaluations = 6           # on the way, evenly spaced; the last one after the last update
    [every]                   # set in all trials, trial 0 too
    "task.validation_size" = 4000
    [shared]                  # drawn for all models alike: trial 3 has one step size
    "fit.lr" = {log = [1e-4, 2e-3]}
    "model.forget_bias" = [0.0, 1.0, 3.0]
    [own.riglstm]             # drawn for one model alone
    "model.steady_start" = [true, false]
    [named.start-0]           # a trial by name, for questions that a draw does not ask
    "task.start_range" = 0.1

An option that a model does not have is left out of its trials. No trial sees test data. What is
trained with the recipes that were found, and does see test data, is in the file, too
(`riglstm.lab.tables.finals`):

    final_seeds = [1, 2, 3]   # seeds that no trial had
    [final_updates]           # times the trial's, in each setting that the recipe is trained in
    "14x14" = 3
    [final_seeds_of]          # of models that have others
    riglstm = [1, 2, 3, 4, 5]

A file of final runs alone has `recipe_of = ["mnist", "riglstm"]`, the space and the model whose
recipe all its rows take, with `every` set besides; `rules` names those that are asked for.
"""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from riglstm.lab.tables.plan import Planned, RunSpec, folder_name, planned, spec_of
from riglstm.lab.tables.recipes import AT_HOME, SHIFTED, Budget, Recipe, chosen, recipe, steady
from riglstm.lab.tables.result import made_by, read_planned
from riglstm.lab.tables.rows import append_text
from riglstm.lab.tasks.common import check_whole
from riglstm.models import build, options_of
from riglstm.models.rig import changes_of

PARTS = ("task", "fit", "model")
UPDATES = "fit.updates"
MOST_OWN = 4
"""Options that a model may have for itself."""


@dataclass(frozen=True)
class Space:
    """What is searched; the fields are those of its file."""

    name: str
    table: str
    setting: str
    budget: Budget = "tuned"
    trials: int = 16
    evaluations: int = 6
    seeds: tuple[int, ...] = (0,)
    models: tuple[str, ...] = ()
    every: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    named: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    final_seeds: tuple[int, ...] = ()
    final_seeds_of: Mapping[str, Sequence[int]] = field(default_factory=dict)
    final_updates: Mapping[str, int] = field(default_factory=dict)
    recipe_of: tuple[str, ...] = ()
    rules: tuple[str, ...] = (AT_HOME, SHIFTED)
    source: Space | None = None
    """The space that `recipe_of` names, which is read with this one; None: none."""

    @property
    def searched(self) -> Space:
        """The space whose trials choose the recipes."""
        return self.source or self

    @property
    def how(self) -> Recipe:
        """The recipe that its trials change."""
        return recipe(self.table, self.budget)

    def labels(self) -> list[str]:
        """All trials: by number, then by name."""
        return [*map(str, range(self.trials)), *self.named]

    def all_final_seeds(self) -> list[int]:
        """Those that any model has, in order."""
        return sorted({*self.final_seeds, *chain(*self.final_seeds_of.values())})


def read_space(path: Path, *, chooses: bool = False) -> Space:
    """A space from its file; raises ValueError where it is none.

    `chooses`: another space takes its recipe from this one, which must have trials itself.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        chosen("its fields", FIELDS, data)
        data |= {name: tuple(data[name]) for name in TUPLES if name in data}
        space = Space(path.stem, **data)
        if space.recipe_of and chooses:
            raise ValueError("recipe_of must name a space with trials, got one that has recipe_of")
        if space.recipe_of:
            name, model = space.recipe_of
            source = read_space(path.with_name(f"{name}.toml"), chooses=True)
            chosen("recipe_of", source.models, [model])
            space = replace(space, source=source)
        how = space.how
        models = chosen("models", how.rows, space.models) or how.models
        space = replace(space, models=models, rules=chosen("rules", RULES, space.rules))
        chosen("setting", how.settings, [space.setting])
        _check_numbers(space)
        for model, options in space.own.items():
            if model not in space.models or len(options) > MOST_OWN:
                raise ValueError(
                    f"own.{model} must be at most {MOST_OWN} options of one of "
                    f"{', '.join(space.models)}, got {', '.join(options)}"
                )
        # Whether every trial can be built is told before the first one is trained.
        for model, label in product(space.models, space.searched.labels()):
            made = spec(space, model, label)
            made.resolved()
            build(made.model, 600, made.hidden_size, **made.model_options, device="meta")
    except (TypeError, ValueError, AttributeError, OSError) as error:
        raise ValueError(f"{path} must be a search space: {error}") from error
    return space


FIELDS = tuple(f.name for f in fields(Space) if f.name not in ("name", "source"))
"""What a file may have; its name is the space's."""
TUPLES = ("seeds", "models", "final_seeds", "recipe_of", "rules")
"""Fields that are lists in a file."""


def _check_numbers(space: Space) -> None:
    """What is counted, and what is drawn from."""
    check_whole("trials", space.trials, 0)
    check_whole("evaluations", space.evaluations)
    if space.recipe_of and space.labels():
        raise ValueError(
            "a space with recipe_of has no trials of its own and must have trials = 0 and nothing "
            f"named, got the trials {', '.join(space.labels())}"
        )
    chosen("final_updates", space.how.settings, [*space.final_updates])
    chosen("final_seeds_of", space.models, [*space.final_seeds_of])
    for times in space.final_updates.values():
        check_whole("final_updates", times)
    for seed in space.all_final_seeds():
        if seed in space.searched.seeds:
            raise ValueError(f"a final seed must be one that no trial had, got {seed}")
    if bool(space.final_updates) != bool(space.final_seeds):
        raise ValueError("final_updates and final_seeds must both be there, or neither")
    known = {f"model.{o}" for m in space.models for o in options_of(space.how.rows[m].model)}
    drawn = (space.shared, *space.own.values())
    for name in chain(space.every, *space.named.values(), *drawn):
        if name.startswith("model.") and name not in known:
            raise ValueError(f"{name} is an option of none of {', '.join(space.models)}")
    for name, choices in chain(*(part.items() for part in drawn)):
        log = isinstance(choices, Mapping)
        values = choices.get("log") if log else choices
        fits = isinstance(values, list) and len(values) > 0
        if not fits or (log and not (len(values) == 2 and 0 < values[0] < values[1])):
            raise ValueError(
                f"{name} must be a list of values, or {{log = [low, high]}}, got {choices!r}"
            )


def options(space: Space, model: str, label: str) -> dict[str, Any]:
    """What a trial changes in the recipe of a model's row, by `part.name`.

    Trial 0 is that recipe, but for its updates, which are drawn as those of the others are.
    """
    row = space.how.rows[model]
    # A variant of RigLSTM sets some options itself, and cannot have others.
    refused = {*changes_of(row.options)}
    if row.model == "riglstm" and not steady(row):
        refused.add("steady_start")
    known = {f"model.{name}" for name in options_of(row.model) if name not in refused}
    changed = dict(space.every)
    if space.source is not None:
        changed = {**options(space.source, space.recipe_of[1], label), **changed}
    elif label in space.named:
        changed |= space.named[label]
    else:
        drawn = {**space.shared, **space.own.get(model, {})}
        names = drawn if label != "0" else drawn.keys() & {UPDATES}
        changed |= {name: _draw(drawn[name], name, int(label), space.trials) for name in names}
    return {n: v for n, v in changed.items() if n in known or not n.startswith("model.")}


def _draw(choices: Any, name: str, trial: int, trials: int) -> Any:
    """One of a list, or a number from a range by its logarithm, the same in every process.

    Trials share out a list, or the range's equal parts, among them: none is left out by chance.
    """
    source = random.Random(name)
    order = source.sample(range(trials), trials)
    place = order[trial]
    if isinstance(choices, Mapping):
        low, high = map(math.log, choices["log"])
        part = (place + random.Random(f"{name}, trial {trial}").random()) / trials
        return float(f"{math.exp(low + part * (high - low)):.3g}")
    return choices[place % len(choices)]


def spec(space: Space, model: str, label: str, seed: int = 0) -> RunSpec:
    """The run of a trial."""
    base = spec_of(space.table, space.how, space.setting, model)
    by_part: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, value in options(space, model, label).items():
        part, dot, option = name.partition(".")
        if part not in PARTS or not dot:
            raise ValueError(f"an option must begin with {' or '.join(PARTS)}, got {name!r}")
        # TOML has no word for None; of `decay` it is a value.
        by_part[part][option] = None if value == "none" and option != "decay" else value
    fit = replace(base.fit, **by_part["fit"])
    every = max(1, fit.updates // space.evaluations)
    return replace(
        base,
        task_options={**base.task_options, **by_part["task"]},
        model_options={**base.model_options, **by_part["model"]},
        fit=replace(fit, evaluate_every=every, checkpoint_every=every, test=False),
        seed=seed,
    )


def plan(
    space: Space,
    models: Sequence[str],
    labels: Iterable[str],
    root: Path,
    device: str,
    done: Iterable[Mapping[str, Any]] = (),
) -> list[Planned]:
    """The trials that have no line yet, trial by trial, so that models stay level."""
    # Without an option that one of them lacks, two trials of a model may be one run.
    there = {line["run"] for line in done}
    found = []
    for label, model, seed in product(labels, models, space.seeds):
        made = spec(space, model, label, seed)
        if (name := folder_name(made)) not in there:
            there.add(name)
            found.append(planned(made, root, device, space.setting, model, trial=label))
    return found


def runs(space: Space) -> dict[str, str]:
    """The names of all runs of a space, each with its trial; of two that are one run the first."""
    every = [*product(space.models, space.labels(), space.seeds)]
    return {folder_name(spec(space, *trial)): trial[1] for trial in reversed(every)}


def line(space: Space, trial: Planned) -> dict[str, Any] | None:
    """What a trial came to; None where its run is not done."""
    if trial.state not in ("done", "failed"):
        return None
    record = read_planned(trial, curves=True)
    said: dict[str, Any] = {
        "space": space.name,
        "model": trial.row,
        "trial": trial.trial,
        "seed": trial.spec.seed,
        "run": trial.folder.name,
        "options": options(space, trial.row, trial.trial),
        "precision": trial.spec.precision,
        **made_by(record.run),
    }
    if not record.result:
        cost = {name: record.failed.get(name) or 0 for name in ("updates", "seconds")}
        return {**said, **cost, "failed": record.reason}
    best, home = record.result["chosen"], record.result["trained_on"]
    step = best[home]["step"]
    values = {
        condition: float(series.values[series.steps == step][0])
        for condition, series in record.validated.items()
    }
    copied = ("updates", "seconds", "parameters", "metric", "higher_is_better")
    return {
        **said,
        **{name: record.result[name] for name in copied},
        "trained_on": home,
        "validation": {"step": step, **values},
        "best": best,
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All trials of a file, none where it is not there; raises ValueError for another file."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            found.append(json.loads(line))
            if not isinstance(found[-1], dict) or not {"run", "model", "trial"} <= found[-1].keys():
                raise ValueError(f"line {number} is {line[:80]!r}")
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} must hold the trials of a search, one line of JSON each: {error}; "
            "mend it, or give another file"
        ) from error
    return found


def append(path: Path, said: Mapping[str, Any]) -> None:
    """Add a trial's line.

    A run that has its line keeps it: a second one would make the trial the best of two.
    """

    def content(_: int) -> str:
        there = {line["run"] for line in read_lines(path)}
        return "" if said["run"] in there else f"{json.dumps(said)}\n"

    append_text(path, content)


def _home(said: Mapping[str, Any]) -> float:
    return float(said["validation"][said["trained_on"]])


def _shifted(said: Mapping[str, Any]) -> float:
    best, home = said["best"], said["trained_on"]
    others = [condition for condition in best if condition != home] or [home]
    return sum(float(best[condition]["value"]) for condition in others) / len(others)


RULES: dict[str, Callable[[Mapping[str, Any]], float]] = {AT_HOME: _home, SHIFTED: _shifted}
"""How a recipe is chosen among a model's trials: the score of each."""


def scored(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The trials that were trained to their end, by number, then by name."""
    whole = (said for said in lines if "failed" not in said)
    return sorted(whole, key=lambda said: (len(str(said["trial"])), str(said["trial"])))


def winners(
    lines: Iterable[Mapping[str, Any]], runs: Collection[str], higher_is_better: bool = True
) -> dict[str, dict[str, Mapping[str, Any]]]:
    """By model and by each of `RULES` the best trial of those in `runs`.

    A space that was changed has other runs. A trial that failed is none, and a figure that is no
    number is worse than all others. Of equals it is the first by number, then by name: which of
    them ended first is chance.
    """
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for said in scored(lines):
        if said["run"] in runs:
            by_model.setdefault(str(said["model"]), []).append(said)
    sign = 1 if higher_is_better else -1

    def order(value: float) -> float:
        return -math.inf if math.isnan(value) else sign * value

    return {
        model: {
            rule: max(own, key=lambda said: order(score(said))) for rule, score in RULES.items()
        }
        for model, own in by_model.items()
    }
