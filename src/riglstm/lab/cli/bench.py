"""`riglstm bench`: milliseconds a step, ratio and memory, beside nn.LSTM; the harness's cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from riglstm.lab.bench import cuda
from riglstm.lab.bench.tables import rows
from riglstm.lab.bench.timing import METERS
from riglstm.lab.cli import bench_harness, bench_minigrid, bench_parts, flags, text
from riglstm.lab.train.config import Fit
from riglstm.lab.train.devices import commit, pick

Table: TypeAlias = Literal["batch", "stream", "growth", "kernels", "harness", "minigrid"]


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
        """Its rounds, once it is known where it runs."""
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


def main(args: Sequence[str]) -> None:
    """Measure speed and memory beside nn.LSTM."""
    config = flags.read_one("riglstm bench", Bench, args)
    device = pick(Fit(device=config.device))
    tables = bench_parts.TABLES[device.type] if config.tables is None else config.tables
    rounds = ROUNDS[device.type] if config.rounds is None else config.rounds
    config = replace(config, device=str(device), tables=tables, rounds=rounds)
    bench_parts.check(config)
    if config.quick:
        kept = {name: getattr(config, name) for name in ("device", "tables", "seed", "json")}
        config = replace(QUICK, **kept)
    run(config)


def run(config: Bench) -> None:
    """Measure the tables, print each when it is there, and write the file."""
    assert config.tables is not None
    machine, sections = bench_parts.describe(config.device), bench_parts.sections(config)
    meter = METERS[config.device.partition(":")[0]]
    content: dict[str, Any] = {"machine": machine, "commit": commit()}
    content |= {"rows": [], "harness": [], "minigrid": {}}
    print(bench_parts.headline(machine, content["commit"], config.timed))
    runs = sum(section.runs for section in sections)
    ticker = text.Ticker(runs + 4 * bench_harness.rounds(config) * ("harness" in config.tables))
    for table, parts in itertools.groupby(sections, lambda section: section.table):
        measured = [rows(part, meter, partial(ticker.tick, part.work)) for part in parts]
        ticker.clear()
        heading, on_gpu = bench_parts.title(table, config), config.device != "cpu"
        print(f"\n{bench_parts.table(heading, measured, on_gpu)}", flush=True)
        content["rows"] += [asdict(row) for row in itertools.chain(*measured)]
        bench_parts.keep(config, content)
    if sections:
        print(f"\n{bench_parts.LEGEND}")
    if "harness" in config.tables:
        harness = bench_harness.measure(config, ticker.tick)
        ticker.clear()
        print(f"\n{bench_harness.table(harness, config)}\n\n{bench_harness.LEGEND}", flush=True)
        content["harness"] = bench_harness.as_json(harness)
        bench_parts.keep(config, content)
    if "minigrid" in config.tables:
        content["minigrid"] = bench_minigrid.show(config)
    if config.device != "cpu":
        content["kernels"] = cuda.kernels(sections)
    bench_parts.write(config, content)
