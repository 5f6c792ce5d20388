"""What is left of a run that is done: tested again, looked into, or put into one file.

Such a file, safetensors, holds the weights that were chosen on validation data of the training
condition, and in its metadata the run's configuration and result: it needs no folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from riglstm.lab.tables.read_run import read_record
from riglstm.lab.tables.result import CHOSEN, check_result
from riglstm.lab.tables.run import build, tested
from riglstm.lab.tables.spec import RunSpec
from riglstm.lab.tasks.base import Task
from riglstm.lab.train.devices import commit, device_name, pick
from riglstm.lab.train.folder import RunFolder

KEY = "riglstm"
"""In the metadata of a file: configuration and result, as JSON."""


class Finished(NamedTuple):
    """A run that is done, in a folder or in a file."""

    spec: RunSpec
    result: dict[str, Any]
    weights_of: Callable[[int], Path]
    """The file of the weights after so many updates."""

    @property
    def home(self) -> str:
        """The condition of the training data."""
        return str(self.result["rows"][0]["chosen_on"]).removeprefix(CHOSEN)


def finished(path: Path | str) -> Finished:
    """What a run's folder says, or an exported file."""
    path = Path(path)
    if path.is_file():
        from riglstm.lab.train.weights import read_metadata

        text = read_metadata(path).get(KEY)
        if text is None:
            raise ValueError(
                f"{path} must say in its metadata which run it is of, got none; "
                "`riglstm export RUN FILE` writes such files"
            )
        config, result = _read_metadata(text, path)
        return Finished(RunSpec.from_json(config), result, lambda step: path)
    folder = RunFolder(path)
    if folder.state == "partial":
        raise ValueError(
            f"{path} holds a run that is not done: expected result.json, got none; "
            "go on with it by --resume first"
        )
    run = read_record(path, curves=False)
    return Finished(run.spec, dict(run.result or {}), folder.weights_of)


def _read_metadata(text: str, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and result; raises ValueError where another program wrote the text."""
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    parts = said if isinstance(said, dict) else {}
    config, result = parts.get("config"), parts.get("result")
    if not isinstance(config, dict) or not isinstance(result, dict):
        raise ValueError(
            f"{path} must say in its metadata, under {KEY}, the configuration and the result of a "
            f"run, as JSON, got {text[:60]!r}; `riglstm export RUN FILE` writes such files"
        )
    check_result(result, path, "export it anew")
    return config, result


def export(path: Path | str, to: Path) -> Path:
    """Write a run's chosen weights to a file that is enough to test it; returns the file."""
    from riglstm.lab.train.weights import read_weights, write_weights

    run = finished(path)
    result = {
        **run.result,
        "rows": [row for row in run.result["rows"] if row["chosen_on"] == f"{CHOSEN}{run.home}"],
        "chosen": {run.home: run.result["chosen"][run.home]},
        # An exported file knows its run, whatever it is called itself.
        "run": run.result.get("run") or Path(path).resolve().name,
    }
    content = json.dumps({"config": run.spec.resolved(), "result": result})
    file = run.weights_of(run.result["chosen"][run.home]["step"])
    check_finite(file)
    write_weights(read_weights(file), to, {KEY: content})
    return to


def evaluate(
    path: Path | str,
    device: str = "auto",
    data_dir: Path | None = None,
    conditions: Sequence[str] | None = None,
    show: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The result again, from the folder or the file alone; nothing is written.

    `conditions`: others than the run's own. Those have no choice of their own, and are tested
    with the weights that the training condition chose. `show` hears in a line what takes long.
    """
    run = finished(path)
    for file in {run.weights_of(chosen["step"]) for chosen in run.result["chosen"].values()}:
        check_finite(file)
    spec, task, net = load(path, device, data_dir, show)
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
    from riglstm.lab.train.weights import load_weights

    spec, result, weights_of = finished(path)
    chosen = result["chosen"]
    here = pick(replace(spec.fit, device=device, devices=1))
    task, net = build(spec, here, data_dir, show)
    if task.trained_on not in chosen:
        raise ValueError(
            f"the result in {path} must say which weights {task.trained_on} chose, which the run "
            f"was trained on, got {', '.join(chosen) or 'none'}; train anew"
        )
    file = weights_of(chosen[task.trained_on]["step"])
    check_finite(file)
    load_weights(net, file)
    return spec, task, net.eval()


def check_finite(file: Path) -> None:
    """Raise ValueError for weights that are no numbers: what they compute is no result."""
    from riglstm.lab.train.weights import read_weights

    weights = read_weights(file)
    bad = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if bad:
        raise ValueError(
            f"{file} must hold finite weights, got NaN or infinity in {len(bad)} of "
            f"{len(weights)} tensors ({', '.join(bad[:3])}{', …' if len(bad) > 3 else ''}); "
            "take another checkpoint, or train anew"
        )
