"""`riglstm sweep`: the trials of a search space, and the final runs of what they found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from riglstm.lab.cli import UsageError, flags
from riglstm.lab.cli.reproduce import Engine, Place, place, tell_left
from riglstm.lab.tables import finals, rows, search
from riglstm.lab.tables.executor import Processes, make_runs
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.recipes import SEARCHED, TABLES
from riglstm.lab.tables.result import ResultRow
from riglstm.lab.tables.run import open_data, run
from riglstm.lab.tables.table import TextTable, markdown, tables, text_table
from riglstm.lab.train.progress import say


@dataclass(frozen=True)
class Sweep:
    """Train the trials of a search space, and print each model's best.

    A space is a TOML file: options that all models share, options of single models, and how many
    trials are drawn; `pydoc riglstm.lab.tables.search` explains it, and `protocol/` has examples.
    Trial 0 is the table's own recipe. A trial that has its line in the results is skipped, one
    that was stopped is gone on with: the same command does the rest. No trial sees test data.

    With --finals the best recipe of each model, by each of two rules, is trained for longer with
    new seeds, and tested. Its figures become rows of the table. A model needs all its trials first.

    Example: riglstm sweep protocol/mnist.toml --models riglstm lstm --jobs 6 --minutes 9
    """

    space: Path
    """The file of the space."""
    finals: bool = False
    """Make the final runs of the recipes that were found, in place of trials."""
    models: tuple[str, ...] | None = None
    """Rows of the table; none: all of the space, of final runs those that have all their trials."""
    trials: tuple[str, ...] | None = None
    """Trials by number or name; none: all of the space."""
    rules: tuple[str, ...] | None = None
    """Of the final runs those that these rules choose, such as "training condition"; none: all."""
    out: Path = Path("runs/sweep")
    """Folder of the runs."""
    results: Path = Path("results")
    """Folder of the results: trials/SPACE.jsonl takes one line of JSON for each trial, TABLE.csv
    one line for each figure of each final run."""
    data_dir: Path | None = None
    """Folder that holds the data; none: RIGLSTM_DATA, or a download to the user's cache."""


def main(args: Sequence[str]) -> None:
    """Search for recipes: the trials of a space, for several models alike; then the final runs."""
    groups: dict[str, type] = {"flags": Sweep, "engine": Engine}
    given = flags.read("riglstm sweep", inspect.getdoc(Sweep) or "", groups, args)
    config = given["flags"]
    where = place(given["engine"])
    if not config.space.is_file():
        raise UsageError(f"SPACE must be a TOML file, got {config.space}, which is not there")
    if config.results.exists() and not config.results.is_dir():
        raise UsageError(f"--results must be a folder, got {config.results}, which is a file")
    space = search.read_space(config.space)
    flags.check_names("--models", config.models, space.models)
    flags.check_names("--trials", config.trials, space.labels())
    flags.check_names("--rules", config.rules, space.rules)
    path = config.results / "trials" / f"{space.searched.name}.jsonl"
    again = flags.again("sweep", args)
    (_finals if config.finals else _trials)(config, space, path, where, again)


def _trials(config: Sweep, space: search.Space, path: Path, where: Place, again: str) -> None:
    if config.rules is not None:
        raise UsageError("--rules choose among final runs, got them without --finals")
    models, labels = config.models or space.models, config.trials or space.labels()
    done = search.read_lines(path)
    waiting = search.plan(space, models, labels, config.out, where.device, done)
    print(f"{space.name}: {len(waiting)} trials to make, {len(done)} lines in {path}", flush=True)

    def ended(trial: Planned) -> None:
        said = search.line(space, trial)
        if said is not None:
            search.append(path, said)
            say(f"{said['model']}, trial {said['trial']}: {_words(said)}")

    errors = _make(config, waiting, ended, where, again)
    lines = search.read_lines(path)
    if lines:
        print(f"\n{_best(space, lines)}\nwritten: {path}")
    left = len(search.plan(space, models, labels, config.out, where.device, lines))
    tell_left("trials", errors, left, again)


def _finals(config: Sweep, space: search.Space, path: Path, where: Place, again: str) -> None:
    if config.trials is not None:
        raise UsageError("--finals are of the trials that were chosen, got --trials as well")
    if not space.final_updates:
        raise UsageError(f"{config.space} must have final_updates, got none; see docs/protocol.md")
    space = replace(space, rules=config.rules or space.rules)
    lines = search.read_lines(path)
    models = config.models or space.models
    folder = config.space.parent
    refused = {m: why for m in models if (why := finals.lacking(space, m, lines, folder))}
    reasons = "\n".join(dict.fromkeys(refused.values()))
    # What was asked for by name is made, or the reason is said; else those that can be made are.
    if refused and (config.models or len(refused) == len(models)):
        raise UsageError(reasons)
    if refused:
        print(reasons, flush=True)
    ready = [model for model in models if model not in refused]
    table = config.results / f"{space.table}.csv"

    def there() -> list[ResultRow]:
        return rows.read(table) if table.exists() else []

    def left() -> list[Planned]:
        done = {(row.run, rule) for row in there() for rule in row.rules}
        return finals.plan(space, ready, lines, config.out, where.device, done)

    # What another rule has chosen before has been trained, and has its figures.
    known = there()
    for one in left():
        own = [row for row in known if row.run == one.folder.name]
        if own:
            rows.append(table, [replace(row, trial=one.trial, rule=one.rule) for row in own])
    waiting = left()
    print(f"{space.name}: {len(waiting)} final runs to make, figures in {table}", flush=True)

    def ended(final: Planned) -> None:
        rows.append(table, finals.rows(space, final))

    errors = _make(config, waiting, ended, where, again)
    for shown in tables([row for row in there() if row.budget == SEARCHED]):
        print(f"\n{markdown(text_table(shown))}\nwritten: {table}")
    tell_left("final runs", errors, len(left()), again)


def _make(
    config: Sweep,
    waiting: Sequence[Planned],
    ended: Callable[[Planned], None],
    where: Place,
    again: str,
) -> list[str]:
    """Make the runs that wait; `ended` hears of each. Returns their errors."""
    jobs = max(1, min(where.jobs, len(waiting)))
    open_data(waiting, config.data_dir)
    until = where.deadline
    make = partial(run, data_dir=config.data_dir, deadline=until, jobs=jobs)
    return make_runs(waiting, make, where.executor or Processes(jobs, until), ended, again)


def _words(said: Mapping[str, Any]) -> str:
    """A trial's figures on validation data, at the update that the training condition chose."""
    if "failed" in said:
        return f"failed: {said['failed']}"
    figures = (f"{c} {v:.4f}" for c, v in said["validation"].items() if c != "step")
    return f"{', '.join(figures)} after {said['validation']['step']} updates"


def _best(space: search.Space, lines: Sequence[Mapping[str, Any]]) -> str:
    """The best trial of each model by each rule."""
    found = search.winners(lines, search.runs(space), TABLES[space.table].metric.higher_is_better)
    shown = [
        [f"{model}, {rule}", str(said["trial"]), f"{search.RULES[rule](said):.4f}"]
        for model, best in found.items()
        for rule, said in best.items()
    ]
    heads = ["best by", "trial", "score"]
    return markdown(TextTable(f"{space.name}, validation data", heads, shown, lead=1))
