"""`riglstm reproduce`: a table of the paper, from plan to print; and where many runs are made."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from riglstm.lab.cli import UsageError, flags
from riglstm.lab.cli.bench import processor
from riglstm.lab.tables import complexity, on_ray
from riglstm.lab.tables.executor import Executor, overview
from riglstm.lab.tables.plan import plan
from riglstm.lab.tables.recipes import MEASURED, MEASURED_ROWS, NAMES, Budget, recipe
from riglstm.lab.tables.reproduce import Reproduced, reproduce
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.tasks.common import Count, Device, Options, Share
from riglstm.lab.train.config import Precision, launched
from riglstm.lab.train.folder import atomic_write
from riglstm.lab.train.progress import say
from riglstm.lab.train.stopping import Deadline

PROCESSES = "processes"


@dataclass(frozen=True)
class Engine(Options):
    """What makes the runs."""

    device: Device = "auto"
    """Where to train: auto (a GPU where there is one), cpu, cuda, cuda:1."""
    jobs: Count = 1
    """Runs at a time on the device, each in a process of its own."""
    minutes: float | None = None
    """Stop in good time before so many minutes are over, with all runs saved; none: never. The
    same command goes on."""
    on: str = PROCESSES
    """processes of this machine; ray: its Ray cluster, or that of RAY_ADDRESS, begun where there is
    none; or the Ray cluster ray://HOST:PORT. All nodes of a cluster have to see --out."""
    gpus_per_run: Share = 0.0
    """Share of a GPU that each run takes on Ray, such as 0.25; 0: it trains on cores."""
    cores_per_run: Count = 1
    """Cores that each run takes on Ray, and its threads."""


class Place(NamedTuple):
    """Where runs are made."""

    executor: Executor | None
    """None: on this machine."""
    jobs: int
    """How many share a device."""
    device: str
    deadline: Deadline


def place(engine: Engine) -> Place:
    """Where and until when the runs of a command are made; refuses what does not go together."""
    deadline = Deadline.after(engine.minutes)
    share = engine.gpus_per_run
    if engine.on == PROCESSES:
        if share or engine.cores_per_run != 1:
            raise UsageError(
                "--gpus-per-run and --cores-per-run are shares of a Ray cluster, got "
                f"--on {PROCESSES}; use --jobs, or --on ray"
            )
        return Place(None, engine.jobs, engine.device, deadline)
    if engine.on != on_ray.HERE and not engine.on.startswith("ray://"):
        raise UsageError(f"--on must be {PROCESSES}, ray or ray://HOST:PORT, got {engine.on!r}")
    if engine.jobs != 1:
        raise UsageError(
            f"--jobs {engine.jobs} is for one machine; with --on ray, --gpus-per-run or "
            "--cores-per-run say how many runs a node has room for"
        )
    kind = "cuda" if share else "cpu"
    if engine.device not in ("auto", kind):
        raise UsageError(
            f"--device must be auto or {kind} with --gpus-per-run {share:g}, got {engine.device}: "
            "Ray gives a run its part of a GPU, or none"
        )
    on_ray.imported()  # It may not be installed, and is needed only later.
    executor = on_ray.OnRay(engine.on, share, engine.cores_per_run, deadline)
    return Place(executor, int(1 / share + 1e-9) if share else 1, kind, deadline)


@dataclass(frozen=True)
class Reproduce(Options):
    """Train the models of one of the paper's tables, and print the table.

    Tables: mnist, cifar, ablation, balls, copying; complexity is measured, not trained; minigrid
    has flags of its own, see `riglstm reproduce minigrid --help`. Runs that
    are done are skipped, one that was stopped is gone on with: the same command does the rest.
    The table is printed at the end and at a stop; --results takes the figures run by run.

    `--budget quick` takes minutes on two cores, with small models that are trained for a short
    while: it shows how it works, and reproduces nothing. `--budget paper` has the paper's sizes,
    and puts its figures beside ours; for that, have a GPU and days. `--budget tuned` has the same
    sizes and the recipe that was found to learn, for copying, mnist and ablation; hours on a GPU.

    Example: riglstm reproduce copying --budget tuned --settings M=1 --jobs 4 --minutes 9
    """

    table: str
    """Which table."""
    models: tuple[str, ...] | None = None
    """Rows to train; none: all, in the quick budget some. The table has all that were ever run."""
    settings: tuple[str, ...] | None = None
    """What rows are trained in, where a table has several (M=1 M=8); none: all."""
    seeds: Count | None = None
    """Runs of each row; none: 3 (5 for balls), in the quick budget 1."""
    seed_list: tuple[int, ...] | None = None
    """Which seeds, in place of how many; none: those from 0 on."""
    precision: Precision | None = None
    """Of matrix products, in all runs; none: the recipe's. Another makes other runs."""
    budget: Budget = "quick"
    """Sizes: minutes on two cores, or the paper's, with its recipe or the one that was found."""
    out: Path = Path("runs")
    """Folder of the runs, and of the table at the end."""
    data_dir: Path | None = None
    """Folder that holds the data; none: RIGLSTM_DATA, or a download to the user's cache."""
    results: Path | None = None
    """CSV file that takes one line for each figure of each run; JSON file where the table is
    complexity; none: none."""


def main(args: Sequence[str]) -> None:
    """Train what a table of the paper needs, and print the table."""
    if args and args[0] == MINIGRID:
        from riglstm.lab.cli import minigrid

        return minigrid.reproduce_table(args[1:])
    groups: dict[str, type] = {"flags": Reproduce, "engine": Engine}
    given = flags.read("riglstm reproduce", inspect.getdoc(Reproduce) or "", groups, args)
    config, engine = given["flags"], given["engine"]
    flags.check_name("TABLE", config.table, (*NAMES, MINIGRID))
    if config.table == MINIGRID:
        raise UsageError(f"{MINIGRID} must come before its flags: riglstm reproduce {MINIGRID} ...")
    rows = MEASURED_ROWS if config.table == MEASURED else recipe(config.table, config.budget).rows
    flags.check_names("--models", config.models, rows)
    _check(config, engine)
    if launched() is not None:
        raise UsageError(
            "reproduce trains each run on one device, got several processes from torchrun; start "
            "it once, with --on ray --gpus-per-run 1, which takes all GPUs of all nodes"
        )
    if config.table == MEASURED:
        measured = complexity.table(
            *(config.models, config.budget, engine.device, say),
            results=config.results,
            processor=processor(),
        )
        return print(f"\n{measured}")
    where = place(engine)
    runs = plan(
        *(config.table, config.models, config.seed_list or config.seeds, config.budget),
        *(config.out, where.device),
        settings=config.settings,
        precision=config.precision,
    )
    print(f"{config.table}, {config.budget}, in {config.out}: {overview(runs)[0]}", flush=True)
    again = flags.again("reproduce", args)
    done = reproduce(
        *(config.table, runs, config.budget, config.out, config.data_dir),
        jobs=where.jobs,
        executor=where.executor,
        deadline=where.deadline,
        results=config.results,
        again=again,
    )
    named = "-".join(filter(None, (config.table, config.budget, config.precision)))
    tell(done, config.out / f"{named}.md", again)


def tell(done: Reproduced, path: Path, again: str = "") -> None:
    """Print a table of runs as it is now, and write it; then say what became of the other runs."""
    print(f"\n{done.rendered.markdown}")
    with atomic_write(path) as file:
        file.write(done.rendered.markdown.encode())
    print(f"written: {path}")
    if done.failed:
        print(f"{done.failed} failed, as the notes say; a run whose folder is deleted begins anew")
    tell_left("runs", done.errors, done.left, again)


def tell_left(what: str, errors: Sequence[str], left: int, again: str) -> None:
    """Say how to go on with runs that are not done; raise UsageError where some had an error."""
    if errors:
        listed = "\n  ".join(errors)
        raise UsageError(
            f"{len(errors)} {what} ended with an error, {left} are not done; the same command goes "
            f"on with them:\n  {listed}"
        )
    if left:
        print(f"{left} {what} are not done; go on with: {again}")


def _check(config: Reproduce, engine: Engine) -> None:
    """What can be asked for, and together."""
    if config.seeds is not None and config.seed_list is not None:
        raise UsageError("--seeds says how many, --seed-list which: expected one of them, got both")
    if config.table == MEASURED:
        given, usual = {**vars(config), **vars(engine)}, {**vars(Engine()), "device": engine.device}
        for name in ("settings", "seeds", "seed_list", "precision", *usual):
            if given[name] != usual.get(name):
                raise UsageError(f"{MEASURED} is measured, and takes no {flags.flag_of(name)}")
        return
    known = recipe(config.table, config.budget).settings
    flags.check_names("--settings", config.settings, known)
