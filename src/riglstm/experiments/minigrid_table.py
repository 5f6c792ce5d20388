"""All of MiniGrid from one call: plan, run what is not done, and the table of success rates."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from riglstm.experiments.minigrid import run
from riglstm.experiments.minigrid_spec import LAST, MEMORIES, TASK, GridSpec
from riglstm.experiments.render import Grid, Rendered, render
from riglstm.experiments.result import FAILED
from riglstm.experiments.sheet import Cell
from riglstm.tasks.minigrid_levels import FAMILIES, SHOWN, family
from riglstm.train.folder import RunFolder
from riglstm.train.lock import BusyError
from riglstm.train.ppo_config import PPO

MODELS = ("riglstm", "rim", "lstm")
"""What is compared, if nothing else is said."""

METRICS = {"success": "actions drawn", "success_greedy": "most probable actions"}
RECORD = ("family", "level", "model", "seed", "metric", "value", "chosen_on", "frames")


class Planned(NamedTuple):
    """One run."""

    spec: GridSpec
    folder: Path


class Run(NamedTuple):
    """A run's folder."""

    spec: GridSpec
    folder: Path
    result: dict[str, Any] | None
    """None: it is not done."""

    @property
    def state(self) -> str:
        """As `RunFolder.state`."""
        return "partial" if self.result is None else "done"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its figures."""
        return [] if self.result is None else list(self.result["rows"])

    def rates(self, metric: str = "success") -> dict[str, float]:
        """Success rates by level."""
        return {r["condition"]: r["value"] for r in self.rows if r["metric"] == metric}


def plan(
    families: Sequence[str] | None,
    models: Sequence[str] | None,
    seeds: int,
    root: Path | str,
    ppo: PPO,
    episodes: int = 100,
) -> list[Planned]:
    """All runs, seed by seed; None: the families whose goal can be seen, and `MODELS`."""
    for name in models or ():
        if name not in MEMORIES:
            raise ValueError(f"models must be some of {', '.join(MEMORIES)}, got {name!r}")
    for name in families or ():
        family(name)
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds must be a number of runs from 1 on, got {seeds!r}")
    found = []
    for seed in range(seeds):
        for of in families or SHOWN:
            for model in models or MODELS:
                memory = MEMORIES[model]
                spec = GridSpec(
                    *(of, memory.model, memory.hidden_size, dict(memory.options), ppo, seed),
                    episodes=episodes,
                )
                name = f"{TASK}-{of}-{model}-seed{seed}-{spec.digest()}"
                found.append(Planned(spec, Path(root) / name))
    return found


def reproduce(
    families: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    seeds: int = 3,
    root: Path | str = "runs",
    out: Path | str = "out",
    ppo: PPO | None = None,
    *,
    episodes: int = 100,
    progress: bool = True,
    again: str = "",
) -> tuple[Rendered, tuple[Path, ...]]:
    """Run what is not done, write the table anew after every run; the table and its files.

    A run that was stopped is gone on with; one that diverged is marked in its folder, and left;
    one that another process trains is passed over.
    """
    from riglstm.train.reinforced import Diverged

    planned = plan(families, models, seeds, root, ppo or PPO(), episodes)
    waiting = [p for p in planned if RunFolder(p.folder).state != "done"]
    for number, (spec, path) in enumerate(waiting, start=1):
        if progress:
            print(f"run {number} of {len(waiting)}: {path}", file=sys.stderr, flush=True)
        if (path / FAILED).exists():
            continue
        folder = RunFolder(path)
        try:
            with folder.held():
                if folder.state != "done":
                    run(spec, folder, resume=True, progress=progress, again=again)
        except (Diverged, BusyError) as error:
            print(f"{path}: {error}", file=sys.stderr)
        table(planned).write(Path(out), TASK)
    rendered = table(planned)
    return rendered, rendered.write(Path(out), TASK)


def read(path: Path) -> Run:
    """A run; raises ValueError where the folder's files are not those of one."""
    folder = RunFolder(path)
    spec = GridSpec.from_json(folder.read_json(folder.config))
    if folder.state != "done":
        return Run(spec, path, None)
    result = folder.read_json(folder.result)
    if not isinstance(result.get("rows"), list):
        raise ValueError(
            f"{folder.result} must be the result of a run, with rows, a list of figures, got "
            f"{', '.join(result) or 'an empty one'}; delete the folder, and train anew"
        )
    return Run(spec, path, result)


def table(planned: Sequence[Planned]) -> Rendered:
    """Success rates in %, mean ± sd (n) over seeds, by family, level and model."""
    done = [read(p.folder) for p in planned if RunFolder(p.folder).state == "done"]
    shown = grid([run.spec.name for run in done], done, len(planned))
    records = [
        (
            *(run.spec.family, r["condition"], run.spec.name, run.spec.seed),
            *(r["metric"], r["value"], LAST, r["step"]),
        )
        for run in done
        for r in run.rows
    ]
    return render(shown, RECORD, records)


def grid(models: Iterable[str], done: Sequence[Run], planned: int | None = None) -> Grid:
    """The table for readers."""
    names = [name for name in dict.fromkeys((*MEMORIES, *models)) if name in set(models)]
    lines = []
    for key, of in FAMILIES.items():
        here = [d for d in done if d.spec.family == key]
        for level in of.levels if here else ():
            cells = [
                _cell([d for d in here if d.spec.name == name], level.name, metric).text()
                for metric in METRICS
                for name in names
            ]
            lines.append([of.title, level.name, *cells])
    heads = [f"{label(name)}, {said}" for said in METRICS.values() for name in names]
    notes = [
        "Success rates in %, mean ± standard deviation over seeds (number of seeds). Trained on "
        "each family's first level alone; the last weights are tested (P35)."
    ]
    if planned is not None and len(done) < planned:
        notes.append(f"{planned - len(done)} of {planned} runs are not done.")
    return Grid(TASK, "MiniGrid: episodes solved", ["family", "level", *heads], lines, 2, notes)


def quick(ppo: PPO, families: Sequence[str] | None) -> PPO:
    """A twentieth of the longest family's frames: it shows how it works, and no more."""
    longest = max(FAMILIES[name].frames for name in families or SHOWN)
    return replace(ppo, frames=longest // 20)


def _cell(runs: Sequence[Run], level: str, metric: str) -> Cell:
    rates = [run.rates(metric) for run in runs]
    return Cell(tuple(100 * r[level] for r in rates if level in r))


def label(name: str) -> str:
    """A memory's name for readers."""
    return MEMORIES[name].label if name in MEMORIES else name
