"""Runs on MiniGrid read from their folders, which of them may share a mean, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.spec import LAST, MEMORIES, TASK, GridSpec
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.reproduce import Rendered
from riglstm.lab.tables.result import FAILED, ResultRow, RunFiles, read_run, rows_of
from riglstm.lab.tables.table import SPREAD, Table, bullets, line, markdown, text_table
from riglstm.lab.train.folder import RunFolder, differences

METRICS = {"success": "drawn", "success_greedy": "most probable"}
"""What a run is tested by, and which actions it takes then."""


@dataclass(frozen=True, kw_only=True)
class GridRun(RunFiles):
    """A run on MiniGrid."""

    spec: GridSpec


def is_grid(path: Path | str) -> bool:
    """Whether a folder holds a run on MiniGrid."""
    folder = RunFolder(path)
    return folder.config.exists() and folder.read_json(folder.config).get("task") == TASK


def read(path: Path, curves: bool = True) -> GridRun:
    """A run; raises ValueError where the folder's files are not those of one."""
    return read_run(path, GridRun, GridSpec.from_json, curves)


def comparable(runs: Sequence[GridRun]) -> tuple[list[GridRun], list[str]]:
    """Of each memory on each family the runs of one training, and what is left out, in words.

    That with the most seeds that are done, then the one begun last. Runs may have been made by
    hand, with other frames or another step size; their mean would be that of no experiment.
    """
    groups: dict[tuple[str, str], dict[str, list[GridRun]]] = {}
    for run in runs:
        named = groups.setdefault((run.spec.family, run.spec.name), {})
        named.setdefault(run.spec.recipe(), []).append(run)
    first = {of: max(named.values(), key=_rank)[0] for of, named in groups.items()}
    kept: list[GridRun] = []
    left: list[str] = []
    for run in runs:
        counted = first[run.spec.family, run.spec.name]
        if found := differences(counted.spec.training(), run.spec.training()):
            words = f"left out, trained otherwise than {counted.path}: {'; '.join(found)}"
            left.append(f"{run.path}: {words}")
        else:
            kept.append(run)
    return kept, left


def _rank(runs: Sequence[GridRun]) -> tuple[int, str]:
    seeds = {run.spec.seed for run in runs if run.state == "done"}
    return len(seeds), max(str(run.run.get("started", "")) for run in runs)


def table(planned: Sequence[Planned]) -> Rendered:
    """The tables of all runs that were begun, and their rows."""
    there = (p.folder for p in planned if (p.folder / "config.json").exists())
    begun = [read(folder, curves=False) for folder in there]
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
        levels = tuple(of.levels)
        lines = [
            line(
                [r for r in rows if r.model == name and r.metric.split("@")[0] in (metric, FAILED)],
                *(levels, LAST, 100.0),
                both=False,
                setting=said,
                label=label(name),
            )
            for metric, said in METRICS.items()
            for name in models
        ]
        found.append(
            Table(
                name=TASK,
                title=f"MiniGrid, {of.title}",
                measure="episodes solved in %",
                conditions=levels,
                trained_on=dict.fromkeys(METRICS.values(), levels[0]),
                lines=tuple(lines),
                missing=", ".join(label(name) for name in names if name not in models),
                settings="actions",
            )
        )
    notes = [
        f"{SPREAD} Trained on each family's first level alone; the last weights are tested (P35).",
        *(f"Failed: {run.path.name}: {run.reason}." for run in shown if run.reason),
        *(f"{words}." for words in left),
    ]
    if planned is not None and len(ended) < planned:
        notes.append(f"{planned - len(ended)} of {planned} runs are not done.")
    return found, notes


def _rows(run: GridRun, name: str) -> list[ResultRow]:
    of = run.spec
    return rows_of(run, table=TASK, model=of.name, budget="", setting=of.family, run=name)


def label(name: str) -> str:
    """A memory's name for readers."""
    return MEMORIES[name].label if name in MEMORIES else name
