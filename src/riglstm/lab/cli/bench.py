"""`riglstm bench`: milliseconds a step, ratio and memory, beside nn.LSTM; the harness's cost."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from riglstm import BackendError, __version__
from riglstm.lab.bench.contestants import (
    BATCHED,
    against_lstm,
    contestants,
    growth,
    kernel_sections,
)
from riglstm.lab.bench.harness import Overhead, overhead
from riglstm.lab.bench.timing import METERS, Row, Section, Spread, rows
from riglstm.lab.cli import UsageError, flags, text
from riglstm.lab.minigrid.levels import available, family
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.tasks.copying import Copying
from riglstm.lab.train.config import Fit
from riglstm.lab.train.devices import commit, device_name, pick
from riglstm.models import build
from riglstm.scan import Backend

Table: TypeAlias = Literal["batch", "stream", "growth", "kernels", "harness", "minigrid"]

TABLES: dict[str, tuple[Table, ...]] = {
    "cpu": ("batch", "stream", "growth", "harness", "minigrid"),
    "cuda": ("kernels", "harness"),
}
"""By kind of device."""


@dataclass(frozen=True)
class Bench:
    """Time RigLSTM's backends beside nn.LSTM, in interleaved rounds of one process.

    Ratios are taken within a round, against the faster mode of nn.LSTM. A backend is timed only
    if its output, and in training the input's gradient, is the reference's. The last table has
    what the training harness adds to an update. Takes about eight minutes on two cores.
    On a GPU the table kernels has fixed sizes, each precision beside cuDNN's nn.LSTM in the same
    one. There the first steps are compared with float64, and `make test-gpu` compares the rest.

    Example: riglstm bench --device cpu --no-compiled --json bench.json
    """

    device: str = "cpu"
    """Where to run: cpu, or a GPU: cuda, cuda:1."""
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
    harness_updates: int | None = None
    """Updates in a round of the fourth table; none: 4 on a CPU, 200 on a GPU."""
    tables: tuple[Table, ...] | None = None
    """Which to measure; none: all that the device has, batch stream growth harness minigrid on a
    CPU, kernels harness on a GPU. harness: what training by `riglstm train` adds to an update;
    minigrid: training beside mere stepping, where riglstm[rl] is installed."""
    rounds: int | None = None
    """Timed rounds, after the warm-up; none: 7 on a CPU, 15 on a GPU. At most three in the third
    and fourth table."""
    compiled: bool = True
    """Also the compiled backend, which takes half a minute or more to build."""
    seed: int = 0
    """Of the weights and the inputs."""
    quick: bool = False
    """Tiny sizes, two rounds, not compiled: shows that all of it runs; its figures say nothing."""
    json: Path | None = None
    """File for the rows, with versions, commit, processor, threads and load. A bench that is cut
    off leaves what it has measured beside it, as FILE.part."""

    @property
    def timed(self) -> int:
        """The number of rounds, once it is known where it runs."""
        assert self.rounds is not None
        return self.rounds


ROUNDS = {"cpu": 7, "cuda": 15}
QUICK = Bench(
    input_size=12,
    hidden_size=12,
    num_cells=3,
    batch_size=4,
    length=4,
    stream_length=4,
    growth_batch_size=2,
    growth_lengths=(4, 8),
    harness_updates=2,
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


def main(args: Sequence[str]) -> None:
    """Measure speed and memory beside nn.LSTM."""
    config = flags.read_one("riglstm bench", Bench, args)
    device = pick(Fit(device=config.device))
    tables = TABLES[device.type] if config.tables is None else config.tables
    rounds = ROUNDS[device.type] if config.rounds is None else config.rounds
    config = replace(config, device=str(device), tables=tables, rounds=rounds)
    check(config)
    if config.quick:
        kept = {name: getattr(config, name) for name in ("device", "tables", "seed", "json")}
        config = replace(QUICK, **kept)
    run(config)


def check(config: Bench) -> None:
    """Refuse what cannot be measured, before anything is."""
    assert config.tables is not None
    there = TABLES[config.device.partition(":")[0]]
    wrong = [name for name in config.tables if name not in there]
    if wrong:
        raise UsageError(
            f"--tables must name some of {', '.join(there)} on {config.device}, "
            f"got {', '.join(wrong)}"
        )
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


def run(config: Bench) -> None:
    """Measure the tables, print each when it is there, and write the file."""
    assert config.tables is not None
    machine, sections = describe(config.device), _sections(config)
    content: dict[str, Any] = {"machine": machine, "commit": commit()}
    content |= {"rows": [], "harness": [], "minigrid": {}}
    print(headline(machine, content["commit"], config.timed))
    turns = len(HARNESS_MODELS) * 2 * _harness_rounds(config) * ("harness" in config.tables)
    ticker = Ticker(sum(section.runs for section in sections) + turns)
    meter = METERS[config.device.partition(":")[0]]
    for name, parts in itertools.groupby(sections, lambda section: section.table):
        measured = [rows(part, meter, partial(ticker.tick, part.work)) for part in parts]
        ticker.clear()
        print(f"\n{table(name, measured, config)}", flush=True)
        content["rows"] += [asdict(row) for row in itertools.chain(*measured)]
        _save(config, content, whole=False)
    if sections:
        print(f"\n{LEGEND}")
    if "harness" in config.tables:
        found = _overheads(config, ticker.tick)
        ticker.clear()
        print(f"\n{_harness_table(found, config)}\n\n{HARNESS_LEGEND}", flush=True)
        content["harness"] = [
            {"table": "harness", "model": model, **asdict(o)} for model, o in found.items()
        ]
        _save(config, content, whole=False)
    if "minigrid" in config.tables:
        content["minigrid"] = _minigrid(config)
    _save(config, content, whole=True)


def _sections(config: Bench) -> list[Section]:
    """The wanted tables beside nn.LSTM: a batch, one sequence, growth; on a GPU the kernels."""
    assert config.tables is not None
    torch.manual_seed(config.seed)
    if "kernels" in config.tables:
        return kernel_sections(config.quick, config.timed)
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


def table(name: str, parts: Sequence[Sequence[Row]], config: Bench) -> str:
    """A printed table, one section for each kind of work."""
    on_gpu = config.device != "cpu"
    unit, factor = ("µs", 1e3) if on_gpu else ("ms", 1.0)
    lines: list[Sequence[str]] = []
    for part in parts:
        lines.append([part[0].work])
        lines += [[f"  {row.name}", *_cells(row, factor)] for row in part]
    heading = name if on_gpu else _heading(name, config)
    return text.table(heading, ("", f"{unit} a step", "ratio", "peak MB", "differs"), lines)


def _heading(table: str, config: Bench) -> str:
    """The name of a table and the sizes that it was measured at."""
    what = {
        "batch": f"B = {config.batch_size}, T = {config.length}",
        "stream": f"B = 1, T = {config.stream_length}",
        "growth": f"B = {config.growth_batch_size}, {BATCHED}",
    }
    N = config.num_cells
    sizes = f"N = K = {N}, d = {config.hidden_size // N}, input {config.input_size}"
    return f"{table}: {sizes}, {what[table]}"


def _cells(row: Row, factor: float) -> tuple[str, str, str, str]:
    """The columns of a printed row after its name."""
    differs = "" if row.difference is None else f"{row.difference:.0e}"
    peak = f"{row.peak_mb:.1f}"
    if row.ms is None or row.ratio is None:
        return "not timed", f"{row.agreeing:.0%} of {row.least:.0%} agree", peak, differs
    ratio = f"{row.ratio.median:.2f} ({row.ratio.low:.2f}–{row.ratio.high:.2f})"
    time = f"{factor * row.ms.median:.2f}"
    return time, "base" if row.name == row.base else ratio, peak, differs


HARNESS_MODELS = ("riglstm", "lstm")
HARNESS_UPDATES = {"cpu": 4, "cuda": 200}
"""Updates in a round, where no other number is asked for: seconds of each."""
HARNESS_LEGEND = """\
bare: batch, forward, loss, backward, clipping, Adam, in a loop by hand
fit: the same updates by `riglstm train`, its log included; no evaluation, no checkpoint
overhead: of fit over bare in the same round; median over the rounds (10–90 %)"""


def _harness_rounds(config: Bench) -> int:
    """At most three: on a CPU a round at the paper's size takes the better part of a minute."""
    return min(config.timed, 3)


def _overheads(config: Bench, tick: Callable[[str], None]) -> dict[str, Overhead]:
    """What training by `fit` costs each model, on the copying task of the paper: P = 50, L = 10."""
    device = torch.device(config.device)
    L, P = (2, 2) if config.quick else (10, 50)
    sizes = Copying(L=L, P=P, batch_size=config.batch_size, input_size=config.input_size)
    task = sizes.open(device)

    def make(model: str) -> nn.Module:
        torch.manual_seed(config.seed)
        options = {"num_cells": config.num_cells} if model == "riglstm" else {}
        core = build(model, task.input_size, config.hidden_size, **options)
        return task.network(core).to(device)  # type: ignore[arg-type]

    return {
        model: overhead(
            task,
            partial(make, model),
            Fit(device=config.device),
            updates=config.harness_updates or HARNESS_UPDATES[device.type],
            rounds=_harness_rounds(config),
            seed=config.seed,
            tick=lambda name, model=model: tick(f"{model}: {name}"),  # type: ignore[misc]
        )
        for model in HARNESS_MODELS
    }


def _harness_table(found: Mapping[str, Overhead], config: Bench) -> str:
    lines = [
        [model, f"{o.bare.median:.2f}", f"{o.harness.median:.2f}", _percent(o.ratio)]
        for model, o in found.items()
    ]
    any_one = next(iter(found.values()))
    heading = (
        f"harness: copying, width {config.hidden_size}, B = {config.batch_size}, "
        f"{any_one.rounds} rounds of {any_one.updates} updates"
    )
    return text.table(heading, ("", "bare, ms an update", "fit, ms an update", "overhead"), lines)


def _percent(ratio: Spread) -> str:
    low, middle, high = (100 * (r - 1) for r in (ratio.low, ratio.median, ratio.high))
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


GRID_FAMILY, GRID_MODELS = "doorkey", ("lstm", "riglstm")
RANDOM_STEPS = "random steps"


def _minigrid(config: Bench) -> dict[str, list[float]]:
    """Measure and print frames a second by round, where there are environments."""
    try:
        available()
    except ValueError as error:
        print(f"\n{error}")
        return {}
    sizes = PPO(envs=4, steps=8, window=4, minibatch=16) if config.quick else PPO()
    speeds = _frame_rates(config.timed, sizes)
    print(f"\n{_minigrid_table(speeds, sizes)}")
    return speeds


def _frame_rates(rounds: int, config: PPO) -> dict[str, list[float]]:
    """Random steps, and updates of each model, taking turns; the first turn is not counted.

    All in the same processes, on the same environments.
    """
    import numpy as np

    from riglstm.lab.minigrid.envs import Environments
    from riglstm.lab.minigrid.ppo import Agent
    from riglstm.lab.minigrid.runs import build
    from riglstm.lab.minigrid.spec import MEMORIES, GridSpec

    rng = np.random.default_rng(0)
    levels = [family(GRID_FAMILY).levels[0].id] * config.envs
    with Environments(levels, 0, workers=config.workers) as envs:

        def stepping() -> None:
            for actions in rng.integers(0, 7, (config.steps, config.envs)):
                envs.step(actions)

        work: dict[str, Callable[[], Any]] = {RANDOM_STEPS: stepping}
        for name in GRID_MODELS:
            memory = MEMORIES[name]
            options = dict(memory.options)
            spec = GridSpec(GRID_FAMILY, memory.model, memory.hidden_size, options, config, 0)
            work[name] = Agent(build(spec, torch.device("cpu")), envs, config, 0).update
        speeds: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(rounds + 1):
            for name, do in work.items():
                began = time.perf_counter()
                do()
                if turn:
                    speeds[name].append(config.batch / (time.perf_counter() - began))
    return speeds


def _minigrid_table(speeds: Mapping[str, list[float]], config: PPO) -> str:
    """Side by side; ratios are taken within a round, and their median is printed."""

    def ratio(a: str, b: str) -> str:
        pairs = zip(speeds[a], speeds[b], strict=True)
        return f"{statistics.median(x / y for x, y in pairs):.2f}"

    lines = [
        [
            name if name == RANDOM_STEPS else f"training {name}",
            f"{statistics.median(found):,.0f}",
            ratio(name, RANDOM_STEPS),
            "" if name == RANDOM_STEPS else ratio("lstm", name),
        ]
        for name, found in speeds.items()
    ]
    title = f"MiniGrid DoorKey-5x5, {config.envs} environments, {torch.get_num_threads()} threads"
    return text.table(title, ("", "frames/s", "of random steps", "time of lstm's"), lines)


class Ticker:
    """A line of progress that is written over; silent where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.perf_counter()

    def tick(self, *work: str) -> None:
        """Say that another piece of work begins."""
        self.done += 1
        seconds = time.perf_counter() - self.start
        self._write(f"{self.done}/{self.total}  {seconds:.0f} s  {': '.join(work)}", "")

    def clear(self) -> None:
        """Make room for what is printed next."""
        self._write("", "\r")

    def _write(self, line: str, end: str) -> None:
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end=end, file=sys.stderr, flush=True)


def _save(config: Bench, content: dict[str, Any], whole: bool) -> None:
    """Write the rows: a whole bench to its file, and until then beside it."""
    path = config.json
    if path is None or (not whole and path.exists() and not path.is_file()):
        return
    options = {key: value for key, value in asdict(config).items() if key != "json"}
    said = json.dumps({"options": options, **content}, indent=1) + "\n"
    (path if whole else _part(path)).write_text(said)
    if whole:
        _part(path).unlink(missing_ok=True)
        print(f"written: {path}")


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


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
    busy = "\nOther programs are at work: trust no ratio with a wide spread."
    return f"{said}\ncommit {commit}, {rounds} rounds{busy if machine['load'] > BUSY else ''}"


def describe(device: str) -> dict[str, Any]:
    """Versions, device, processor, threads and load: what the figures hold for."""
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
