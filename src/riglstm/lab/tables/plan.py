"""The runs of a table: which there are, in which folders, and how far each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from riglstm.lab.tables.entries import Budget, Recipe
from riglstm.lab.tables.spec import RunSpec
from riglstm.lab.tables.tables import chosen, chosen_settings, recipe, table
from riglstm.lab.train.config import Precision
from riglstm.lab.train.folder import RunFolder, differences

State: TypeAlias = Literal["new", "partial", "done", "failed"]


class Planned(NamedTuple):
    """One run of a table."""

    spec: Any
    """A RunSpec; of a run on MiniGrid its GridSpec."""
    folder: Path
    state: State
    setting: str
    """What it is trained in, as the table says it."""
    row: str


def plan(
    name: str,
    models: Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    budget: Budget = "quick",
    root: Path | str = "runs",
    device: str = "auto",
    *,
    settings: Sequence[str] | None = None,
    precision: Precision | None = None,
) -> list[Planned]:
    """All runs of a table, seed by seed, so that a whole table is there early.

    `models`, `settings`: some of the table's; `seeds`: how many runs of each, or which seeds;
    `precision`: of all of them, which makes them other runs. None: as the recipe says.
    A run that several tables share has one folder.
    """
    how = recipe(name, budget)
    rows = chosen(how, models)
    found = []
    for seed in seeds_of(how, seeds):
        for setting in chosen_settings(how, settings):
            for key in rows:
                made = spec_of(name, how, setting, key, precision)
                spec = replace(made, fit=replace(made.fit, device=device), seed=seed)
                folder = Path(root) / folder_name(spec)
                found.append(Planned(spec, folder, state(spec, folder), setting, key))
    return found


def spec_of(
    name: str, how: Recipe, setting: str, key: str, precision: Precision | None = None
) -> RunSpec:
    """The first run of a row of a table in one of its settings."""
    row, fit = how.rows[key], how.fit
    if precision is not None:
        fit = replace(fit, precision=precision)
    return RunSpec(
        task=table(name).task,
        task_options={
            "conditions": how.conditions,
            **how.task,
            **how.settings[setting].task,
            **row.data(setting),
        },
        model=row.model,
        hidden_size=row.hidden_size,
        model_options=dict(row.options),
        fit=replace(fit, **row.training(setting)),
        seed=0,
    )


def seeds_of(how: Recipe, seeds: int | Sequence[int] | None) -> list[int]:
    """A number of runs as the seeds of those, from 0 on; seeds themselves in their order."""
    seeds = how.seeds if seeds is None else seeds
    if isinstance(seeds, bool) or (isinstance(seeds, int) and seeds < 1):
        raise ValueError(f"seeds must be a number of runs from 1 on, got {seeds!r}")
    return list(range(seeds)) if isinstance(seeds, int) else sorted(set(seeds))


def folder_name(spec: RunSpec) -> str:
    """Task, model, seed, and a digest of everything: another configuration is another folder."""
    return f"{spec.task}-{spec.name}-seed{spec.seed}-{spec.digest()}"


def state(spec: Any, path: Path) -> State:
    """How far the run is; raises ValueError where the folder holds another run."""
    folder = RunFolder(path)
    if folder.state == "new":
        return "new"
    found = differences(folder.read_json(folder.config), spec.resolved())
    if found:
        raise ValueError(
            f"{path} must hold the run that its name says, got another: {'; '.join(found)}; "
            "move it away, or delete it"
        )
    return "failed" if folder.state == "partial" and folder.failed.exists() else folder.state
