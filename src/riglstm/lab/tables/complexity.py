"""The table of inference times, parameters and memory, measured on this machine.

Shapes: T = size² steps, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from riglstm import models
from riglstm.lab.bench.speed import onednn
from riglstm.lab.bench.timing import METERS, interleave, spread
from riglstm.lab.tables.paper import PAPER
from riglstm.lab.tables.recipes import FULL, MEASURED_ROWS, Budget, Row, chosen
from riglstm.lab.tables.reproduce import Rendered
from riglstm.lab.tables.run import core_options
from riglstm.lab.tables.table import TextTable, markdown, number
from riglstm.lab.tasks.common import TokenNetwork
from riglstm.lab.train.config import Fit, device_name, fork_rng, pick, products
from riglstm.lab.train.folder import commit

B = 64
SIZES = (19, 24, 32)
ROUNDS: dict[Budget, int] = {"quick": 1, "paper": 10}


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
    for name in chosen("models", MEASURED_ROWS, models or tuple(MEASURED_ROWS)):
        row, printed = MEASURED_ROWS[name], PAPER["complexity"]["B=64", name]
        if show is not None:
            show(f"measuring {row.label}")
        label, found = measured(row, here, sizes, batch_size, ROUNDS[budget])
        line = [label, row.cells]
        for quantity, said in found.items():
            line += [said, printed.get(quantity, "–")]
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


def measured(
    row: Row, device: torch.device, sizes: Sequence[int], batch_size: int, rounds: int
) -> tuple[str, dict[str, str]]:
    """A model's label; its times, parameters and memory on random black and white pixels.

    On a CPU an LSTM runs in the faster of torch's two modes for it, which its label says.
    """
    net, meter = _network(row, device), METERS[device.type]

    def work(size: int, mode: bool | None) -> Callable[[], Tensor]:
        gen = torch.Generator().manual_seed(0)
        pixels = torch.randint(2, (size**2, batch_size, 1), generator=gen).to(device)

        def run() -> Tensor:
            with torch.no_grad(), onednn(mode), products("fp32", device):
                return net(pixels)  # type: ignore[no-any-return]

        return run

    def brief(mode: bool) -> float:
        run = work(4, mode)
        run()
        return min(meter.seconds(run) for _ in range(3))

    label, mode = row.label, None
    if row.model == "lstm" and device.type == "cpu" and torch.backends.mkldnn.is_available():
        mode = min((True, False), key=brief)
        label += f", oneDNN {'on' if mode else 'off'}"
    runs = {size: work(size, mode) for size in sizes}
    # The longest holds the most; measuring that also warms up for the times.
    peak = meter.peak_bytes(runs[max(sizes)])
    seconds = interleave(runs, meter, rounds)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    count = sum(p.numel() for p in net.parameters())
    return label, {
        **{f"{s}x{s}": number(1e3 * spread(seconds[s])["median"]) for s in sizes},
        "parameters": f"{count / 1e6:.2f}M",
        "memory": f"{(weights + peak) / 1e6:,.0f}M",
    }


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
