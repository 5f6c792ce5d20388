"""Agents on MiniGrid: planned, and their rows as a table for each family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from riglstm.lab.minigrid.levels import FAMILIES, SHOWN
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.minigrid.task import MiniGrid
from riglstm.lab.tables.plan import Planned, RunSpec, planned
from riglstm.lab.tables.recipes import MEMORIES, Row
from riglstm.lab.tables.result import (
    FAILED,
    LAST,
    Record,
    ResultRow,
    read_planned,
    rows_of,
)
from riglstm.lab.tables.table import SPREAD, Table, bullets, extent, line, markdown, text_table
from riglstm.lab.tasks import MINIGRID

COMPARED = ("riglstm", "rim", "lstm")
"""Memories that are trained, if nothing else is said."""
METRICS = {"success": "drawn", "success_greedy": "most probable"}
"""What a table has, and which actions an agent takes then."""
NOTE = f"{SPREAD} Trained on each family's first level alone; the last weights are tested (P35)."


def spec_of(world: MiniGrid, memory: Row, ppo: PPO, seed: int) -> RunSpec:
    """The run of an agent, which is given its family's frames unless `ppo` says how many."""
    frames = FAMILIES[world.family].frames if ppo.frames is None else ppo.frames
    return RunSpec(
        task=MINIGRID,
        task_options=asdict(world),
        model=memory.model,
        hidden_size=memory.hidden_size,
        model_options=dict(memory.options),
        fit=replace(ppo, frames=frames),
        seed=seed,
    )


def plan(
    families: Sequence[str] | None,
    models: Sequence[str] | None,
    seeds: int,
    root: Path | str,
    ppo: PPO,
    episodes: int = 100,
) -> list[Planned]:
    """All runs, seed by seed; None: the families whose goal can be seen, and `COMPARED`."""
    return [
        planned(
            spec_of(MiniGrid(family, episodes), MEMORIES[model], ppo, seed),
            *(root, ppo.device, family, model),
        )
        for seed, family, model in product(range(seeds), families or SHOWN, models or COMPARED)
    ]


def label(name: str) -> str:
    """A memory's name for readers."""
    return MEMORIES[name].label if name in MEMORIES else name


def rows(run: Record, name: str) -> list[ResultRow]:
    """The figures of an agent; `name`: that of its run."""
    world = run.spec.task_options["family"]
    return rows_of(run, table=MINIGRID, model=run.spec.name, budget="", setting=world, run=name)


def tables(
    found: Sequence[ResultRow], waiting: Mapping[tuple[str, str], int] | None = None
) -> list[Table]:
    """A table for each family; `waiting`: by family and model, how many runs are not done."""
    waiting = waiting or {}
    there = {(row.setting, row.model) for row in found} | set(waiting)
    begun = {model for _, model in there}
    names = [*filter(begun.__contains__, MEMORIES), *sorted(begun - MEMORIES.keys())]
    made = []
    for key, family in FAMILIES.items():
        models, levels = [name for name in names if (key, name) in there], tuple(family.levels)
        lines = []
        for (metric, actions), name in product(METRICS.items(), models):
            of = [row for row in found if (row.setting, row.model) == (key, name)]
            updates = sorted({row.updates for row in of if row.metric != FAILED})
            one = line(
                [row for row in of if row.metric.partition("@")[0] in (metric, FAILED)],
                *(levels, LAST, 100.0, waiting.get((key, name), 0)),
                both=False,
                setting=actions,
                label=label(name),
                made={"updates": extent(updates)} if updates else {},
            )
            lines.append(one)
        table = Table(
            name=MINIGRID,
            title=f"MiniGrid, {family.title}",
            measure="episodes solved in %",
            conditions=levels,
            trained_on=dict.fromkeys(METRICS.values(), levels[0]),
            lines=tuple(lines),
            missing=", ".join(label(name) for name in names if name not in models),
            settings="actions",
        )
        made += [table] if lines else []
    return made


def text(asked: Sequence[Planned]) -> tuple[str, list[ResultRow]]:
    """The tables of planned runs, in Markdown, and their rows."""
    over = [p for p in asked if p.state in ("done", "failed")]
    runs = [read_planned(p) for p in over]
    found = [row for run in runs for row in rows(run, run.path.name)]
    waiting = Counter((p.setting, p.row) for p in asked if p not in over)
    failed = (f"Failed: {run.path.name}: {run.reason}." for run in runs if run.reason)
    shown = (markdown(text_table(table)) for table in tables(found, waiting))
    notes = bullets([NOTE, *failed])
    return "\n".join(("**MiniGrid: episodes solved in %**\n", *shown, f"{notes}\n")), found
