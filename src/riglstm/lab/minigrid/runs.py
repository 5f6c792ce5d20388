"""Folders of runs on MiniGrid, as tables and pages read them, and which may share a mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from riglstm.lab.minigrid.spec import GridSpec
from riglstm.lab.tables.result import RunFiles, check_result, read_files, refused
from riglstm.lab.train.folder import differences


@dataclass(frozen=True, kw_only=True)
class GridRun(RunFiles):
    """A run on MiniGrid."""

    spec: GridSpec

    def rates(self, metric: str = "success") -> dict[str, float]:
        """Success rates by level."""
        return {r["condition"]: r["value"] for r in self.rows if r["metric"] == metric}


def read(path: Path, curves: bool = True) -> GridRun:
    """A run; raises RunError where the folder's files are not those of one."""
    files = read_files(path, curves)
    with refused(path / "config.json"):
        spec = GridSpec.from_json(files.config)
        spec.digest()
    if files.result is not None:
        check_result(files.result, path / "result.json", chosen=False)
    return GridRun(**vars(files), spec=spec)


def comparable(runs: Sequence[GridRun]) -> tuple[list[GridRun], list[str]]:
    """Of each memory on each family the runs of one training, and what is left out, in words.

    That with the most seeds that are done, then the one begun last. Runs may have been made by
    hand, with other frames or another step size; their mean would be that of no experiment.
    """
    groups: dict[tuple[str, str], dict[str, list[GridRun]]] = {}
    for run in runs:
        key = json.dumps(run.spec.training(), sort_keys=True)
        named = groups.setdefault((run.spec.family, run.spec.name), {})
        named.setdefault(key, []).append(run)
    kept: list[GridRun] = []
    left: list[str] = []
    for found in groups.values():
        best = max(found.values(), key=_rank)
        kept += best
        for other in found.values():
            if other is not best:
                left += [_words(run, best[0]) for run in other]
    order = {id(run): i for i, run in enumerate(runs)}
    return sorted(kept, key=lambda run: order[id(run)]), left


def _rank(runs: Sequence[GridRun]) -> tuple[int, str]:
    seeds = {run.spec.seed for run in runs if run.state == "done"}
    return len(seeds), max(str(run.run.get("started", "")) for run in runs)


def _words(run: GridRun, kept: GridRun) -> str:
    found = differences(kept.spec.training(), run.spec.training())
    return f"{run.path}: left out, trained otherwise than {kept.path}: {'; '.join(found)}"
