"""Which runs on MiniGrid may stand in one mean: those of one training, with several seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence

from riglstm.lab.minigrid.runs import GridRun
from riglstm.lab.train.folder import differences


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
