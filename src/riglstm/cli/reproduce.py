"""`riglstm reproduce`: a table of the paper, from plan to print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from riglstm.cli import UsageError, flags, launch, values
from riglstm.experiments.plan import Planned, State, plan
from riglstm.experiments.recipes import MEASURED_ROWS
from riglstm.experiments.reproduce import reproduce
from riglstm.experiments.tables import MEASURED, NAMES, recipe
from riglstm.train.devices import launched
from riglstm.train.folder import RunFolder

MINIGRID = "minigrid"


@dataclass(frozen=True)
class Reproduce:
    """Train the models of one of the paper's tables, and print the table.

    Tables: mnist, cifar, ablation, balls, copying; complexity is measured, not trained; minigrid
    has flags of its own, see `riglstm reproduce minigrid --help`. Runs that
    are done are skipped, one that was stopped is gone on with: the same command does the rest.
    The table is written anew after every run, as Markdown, CSV and LaTeX.

    `--budget quick` takes minutes on two cores, with small models that are trained for a short
    while: it shows how it works, and reproduces nothing. `--budget paper` has the paper's sizes,
    and puts its figures beside ours; for that, have a GPU and days.

    Example: riglstm reproduce mnist --budget paper --models lstm riglstm --seeds 3
    """

    table: str
    """Which table."""
    models: tuple[str, ...] | None = None
    """Rows to train; none: all, in the quick budget some. The table has all that were ever run."""
    seeds: int | None = None
    """Runs of each row; none: 3 (5 for balls), in the quick budget 1."""
    budget: Literal["quick", "paper"] = "quick"
    """Sizes: minutes on two cores, or the paper's."""
    out: Path = Path("runs")
    """Folder of the runs; the table goes to `tables` in it."""
    device: str = "auto"
    """Where to train: auto (a GPU where there is one), cpu, cuda, cuda:1."""
    data_dir: Path | None = None
    """Folder that holds the data; none: RIGLSTM_DATA, or a download to the user's cache."""
    results: Path | None = None
    """CSV file that takes one line for each figure of each run; none: none."""
    retry_failed: bool = False
    """Train anew what diverged, from its first update; without a change of code or device it
    diverges again. It is shown as failed otherwise."""


def main(args: Sequence[str]) -> None:
    """Train what a table of the paper needs, and print the table."""
    if args and args[0] == MINIGRID:
        from riglstm.cli import minigrid

        return minigrid.reproduce_all(args[1:])
    config = flags.read_one("riglstm reproduce", Reproduce, args)
    values.check_name("TABLE", config.table, (*NAMES, MINIGRID))
    if config.table == MINIGRID:
        raise UsageError(f"{MINIGRID} must come before its flags: riglstm reproduce {MINIGRID} ...")
    rows = MEASURED_ROWS if config.table == MEASURED else recipe(config.table, config.budget).rows
    for name in config.models or ():
        values.check_name("--models", name, rows)
    if config.seeds is not None:
        flags.check_at_least("seeds", config.seeds, 1)
    if launched() is not None:
        raise UsageError(
            "reproduce trains each run on one device, got several processes from torchrun; start "
            "it once for each GPU, with --device cuda:0 --models lstm and so on"
        )
    asked = (config.table, config.models, config.seeds, config.budget, config.out)
    if config.table != MEASURED:
        print(outlook(plan(*asked, config.device), config), flush=True)
    done = reproduce(
        *asked,
        config.out / "tables",
        config.data_dir,
        device=config.device,
        results=config.results,
        retry_failed=config.retry_failed,
        again=launch.again("reproduce", args),
    )
    print(f"\n{done.rendered.markdown}\nwritten: {', '.join(map(str, done.paths))}")
    if done.failed:
        print(
            f"{done.failed} failed; --retry-failed trains them anew, which helps after a change of "
            "code or device"
        )
    if config.budget == "quick" and config.table != MEASURED:
        print("These are quick sizes; --budget paper has the paper's.")


def outlook(planned: Sequence[Planned], config: Reproduce) -> str:
    """How many runs there are, how many are to come, and what is known of their cost."""
    states = Counter(p.state for p in planned)
    waits = {"new", "partial", *(["failed"] if config.retry_failed else [])}
    todo = [p for p in planned if p.state in waits]
    counts = [f"{states[s]} {w}" for s, w in WORDS.items() if states[s]]
    lines = [f"{config.table}, {config.budget}: {len(planned)} runs in {config.out}"]
    lines[0] += f": {', '.join(counts)}"
    if todo:
        lines.append(f"{todo[0].spec.fit.updates:,} updates each, at most; {_cost(planned, todo)}")
    return "\n".join(lines)


WORDS: dict[State, str] = {
    "done": "done",
    "partial": "to go on with",
    "new": "to begin",
    "failed": "failed",
}


def _cost(planned: Sequence[Planned], todo: Sequence[Planned]) -> str:
    """From the runs that are done, row by row."""
    seconds: dict[tuple[str, str], float] = {}
    for run in planned:
        if run.state == "done":
            folder = RunFolder(run.folder)
            seconds[run.setting, run.row] = folder.read_json(folder.result)["seconds"]
    if any((run.setting, run.row) not in seconds for run in todo):
        return "how long they take is known when one run of each row is done"
    total = sum(seconds[run.setting, run.row] for run in todo)
    return f"about {total / 60:.0f} minutes, as the runs that are done took"
