"""One run: built, trained and tested; once it is done, tested again, loaded, or put into one file.

Such a file, safetensors, holds the weights that were chosen on validation data of the training
condition, and in its metadata the run's configuration and result: it needs no folder.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from riglstm import models
from riglstm.lab.minigrid.levels import chosen_levels
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.tables.plan import Planned, RunSpec
from riglstm.lab.tables.result import (
    CHOSEN,
    LAST,
    Record,
    check_result,
    made_by,
    read_record,
    refused,
)
from riglstm.lab.tasks.base import Task, generator, means
from riglstm.lab.train.config import (
    Fit,
    check_precision,
    check_products,
    device_name,
    fork_rng,
    pick,
    score,
)
from riglstm.lab.train.folder import BusyError, RunFolder, commit
from riglstm.lab.train.progress import say
from riglstm.lab.train.stopping import NEVER, Deadline, Diverged, Interrupted, untested

if TYPE_CHECKING:
    from riglstm.lab.train.checkpoints import Fitted

CPU = torch.device("cpu")


def build(
    spec: RunSpec,
    device: torch.device | str = CPU,
    data_dir: Path | None = None,
    show: Callable[[str], None] | None = None,
) -> tuple[Task, nn.Module]:
    """The task and the network, whose start values depend on the seed alone."""
    device = torch.device(device)
    task = spec.task_config().open(device, data_dir, show)
    options = dict(spec.model_options)
    if isinstance(spec.fit, Fit):
        options = core_options(spec.model, options, device)
    # Drawn on the CPU, so that every device starts from the same weights.
    with fork_rng(CPU, spec.seed):
        core = models.build(spec.model, task.input_size, spec.hidden_size, **options)
        net = task.network(core)  # type: ignore[arg-type]
    return task, net.to(device)


def core_options(model: str, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A model's options, with those that only say how it is computed on a device."""
    # On a GPU a step is many small kernels, and most of the time is spent in starting them.
    compiled = device.type == "cuda" and "compile_step" in models.options_of(model)
    return {**options, "compile_step": True} if compiled else dict(options)


def run(
    spec: RunSpec,
    folder: RunFolder | Path | str,
    data_dir: Path | None = None,
    *,
    resume: bool = False,
    again: str = "",
    deadline: Deadline = NEVER,
    jobs: int = 1,
) -> dict[str, Any]:
    """Train, test the chosen weights on every condition, write the result; returns it.

    A run that diverges leaves the reason in its folder.
    `again`: the command that goes on with the run, for whoever stops it. `deadline`: when it has
    to have stopped. `jobs`: how many runs share the device, for the record. Raises
    what `riglstm.lab.train.loop.fit` does, or `riglstm.lab.minigrid.training.train`.
    """
    learn = _learner(spec)
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    with folder.held():
        device = pick(spec.fit)
        check_precision(spec.fit, device)
        task, net = build(spec, device, data_dir, say)
        # Data that cannot be read or made is told of before there is a run.
        task.ready()
        with training(folder, spec.resolved(), device, jobs=jobs, resume=resume):
            own = net, task, spec.fit, spec.seed, folder
            fitted = learn(*own, again=again, deadline=deadline)
        if not folder.writes:
            return {}
        chosen = {name: {"step": c.step, "value": c.value} for name, c in fitted.chosen.items()}
        conditions = task.conditions if spec.fit.test else ()
        try:
            figures = tested(spec, task, net, folder.weights_of, chosen, conditions)
        except KeyboardInterrupt:
            raise Interrupted(untested(again)) from None
        result = {
            "rows": figures,
            "chosen": chosen,
            "metric": task.metric.name,
            "higher_is_better": task.metric.higher_is_better,
            "trained_on": task.trained_on,
            "updates": fitted.updates,
            "stopped": fitted.stopped,
            "seconds": fitted.seconds,
            "parameters": sum(p.numel() for p in net.parameters()),
            **made_by(folder.read_json(folder.run)),
        }
        if hasattr(task, "yardsticks"):
            # Figures that need no model.
            result["yardsticks"] = {c: task.yardsticks(c, "test") for c in conditions}
        folder.finish(result)
        return result


def _learner(spec: RunSpec) -> Callable[..., Fitted]:
    """What trains the network."""
    # Both take long to load, and need more than what reads folders.
    if isinstance(spec.fit, PPO):
        from riglstm.lab.minigrid.training import train

        return train
    from riglstm.lab.train.loop import fit

    return fit


@contextlib.contextmanager
def training(
    folder: RunFolder,
    config: Mapping[str, Any],
    device: torch.device,
    *,
    jobs: int = 1,
    resume: bool,
) -> Iterator[None]:
    """Begin a run in its folder, or go on with it; if it diverges, the folder says why."""
    if device.type == "cuda":
        check_products(device)
    command = shlex.join((Path(sys.argv[0]).name, *sys.argv[1:]))
    folder.begin(config, command=command, device=device_name(device), jobs=jobs, resume=resume)
    if folder.writes:
        folder.failed.unlink(missing_ok=True)
    try:
        yield
    except Diverged as error:
        folder.write_json(folder.failed, {"reason": str(error), **error.cost})
        raise


Make: TypeAlias = Callable[..., object]
"""What trains and tests a run in a folder that is held: `run`."""


def attempt(planned: Planned, make: Make) -> None:
    """One run of several; if it diverges, its folder says so, and the others go on.

    One that another process trains, or has trained, is passed over. Raises Interrupted, and
    OutOfTime where its deadline is near.
    """
    folder, said = RunFolder(planned.folder), ""
    try:
        with folder.held():
            now = planned.state
            if now in ("done", "failed"):
                folder.tidy()
                said = f"it is {now} already; passed over"
            else:
                make(planned.spec, folder, resume=now != "new")
    except Diverged as error:
        said = str(error)
    except BusyError:
        said = "another process is training it; passed over"
    if said:
        say(f"{planned.folder}: {said}")


def open_data(planned: Sequence[Planned], data_dir: Path | None) -> None:
    """Download or make the data of several runs, once; what is wrong with it is said once."""
    for task in {str(p.spec.task_options): p.spec.task_config() for p in planned}.values():
        task.open(CPU, data_dir, say).ready()


def tested(
    spec: RunSpec,
    task: Task,
    net: nn.Module,
    weights_of: Callable[[int], Path],
    chosen: Mapping[str, Mapping[str, Any]],
    conditions: Sequence[str],
) -> list[dict[str, Any]]:
    """Figures on test data: by the weights that the training condition chose, then by those that
    the condition itself did, where it is another. `weights_of`: the file, by its update."""
    from riglstm.lab.train.checkpoints import load_weights

    rows = []
    for chooser in dict.fromkeys((task.trained_on, *conditions)):
        asked = conditions if chooser == task.trained_on else (chooser,)
        if chooser not in chosen or not asked:
            continue
        step = chosen[chooser]["step"]
        load_weights(net, weights_of(step))
        say(f"testing on {', '.join(asked)} with the weights of update {step}")
        rows += [
            {
                "table": None,
                "model": spec.name,
                "seed": spec.seed,
                "condition": condition,
                "metric": metric,
                "value": value,
                "chosen_on": f"{CHOSEN}{chooser}" if isinstance(spec.fit, Fit) else LAST,
                "step": step,
            }
            for condition, figures in _test(spec, task, net, asked).items()
            for metric, value in figures.items()
        ]
    load_weights(net, weights_of(chosen[task.trained_on]["step"]))
    return rows


def _test(
    spec: RunSpec, task: Any, net: Any, conditions: Sequence[str]
) -> dict[str, dict[str, float]]:
    """By condition, the figures on test data; models that draw do so from the run's seed."""
    if isinstance(spec.fit, PPO):
        from riglstm.lab.minigrid.training import trials

        levels = chosen_levels(task.family, conditions)
        return trials(net.eval(), levels, task.episodes, spec.fit.workers)
    found, name = {}, task.metric.name
    for condition in conditions:
        with fork_rng(task.device, generator(CPU, spec.seed).initial_seed()):
            totals = score(net, task, condition, "test", precision=spec.fit.precision)
        found[condition] = {name: means(totals)[name]}
    return found


KEY = "riglstm"
"""In the metadata of a file: configuration and result, as JSON."""


def finished(path: Path | str) -> Record:
    """A run that is done, from its folder or from an exported file."""
    path = Path(path)
    if path.is_file():
        from riglstm.lab.train.checkpoints import read_metadata

        text = read_metadata(path).get(KEY, "none")
        try:
            said = json.loads(text)
            config, result = dict(said["config"]), dict(said["result"])
        except (ValueError, TypeError, LookupError):
            raise ValueError(
                f"{path} must say in its metadata, under {KEY}, the configuration and the result "
                f"of a run, got {text[:60]!r}; `riglstm export RUN FILE` writes such files"
            ) from None
        check_result(result, path, "export it anew")
        with refused(path):
            spec = RunSpec.from_json(config)
        return Record(path=path, spec=spec, state="done", result=result)
    run = read_record(path, curves=False)
    run.check_done()
    return run


def export(path: Path | str, to: Path) -> Path:
    """Write a run's chosen weights to a file that is enough to test it; returns the file."""
    from riglstm.lab.train.checkpoints import read_weights, write_weights

    run = finished(path)
    home = run.trained_on
    chosen = run.result["chosen"][home]
    result = {
        **run.result,
        "rows": [row for row in run.rows if row["chosen_on"] == run.rows[0]["chosen_on"]],
        "chosen": {home: chosen},
        # An exported file knows its run, whatever it is called itself.
        "run": run.result.get("run") or Path(path).resolve().name,
    }
    content = json.dumps({"config": run.spec.resolved(), "result": result})
    write_weights(read_weights(run.weights_of(chosen["step"])), to, {KEY: content})
    return to


def evaluate(
    path: Path | str,
    device: str = "auto",
    data_dir: Path | None = None,
    conditions: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The result again, from the folder or the file alone; nothing is written.

    `conditions`: others than the run's own. Those have no choice of their own, and are tested
    with the weights that the training condition chose.
    """
    run = finished(path)
    spec, task, net = load(path, device, data_dir, say)
    if isinstance(spec.fit, PPO):
        # As many processes step environments as this machine has cores.
        spec = replace(spec, fit=replace(spec.fit, workers=None))
    asked = task.conditions if conditions is None else tuple(conditions)
    return {
        **run.result,
        "rows": tested(spec, task, net, run.weights_of, run.result["chosen"], asked),
        "device": device_name(task.device),
        "commit": commit(),
    }


def load(
    path: Path | str,
    device: str = "auto",
    data_dir: Path | None = None,
    show: Callable[[str], None] | None = None,
) -> tuple[RunSpec, Task, nn.Module]:
    """A finished run: what it was, its task, and the network with the weights that were chosen.

    They are those that were best on validation data of the training condition. The network is in
    eval mode.
    """
    from riglstm.lab.train.checkpoints import load_weights

    run = finished(path)
    here = pick(Fit(device=device))
    task, net = build(run.spec, here, data_dir, show)
    load_weights(net, run.weights_of(run.result["chosen"][task.trained_on]["step"]))
    return run.spec, task, net.eval()
