"""What one run is, as data that a file can hold, and the runs of a table, in their folders."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from riglstm import RigLSTM
from riglstm.lab import tasks
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.minigrid.task import TEST_SEED, MiniGrid
from riglstm.lab.tables.recipes import MEMORIES, TABLES, Budget, Recipe, chosen, recipe
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.tasks.base import TaskConfig, options
from riglstm.lab.tasks.common import check_whole
from riglstm.lab.train.config import FREE, Fit, Precision
from riglstm.lab.train.folder import RunFolder, State
from riglstm.models import MODELS, options_of
from riglstm.models.rig import changes_of, settled

PLACE = ("batch_first", "compile_step", "device", "dtype")
"""Options of models that a run does not set: they belong to the task, or to the machine."""

UNNAMED: dict[str, float | None] = {
    "average": None,
    "input_rate": 1.0,
    "forget_bias": 0.0,
    "steady_start": False,
    "weight_decay": 0.0,
    "flood": 0.0,
    "test": True,
    "gate_scale": 1.0,
    "start_range": None,
    "label_smoothing": 0.0,
    "flip": False,
    "levels": 256,
    "train_rollout": 0,
}
"""Options that are younger than the first rows in `results/`: at these values they are no part of a
run's name, so that those rows and trials keep theirs."""


@dataclass(frozen=True)
class RunSpec:
    """A model, a task, and how the one learns the other."""

    task: str
    """A name that `riglstm.lab.tasks.find` knows, or MINIGRID."""
    task_options: dict[str, Any]
    """Fields of the task's configuration that differ from its defaults."""
    model: str
    """A key of `riglstm.models.MODELS`."""
    hidden_size: int
    """The model's whole width."""
    model_options: dict[str, Any]
    """Other arguments of the model."""
    fit: Any
    """How it is trained: a Fit, or an agent's PPO."""
    seed: int
    """Of the weights, of the training data, and of what the model draws."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"the model must be one of {', '.join(MODELS)}, got {self.model!r}")
        known = tuple(f.name for f in fields(_config_of(self.task)))  # type: ignore[arg-type]
        _check_known("task", self.task, self.task_options, known)
        if not isinstance(self.fit, _fit_of(self.task)):
            raise ValueError(
                f"{self.task} must be learned by {_fit_of(self.task).__name__}, got {self.fit!r}"
            )
        if isinstance(self.fit, PPO) and self.fit.frames is None:
            raise ValueError(
                "an agent's run must say its frames, got None; riglstm.lab.tables.agents.spec_of "
                "takes those of the family"
            )
        check_options(self.model, self.model_options)
        # As many as every generator of random numbers takes.
        most = TEST_SEED if self.task == MINIGRID else 2**32
        check_whole("the seed", self.seed, low=0, high=most - 1)
        check_whole("hidden_size", self.hidden_size)

    @property
    def name(self) -> str:
        """The model, or the ablation that it is; of an agent the memory that it has."""
        if self.task == MINIGRID:
            return _memory(self.model, self.hidden_size, self.model_options)
        return str(self.model_options.get("variant") or self.model)

    @property
    def precision(self) -> str:
        """Of matrix products."""
        return str(self.fit.precision)

    def task_config(self) -> TaskConfig:
        """The task's configuration."""
        said = self.task_options.items()
        found = {k: tuple(v) if isinstance(v, list) else v for k, v in said}
        return _config_of(self.task)(**found)

    def resolved(self) -> dict[str, Any]:
        """As JSON has it, with the defaults of task and model written out."""
        # Agents have always been named by what was given.
        more = {} if self.task == MINIGRID else _model_defaults(self.model, self.model_options)
        said = {**more, **self.model_options}
        return {
            "task": self.task,
            "task_options": options(self.task_config()),
            "model": self.model,
            "hidden_size": self.hidden_size,
            "model_options": plain_options(self.model, self.hidden_size, said),
            "fit": asdict(self.fit),
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunSpec:
        """The inverse of `resolved`."""
        names = [f.name for f in fields(cls)]
        if set(data) != set(names):
            raise ValueError(
                f"a run's configuration must have the fields {', '.join(names)}, "
                f"got {', '.join(sorted(data)) or 'none'}; is this the config.json of a run?"
            )
        fit = _fit_of(data["task"])
        _check_known("training", fit.__name__, data["fit"], [f.name for f in fields(fit)])
        made = cls(**{**data, "fit": fit(**data["fit"])})
        made.task_config()
        return made

    def identity(self) -> dict[str, Any]:
        """What makes it this run, see `identity`."""
        return identity(self.resolved())

    def digest(self) -> str:
        """Eight hexadecimal digits of `identity`, for the name of a folder."""
        return digest(self.identity())

    def recipe(self) -> str:
        """The same without the seed: runs that have it are repetitions of each other."""
        return digest({**self.identity(), "seed": None})


def _config_of(task: str) -> type[TaskConfig]:
    """The options of a task, or of MiniGrid."""
    return MiniGrid if task == MINIGRID else tasks.find(task)


def _fit_of(task: str) -> type[Fit | PPO]:
    """How a task is learned."""
    return PPO if task == MINIGRID else Fit


def _memory(model: str, hidden_size: int, options: Mapping[str, Any]) -> str:
    """The name among `MEMORIES`, or the model's with a mark: other sizes."""

    def sizes(model: str, hidden_size: int, options: Mapping[str, Any]) -> Any:
        # The backend computes the same in another way.
        known = {k: v for k, v in options.items() if k != "backend"}
        return model, hidden_size, plain_options(model, hidden_size, known)

    own = sizes(model, hidden_size, options)
    for name, memory in MEMORIES.items():
        if own == sizes(memory.model, memory.hidden_size, memory.options):
            return name
    return f"{model}-other"


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration, less what only says how it is computed and less `UNNAMED`."""
    data = dict(config)
    for part in ("task_options", "fit", "model_options"):
        said = data[part].items()
        data[part] = {k: v for k, v in said if k not in UNNAMED or v != UNNAMED[k]}
    data["fit"] = {k: v for k, v in data["fit"].items() if k not in FREE}
    if data["model"] == "rim":
        # RIM had an option once that its rows in `results/` are named by.
        data["model_options"]["cell"] = "original"
    return data


def digest(data: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8]


def plain_options(model: str, hidden_size: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """A model's options as JSON has them, RigLSTM's soft update in numbers: defaults may change."""
    said = settled(hidden_size, given) if model == "riglstm" else given
    return {k: list(v) if isinstance(v, tuple) else v for k, v in said.items()}


def _model_defaults(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were not given, but for those that a variant sets and those of the machine."""
    parameters = dict(inspect.signature(MODELS[model]).parameters)
    if model == "riglstm":
        parameters |= inspect.signature(RigLSTM).parameters
    set_already = {*PLACE, *given, *changes_of(given)}
    return {n: parameters[n].default for n in options_of(model) if n not in set_already}


def check_options(model: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the model does not have, or that a run does not set."""
    _check_known("model", model, given, [o for o in options_of(model) if o not in PLACE])


def _check_known(kind: str, of: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(
                f"{name!r} is no {kind} option of {of!r}; it takes {', '.join(sorted(known))}"
            )


class Planned(NamedTuple):
    """One run of a table, or of a search."""

    spec: RunSpec
    folder: Path
    setting: str
    """What it is trained in, as the table says it."""
    row: str
    trial: str = ""
    """Of a search: the trial that it is, or whose recipe it has."""
    rule: str = ""
    """The rule, or the two, that chose the trial."""

    @property
    def state(self) -> State:
        """How far it is by now."""
        return RunFolder(self.folder).state

    @property
    def label(self) -> str:
        """The run in a few words."""
        trial = f" trial {self.trial}" if self.trial else ""
        return f"{self.row} {self.setting}{trial} seed {self.spec.seed}"


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
    rows = how.models if models is None else chosen("models", how.rows, models)
    trained_in = how.settings if settings is None else chosen("settings", how.settings, settings)
    found, seeds = [], how.seeds if seeds is None else seeds
    for seed in range(seeds) if isinstance(seeds, int) else sorted(set(seeds)):
        for setting in trained_in:
            for key in rows:
                spec = replace(spec_of(name, how, setting, key, precision), seed=seed)
                found.append(planned(spec, root, device, setting, key))
    return found


def planned(
    spec: RunSpec, root: Path | str, device: str, setting: str, row: str, **search: str
) -> Planned:
    """A run in its folder, on a device; `search`: its trial and rule."""
    spec = replace(spec, fit=replace(spec.fit, device=device))
    return Planned(spec, Path(root) / folder_name(spec), setting, row, **search)


def spec_of(
    name: str, how: Recipe, setting: str, key: str, precision: Precision | None = None
) -> RunSpec:
    """The first run of a row of a table in one of its settings."""
    row, fit = how.rows[key], how.fit
    if precision is not None:
        fit = replace(fit, precision=precision)
    return RunSpec(
        task=TABLES[name].task,
        task_options={
            "conditions": how.conditions,
            **how.task,
            **how.settings[setting].task,
            **row.task,
            **row.task_in.get(setting, {}),
        },
        model=row.model,
        hidden_size=row.hidden_size,
        model_options=dict(row.options),
        fit=replace(fit, **{**row.fit, **row.fit_in.get(setting, {})}),
        seed=0,
    )


def folder_name(spec: RunSpec) -> str:
    """Task, model, seed, and a digest of everything: another configuration is another folder."""
    family = f"-{spec.task_options['family']}" if spec.task == MINIGRID else ""
    return f"{spec.task}{family}-{spec.name}-seed{spec.seed}-{spec.digest()}"
