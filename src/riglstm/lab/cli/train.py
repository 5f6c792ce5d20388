"""`riglstm train`: one model on one task, in a folder that can be gone on with, tested, drawn."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from riglstm import VARIANTS, RigLSTM
from riglstm.lab import tasks
from riglstm.lab.cli import UsageError, flags, text
from riglstm.lab.tables.plan import PLACE, RunSpec
from riglstm.lab.tables.result import read_record
from riglstm.lab.tables.run import run
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.tasks.base import options as task_options
from riglstm.lab.train.config import Fit, rank
from riglstm.lab.train.folder import RunFolder, differences
from riglstm.lab.train.stopping import Deadline, OutOfTime
from riglstm.models import MODELS, options_of

ABOUT = """\
Train a model on {about}

Everything goes to one folder: configuration, logs, weights, the result. Ctrl-C saves, and says
how to go on; the same command with --resume does so after any kind of stop. At the end the
model is tested on conditions that training never saw.

Example: riglstm train {task} {example}"""

EXAMPLES: dict[str, str] = {
    # Two minutes on a core, and it learns; the paper's sizes want a GPU.
    "copying": "--hidden-size 64 --set num_cells=4 --L 4 --P 10 --digits 4 --loss-on answer "
    "--input-size 16 --updates 600 --evaluate-every 200 --lr 0.01",
    "mnist": "--model riglstm --set active_cells=5 --dropout 0.5 --updates 75000",
    "cifar": "--model riglstm --dropout 0.2 --updates 62500",
    "balls": "--hidden-size 250 --set num_cells=5 active_cells=2 --lr 3e-4 --updates 20000",
}


@dataclass(frozen=True)
class Model:
    """What is trained."""

    model: str = "riglstm"
    """Its name; `riglstm list` has all."""
    hidden_size: int = 600
    """Its whole width: of RigLSTM, all cells together. In the paper 600, for balls 250."""
    set: tuple[str, ...] = ()
    """Other options of the model, as name=value; `riglstm list` has all. A list has commas."""


@dataclass(frozen=True)
class Place:
    """Where a run is written, and until when."""

    seed: int = 0
    """Seed of the weights, of the data or the episodes, and of what a model draws."""
    out: Path | None = None
    """The run's folder; none: runs/TASK/MODEL-sSEED, or runs/minigrid/FAMILY-MODEL-sSEED."""
    resume: bool = False
    """Go on with the run that is in the folder; begin where there is none."""
    minutes: float | None = None
    """Stop in good time before so many minutes are over, saved; none: never. --resume goes on."""


@dataclass(frozen=True)
class Run(Place):
    """Where it is written, and its data are."""

    data_dir: Path | None = None
    """Folder that holds the data; none: RIGLSTM_DATA, or a download to the user's cache."""


def main(args: Sequence[str]) -> None:
    """Train a model on a task, in a folder that can be gone on with."""
    if not args or args[0].startswith("-"):
        _without_task(args)
    task, rest = args[0], args[1:]
    if task == MINIGRID:
        from riglstm.lab.cli import minigrid

        return minigrid.train(args)
    flags.check_name("the task", task, (*tasks.names(), MINIGRID))
    options = tasks.find(task)
    doc = (inspect.getdoc(options) or "").replace("\n\n", "\n")
    about = ABOUT.format(about=f"{task}. {doc}", task=task, example=EXAMPLES.get(task, ""))
    groups: dict[str, type] = {"task": options, "model": Model, "training": Fit, "run": Run}
    given = flags.read(f"riglstm train {task}", about, groups, rest)
    model, where = given["model"], given["run"]
    flags.check_name("--model", model.model, MODELS)
    spec = RunSpec(
        task=task,
        task_options=task_options(given["task"]),
        model=model.model,
        hidden_size=model.hidden_size,
        model_options=read_options(model.model, model.set),
        fit=given["training"],
        seed=where.seed,
    )
    make(spec, spec.name, where, args, where.data_dir)


def make(
    spec: RunSpec, name: str, where: Place, args: Sequence[str], data_dir: Path | None = None
) -> None:
    """Train, test and print a run; `name`: that of its folder, and of its model for readers."""
    deadline = Deadline.after(where.minutes)
    out = where.out or Path("runs") / spec.task / f"{name}-s{where.seed}"
    title = f"{spec.task}: {name}, seed {where.seed}"
    # Of several processes the first one looks; that a run is done all of them have to know.
    first = rank() == 0 or (where.resume and RunFolder(out).state == "done")
    if first and check_folder(out, where.resume, spec.resolved()):
        result = read_record(out, curves=False).result
        print(f"{title}, in {out}: done already\n\n{text.result_table(result, title)}")
        return
    print(f"{title}, into {out}", flush=True)
    again = flags.again("train", args, "--resume")
    try:
        result = run(spec, out, data_dir, resume=where.resume, again=again, deadline=deadline)
    except OutOfTime as stop:
        print(f"time is up: {stop}")
        return
    if result:
        title += f", {result['updates']} updates"
        print(f"\n{text.result_table(result, title)}\n\nwritten to {out}")


def summary(task: str) -> str:
    """The first line on a task; of one that cannot be used, why."""
    try:
        return (inspect.getdoc(tasks.find(task)) or "").partition("\n")[0]
    except ValueError as error:
        return str(error)


def option_types(model: str) -> dict[str, Any]:
    """The options of a model that a run can set, with their types."""
    known = get_type_hints(MODELS[model].__init__)
    if model == "riglstm":
        known |= get_type_hints(RigLSTM.__init__)
    return {name: known[name] for name in options_of(model) if name not in PLACE}


def read_options(model: str, pairs: Sequence[str]) -> dict[str, Any]:
    """The pairs of `--set`, `num_cells=4` and the like, typed by the model's signature."""
    known, given = option_types(model), {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise UsageError(f"--set must be like num_cells=4, got {pair!r}")
        if name not in known:
            takes = ", ".join(known)
            near = flags.did_you_mean(name, known)
            raise UsageError(f"--set: {model} has no option {name!r}; it takes {takes}{near}")
        try:
            given[name] = flags.convert(known[name], value)
        except ValueError as error:
            raise UsageError(f"--set {name}: {error}") from error
        if name == "variant" and given[name] is not None:
            flags.check_name("--set variant", given[name], VARIANTS)
    return given


def _without_task(args: Sequence[str]) -> None:
    """`riglstm train --help`, or an error."""
    if "-h" not in args and "--help" not in args:
        known = flags.one_of((*tasks.names(), MINIGRID))
        raise UsageError(f"train must be followed by a task, {known}, got none")
    summaries = {name: summary(name).partition(";")[0] for name in tasks.names()}
    summaries[MINIGRID] = "An agent with a memory, trained by recurrent PPO"
    listed = "\n".join(f"  {name:<10}{text}" for name, text in summaries.items())
    about = f"a task. `riglstm train TASK --help` has its own flags.\n\ntasks:\n{listed}"
    about = ABOUT.format(about=about, task="copying", example=EXAMPLES["copying"])
    flags.read("riglstm train TASK", about, {"model": Model, "training": Fit, "run": Run}, args)


def check_folder(out: Path, resume: bool, spec: Mapping[str, Any]) -> bool:
    """Refuse a folder that a run cannot be made in; True: the run is there, and done."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out must be a folder, or a new one, got {out}, which is a file")
    folder = RunFolder(out)
    folder.check()
    if folder.state == "done" and resume and not differences(folder.read_json(folder.config), spec):
        # A kill may have come before all that has served was removed.
        with folder.held():
            folder.tidy()
        return True
    if folder.state == "failed":
        raise UsageError(
            f"{out} holds a run that failed, and would again: "
            f"{folder.read_json(folder.failed).get('reason') or 'for a reason not recorded'}; "
            "--out names another folder"
        )
    folder.check_run(spec, resume=resume)
    return False
