"""What `riglstm bench` measures and refuses, and how its rows and the machine are printed."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from riglstm import BackendError, __version__
from riglstm.lab.bench import cuda
from riglstm.lab.bench.contestants import BATCHED, contestants
from riglstm.lab.bench.tables import Row, Section, against_lstm, growth
from riglstm.lab.cli import UsageError, flags, text
from riglstm.lab.train.devices import device_name
from riglstm.scan import Backend

if TYPE_CHECKING:
    from riglstm.lab.cli.bench import Bench, Table

TABLES: dict[str, tuple[Table, ...]] = {
    "cpu": ("batch", "stream", "growth", "harness", "minigrid"),
    "cuda": ("kernels", "harness"),
}
"""By kind of device."""

BUSY = 0.5
"""Load of the last minute, in processors, from which on others disturb the measurement."""

LEGEND = """\
training: forward, and backward to the input and all weights
streaming: one call a step, the state carried
base: the faster mode of nn.LSTM, or the first length
ratio: to the base of the same round; median over the rounds (10–90 %)
peak MB: tensors held at the highest point of a run, as torch's allocator
         counts them, beyond weights and input
differs: largest difference to the reference, as a share of its largest value"""


def check(config: Bench) -> None:
    """Everything that can be refused before anything is measured."""
    there = TABLES[config.device.partition(":")[0]]
    wrong = [name for name in config.tables or () if name not in there]
    if wrong:
        raise UsageError(
            f"--tables must name some of {', '.join(there)} on {config.device}, "
            f"got {', '.join(wrong)}"
        )
    assert config.tables is not None
    if "harness" in config.tables and importlib.util.find_spec("lightning_fabric") is None:
        raise UsageError(
            "--tables harness needs lightning_fabric, which is not installed: "
            "pip install 'riglstm[train]', or name the other tables only"
        )
    flags.check_at_least("seed", config.seed, 0)
    sizes = ("input_size", "hidden_size", "num_cells", "batch_size", "length", "stream_length")
    for name in (*sizes, "growth_batch_size", "rounds"):
        flags.check_at_least(name, getattr(config, name), 1)
    if min(config.growth_lengths, default=0) < 1:
        raise UsageError(
            f"--growth-lengths must be one or more numbers of steps, got {config.growth_lengths}"
        )
    if config.harness_updates is not None:
        flags.check_at_least("harness_updates", config.harness_updates, 1)
    path = config.json
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"--json must name a file in a folder that exists, got {path}")
    for file in () if path is None else (path, _part(path)):
        if file.exists() and not _is_bench(file):
            raise UsageError(
                f"--json must name a new file, or one that a bench wrote, got {path}: {file} is "
                "another; give another name"
            )


def sections(config: Bench) -> list[Section]:
    """The wanted tables beside nn.LSTM: a batch, one sequence, growth; on a GPU the kernels."""
    assert config.tables is not None
    torch.manual_seed(config.seed)
    if "kernels" in config.tables:
        return cuda.sections(config.quick, config.timed)
    if set(config.tables) <= {"harness", "minigrid"}:
        return []
    backends: list[Backend] = ["batched", "compiled", "reference"]
    if not config.compiled:
        backends.remove("compiled")
    D, N = config.input_size, config.num_cells
    try:
        who = contestants(D, config.hidden_size, N, backends, config.device)
    except BackendError as error:
        raise UsageError(f"{error}; --no-compiled leaves that backend out") from error
    except ValueError as error:
        raise UsageError(str(error)) from error

    def x(T: int, B: int) -> Tensor:
        return torch.randn(T, B, D, device=config.device, requires_grad=True)

    batch, one = x(config.length, config.batch_size), x(config.stream_length, 1)
    long = [x(T, config.growth_batch_size) for T in config.growth_lengths]
    batched = next(w for w in who if w.name == BATCHED)
    rounds, fewer = config.timed, min(config.timed, 3)
    sections = [
        against_lstm("batch", "inference", who, batch, rounds),
        against_lstm("batch", "training", who, batch, rounds),
        against_lstm("stream", "streaming", who, one, rounds),
        against_lstm("stream", "inference", who, one, rounds),
        growth("growth", "inference", batched, long, fewer),
        growth("growth", "training", batched, long, fewer),
    ]
    return [section for section in sections if section.table in config.tables]


def title(table: str, config: Bench) -> str:
    """What a table was measured at."""
    if config.device != "cpu":
        return table
    what = {
        "batch": f"B = {config.batch_size}, T = {config.length}",
        "stream": f"B = 1, T = {config.stream_length}",
        "growth": f"B = {config.growth_batch_size}, {BATCHED}",
    }
    N = config.num_cells
    sizes = f"N = K = {N}, d = {config.hidden_size // N}, input {config.input_size}"
    return f"{table}: {sizes}, {what[table]}"


def table(heading: str, parts: Sequence[Sequence[Row]], on_gpu: bool) -> str:
    """A printed table, one section for each kind of work."""
    unit, factor = ("µs", 1e3) if on_gpu else ("ms", 1.0)
    lines: list[Sequence[str]] = []
    for part in parts:
        lines.append([part[0].work])
        lines += [[f"  {row.name}", *_cells(row, factor)] for row in part]
    return text.table(heading, ("", f"{unit} a step", "ratio", "peak MB", "differs"), lines)


def _cells(row: Row, factor: float) -> tuple[str, str, str, str]:
    """The columns of a printed row after its name."""
    differs = "" if row.difference is None else f"{row.difference:.0e}"
    peak = f"{row.peak_mb:.1f}"
    if row.ms is None or row.ratio is None:
        return "not timed", f"{row.agreeing:.0%} of {row.least:.0%} agree", peak, differs
    ratio = f"{row.ratio.median:.2f} ({row.ratio.low:.2f}–{row.ratio.high:.2f})"
    time = f"{factor * row.ms.median:.2f}"
    return time, "base" if row.name == row.base else ratio, peak, differs


def keep(config: Bench, content: dict[str, Any]) -> None:
    """What is measured so far, beside the file, whose place only a whole bench takes."""
    path = config.json
    if path is not None and (path.is_file() or not path.exists()):
        _part(path).write_text(_as_text(config, content))


def write(config: Bench, content: dict[str, Any]) -> None:
    """The file of rows, where one is asked for."""
    if config.json is not None:
        config.json.write_text(_as_text(config, content))
        _part(config.json).unlink(missing_ok=True)
        print(f"written: {config.json}")


def _is_bench(path: Path) -> bool:
    """Whether `riglstm bench` wrote a file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"options", "machine", "rows"} <= content.keys()


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _as_text(config: Bench, content: dict[str, Any]) -> str:
    """Rows with the options that they hold for."""
    options = {key: value for key, value in asdict(config).items() if key != "json"}
    return json.dumps({"options": options, **content}, indent=1) + "\n"


def headline(machine: Mapping[str, Any], commit: str | None, rounds: int) -> str:
    """The machine in a line, what is measured, and a warning where the machine is not idle."""
    said = ", ".join(f"{key} {value}" for key, value in machine.items())
    busy = "\nOther programs are at work: trust no ratio with a wide spread."
    return f"{said}\ncommit {commit}, {rounds} rounds{busy if machine['load'] > BUSY else ''}"


def describe(device: str) -> dict[str, Any]:
    """Versions, processor, threads and load: what the figures hold for."""
    return {
        "riglstm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device if device == "cpu" else device_name(torch.device(device)),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0,
    }


def _processor() -> str:
    """The processor's name: Python knows it on few systems, `lscpu` on every Linux."""
    if shutil.which("lscpu"):
        english = {**os.environ, "LC_ALL": "C"}
        said = subprocess.run(["lscpu"], capture_output=True, text=True, env=english, check=False)
        for line in said.stdout.splitlines():
            if line.startswith("Model name:"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
