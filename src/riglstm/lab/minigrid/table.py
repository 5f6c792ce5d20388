"""The table of success rates on MiniGrid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.runs import GridRun, comparable, read
from riglstm.lab.minigrid.spec import LAST, MEMORIES, TASK
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.render import Grid, Rendered, render
from riglstm.lab.tables.sheet import Cell

METRICS = {"success": "actions drawn", "success_greedy": "most probable actions"}
RECORD = ("family", "level", "model", "seed", "metric", "value", "chosen_on", "frames")


def table(planned: Sequence[Planned]) -> Rendered:
    """Success rates in %, mean ± sd over seeds, by family, level and model."""
    found = [p.folder for p in planned if (p.folder / "config.json").exists()]
    begun = [read(folder, curves=False) for folder in found]
    shown = grid([run.spec.name for run in begun], begun, len(planned))
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
