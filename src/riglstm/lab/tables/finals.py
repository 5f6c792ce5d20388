"""The final runs of a search: each model's best recipe, with new seeds, on test data.

A recipe is the best trial's by one of the two rules (`riglstm.lab.tables.search.winners`). It is
trained for a multiple of the trial's updates, in every setting that the space names, and looked at
as often on the way. Where both rules have chosen one trial, one run serves both.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from riglstm.lab.tables import search
from riglstm.lab.tables.plan import Planned, RunSpec, folder_name, planned
from riglstm.lab.tables.recipes import SEARCHED, TABLES
from riglstm.lab.tables.result import ResultRow, read_planned, rows_of
from riglstm.lab.tables.search import Space


def plan(
    space: Space,
    models: Sequence[str],
    lines: Sequence[Mapping[str, Any]],
    root: Path,
    device: str,
    done: Collection[tuple[str, str]] = (),
) -> list[Planned]:
    """The final runs of models whose trials are all done, but for those in `done`.

    `done`: a run's name and a rule that its rows count by; a run that another rule chooses later
    gets rows by that rule, too. By rule, then the longest first, so that runs that are made side by
    side end together.
    """
    found: dict[str, Planned] = {}
    chosen = {model: choices(space, model, lines) for model in models}
    settings = sorted(space.final_updates, key=lambda name: -space.final_updates[name])
    every = product(space.rules, settings, space.all_final_seeds(), models)
    for rule, setting, seed, model in dict.fromkeys(every):
        if seed not in space.final_seeds_of.get(model, space.final_seeds):
            continue
        label = chosen[model][rule]
        made = spec(space, model, label, setting, seed)
        name = folder_name(made)
        if (name, rule) in done:
            continue
        rules = f"{found[name].rule}, {rule}" if name in found else rule
        found[name] = planned(made, root, device, setting, model, trial=label, rule=rules)
    return list(found.values())


def choices(space: Space, model: str, lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By rule, the trial that was chosen for a model."""
    searched, of, runs = _searched(space, model)
    # A run's name holds its options; the label in its line may be of a space before a change.
    own = [{**a, "model": of, "trial": runs[a["run"]]} for a in lines if a["run"] in runs]
    best = search.winners(own, runs, TABLES[searched.table].metric.higher_is_better)[of]
    return {rule: str(said["trial"]) for rule, said in best.items() if rule in space.rules}


def spec(space: Space, model: str, label: str, setting: str, seed: int) -> RunSpec:
    """A trial's recipe in a setting, trained for longer, and tested."""
    trial = search.spec(space, model, label, seed)
    # All else that the table's own recipe changes in a setting was not searched.
    data = space.how.settings[setting].task
    updates = space.final_updates[setting] * trial.fit.updates
    return replace(
        trial,
        task_options={**trial.task_options, **data},
        fit=replace(trial.fit, updates=updates, test=True),
    )


def lacking(space: Space, model: str, lines: Iterable[Mapping[str, Any]], folder: Path) -> str:
    """Why a model has no final runs yet, and what to do; empty where it has all its trials.

    `folder`: of the space's file, and of that of the space that it takes its recipe from.
    """
    searched, of, asked = _searched(space, model)
    own = [said for said in lines if said["run"] in asked]
    left = len(asked.keys() - {said["run"] for said in own})
    if left:
        return (
            f"{of} must have all its {len(asked)} trials before its final runs, got "
            f"{len(asked) - left}; make the other {left} with: riglstm sweep "
            f"{shlex.quote(str(folder / f'{searched.name}.toml'))} --models {of}"
        )
    if all("failed" in said for said in own):
        return f"{of} must have a trial that did not fail, got {len(own)} that did; see their lines"
    return ""


def _searched(space: Space, model: str) -> tuple[Space, str, dict[str, str]]:
    """The space and the model whose trials choose the recipe of a row, and these trials by run."""
    of = model if space.source is None else space.recipe_of[1]
    searched = replace(space.searched, models=(of,))
    return searched, of, search.runs(searched)


def rows(space: Space, final: Planned) -> list[ResultRow]:
    """The figures of a final run; none where it is not done."""
    if final.state not in ("done", "failed"):
        return []
    return rows_of(
        read_planned(final),
        table=space.table,
        model=final.row,
        budget=SEARCHED,
        setting=final.setting,
        run=final.folder.name,
        trial=final.trial,
        rule=final.rule,
    )
