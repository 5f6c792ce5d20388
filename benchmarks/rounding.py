"""How far rounding and noise carry: a last bit may decide which cell wakes.

`python benchmarks/rounding.py` prints the figures of docs/speed.md, in a quarter of an hour.
It needs `weights/`, and the pictures in `../shared/data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from riglstm import RigLSTM
from riglstm.lab.tables.run import load
from riglstm.lab.tasks.common import lookup

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
FILES = ROOT / "weights"
CONDITIONS = {
    "mnist 14x14": ("mnist", "14x14", 500),
    "mnist 16x16": ("mnist", "16x16", 500),
    "copying P=50": ("copying", "P=50", 200),
    "copying P=200": ("copying", "P=200", 200),
}
"""Weights, condition, and how many sequences the guide's table is of."""
UNTRAINED: dict[str, Callable[[], nn.Module]] = {
    "RigLSTM": lambda: RigLSTM(600, 600),
    "RigLSTM, steady_start=True": lambda: RigLSTM(600, 600, steady_start=True),
    'RigLSTM, cells="all"': lambda: RigLSTM(600, 600, cells="all"),
    'RigLSTM, cells, views and peers "all"': lambda: RigLSTM(
        600, 600, cells="all", views="all", peers="all"
    ),
    "nn.LSTM": lambda: nn.LSTM(600, 600),
}
WAYS = ("float32", "bf16", "noise")
"""As it is, under autocast, and with noise of 1 % of the input's own size."""


class Figures(NamedTuple):
    """Shares of one: what changed against float32, and what was right."""

    output: float
    """Norm of the difference of all outputs, over the norm of the outputs."""
    cells: float
    """(step, cell) decisions that are other ones."""
    right: float = float("nan")

    def __str__(self) -> str:
        return " | ".join(f"{100 * share:.1f} %" for share in self)


def one_way(layer: nn.Module, x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    """The outputs (T, B, H), and which cells woke (T, B, N)."""
    if way == "noise":
        x = x + 0.01 * x.square().mean().sqrt() * torch.randn_like(x)
    lower: AbstractContextManager[Any] = nullcontext()
    if way == "bf16":
        lower = torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), lower:
        if isinstance(layer, RigLSTM):
            (trace,) = layer.trace(x)
            return trace.output, trace.active
        return layer(x)[0].float(), torch.zeros(*x.shape[:2], 1, dtype=torch.bool)


def measure(
    layer: nn.Module, batches: Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]
) -> dict[str, Figures]:
    """Each way beside float32, over batches of inputs (T, B, D) with what scores the outputs."""
    sums = {way: torch.zeros(4, dtype=torch.float64) for way in WAYS}
    count = 0
    for x, score in batches:
        exact, chosen = one_way(layer, x, "float32")
        for way in WAYS:
            y, active = (exact, chosen) if way == "float32" else one_way(layer, x, way)
            parts = ((y - exact).square().sum(), exact.square().sum())
            changed = (active != chosen).double().mean() * x.shape[1]
            sums[way] += torch.stack([p.double() for p in (*parts, changed, score(y).sum())])
        count += x.shape[1]
    return {
        way: Figures(float((d / e).sqrt()), float(c / count), float(r / count))
        for way, (d, e, c, r) in sums.items()
    }


def pieces(many: int) -> Iterator[slice]:
    """Rows 0 to `many`, as many at a time as fit."""
    yield from (slice(i, min(i + 100, many)) for i in range(0, many, 100))


def trained(task_name: str, condition: str, many: int) -> dict[str, Figures]:
    """The trained network of `weights/`, on the first sequences of its test data."""
    torch.manual_seed(0)
    _, task, net = load(FILES / f"{task_name}-riglstm.safetensors", "cpu", DATA)
    model: Any = net

    def batches() -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        for rows in pieces(many):
            batch = task.examples(condition, "test", rows)  # type: ignore[attr-defined]
            last = slice(-10, None) if task_name == "copying" else slice(-1, None)
            targets = batch.targets[last, :, 0] if task_name == "copying" else batch.targets

            def score(y: Tensor, last: slice = last, targets: Tensor = targets) -> Tensor:
                with torch.no_grad():
                    right: Tensor = model.readout(y[last]).argmax(-1) == targets  # (steps, B)
                return right.double().mean(0)

            with torch.no_grad():
                x = lookup(batch.inputs + model.start, model.tables.weight).flatten(2)
            yield x, score

    return measure(model.core.layer, batches())


def untrained(name: str, many: int, T: int = 196) -> dict[str, Figures]:
    """A new layer, on pictures of two colours, as a new table of tokens has them."""
    torch.manual_seed(0)
    layer, table = UNTRAINED[name](), torch.randn(2, 600)
    tokens = torch.randint(2, (T, many))
    none = torch.zeros(1)
    return measure(layer, ((table[tokens[:, rows]], lambda y: none) for rows in pieces(many)))


def completeness(layer: nn.Module, x: Tensor, read: Callable[[Tensor], Tensor], n: int) -> Tensor:
    """How much integrated gradients of n points, from a zero input, miss of what they explain.

    x (T, 1, D). They should add up to the difference of what is read from both inputs.
    """
    at = (torch.arange(n) + 0.5) / n
    path = (at.view(1, n, 1) * x).requires_grad_()
    (slope,) = torch.autograd.grad(read(layer(path)[0]).sum(), path)
    with torch.no_grad():
        ends = read(layer(torch.cat([0 * x, x], 1))[0])
    explained = ends[1] - ends[0]
    return ((slope.mean(1, keepdim=True) * x).sum() - explained).abs() / explained.abs()


def attributions(many: int, n: int) -> tuple[float, float]:
    """The median of `completeness` over digits: the trained network, and an untrained nn.LSTM."""
    torch.manual_seed(0)
    _, task, net = load(FILES / "mnist-riglstm.safetensors", "cpu", DATA)
    model: Any = net.requires_grad_(False)
    lstm = nn.LSTM(600, 600).requires_grad_(False)
    batch = task.examples("14x14", "test", slice(0, many))  # type: ignore[attr-defined]
    x = lookup(batch.inputs + model.start, model.tables.weight).flatten(2)
    missed = []
    for i in range(many):
        digit = batch.targets[i]

        def read(y: Tensor, digit: Tensor = digit) -> Tensor:
            logits: Tensor = model.readout(y[-1])[:, digit]
            return logits

        one = x[:, i : i + 1]
        missed.append([completeness(rnn, one, read, n) for rnn in (model.core.layer, lstm)])
    ours, theirs = torch.tensor(missed).quantile(0.5, 0).tolist()
    return ours, theirs


if __name__ == "__main__":
    for name, wanted in CONDITIONS.items():
        for way, figures in trained(*wanted).items():
            print(f"| {name} | {way} | {figures} |", flush=True)
    for name in UNTRAINED:
        for way, figures in untrained(name, 100).items():
            print(f"| {name} | {way} | {figures} |", flush=True)
    print("integrated gradients", *(f"{share:.2%}" for share in attributions(12, 32)))
