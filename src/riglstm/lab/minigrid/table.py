"""All of MiniGrid from one call: plan, run what is not done, and the table of success rates."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from riglstm.lab.minigrid.groups import comparable
from riglstm.lab.minigrid.levels import FAMILIES, SHOWN, family
from riglstm.lab.minigrid.ppo import PPO, check_count
from riglstm.lab.minigrid.reproduce import run
from riglstm.lab.minigrid.runs import GridRun, read
from riglstm.lab.minigrid.spec import LAST, MEMORIES, TASK, GridSpec
from riglstm.lab.tables.render import Grid, Rendered, render
from riglstm.lab.tables.result import FAILED
from riglstm.lab.tables.sheet import Cell
from riglstm.lab.train.folder import BusyError, RunFolder

MODELS = ("riglstm", "rim", "lstm")
"""What is compared, if nothing else is said."""

METRICS = {"success": "actions drawn", "success_greedy": "most probable actions"}
RECORD = ("family", "level", "model", "seed", "metric", "value", "chosen_on", "frames")


class Planned(NamedTuple):
    """One run."""

    spec: GridSpec
    folder: Path

    @property
    def state(self) -> str:
        """How far it is: new, partial, failed or done."""
        state = RunFolder(self.folder).state
        return "failed" if state == "partial" and (self.folder / FAILED).exists() else state


class Reproduced(NamedTuple):
    """A table that was asked for."""

    rendered: Rendered
    paths: tuple[Path, ...]
    """Where it was written: Markdown, CSV, LaTeX."""
    failed: int
    """Runs that diverged; the table says which, and why."""
    left: int
    """Runs that are not done: another process makes them."""


def plan(
    families: Sequence[str] | None,
    models: Sequence[str] | None,
    seeds: int,
    root: Path | str,
    ppo: PPO,
    episodes: int = 100,
    *,
    quick: bool = False,
) -> list[Planned]:
    """All runs, seed by seed; None: the families whose goal can be seen, and `MODELS`.

    `quick`: a twentieth of each family's frames, which shows how it works, and no more.
    """
    for name in models or ():
        if name not in MEMORIES:
            raise ValueError(f"models must be some of {', '.join(MEMORIES)}, got {name!r}")
    for name in families or ():
        family(name)
    check_count("seeds", seeds)
    found = []
    for seed in range(seeds):
        for of in families or SHOWN:
            how = ppo
            if quick and ppo.frames is None:
                how = replace(ppo, frames=max(ppo.batch, family(of).frames // 20))
            for model in models or MODELS:
                memory = MEMORIES[model]
                spec = GridSpec(
                    *(of, memory.model, memory.hidden_size, dict(memory.options), how, seed),
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
    quick: bool = False,
    retry_failed: bool = False,
    progress: bool = True,
    again: str = "",
) -> Reproduced:
    """Run what is not done, write the table anew after every run; the table and its files.

    A run that was stopped is gone on with; one that diverged is marked in its folder, shown as
    failed, and left, but with `retry_failed` begun anew; one that another process trains is passed
    over.
    """
    from riglstm.lab.minigrid.training import Diverged

    planned = plan(families, models, seeds, root, ppo or PPO(), episodes, quick=quick)
    table(planned).check(Path(out), TASK)
    open_states = {"new", "partial", *(("failed",) if retry_failed else ())}
    waiting = [p for p in planned if p.state in open_states]
    for number, (spec, path) in enumerate(waiting, start=1):
        if progress:
            print(f"run {number} of {len(waiting)}: {path}", file=sys.stderr, flush=True)
        folder = RunFolder(path)
        try:
            with folder.held():
                if folder.state != "done":
                    if folder.failed.exists():
                        # Gone on with, it would diverge again, bit for bit.
                        folder.empty()
                    run(spec, folder, resume=True, progress=progress, again=again)
        except (Diverged, BusyError) as error:
            print(f"{path}: {error}", file=sys.stderr)
        table(planned).write(Path(out), TASK)
    rendered = table(planned)
    states = [p.state for p in planned]
    return Reproduced(
        *(rendered, rendered.write(Path(out), TASK)),
        failed=states.count("failed"),
        left=states.count("new") + states.count("partial"),
    )


def table(planned: Sequence[Planned]) -> Rendered:
    """Success rates in %, mean ± sd over seeds, by family, level and model."""
    begun = [read(p.folder, curves=False) for p in planned if p.state != "new"]
    shown = grid([p.spec.name for p in planned if p.state != "new"], begun, len(planned))
    records = [
        (
            *(run.spec.family, r["condition"], run.spec.name, run.spec.seed),
            *(r["metric"], r["value"], LAST, r["step"]),
        )
        for run in begun
        for r in run.rows
    ]
    return render(shown, RECORD, records)


def grid(models: Iterable[str], runs: Sequence[GridRun], planned: int | None = None) -> Grid:
    """The table for readers, of runs that are done or have failed; no mean is over two trainings.

    `planned`: how many runs there are to be.
    """
    ended = [run for run in runs if run.state in ("done", "failed")]
    shown, left = comparable(ended)
    models = set(models)
    names = [name for name in dict.fromkeys((*MEMORIES, *sorted(models))) if name in models]
    lines = []
    for key, of in FAMILIES.items():
        here = [run for run in shown if run.spec.family == key]
        for level in of.levels if here else ():
            cells = [
                _cell([run for run in here if run.spec.name == name], level.name, metric).text()
                for metric in METRICS
                for name in names
            ]
            lines.append([of.title, level.name, *cells])
    heads = [f"{label(name)}, {said}" for said in METRICS.values() for name in names]
    notes = [
        "Success rates in %: mean ± standard deviation; fewer than three runs are shown one by "
        "one. Trained on each family's first level alone; the last weights are tested (P35)."
    ]
    notes += [f"Failed: {run.path.name}: {run.reason}." for run in shown if run.reason]
    notes += [f"{words}." for words in left]
    if planned is not None and len(ended) < planned:
        notes.append(f"{planned - len(ended)} of {planned} runs are not done.")
    return Grid(TASK, "MiniGrid: episodes solved", ["family", "level", *heads], lines, 2, notes)


def _cell(runs: Sequence[GridRun], level: str, metric: str) -> Cell:
    rates = [run.rates(metric) for run in runs]
    failed = sum(run.state == "failed" for run in runs)
    return Cell(tuple(100 * r[level] for r in rates if level in r), failed)


def label(name: str) -> str:
    """A memory's name for readers."""
    return MEMORIES[name].label if name in MEMORIES else name
