"""`riglstm bench`: milliseconds a step, ratio and memory, beside nn.LSTM."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from riglstm import BackendError, __version__
from riglstm.benchmark import cuda
from riglstm.benchmark.contestants import BATCHED, contestants
from riglstm.benchmark.tables import Row, Section, against_lstm, growth, rows
from riglstm.benchmark.timing import AGREEING, METERS
from riglstm.cli import UsageError
from riglstm.scan import Backend


@dataclass(frozen=True)
class Bench:
    """Time RigLSTM's backends beside nn.LSTM, in interleaved rounds of one process.

    Ratios are taken within a round, against the faster mode of nn.LSTM. A backend is timed only
    if its output, and in training the input's gradient, is the reference's. Takes about five
    minutes on two cores. On a GPU the sizes are fixed: the fused kernels beside cuDNN, each
    precision beside its own; there, `make test-gpu` compares the numbers.

    Example: riglstm bench --device cpu --no-compiled --json bench.json
    """

    device: str = "cpu"
    """Where to run: cpu or cuda."""
    input_size: int = 600
    """Features of the input."""
    hidden_size: int = 600
    """The whole width N·d."""
    num_cells: int = 6
    """N, and as many views; two thirds of the cells are active."""
    batch_size: int = 64
    """Sequences of the first table."""
    length: int = 32
    """Steps of the first table."""
    stream_length: int = 128
    """Steps of the second table, which has one sequence."""
    growth_batch_size: int = 4
    """Sequences of the third table."""
    growth_lengths: tuple[int, ...] = (32, 128, 512, 1024)
    """Steps of the third table."""
    tables: tuple[Literal["batch", "stream", "growth"], ...] = ("batch", "stream", "growth")
    """Which of the three to measure."""
    rounds: int = 7
    """Timed rounds, after the warm-up; at most three in the third table."""
    compiled: bool = True
    """Also the compiled backend, which takes half a minute or more to build."""
    seed: int = 0
    """Of the weights and the inputs."""
    quick: bool = False
    """Tiny sizes, two rounds, not compiled: shows that all of it runs; its figures say nothing."""
    json: Path | None = None
    """File for the rows, with versions, processor, threads and load."""


QUICK = Bench(
    input_size=12,
    hidden_size=12,
    num_cells=3,
    batch_size=4,
    length=4,
    stream_length=4,
    growth_batch_size=2,
    growth_lengths=(4, 8),
    rounds=2,
    compiled=False,
    quick=True,
)

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


def run(config: Bench) -> None:
    """Measure the tables, print each when it is there, and write the file."""
    if config.quick:
        kept = {name: getattr(config, name) for name in ("device", "tables", "seed", "json")}
        config = replace(QUICK, **kept)
    _check(config)
    # The profiler that counts memory would write its own log between the tables.
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    on_gpu = config.device == "cuda"
    sections = cuda.sections(config.quick, config.rounds) if on_gpu else _sections(config)
    meter = METERS[config.device]
    machine = describe(config.device)
    console = Console(highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if machine["load"] > BUSY:
        console.print("[bold]Other programs are at work[/]: trust no ratio with a wide spread.")
    done: list[Row] = []
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(section.runs for section in sections))

        def tick(work: str, name: str) -> None:
            progress.update(task, advance=1, description=f"{work}: {name}")

        for table, parts in itertools.groupby(sections, lambda section: section.table):
            measured = [rows(part, meter, partial(tick, part.work)) for part in parts]
            console.print(_table(table if on_gpu else _title(table, config), measured, on_gpu))
            done += itertools.chain(*measured)
    console.print(LEGEND)
    if config.json is not None:
        options = {key: value for key, value in asdict(config).items() if key != "json"}
        content = {"machine": machine, "options": options, "rows": [asdict(row) for row in done]}
        config.json.write_text(json.dumps(content, indent=1) + "\n")
        console.print(f"written: {config.json}")


def _check(config: Bench) -> None:
    if config.device not in METERS:
        raise UsageError(f"--device must be one of {', '.join(METERS)}, got {config.device!r}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU that torch can use, got none; use --device cpu")
    for name in ("batch_size", "length", "stream_length", "growth_batch_size", "rounds"):
        if getattr(config, name) < 1:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} must be at least 1, got {getattr(config, name)}")
    if min(config.growth_lengths, default=0) < 1:
        raise UsageError(
            f"--growth-lengths must be one or more numbers of steps, got {config.growth_lengths}"
        )
    if not config.tables:
        raise UsageError("--tables must name one or more of batch, stream, growth, got none")
    path = config.json
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"--json must name a file in a folder that exists, got {path}")


def _sections(config: Bench) -> list[Section]:
    """The three tables: a batch, one sequence, growing lengths."""
    torch.manual_seed(config.seed)
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
    rounds, fewer = config.rounds, min(config.rounds, 3)
    sections = [
        against_lstm("batch", "inference", who, batch, rounds),
        against_lstm("batch", "training", who, batch, rounds),
        against_lstm("stream", "streaming", who, one, rounds),
        against_lstm("stream", "inference", who, one, rounds),
        growth("growth", "inference", batched, long, fewer),
        growth("growth", "training", batched, long, fewer),
    ]
    return [section for section in sections if section.table in config.tables]


def _title(table: str, config: Bench) -> str:
    what = {
        "batch": f"B = {config.batch_size}, T = {config.length}",
        "stream": f"B = 1, T = {config.stream_length}",
        "growth": f"B = {config.growth_batch_size}, {BATCHED}",
    }
    N = config.num_cells
    sizes = f"N = K = {N}, d = {config.hidden_size // N}, input {config.input_size}"
    return f"{table}: {sizes}, {what[table]}"


def _table(title: str, parts: Sequence[Sequence[Row]], on_gpu: bool) -> Table:
    """A printed table, one section for each kind of work."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("µs a step" if on_gpu else "ms a step", "ratio", "peak MB", "differs"):
        table.add_column(column, justify="right")
    for part in parts:
        table.add_row(f"[bold]{part[0].work}[/]")
        for row in part:
            table.add_row(f"  {row.name}", *_cells(row, 1e3 if on_gpu else 1))
        table.add_section()
    return table


def _cells(row: Row, units: float) -> tuple[str, str, str, str]:
    """The columns of a printed row after its name."""
    differs = "" if row.difference is None else f"{row.difference:.0e}"
    peak = f"{row.peak_mb:.1f}"
    if row.ms is None or row.ratio is None:
        return "not timed", f"{row.agreeing:.0%} of {AGREEING:.0%} agree", peak, differs
    ratio = f"{row.ratio.median:.2f} ({row.ratio.low:.2f}–{row.ratio.high:.2f})"
    return f"{units * row.ms.median:.2f}", "base" if row.name == row.base else ratio, peak, differs


def describe(device: str) -> dict[str, Any]:
    """Versions, processor, threads and load: what the figures hold for."""
    return {
        "riglstm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
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
