"""The table of inference times, parameters and memory, measured on this machine.

Shapes: T = size² steps, B sequences.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from riglstm import models
from riglstm.lab.bench import SECONDS, by_clock, interleave, onednn, spread
from riglstm.lab.tables.paper import PAPER
from riglstm.lab.tables.recipes import FULL, MEASURED_ROWS, Budget, Row, chosen
from riglstm.lab.tables.run import core_options
from riglstm.lab.tables.table import TextTable, markdown, number, words
from riglstm.lab.tasks.common import TokenNetwork
from riglstm.lab.train.config import Fit, device_name, fork_rng, pick, products
from riglstm.lab.train.folder import atomic_write, commit

B = 64
SIZES = (19, 24, 32)
ROUNDS: dict[Budget, int] = {"quick": 1, "paper": 10}


@dataclass(frozen=True)
class Measured:
    """A model's figures on a device."""

    device: str
    model: str
    """A key of `MEASURED_ROWS`."""
    label: str
    ms: dict[str, float]
    """By size, the median for a batch."""
    parameters: int
    memory: int
    """Bytes of the weights, and of what the longest call holds beside them."""
    batch_size: int
    rounds: int
    torch: str
    commit: str | None


def table(
    models: Sequence[str] | None = None,
    budget: Budget = "quick",
    device: str = "auto",
    show: Callable[[str], None] = lambda line: None,
    sizes: Sequence[int] = SIZES,
    batch_size: int = B,
    *,
    results: Path | None = None,
    processor: str = "",
) -> str:
    """Measure; the table in Markdown, beside the paper's. Budgets differ in the number of rounds.

    `results`: a JSON file that takes the figures, in place of those of the same model and device;
    `processor`: its name, which stands beside that of a CPU.
    """
    if budget not in ROUNDS:
        raise ValueError(f"the budget must be one of {', '.join(ROUNDS)}, got {budget!r}")
    here, found = pick(Fit(device=device)), list[Measured]()
    # What cannot take the figures is refused before anything is measured.
    known = [] if results is None else read(results)
    if results is not None:
        _write(known, results)
    for name in chosen("models", MEASURED_ROWS, models or tuple(MEASURED_ROWS)):
        show(f"measuring {MEASURED_ROWS[name].label}")
        found.append(measured(name, here, sizes, batch_size, ROUNDS[budget], processor))
    if results is not None:
        anew = {(row.device, row.model) for row in found}
        kept = [row for row in known if (row.device, row.model) not in anew]
        _write(kept + found, results)
    return "\n".join(map(markdown, tables(found)))


def _write(rows: Sequence[Measured], path: Path) -> None:
    with atomic_write(path) as file:
        file.write(f"{json.dumps([*map(asdict, rows)], indent=1)}\n".encode())


def read(path: Path) -> list[Measured]:
    """What a file holds; none, where it is not there. Raises ValueError where it is another's."""
    try:
        rows = json.loads(path.read_bytes()) if path.exists() else []
        found = [Measured(**row) for row in rows]
        tables(found)
        return found
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must be a new file, or one that `riglstm reproduce complexity --results` "
            f"wrote, got {error}; give another"
        ) from error


def tables(rows: Sequence[Measured]) -> list[TextTable]:
    """A table for each device, with the paper's figures."""
    return [
        _table(device, [row for row in rows if row.device == device])
        for device in dict.fromkeys(row.device for row in rows)
    ]


def _table(device: str, rows: Sequence[Measured]) -> TextTable:
    sizes, lines = list(rows[0].ms), []
    for row in sorted(rows, key=lambda row: list(MEASURED_ROWS).index(row.model)):
        printed = PAPER["complexity"]["B=64", row.model]
        figures = {size: number(ms) for size, ms in row.ms.items()}
        figures["parameters"] = f"{row.parameters / 1e6:.2f}M"
        figures["memory"] = f"{row.memory / 1e6:,.0f}M"
        pairs = ((said, printed.get(name, "–")) for name, said in figures.items())
        lines.append(
            [row.label, MEASURED_ROWS[row.model].cells, *(x for pair in pairs for x in pair)]
        )
    heads = [*(f"{size}, ms" for size in sizes), "parameters", "memory"]
    rounds = words(str(row.rounds) for row in rows)
    return TextTable(
        title=f"Inference on sequential MNIST, batches of {rows[0].batch_size}: {device}",
        heads=["model", "(N, K_a)", *(x for head in heads for x in (head, "paper"))],
        lines=lines,
        lead=2,
        notes=[
            f"Measured on {device}, torch {words(row.torch for row in rows)}, commit "
            f"{words((row.commit or 'unknown')[:7] for row in rows)}, float32; the paper's on one "
            "NVIDIA Tesla V100, with its own code: times compare machines as much as models.",
            f"Times: milliseconds for a batch, median of {rounds}; with one thread of a CPU "
            "the processor's own time, whatever else it did. Parameters: embedding and read-out "
            "included; what the paper counts is open (P20, P23).",
            f"Memory: weights, and the most that a call at {sizes[-1]} holds in tensors beside "
            "them, in millions of bytes; the paper's is what its GPU had occupied.",
        ],
    )


def measured(
    name: str,
    device: torch.device,
    sizes: Sequence[int],
    batch_size: int,
    rounds: int,
    processor: str,
) -> Measured:
    """A model's times, parameters and memory on random black and white pixels.

    On a CPU an LSTM runs in the faster of torch's two modes for it, which its label says.
    """
    row = MEASURED_ROWS[name]
    net, in_seconds = _network(row, device), SECONDS[device.type]
    if device.type == "cpu" and torch.get_num_threads() == 1:
        # The processor's own time, which other programs do not take.
        in_seconds = partial(by_clock, time.process_time)

    def work(size: int, mode: bool) -> Callable[[], Tensor]:
        gen = torch.Generator().manual_seed(0)
        pixels = torch.randint(2, (size**2, batch_size, 1), generator=gen).to(device)

        def run() -> Tensor:
            with torch.no_grad(), onednn(mode), products("fp32", device):
                return net(pixels)  # type: ignore[no-any-return]

        return run

    def brief(mode: bool) -> float:
        run = work(4, mode)
        run()
        return min(in_seconds(run) for _ in range(3))

    label, mode = row.label, bool(torch.backends.mkldnn.enabled)
    if row.model == "lstm" and device.type == "cpu" and torch.backends.mkldnn.is_available():
        mode = min((True, False), key=brief)
        label += f", oneDNN {'on' if mode else 'off'}"
    runs = {size: work(size, mode) for size in sizes}
    # The longest holds the most; measuring that also warms up for the times.
    peak = PEAK_BYTES[device.type](runs[max(sizes)])
    seconds = interleave(runs, in_seconds, rounds)
    named = device_name(device)
    return Measured(
        device=f"{processor}, {named}" if processor and device.type == "cpu" else named,
        model=name,
        label=label,
        ms={f"{s}x{s}": 1e3 * spread(seconds[s])["median"] for s in sizes},
        parameters=sum(p.numel() for p in net.parameters()),
        memory=sum(p.numel() * p.element_size() for p in net.parameters()) + peak,
        batch_size=batch_size,
        rounds=rounds,
        torch=str(torch.__version__),
        commit=commit(),
    )


def _network(row: Row, device: torch.device) -> nn.Module:
    options = core_options(row.model, row.options, device)
    with fork_rng(torch.device("cpu")):
        core = models.build(row.model, FULL.hidden, row.hidden_size, **options)
        net = TokenNetwork(core, 1, 2, (10,), dropout=0.0, summarise=True)  # type: ignore[arg-type]
    return net.to(device).eval()


def cpu_peak_bytes(run: Callable[[], object]) -> int:
    """Tensor memory as torch's allocator reports it, so the same in every run.

    The size of the process would depend on what earlier calls left in the heap. Buffers that a
    library under torch allocates for itself are not in it.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    results = None if profile.profiler is None else profile.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _cuda_peak_bytes(run: Callable[[], object]) -> int:
    """After the first calls, in which kernels are compiled and the clock rises."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


PEAK_BYTES = {"cpu": cpu_peak_bytes, "cuda": _cuda_peak_bytes}
"""Memory at the highest point of a call, beyond what was held before it, by device."""
