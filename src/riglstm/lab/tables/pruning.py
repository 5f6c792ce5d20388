"""Early stopping of hopeless trials by Optuna, where a space asks for it: `stop = "median"`.

Trials share nothing but their folders: after an evaluation a trial reads those of its model that
are done, and Optuna's pruner judges it by their evaluations. Trials that are trained for more
updates are compared by the number of the evaluation. Which trials are done by then is chance.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.result import Record, read_record
from riglstm.lab.train.stopping import Hopeless

MEDIAN = "median"
"""A trial stops whose best figure is worse than the median of the others at that evaluation."""


def pruner(planned: Sequence[Planned]) -> Hopeless:
    """What judges the trials of each model; raises ModuleNotFoundError without Optuna."""
    _optuna()
    return partial(judge, planned)


def judge(planned: Sequence[Planned], path: Path, condition: str) -> str:
    """Why the trial in a folder has no hope beside those of its model; empty where it has.

    By Optuna's median rule, with its own default: none is judged by fewer than five others.
    """
    (row,) = (trial.row for trial in planned if trial.folder == path)
    rivals = [trial for trial in planned if trial.row == row and trial.state == "done"]
    done = [read_record(trial.folder) for trial in rivals]
    if not done:
        return ""
    optuna = _optuna()
    direction = "maximize" if done[0].result["higher_is_better"] else "minimize"
    study = optuna.create_study(direction=direction, pruner=optuna.pruners.MedianPruner())
    for record in done:
        values = _evaluations(record, condition)
        study.add_trial(
            # The median rule reads evaluations alone, and a value may not be NaN.
            optuna.trial.create_trial(value=0.0, intermediate_values=dict(enumerate(values)))
        )
    trial = study.ask()
    for number, value in enumerate(_evaluations(read_record(path), condition)):
        trial.report(value, number)
    words = f"its best is worse than the median of {len(done)} trials at that evaluation"
    return words if trial.should_prune() else ""


def _optuna() -> Any:
    optuna = importlib.import_module("optuna")
    # A study is made for one question; Optuna would announce each.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _evaluations(record: Record, condition: str) -> list[float]:
    return [float(value) for value in record.validated[condition].values]
