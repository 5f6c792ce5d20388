"""`riglstm bench`: RigLSTM's microseconds a step beside nn.LSTM's."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch

from riglstm import __version__
from riglstm.lab.bench import CASES, FIGURES, QUICK, Case, measure, ratios
from riglstm.lab.cli import UsageError, flags
from riglstm.lab.tables.table import TextTable, markdown
from riglstm.lab.tasks.common import Count, Device, Options, whole
from riglstm.lab.train.config import Fit, device_name, pick
from riglstm.lab.train.folder import atomic_write, commit

Table: TypeAlias = Literal["speed", "widths", "rules"]

ROUNDS = {"cpu": 7, "cuda": 15}


@dataclass(frozen=True)
class Bench(Options):
    """Time RigLSTM beside nn.LSTM, in interleaved rounds of one process.

    On a GPU each is called plainly and replayed from a CUDA graph; the best ratio has each in its
    faster way. RigLSTM is timed only where its first steps are those of float64. What fails is
    shown as failed, and the rest is measured. Takes two minutes or so.

    Example: riglstm bench --device cuda --json bench.json
    """

    device: Device = "cpu"
    """Where to run: cpu, or a GPU: cuda, cuda:1."""
    tables: tuple[Table, ...] | None = None
    """Which to measure; none: all that the device has. speed: several sizes; widths: every width of
    a small batch, and rules: other rules of choosing, on a GPU."""
    rounds: Count | None = None
    """Timed rounds, after the warm-up; none: 7 on a CPU, 15 on a GPU."""
    seed: Annotated[int, whole(0)] = 0
    """Of the weights and the inputs."""
    quick: bool = False
    """Tiny sizes, two rounds: shows that all of it runs; its figures say nothing."""
    json: Path | None = None
    """File for the rows, with versions, commit, processor, threads and load; written after each
    row, so that a bench that is cut off leaves what it has measured."""


BUSY = 0.5
"""Load of the last minute, in processors, from which on others disturb the measurement."""


def main(args: Sequence[str]) -> None:
    """Measure speed beside nn.LSTM."""
    config = flags.read_one("riglstm bench", Bench, args)
    device = pick(Fit(device=config.device))
    there, path = (QUICK if config.quick else CASES)[device.type], config.json
    tables: Sequence[str] = config.tables or tuple(there)
    wrong = [name for name in tables if name not in there]
    if wrong:
        raise UsageError(
            f"--tables must name some of {', '.join(there)} on {device}, got {', '.join(wrong)}"
        )
    if path is not None and path.exists() and not _is_bench(path):
        raise UsageError(
            f"--json must name a new file, or one that a bench wrote, got {path}; give another name"
        )
    rounds = config.rounds or (2 if config.quick else ROUNDS[device.type])
    options = {**asdict(config), "device": str(device), "tables": tables, "rounds": rounds}
    del options["json"]
    run({name: there[name] for name in tables}, device, options, path)


def run(
    tables: Mapping[str, Sequence[Case]],
    device: torch.device,
    options: Mapping[str, Any],
    path: Path | None,
) -> None:
    """Measure the tables, print each when it is there, and write the file row by row."""
    content: dict[str, Any] = {"options": options, "machine": describe(device)}
    content |= {"commit": commit(), "rows": []}
    rounds, seed = options["rounds"], options["seed"]
    print(headline(content["machine"], content["commit"], rounds))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Events and streams are of the current one.
    for name, cases in tables.items():
        for case in cases:
            for work in case.works:
                if sys.stderr.isatty():
                    print(f"{name}: {case.hidden_size} wide, {work}", file=sys.stderr)
                row = measure(name, case, work, device, rounds, seed)
                content["rows"].append(row)
                if path is not None:
                    with atomic_write(path) as file:
                        file.write((json.dumps(content, indent=1) + "\n").encode())
                for figure, why in row["failed"].items():
                    print(f"failed: {name}, {figure}, {case}, {work}: {why}", flush=True)
        print(f"\n{speed_tables(content)[-1]}", end="", flush=True)
    print(f"\n{LEGEND}")
    if path is not None:
        print(f"written: {path}")


LEGEND = """\
Microseconds a step, what the host does included; medians of interleaved rounds.
plain, captured, best: RigLSTM's time over nn.LSTM's; below one, in bold, RigLSTM is faster
captured: replayed from a CUDA graph; training has forward and backward pass in one
best: each in its faster way
bf16: RigLSTM under autocast, and nn.LSTM itself in bfloat16"""


def speed_tables(content: Mapping[str, Any]) -> list[str]:
    """The tables of a file in Markdown, one line for each case and kind of work."""
    found = []
    for name, group in groupby(content["rows"], lambda row: row["table"]):
        rows = list(group)
        us = [{key: value["median"] for key, value in row["us"].items()} for row in rows]
        figures = [f for f in FIGURES if any(f in row["us"] | row["failed"] for row in rows)]
        compared = [ratios(values) for values in us]
        shown = ["plain", "captured", "best"] if len(figures) > 2 else ["plain"]
        shown = [key for key in shown if any(ratio[key] is not None for ratio in compared)]
        lead = ["hidden (cells)", "B", "T", "precision", "work", "runs"]
        lines, best = [], set()
        for i, (row, values, ratio) in enumerate(zip(rows, us, compared, strict=True)):
            line = [_size(row), str(row["B"]), str(row["T"])]
            line += [row["precision"], row["work"], row["backend"]]
            lack = {f: "failed" if f in row["failed"] else "–" for f in figures}
            line += [f"{values[f]:.1f}" if f in values else lack[f] for f in figures]
            for key in shown:
                value = ratio[key]
                if value is not None and round(value, 2) < 1:
                    best.add((i, len(line)))
                line.append("–" if value is None else f"{value:.2f}")
            lines.append(line)
        title = f"{name}, {content['machine']['device']}"
        heads = [*lead, *figures, *shown]
        table = TextTable(title, heads, lines, len(lead), best=frozenset(best))
        found.append(markdown(table))
    return found


def _size(row: Mapping[str, Any]) -> str:
    N = row["num_cells"]
    rules = "".join(f", {key}={value}" for key, value in row["options"].items())
    return f"{row['hidden_size']:,} ({N} × {row['hidden_size'] // N}){rules}"


def _is_bench(path: Path) -> bool:
    """True if `riglstm bench` wrote the file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"options", "machine", "rows"} <= content.keys()


def headline(machine: Mapping[str, Any], commit: str | None, rounds: int) -> str:
    """The machine in a line, what is measured, and a warning where the machine is not idle."""
    said = ", ".join(f"{key} {value}" for key, value in machine.items())
    busy = "\nOther programs are at work, and disturb the figures."
    return f"{said}\ncommit {commit}, {rounds} rounds{busy if machine['load'] > BUSY else ''}"


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, device, processor, threads and load: what the figures hold for."""
    return {
        "riglstm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu" if device.type == "cpu" else device_name(device),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0,
    }


def processor() -> str:
    """The processor's name: Python knows it on few systems, `lscpu` on every Linux."""
    if shutil.which("lscpu"):
        english = {**os.environ, "LC_ALL": "C"}
        said = subprocess.run(["lscpu"], capture_output=True, text=True, env=english, check=False)
        for line in said.stdout.splitlines():
            if line.startswith("Model name:"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
