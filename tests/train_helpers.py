"""Processes that train, and what their runs leave behind."""

from __future__ import annotations

import csv
import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from riglstm.lab.train.checkpoints import read_checkpoint
from riglstm.lab.train.folder import RunFolder

# Its children are forked from one process that has torch and Lightning loaded: a start costs
# milliseconds, and still each is a process that can be killed. What hangs ends with the tests.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["riglstm.lab.train.loop"])


def start(target: Callable[..., object], *arguments: object) -> ForkServerProcess:
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def finish(process: ForkServerProcess) -> int | None:
    process.join(60)
    hangs = process.is_alive()
    if hangs:
        process.kill()
    assert not hangs, "the run hangs"
    return process.exitcode


def weights_of_both(path: Path) -> dict[str, Tensor]:
    """The last weights of two processes of a run, which have the same."""
    first, second = (torch.load(path / f"rank-{rank}.pt") for rank in (0, 1))
    assert_same(first, second)
    found: dict[str, Tensor] = first
    return found


def outcome(path: Path) -> dict[str, Any]:
    """Everything that a run leaves, but for times and the record of its sessions."""
    folder = RunFolder(path)
    checkpoints = {f.name: read_checkpoint(f) for f in folder.made(folder.checkpoints)}
    for checkpoint in checkpoints.values():
        for name in ("seconds", "pause"):
            del checkpoint[name]
    result = folder.read_json(folder.result) if folder.state == "done" else {}
    return {
        "checkpoints": checkpoints,
        "config": folder.read_json(folder.config),
        "result": {k: v for k, v in result.items() if k not in ("seconds", "commit", "device")},
        "weights": {file.name: file.read_bytes() for file in folder.made(folder.weights)},
        "metrics": [
            line for line in folder.metrics.read_text().splitlines() if "per_second" not in line
        ],
        "files": sorted(str(file.relative_to(path)) for file in path.rglob("*")),
    }


def assert_same(a: object, b: object, where: str = "") -> None:
    """Equal to the bit, tensors too."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor), where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert isinstance(b, dict), where
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert isinstance(b, list | tuple), where
        assert_same(dict(enumerate(a)), dict(enumerate(b)), where)
    else:
        assert a == b, where


def last_step(path: Path) -> int:
    file = path / "metrics.csv"
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    return int(lines[-1].split(",")[0]) if lines else 0


def logged(path: Path) -> dict[str, dict[int, float]]:
    """metrics.csv by name and step."""
    found: dict[str, dict[int, float]] = {}
    with (path / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["name"], {})[int(row["step"])] = float(row["value"])
    return found
