"""One run on MiniGrid: build, train on a family's easiest level, test on all of them."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from riglstm import models
from riglstm.experiments.spec import PLACE
from riglstm.tasks.minigrid_levels import chosen_levels, family
from riglstm.tasks.minigrid_network import FEATURES, ActorCritic
from riglstm.train.config import FREE, Fit
from riglstm.train.devices import pick
from riglstm.train.folder import RunFolder
from riglstm.train.generators import kept
from riglstm.train.ppo_config import PPO
from riglstm.train.record import commit, device_name
from riglstm.train.trials import Score, trials

TASK = "minigrid"
LAST = "last"
"""What chose the weights that a run is tested with: nothing, they are the last (P34)."""


@dataclass(frozen=True)
class Memory:
    """A model as an agent's memory."""

    label: str
    model: str
    hidden_size: int
    options: Mapping[str, Any]


MEMORIES: dict[str, Memory] = {
    "riglstm": Memory(
        "RigLSTM",
        *("riglstm", 64),
        {"num_cells": 4, "active_cells": 4, "views_per_cell": 4, "peers_per_cell": 3},
    ),
    "rim": Memory("RIM", "rim", 64, {"num_cells": 4, "active_cells": 2, "dropout": 0.0}),
    "rim3": Memory("RIM, 3 active", "rim", 64, {"num_cells": 4, "active_cells": 3, "dropout": 0.0}),
    "lstm": Memory("LSTM", "lstm", 64, {}),
    "gridlstm": Memory("GridLSTM", "gridlstm", 64, {"num_cells": 4}),
    "brim": Memory(
        "BRIM", "brim", 64, {"num_cells": (4, 4), "active_cells": (2, 2), "dropout": 0.0}
    ),
    "rmc": Memory("RMC", "rmc", 64, {"num_slots": 4, "num_heads": 4}),
    "entnet": Memory("EntNet", "entnet", 64, {"num_slots": 4}),
}
"""The paper's sizes of RigLSTM (K_h is capped at N - 1) and RIM; the others at their width."""


@dataclass(frozen=True)
class GridSpec:
    """A model, a family, and how the one learns in the other."""

    family: str
    """A key of `FAMILIES`."""
    model: str
    """A key of `riglstm.models.MODELS`."""
    hidden_size: int
    model_options: dict[str, Any]
    ppo: PPO
    seed: int
    episodes: int = 100
    """Of each level, in the test."""

    def __post_init__(self) -> None:
        family(self.family)
        if self.model not in models.MODELS or self.model == "transformer":
            known = ", ".join(name for name in models.MODELS if name != "transformer")
            raise ValueError(f"the memory must be one of {known}, got {self.model!r}")
        known_options = [o for o in models.options_of(self.model) if o not in PLACE]
        for option in self.model_options:
            if option not in known_options:
                raise ValueError(
                    f"{option!r} is no model option of {self.model!r}; "
                    f"it takes {', '.join(known_options)}"
                )
        for name in ("seed", "episodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number from 0 on, got {value!r}")

    @property
    def name(self) -> str:
        """The memory's name among `MEMORIES`, or the model's."""
        for name, memory in MEMORIES.items():
            if (self.model, self.hidden_size) == (memory.model, memory.hidden_size) and _plain(
                self.model_options
            ) == _plain(memory.options):
                return name
        return self.model

    @property
    def frames(self) -> int:
        """To train for."""
        return family(self.family).frames if self.ppo.frames is None else self.ppo.frames

    def resolved(self) -> dict[str, Any]:
        """As JSON has it; the keys are those of other runs."""
        return {
            "task": TASK,
            "task_options": {"family": self.family, "episodes": self.episodes},
            "model": self.model,
            "hidden_size": self.hidden_size,
            "model_options": _plain(self.model_options),
            "fit": {**asdict(self.ppo), "frames": self.frames},
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GridSpec:
        """The inverse of `resolved`."""
        known = {f.name for f in fields(PPO)}
        if data.get("task") != TASK or not set(data.get("fit", ())) <= known:
            raise ValueError(
                f"expected the config.json of a run on {TASK}, got one of {data.get('task')!r}"
            )
        return cls(
            family=data["task_options"]["family"],
            model=data["model"],
            hidden_size=data["hidden_size"],
            model_options=dict(data["model_options"]),
            ppo=PPO(**data["fit"]),
            seed=data["seed"],
            episodes=data["task_options"]["episodes"],
        )

    def digest(self) -> str:
        """Eight hexadecimal digits of what makes it this run, for the name of a folder."""
        data = self.resolved()
        data["fit"] = {k: v for k, v in data["fit"].items() if k not in FREE}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8]


def is_grid(path: Path | str) -> bool:
    """Whether a folder holds a run on MiniGrid."""
    folder = RunFolder(path)
    return folder.config.exists() and folder.read_json(folder.config).get("task") == TASK


def device_of(config: PPO, device: str | None = None) -> torch.device:
    """Where to compute."""
    return pick(Fit(device=config.device if device is None else device))


def build(spec: GridSpec, device: torch.device) -> ActorCritic:
    """The network, whose start values depend on the seed alone."""
    with kept(torch.device("cpu")):
        torch.default_generator.manual_seed(spec.seed)
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in spec.model_options.items()}
        core = models.build(spec.model, FEATURES, spec.hidden_size, **options)
        net = ActorCritic(core, family(spec.family).actions)  # type: ignore[arg-type]
    return net.to(device)


def run(
    spec: GridSpec,
    path: Path | str,
    *,
    resume: bool = False,
    progress: bool = True,
    again: str = "",
) -> dict[str, Any]:
    """Train on the easiest level, test the last weights on every one, write the result.

    Raises what `riglstm.train.reinforced.train` does.
    """
    # It takes seconds to load, and what reads folders does without.
    from riglstm.train.reinforced import train

    folder, of, device = RunFolder(path), family(spec.family), device_of(spec.ppo)
    net = build(spec, device)
    command = shlex.join((Path(sys.argv[0]).name, *sys.argv[1:]))
    folder.begin(spec.resolved(), command=command, device=device_name(device), resume=resume)
    trained = train(
        *(net, of.levels[0].id, spec.frames, spec.ppo, spec.seed, folder),
        resume=resume,
        progress=progress,
        again=again,
    )
    if progress:
        print(f"testing {spec.episodes} episodes of {len(of.levels)} levels", file=sys.stderr)
    scores = trials(net.eval(), of.levels, spec.episodes, spec.ppo.workers)
    result = {
        "rows": _rows(spec, scores, trained.frames),
        "steps": {name: score.steps for name, score in scores.items()},
        "updates": trained.updates,
        "frames": trained.frames,
        "seconds": trained.seconds,
        "parameters": sum(p.numel() for p in net.parameters()),
        "device": device_name(device),
        "commit": commit(),
    }
    folder.finish(result)
    return result


def evaluate(
    path: Path | str,
    device: str = "auto",
    levels: Sequence[str] | None = None,
    episodes: int | None = None,
) -> dict[str, Any]:
    """The result again, from the folder alone; nothing is written."""
    folder = RunFolder(path)
    spec, net = load(path, device)
    result = folder.read_json(folder.result)
    of = family(spec.family)
    asked = chosen_levels(of, None if levels is None else tuple(levels))
    scores = trials(net, asked, episodes or spec.episodes)
    here = device_name(next(net.parameters()).device)
    rows = _rows(spec, scores, result["frames"])
    return {**result, "rows": rows, "device": here, "commit": commit()}


def load(path: Path | str, device: str = "auto") -> tuple[GridSpec, ActorCritic]:
    """A finished run: what it was, and the network with its last weights, in eval mode."""
    from riglstm.train.weights import load_weights

    folder = RunFolder(path)
    spec = GridSpec.from_json(folder.read_json(folder.config))
    if folder.state != "done":
        raise ValueError(
            f"{folder.path} holds a run that is not done: expected result.json, got none; "
            "go on with it by --resume first"
        )
    net = build(spec, device_of(spec.ppo, device))
    load_weights(net, folder.weights_of(folder.read_json(folder.result)["frames"]))
    return spec, net.eval()


def _rows(spec: GridSpec, scores: Mapping[str, Score], frames: int) -> list[dict[str, Any]]:
    return [
        {
            "table": TASK,
            "model": spec.name,
            "seed": spec.seed,
            "condition": level,
            "metric": metric,
            "value": getattr(score, metric),
            "chosen_on": LAST,
            "step": frames,
        }
        for level, score in scores.items()
        for metric in ("success", "success_greedy")
    ]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(dict(value) if isinstance(value, Mapping) else value))
