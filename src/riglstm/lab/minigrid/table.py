"""The tables of success rates on MiniGrid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.runs import GridRun, comparable, read
from riglstm.lab.minigrid.spec import LAST, MEMORIES, TASK
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.reproduce import Rendered
from riglstm.lab.tables.rows import FAILED, ResultRow, rows_of
from riglstm.lab.tables.table import SPREAD, Table, bullets, line, markdown, text_table

METRICS = {"success": "drawn", "success_greedy": "most probable"}
"""What a run is tested by, and which actions it takes then."""


def table(planned: Sequence[Planned]) -> Rendered:
    """The tables of all runs that were begun, and their rows."""
    folders = [p.folder for p in planned if (p.folder / "config.json").exists()]
    begun = [read(folder, curves=False) for folder in folders]
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
