"""The table of inference times, parameters and memory, measured on this machine.

Shapes: T = size² steps, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from riglstm import models
from riglstm.lab.bench.speed import onednn
from riglstm.lab.bench.timing import METERS, interleave, spread
from riglstm.lab.tables.paper import PAPER
from riglstm.lab.tables.recipes import FULL, MEASURED_ROWS, Budget, Row
from riglstm.lab.tables.reproduce import Rendered
from riglstm.lab.tables.run import core_options
from riglstm.lab.tables.table import TextTable, markdown, number
from riglstm.lab.tasks.common import TokenNetwork
from riglstm.lab.train.config import Fit, device_name, fork_rng, pick, products
from riglstm.lab.train.folder import commit

B = 64
SIZES = (19, 24, 32)
ROUNDS: dict[Budget, int] = {"quick": 1, "paper": 10}


class Subject(NamedTuple):
    """A model that is measured."""

    label: str
    row: Row
    key: str
    onednn: bool | None = None
    """The mode it runs in; None: torch's own choice."""


class Measured(NamedTuple):
    """Of one model."""

    ms: tuple[float, ...]
    """A batch, at each of the sizes; the median."""
    parameters: int
    memory: int
    """Bytes: weights, and the most that a call holds beside them."""


def table(
    models: Sequence[str] | None = None,
    budget: Budget = "quick",
    device: str = "auto",
    show: Callable[[str], None] | None = None,
    sizes: Sequence[int] = SIZES,
    batch_size: int = B,
) -> Rendered:
    """Measure, beside the paper's figures. The budgets differ in the number of rounds."""
    if budget not in ROUNDS:
        raise ValueError(f"the budget must be one of {', '.join(ROUNDS)}, got {budget!r}")
    here = pick(Fit(device=device))
    lines = []
    for subject in subjects(models, here, batch_size):
        if show is not None:
            show(f"measuring {subject.label}")
        found = measured(subject, here, sizes, batch_size, ROUNDS[budget])
        quantities = {
            f"{size}x{size}": number(ms) for size, ms in zip(sizes, found.ms, strict=True)
        }
        quantities["parameters"] = f"{found.parameters / 1e6:.2f}M"
        quantities["memory"] = f"{found.memory / 1e6:,.0f}M"
        line = [subject.label, subject.row.cells]
        for quantity, said in quantities.items():
            line += [said, PAPER["complexity"]["B=64", subject.key].get(quantity, "–")]
        lines.append(line)
    heads = ["model", "(N, K_a)"]
    for name in [*(f"{size}x{size}, ms" for size in sizes), "parameters", "memory"]:
        heads += [name, "paper"]
    shown = TextTable(
        title=f"Inference on sequential MNIST, batches of {batch_size}, median of "
        f"{ROUNDS[budget]}: {device_name(here)}",
        heads=heads,
        lines=lines,
        lead=2,
        notes=_notes(here, budget, max(sizes)),
    )
    return Rendered(markdown(shown))


def subjects(
    names: Sequence[str] | None, device: torch.device, batch_size: int = B
) -> list[Subject]:
    """The models that are asked for; on a CPU an LSTM in the faster of torch's modes for it."""
    found = []
    for name in MEASURED_ROWS if names is None else names:
        if name not in MEASURED_ROWS:
            raise ValueError(f"models must be some of {', '.join(MEASURED_ROWS)}, got {name!r}")
        row = MEASURED_ROWS[name]
        modes = [Subject(row.label, row, name)]
        if name == "lstm" and device.type == "cpu" and torch.backends.mkldnn.is_available():
            modes = [Subject(f"{row.label}, oneDNN on", row, name, True)]
            modes += [Subject(f"{row.label}, oneDNN off", row, name, False)]
            modes.sort(key=lambda mode: _trial(mode, device, batch_size))
        found.append(modes[0])
    return found


def measured(
    subject: Subject, device: torch.device, sizes: Sequence[int], batch_size: int, rounds: int
) -> Measured:
    """Build the network of the task, and call it on batches of random black and white pixels."""
    net, meter = _network(subject.row, device), METERS[device.type]
    work = {size: _work(net, subject, size, batch_size, device) for size in sizes}
    # The longest holds the most; measuring that also warms up for the times.
    peak = meter.peak_bytes(work[max(sizes)])
    seconds = interleave(work, meter, rounds)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    return Measured(
        ms=tuple(1e3 * spread(seconds[size]).median for size in sizes),
        parameters=sum(p.numel() for p in net.parameters()),
        memory=weights + peak,
    )


def _trial(subject: Subject, device: torch.device, batch_size: int) -> float:
    """Seconds of a short sequence, the best of three."""
    run = _work(_network(subject.row, device), subject, 4, batch_size, device)
    run()
    return min(METERS[device.type].seconds(run) for _ in range(3))


def _work(
    net: nn.Module, subject: Subject, size: int, batch_size: int, device: torch.device
) -> Callable[[], Tensor]:
    gen = torch.Generator().manual_seed(0)
    pixels = torch.randint(2, (size**2, batch_size, 1), generator=gen).to(device)

    def run() -> Tensor:
        with torch.no_grad(), onednn(subject.onednn), products("fp32", device):
            return net(pixels)  # type: ignore[no-any-return]

    return run


def _network(row: Row, device: torch.device) -> nn.Module:
    options = core_options(row.model, row.options, device)
    with fork_rng(torch.device("cpu")):
        core = models.build(row.model, FULL.hidden, row.hidden_size, **options)
        net = TokenNetwork(core, 1, 2, (10,), dropout=0.0, summarise=True)  # type: ignore[arg-type]
    return net.to(device).eval()


def _notes(device: torch.device, budget: Budget, largest: int) -> list[str]:
    return [
        f"Measured on {device_name(device)}, torch {torch.__version__}, commit "
        f"{commit() or 'unknown'}, float32; the paper's on one NVIDIA Tesla V100, with its own "
        "code: times compare machines as much as models.",
        f"Times: milliseconds for a batch, median of {ROUNDS[budget]}. Parameters: embedding and "
        "read-out included; what the paper counts is open (P20, P23).",
        f"Memory: weights, and the most that a call at {largest}x{largest} holds in tensors beside "
        "them, in millions of bytes; the paper's is what its GPU had occupied.",
    ]
