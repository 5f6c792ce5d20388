"""From result rows to tables: the one way for run folders and for files of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from riglstm.lab.tables.entries import Budget, Recipe
from riglstm.lab.tables.paper import figure
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.read_run import RunFiles, read_record
from riglstm.lab.tables.render import (
    ENOUGH,
    Cell,
    Line,
    Rendered,
    Table,
    markdown,
    number,
    text_table,
)
from riglstm.lab.tables.result import CHOSEN, RunError, read_cost
from riglstm.lab.tables.rows import FAILED, ResultRow
from riglstm.lab.tables.run import most_jobs, sessions
from riglstm.lab.tables.tables import TABLES, recipe
from riglstm.lab.train.folder import RunFolder

SPREAD = (
    f"Mean ± standard deviation (with n − 1); fewer than {ENOUGH} runs are shown one by one, and "
    "the best mean is bold."
)
RULES = (
    f"{SPREAD} Checkpoints are chosen on validation data of the training condition. “Best "
    "checkpoint at” a test condition means chosen on validation data of that condition, the rule "
    "of earlier papers."
)
"""What is said with every table of runs."""
SIZES = " at quick sizes, not the paper's"
QUICK = (
    "Small models, little data, few updates: this shows that the path from data to table works. "
    "The paper's figures are not comparable and left out; the budget “paper” sets them beside ours."
)


def rows_of(run: RunFiles, /, **identity: Any) -> list[ResultRow]:
    """The figures of a run that is done, or one row of a run that failed.

    `identity`: table, model, seed, budget, setting, precision, recipe and run of the rows.
    """
    folder, figures = RunFolder(run.path), [(FAILED, 1.0, "")]
    if run.result is not None:
        said: Mapping[str, Any] = run.result
        figures = [
            (f"{r['metric']}@{r['condition']}", r["value"], r["chosen_on"]) for r in run.rows
        ]
    elif run.state == "failed":
        said = read_cost(folder)
        if run.run:
            places = {key: sessions(folder, key) for key in ("device", "commit")}
            said = {**said, **places, "jobs": most_jobs(folder)}
    else:
        return []
    return [
        ResultRow(
            **identity,
            metric=metric,
            value=value,
            chosen_on=chosen_on,
            updates=said["updates"],
            seconds=said["seconds"],
            device=said.get("device") or "",
            commit=said.get("commit") or "",
            jobs=said.get("jobs", 1),
        )
        for metric, value, chosen_on in figures
    ]


def line(
    rows: Sequence[ResultRow],
    conditions: Sequence[str],
    chosen_on: str,
    scale: float,
    missing: int = 0,
    *,
    both: bool = True,
    **named: Any,
) -> Line:
    """One model in one setting from its rows; `named`: the other fields of `Line`.

    `chosen_on`: what rows say that were chosen in the training condition; `both`: rows may have
    been chosen in each condition itself, too. `missing`: runs that are not done.
    """
    tested = sorted((row for row in rows if row.metric != FAILED), key=lambda row: row.seed)
    # One that has figures has been trained anew since.
    failed = len({row.run for row in rows} - {row.run for row in tested})

    def cell(condition: str, chooser: str) -> Cell:
        found = {
            row.run: scale * row.value
            for row in tested
            if (row.condition, row.chosen_on) == (condition, chooser)
        }
        return Cell(tuple(found.values()), failed, missing)

    return Line(
        **named,
        ours={c: cell(c, chosen_on) for c in conditions},
        there={c: cell(c, f"{CHOSEN}{c}") for c in conditions} if both else {},
    )


def yardsticks(
    runs: Iterable[RunFiles], conditions: Sequence[str], setting: str, scale: float
) -> list[Line]:
    """Figures that need no model; they are the same in every run of a setting."""
    said = (run.result["yardsticks"] for run in runs if run.result and "yardsticks" in run.result)
    found: Mapping[str, Mapping[str, float]] = next(said, {})
    names = dict.fromkeys(name for values in found.values() for name in values)
    return [
        Line(
            *(setting, name, f"no model: {name}"),
            ours={c: Cell((scale * found[c][name],), exact=True) for c in conditions if c in found},
        )
        for name in names
    ]


def newest(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows that tables show: no quick sizes, and of each table its last budget and precision.

    In these, of each model in each setting the recipe of its last row counts. A model without such
    rows in a setting keeps its own last recipe, and the table says so.
    """
    full = [row for row in rows if row.budget != "quick"]
    how = {row.table: (row.budget, row.precision) for row in full}
    last: dict[tuple[str, str, str], str] = {}
    # Those of the table's budget and precision after all others, each in their order.
    for row in sorted(full, key=lambda row: (row.budget, row.precision) == how[row.table]):
        last[row.table, row.setting, row.model] = row.recipe
    return [row for row in full if last[row.table, row.setting, row.model] == row.recipe]


def tables(rows: Sequence[ResultRow]) -> list[Table]:
    """A table of the newest rows for each of the paper's tables that has some."""
    kept = newest(rows)
    return [
        paper_table(name, own, own[-1].budget)  # type: ignore[arg-type]
        for name in TABLES
        if (own := [row for row in kept if row.table == name])
    ]


def paper_table(
    name: str,
    rows: Sequence[ResultRow],
    budget: Budget,
    waiting: Mapping[tuple[str, str], int] | None = None,
    runs: Mapping[str, Sequence[RunFiles]] | None = None,
    said: Sequence[str] = (),
) -> Table:
    """One of the paper's tables from the rows of its runs.

    `waiting`: by setting and model, how many runs are not done; `runs`: by setting, those that may
    have figures without a model; `said`: notes.
    """
    what, how, waiting, quick = TABLES[name], recipe(name, budget), waiting or {}, budget == "quick"
    recipes = list(what.recipes.values())
    known = {s: v.trained_on for r in (*recipes, how) for s, v in r.settings.items()}
    there = {(row.setting, row.model) for row in rows} | set(waiting)
    homes = {s: home for s, home in known.items() if s in {setting for setting, _ in there}}
    conditions = tuple(dict.fromkeys((*homes.values(), *how.conditions)))
    lines: list[Line] = []
    for setting, home in homes.items():
        for model in dict.fromkeys(model for r in recipes for model in r.rows):
            if (setting, model) not in there:
                continue
            own = [row for row in rows if (row.setting, row.model) == (setting, model)]
            made = _made(own)
            row = what.recipes[made.get("budget", budget)].rows.get(model)  # type: ignore[index]
            printed = {c: figure(name, setting, model, c) for c in conditions}
            one = line(
                *(own, conditions, f"{CHOSEN}{home}", what.scale),
                waiting.get((setting, model), 0),
                setting=setting,
                row=model,
                label=model if row is None else row.label,
                cells="–" if row is None else row.cells,
                paper={c: text for c, text in printed.items() if text and not quick},
                made=made,
            )
            lines.append(one)
        lines += yardsticks((runs or {}).get(setting, ()), conditions, setting, what.scale)
    begun = {(row.setting, row.model) for row in rows if row.budget == budget} | set(waiting)
    only = f", trained on {conditions[0]}" if len(set(homes.values())) == 1 else ""
    table = Table(
        name=name,
        title=f"{what.title}{SIZES if quick else ''}{only}",
        measure=what.measure,
        conditions=conditions,
        trained_on=homes,
        lines=tuple(lines),
        missing=_not_run(how, begun),
        settings=what.settings if len({*homes, *how.settings}) > 1 else None,
        best=what.best,
        higher_is_better=what.higher_is_better,
    )
    notes = (*said, *_run_notes(table, rows, how), *((QUICK,) if quick else what.notes))
    return replace(table, notes=notes)


def _made(rows: Sequence[ResultRow]) -> dict[str, str]:
    """How the runs of a line were made; empty: there are none."""
    if not rows:
        return {}
    updates = sorted({row.updates for row in rows if row.metric != FAILED})
    made = {"budget": rows[-1].budget, "precision": rows[-1].precision}
    return {**made, "updates": extent(updates)} if updates else made


def _run_notes(table: Table, rows: Sequence[ResultRow], how: Recipe) -> list[str]:
    """What the runs cost and where they ran, and their seeds."""
    runs = {row.run: row for row in rows}.values()
    if not runs:
        return []
    # A run that was gone on with may have several.
    commits = [c for row in runs for c in (row.commit or "unknown").split(", then ")]
    mixed = {"budget", "precision"}.intersection(table.differing())
    other = " A model without such runs is shown by its own newest ones, as its columns say."
    updates = sorted({row.updates for row in runs})
    return [
        f"Recipe {rows[-1].budget} in {rows[-1].precision}: {len(runs)} runs of {extent(updates)} "
        f"updates took {duration(sum(row.seconds for row in runs))} in all, up to "
        f"{max(row.jobs for row in runs)} of them at a time, on "
        f"{words(row.device or 'unknown' for row in runs)}. "
        f"Commits: {words(commit[:7] for commit in commits)}.{other if mixed else ''}",
        _seeds(table, rows, ", ".join(map(str, range(how.seeds)))),
    ]


def _seeds(table: Table, rows: Sequence[ResultRow], usual: str) -> str:
    """Those of the recipe, and of each line that has others."""
    done = {row.run for row in rows if row.metric != FAILED}
    said = [f"Seeds: {usual}"]
    for one in table.lines:
        own = {
            r.seed: r.run in done for r in rows if (r.setting, r.model) == (one.setting, one.row)
        }
        seeds = ", ".join(f"{seed}{'' if own[seed] else ' (failed)'}" for seed in sorted(own))
        name = one.label if table.settings is None else f"{one.setting} {one.label}"
        said += [f"{name}: {seeds}"] if own and seeds != usual else []
    return f"{'; '.join(said)}."


def _not_run(how: Recipe, runs: set[tuple[str, str]]) -> str:
    """Models and settings of a recipe that have no run in it; empty: all have."""
    settings, models = {setting for setting, _ in runs}, {row for _, row in runs}
    labels = {key: how.rows[key].label for key in how.models}
    parts = (
        [label for key, label in labels.items() if key not in models],
        [setting for setting in how.settings if setting not in settings],
        [
            f"{label} in {setting}"
            for setting in how.settings
            for key, label in labels.items()
            if setting in settings and key in models and (setting, key) not in runs
        ],
    )
    return "; ".join(", ".join(part) for part in parts if part)


def table_of_runs(
    name: str,
    planned: Sequence[Planned],
    budget: Budget,
    records: Mapping[Path, RunFiles] | None = None,
) -> tuple[Table, list[ResultRow]]:
    """A table from the folders of its runs, and its rows; `records`: the folders, if read."""
    how, found = recipe(name, budget), list[ResultRow]()
    waiting: Counter[tuple[str, str]] = Counter()
    runs: dict[str, list[RunFiles]] = {}
    failed = []
    for p in planned:
        if p.state not in ("done", "failed"):
            waiting[p.setting, p.row] += 1
            continue
        run = read_record(p.folder, curves=False) if records is None else records[p.folder]
        if run.result is not None:
            check_figures(run.result, how, p.setting, p.folder)
        if run.reason:
            # What follows is advice, and where things lie on the machine of the run.
            reason, *_ = run.reason.partition(";")
            where = f"{p.row}, {p.setting}, seed {p.spec.seed}"
            failed.append(f"Failed: {where}: {reason} ({p.folder.name}).")
        runs.setdefault(p.setting, []).append(run)
        found += rows_of(
            run,
            table=name,
            model=p.row,
            seed=p.spec.seed,
            budget=budget,
            setting=p.setting,
            precision=p.spec.fit.precision,
            recipe=p.spec.recipe(),
            # On a page, folders of several parents may have one name.
            run=p.folder.name if records is None else str(p.folder),
        )
    return paper_table(name, found, budget, waiting, runs, (RULES, *failed)), found


def rendered(name: str, planned: Sequence[Planned], budget: Budget) -> Rendered:
    """A table from the folders of its runs, ready to be written."""
    table, rows = table_of_runs(name, planned, budget)
    return Rendered(markdown(text_table(table)), rows)


def check_figures(result: Mapping[str, Any], how: Recipe, setting: str, folder: Path) -> None:
    """Raise RunError for a result that lacks a figure of its row of a table, or has it twice."""
    home = how.settings[setting].trained_on
    counts = Counter((row["condition"], row["chosen_on"]) for row in result["rows"])
    homes = (known.trained_on for known in how.settings.values())
    for condition in dict.fromkeys((*homes, *how.conditions)):
        for chooser in (home, condition):
            if counts[condition, f"{CHOSEN}{chooser}"] != 1:
                raise RunError(
                    f"the result of {folder} must have one figure for {condition}, chosen on "
                    f"{chooser}, got {counts[condition, f'{CHOSEN}{chooser}']}; delete the folder, "
                    "and run it anew"
                )


def extent(numbers: Sequence[int]) -> str:
    """The range of sorted numbers, for a note."""
    low, high = numbers[0], numbers[-1]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def duration(seconds: float) -> str:
    """Seconds or hours, for a note."""
    return f"{seconds:.0f} s" if seconds < 3600 else f"{number(seconds / 3600)} h"


def words(names: Iterable[str]) -> str:
    """Each name once, for a note."""
    return ", ".join(sorted(set(names)))
