"""`riglstm sweep`: the trials of a search space, and the best of each model by both rules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from riglstm.lab.cli import UsageError, flags, text
from riglstm.lab.cli.engine import Engine, place
from riglstm.lab.tables import search
from riglstm.lab.tables.executor import Processes, make_runs
from riglstm.lab.tables.recipes import TABLES
from riglstm.lab.tables.run import open_data, run, say


@dataclass(frozen=True)
class Sweep:
    """Train the trials of a search space, and print each model's best.

    A space is a TOML file: options that all models share, options of single models, and how many
    trials are drawn; `docs/protocol.md` explains it. Trial 0 is the table's own recipe. A trial
    that has its line in the results is skipped, one that was stopped is gone on with: the same
    command does the rest. No trial sees test data.

    Example: riglstm sweep protocol/mnist.toml --models riglstm lstm --jobs 6 --minutes 9
    """

    space: Path
    """The file of the space."""
    models: tuple[str, ...] | None = None
    """Rows of the table that are searched; none: all of the space."""
    trials: tuple[str, ...] | None = None
    """Trials by number or name; none: all of the space."""
    out: Path = Path("runs/sweep")
    """Folder of the runs."""
    results: Path | None = None
    """File that takes one line of JSON for each trial; none: results/trials/SPACE.jsonl."""
    device: str = "auto"
    """Where to train: auto (a GPU where there is one), cpu, cuda, cuda:1."""
    jobs: int = 1
    """Runs at a time on the device, each in a process of its own."""
    minutes: float | None = None
    """Stop in good time before so many minutes are over, with all runs saved; none: never."""
    data_dir: Path | None = None
    """Folder that holds the data; none: RIGLSTM_DATA, or a download to the user's cache."""


def main(args: Sequence[str]) -> None:
    """Search for recipes: the trials of a space, for several models alike."""
    groups: dict[str, type] = {"flags": Sweep, "engine": Engine}
    given = flags.read("riglstm sweep", inspect.getdoc(Sweep) or "", groups, args)
    config = given["flags"]
    deadline = flags.deadline(config.minutes)
    where = place(given["engine"], config.jobs, config.device, deadline)
    if not config.space.is_file():
        raise UsageError(f"SPACE must be a TOML file, got {config.space}, which is not there")
    space = search.read_space(config.space)
    for name in config.models or ():
        flags.check_name("--models", name, space.models)
    for name in config.trials or ():
        flags.check_name("--trials", name, space.labels())
    models, labels = config.models or space.models, config.trials or space.labels()
    path = config.results or Path("results/trials") / f"{space.name}.jsonl"
    done = search.read_lines(path)
    waiting = search.plan(space, models, labels, config.out, where.device, done)
    print(f"{space.name}: {len(waiting)} trials to make, {len(done)} lines in {path}", flush=True)
    again = flags.again("sweep", args)
    jobs = max(1, min(where.jobs, len(waiting)))
    open_data(waiting, config.data_dir)
    by_folder = {planned.folder: planned for planned in waiting}

    def ended(folder: Path) -> None:
        said = search.line(space, by_folder[folder])
        if said is not None:
            search.append(path, said)
            say(f"{said['model']}, trial {said['trial']}: {_words(said)}")

    make = partial(run, data_dir=config.data_dir, deadline=deadline, jobs=jobs)
    errors = make_runs(waiting, make, where.executor or Processes(jobs, deadline), ended, again)
    lines = search.read_lines(path)
    if lines:
        print(f"\n{_best(space, lines)}\n\nwritten: {path}")
    if errors:
        listed = "\n  ".join(errors)
        raise UsageError(f"{len(errors)} trials ended with an error:\n  {listed}")
    left = len(search.plan(space, models, labels, config.out, where.device, lines))
    if left:
        print(f"{left} trials are not done; go on with: {again}")


def _words(said: Mapping[str, Any]) -> str:
    """A trial's figures on validation data, at the update that the training condition chose."""
    if "failed" in said:
        return f"failed: {said['failed']}"
    figures = (f"{c} {v:.4f}" for c, v in said["validation"].items() if c != "step")
    return f"{', '.join(figures)} after {said['validation']['step']} updates"


def _best(space: search.Space, lines: Sequence[Mapping[str, Any]]) -> str:
    """The best trial of each model by each rule."""
    runs = search.runs(space)
    found = search.winners(lines, runs, TABLES[space.table].higher_is_better)
    shown = []
    for model, best in found.items():
        for (rule, score), said in zip(search.RULES.items(), best, strict=True):
            shown.append([f"{model}, {rule}", str(said["trial"]), f"{score(said):.4f}"])
    return text.table(f"{space.name}, validation data", ["best by", "trial", "score"], shown)
