"""All of MiniGrid from one call: plan, run what is not done, and the tables of success rates."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from riglstm.lab.minigrid.config import PPO, check_count
from riglstm.lab.minigrid.groups import comparable
from riglstm.lab.minigrid.levels import FAMILIES, SHOWN, family
from riglstm.lab.minigrid.reproduce import run
from riglstm.lab.minigrid.runs import GridRun, read
from riglstm.lab.minigrid.spec import LAST, MEMORIES, TASK, GridSpec
from riglstm.lab.tables.build import SPREAD, line, rows_of
from riglstm.lab.tables.render import Rendered, Table, bullets, markdown, text_table
from riglstm.lab.tables.result import FAILED as FAILED_FILE
from riglstm.lab.tables.rows import FAILED, ResultRow
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.lock import BusyError

MODELS = ("riglstm", "rim", "lstm")
"""What is compared, if nothing else is said."""

METRICS = {"success": "drawn", "success_greedy": "most probable"}
"""What a run is tested by, and which actions it takes then."""


class Planned(NamedTuple):
    """One run."""

    spec: GridSpec
    folder: Path

    @property
    def state(self) -> str:
        """How far it is: new, partial, failed or done."""
        state = RunFolder(self.folder).state
        return "failed" if state == "partial" and (self.folder / FAILED_FILE).exists() else state


class Reproduced(NamedTuple):
    """A table that was asked for."""

    rendered: Rendered
    paths: tuple[Path, ...]
    """Where it was written: Markdown, and its rows as CSV."""
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
    """The tables of all runs that were begun, and their rows."""
    begun = [read(p.folder, curves=False) for p in planned if p.state != "new"]
    found, notes = tables(begun, len(planned))
    shown = (markdown(text_table(one)) for one in found)
    rows = [row for run in begun for row in _rows(run, run.path.name)]
    text = "\n".join(("**MiniGrid: episodes solved in %**\n", *shown, f"{bullets(notes)}\n"))
    return Rendered(text, rows)


def tables(runs: Sequence[GridRun], planned: int | None = None) -> tuple[list[Table], list[str]]:
    """A table for each family of runs that are done or have failed, and notes on all of them.

    No mean is over two trainings. `planned`: how many runs there are to be.
    """
    ended = [run for run in runs if run.state in ("done", "failed")]
    shown, left = comparable(ended)
    there = {run.spec.name for run in runs}
    names = [name for name in dict.fromkeys((*MEMORIES, *sorted(there))) if name in there]
    found = []
    for key, of in FAMILIES.items():
        rows = [row for run in shown if run.spec.family == key for row in _rows(run, str(run.path))]
        if not rows:
            continue
        models = [name for name in names if name in {row.model for row in rows}]
        levels = tuple(level.name for level in of.levels)
        one = Table(
            name=TASK,
            title=f"MiniGrid, {of.title}",
            measure="episodes solved in %",
            conditions=levels,
            trained_on=dict.fromkeys(METRICS.values(), levels[0]),
            lines=tuple(
                line(
                    [r for r in rows if r.model == name and r.metric.split("@")[0] in known],
                    *(levels, LAST, 100.0),
                    both=False,
                    setting=said,
                    row=name,
                    label=label(name),
                )
                for metric, said in METRICS.items()
                for known in [(metric, FAILED)]
                for name in models
            ),
            missing=", ".join(label(name) for name in names if name not in models),
            settings="actions",
        )
        found.append(one)
    notes = [
        f"{SPREAD} Trained on each family's first level alone; the last weights are tested (P35)."
    ]
    notes += [f"Failed: {run.path.name}: {run.reason}." for run in shown if run.reason]
    notes += [f"{words}." for words in left]
    if planned is not None and len(ended) < planned:
        notes.append(f"{planned - len(ended)} of {planned} runs are not done.")
    return found, notes


def _rows(run: GridRun, name: str) -> list[ResultRow]:
    training = json.dumps(run.spec.training(), sort_keys=True)
    return rows_of(
        run,
        table=TASK,
        model=run.spec.name,
        seed=run.spec.seed,
        budget="",
        setting=run.spec.family,
        precision="fp32",
        recipe=hashlib.sha256(training.encode()).hexdigest()[:8],
        run=name,
    )


def label(name: str) -> str:
    """A memory's name for readers."""
    return MEMORIES[name].label if name in MEMORIES else name
