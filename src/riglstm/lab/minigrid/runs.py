"""Runs on MiniGrid, one or a table of them: trained on a family's easiest level, tested on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from riglstm import models
from riglstm.lab.minigrid.levels import FAMILIES, SHOWN, chosen_levels
from riglstm.lab.minigrid.network import FEATURES, ActorCritic
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.minigrid.spec import LAST, MEMORIES, TASK, GridSpec
from riglstm.lab.minigrid.table import METRICS, GridRun, read, table
from riglstm.lab.tables.executor import InProcess
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.reproduce import Reproduced, complete
from riglstm.lab.tables.result import made_by
from riglstm.lab.tables.run import training
from riglstm.lab.tasks.common import CPU, check_whole
from riglstm.lab.train.config import Fit, device_name, fork_rng, pick
from riglstm.lab.train.folder import RunFolder, commit
from riglstm.lab.train.stopping import Interrupted, untested

COMPARED = ("riglstm", "rim", "lstm")
"""Memories that are trained, if nothing else is said."""


def build(spec: GridSpec, device: torch.device) -> ActorCritic:
    """The network, whose start values depend on the seed alone."""
    with fork_rng(CPU, spec.seed):
        core = models.build(spec.model, FEATURES, spec.hidden_size, **spec.model_options)
        net = ActorCritic(core, FAMILIES[spec.family].actions)  # type: ignore[arg-type]
    return net.to(device)


def run(
    spec: GridSpec, folder: RunFolder | Path | str, *, resume: bool = False, again: str = ""
) -> dict[str, Any]:
    """Train on the easiest level, test the last weights on every one, write the result.

    A run that diverges leaves the reason in its folder. Raises what
    `riglstm.lab.minigrid.training.train` does.
    """
    # It needs numpy and safetensors, and what only explains itself does without.
    from riglstm.lab.minigrid.training import train, trials

    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    with folder.held():
        device = pick(Fit(device=spec.ppo.device))
        net, levels = build(spec, device), FAMILIES[spec.family].levels
        with training(folder, spec.resolved(), device, resume=resume):
            trained = train(net, spec, folder, again=again)
        try:
            scores = trials(net.eval(), levels, spec.episodes, spec.ppo.workers)
        except KeyboardInterrupt:
            raise Interrupted(untested(again)) from None
        result = {
            "rows": _rows(spec, scores, trained["frames"]),
            "steps": {name: score["steps"] for name, score in scores.items()},
            **trained,
            "parameters": sum(p.numel() for p in net.parameters()),
            **made_by(folder.read_json(folder.run)),
        }
        folder.finish(result)
    return result


def plan(
    families: Sequence[str] | None,
    models: Sequence[str] | None,
    seeds: int,
    root: Path | str,
    ppo: PPO,
    episodes: int = 100,
) -> list[Planned]:
    """All runs, seed by seed; None: the families whose goal can be seen, and `COMPARED`."""
    check_whole("seeds", seeds)
    found = []
    for seed, of, model in product(range(seeds), families or SHOWN, models or COMPARED):
        memory = MEMORIES[model]
        spec = GridSpec(
            *(of, memory.model, memory.hidden_size, dict(memory.options), ppo, seed, episodes)
        )
        folder = Path(root) / f"{TASK}-{of}-{model}-seed{seed}-{spec.digest()}"
        found.append(Planned(spec, folder, of, model))
    return found


def reproduce(asked: Sequence[Planned], *, again: str = "") -> Reproduced:
    """Run what is not done of a plan; the table of all that is there.

    A run that was stopped is gone on with; one that diverged is marked in its folder, shown as
    failed, and left; one that another process trains is passed over.
    """
    return complete(asked, run, lambda: table(asked), InProcess(), again)


def evaluate(
    path: Path | str, device: str = "auto", levels: Sequence[str] | None = None
) -> dict[str, Any]:
    """The result again, from the folder alone; nothing is written."""
    from riglstm.lab.minigrid.training import trials

    run, net = load(path, device)
    asked = chosen_levels(FAMILIES[run.spec.family], levels)
    rows = _rows(run.spec, trials(net, asked, run.spec.episodes), run.result["frames"])
    here = device_name(next(net.parameters()).device)
    return {**run.result, "rows": rows, "device": here, "commit": commit()}


def load(path: Path | str, device: str = "auto") -> tuple[GridRun, ActorCritic]:
    """A finished run, and its network with its last weights, in eval mode."""
    from riglstm.lab.train.checkpoints import load_weights

    run = read(Path(path), curves=False)
    run.check_done()
    net = build(run.spec, pick(Fit(device=device)))
    load_weights(net, RunFolder(path).weights_of(run.result["frames"]))
    return run, net.eval()


def _rows(
    spec: GridSpec, scores: Mapping[str, Mapping[str, float]], frames: int
) -> list[dict[str, Any]]:
    return [
        {
            "table": TASK,
            "model": spec.name,
            "seed": spec.seed,
            "condition": level,
            "metric": metric,
            "value": score[metric],
            "chosen_on": LAST,
            "step": frames,
        }
        for level, score in scores.items()
        for metric in METRICS
    ]
