"""Compare settings of RigLSTM, and an LSTM, on five small problems that are not in the paper.

    python benchmarks/choosing.py --jobs 2                    # all runs, under an hour on two cores
    python benchmarks/choosing.py --problems recall --seeds 0 # some of them
    python benchmarks/choosing.py --table                     # the table of what is done

Each run trains a layer of 60 units on short sequences and tests it on short and on long ones. A run
that has its rows in the results is skipped, so that the same command does the rest.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import riglstm

HIDDEN, BATCH, UPDATES, LR = 60, 32, 1500, 3e-3
TESTED = 512
"""Sequences in a test."""
LETTERS = 8
RESULTS = Path("results/trials/choosing.csv")

OPEN = {"active_cells": 6, "views_per_cell": 6, "peers_per_cell": 5}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM": ("lstm", {}),
    "LSTM, forget_bias=3": ("lstm", {"forget_bias": 3.0}),
    "RigLSTM": ("riglstm", {}),
    "forget_bias=3": ("riglstm", {"forget_bias": 3.0}),
    "active_cells=2": ("riglstm", {"active_cells": 2}),
    "active_cells=5": ("riglstm", {"active_cells": 5}),
    "all views and peers": ("riglstm", {"views_per_cell": 6, "peers_per_cell": 5}),
    "all of all": ("riglstm", OPEN),
    "all of all, forget_bias=3": ("riglstm", {**OPEN, "forget_bias": 3.0}),
    "soft_update=False": ("riglstm", {"soft_update": False}),
    'soft_update="printed"': ("riglstm", {"soft_update": "printed"}),
}
"""The model and the options of each line; a line without a model's name is a RigLSTM."""
STEADY = "steady_start"
SETTINGS |= {
    STEADY if name == "RigLSTM" else f"{STEADY}, {name}": (model, {**options, STEADY: True})
    for name, (model, options) in SETTINGS.items()
    if model == "riglstm" and "all of all" not in name
}


class Batch(NamedTuple):
    """Sequences, their targets, and lengths where they differ."""

    x: Tensor  # (T, B) tokens, or (T, B, features)
    y: Tensor  # (B,) or (T, B): classes, or values
    lengths: Tensor | None = None


class Problem(NamedTuple):
    """A small problem: its batches, what goes in and out, and its two lengths."""

    draw: Callable[[torch.Generator, int, int], Batch]
    tokens: int
    """0: the input is numbers."""
    features: int
    outputs: int
    """Classes; 1: a value."""
    every_step: bool
    short: int
    long: int
    score: str


def recall(rng: torch.Generator, size: int, steps: int) -> Batch:
    """One letter among others is marked; which was it?"""
    x = torch.randint(LETTERS, (steps, size), generator=rng)
    place = torch.randint(steps // 2, (size,), generator=rng)
    y = x[place, torch.arange(size)].clone()
    x[place, torch.arange(size)] += LETTERS
    return Batch(x, y)


def adding(rng: torch.Generator, size: int, steps: int) -> Batch:
    """The sum of the two numbers that are marked."""
    x = torch.rand(steps, size, 2, generator=rng)
    x[..., 1] = 0.0
    first = torch.randint(steps // 2, (size,), generator=rng)
    second = steps // 2 + torch.randint(steps - steps // 2, (size,), generator=rng)
    for place in (first, second):
        x[place, torch.arange(size), 1] = 1.0
    return Batch(x, (x[..., 0] * x[..., 1]).sum(0))


def wave(rng: torch.Generator, size: int, steps: int) -> Batch:
    """The next value of a sine with noise whose level jumps now and then."""
    times = torch.arange(steps + 1)[:, None]
    period = 8 + 16 * torch.rand(size, generator=rng)
    phase = 2 * math.pi * torch.rand(size, generator=rng)
    jumps = torch.rand(steps + 1, size, generator=rng) < 0.04
    since = (jumps * times).cummax(0).values
    level = torch.randn(steps + 1, size, generator=rng).gather(0, since)
    noise = 0.05 * torch.randn(steps + 1, size, generator=rng)
    value = torch.sin(2 * math.pi * times / period + phase) + level + noise
    return Batch(value[:-1, :, None], value[1:])


def lengths(rng: torch.Generator, size: int, steps: int) -> Batch:
    """The first and the last of a few events in noise, in sequences of many lengths."""
    length = steps // 3 + torch.randint(steps - steps // 3 + 1, (size,), generator=rng)
    inside = torch.arange(steps)[:, None] < length
    event = (torch.rand(steps, size, generator=rng) < 0.15) & inside
    event[0] = True
    kind = torch.randint(3, (steps, size), generator=rng)
    x = torch.where(event, kind, 3 + torch.randint(5, (steps, size), generator=rng))
    last = (event * torch.arange(1, steps + 1)[:, None]).argmax(0)
    return Batch(x, 3 * x[0] + x[last, torch.arange(size)], length)


@functools.cache
def text() -> Tensor:
    """Python's own reference manual, as numbers of its characters, of which there are 64."""
    said = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    kinds = sorted(set(said), key=lambda c: (-said.count(c), c))[:64]
    number = {character: index for index, character in enumerate(kinds)}
    return torch.tensor([number.get(c, 63) for c in said])


def characters(rng: torch.Generator, size: int, steps: int) -> Batch:
    """The next character of a text; a test reads another part of it."""
    said = text()
    border = int(0.9 * len(said))
    test = rng.initial_seed() >= TEST_SEEDS
    low, high = (border, len(said) - steps - 1) if test else (0, border - steps - 1)
    start = torch.randint(low, high, (size,), generator=rng)
    window = said[start + torch.arange(steps + 1)[:, None]]
    return Batch(window[:-1], window[1:])


TEST_SEEDS = 10_000
"""Batches with seeds from here on are of tests."""

PROBLEMS = {
    "recall": Problem(recall, 2 * LETTERS, 0, LETTERS, False, 30, 300, "accuracy in %"),
    "adding": Problem(adding, 0, 2, 1, False, 30, 300, "error"),
    "wave": Problem(wave, 0, 1, 1, True, 40, 320, "error"),
    "lengths": Problem(lengths, 8, 0, 9, False, 30, 300, "accuracy in %"),
    "text": Problem(characters, 64, 0, 64, True, 40, 320, "bits a character"),
}


class Network(nn.Module):
    """Input map, layer, read-out: the same for every setting but for the layer."""

    def __init__(self, problem: Problem, setting: str) -> None:
        super().__init__()
        model, options = SETTINGS[setting]
        self.problem = problem
        self.map = (
            nn.Embedding(problem.tokens, HIDDEN)
            if problem.tokens
            else nn.Linear(problem.features, HIDDEN)
        )
        self.rnn: nn.Module
        if model == "riglstm":
            self.rnn = riglstm.RigLSTM(HIDDEN, HIDDEN, **options)
        else:
            # That of torch, whose biases alone are set.
            self.rnn = nn.LSTM(HIDDEN, HIDDEN)
            with torch.no_grad():
                self.rnn.bias_ih_l0[HIDDEN : 2 * HIDDEN] += options.get("forget_bias", 0.0)
        self.out = nn.Linear(HIDDEN, problem.outputs)

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor | PackedSequence = self.map(batch.x)
        if batch.lengths is not None:
            assert isinstance(x, Tensor)
            x = pack_padded_sequence(x, batch.lengths, enforce_sorted=False)
        output, state = self.rnn(x)
        read = output if self.problem.every_step else state[0][-1]
        found: Tensor = self.out(read)
        return found.squeeze(-1) if self.problem.outputs == 1 else found


def loss_of(problem: Problem, said: Tensor, y: Tensor) -> Tensor:
    if problem.outputs == 1:
        return F.mse_loss(said, y)
    return F.cross_entropy(said.flatten(0, -2), y.flatten())


def score_of(problem: Problem, net: Network, steps: int, seed: int) -> float:
    """On sequences that training did not see."""
    rng = torch.Generator().manual_seed(TEST_SEEDS + seed)
    with torch.no_grad():
        batch = problem.draw(rng, TESTED, steps)
        said = net(batch)
        if problem.score == "accuracy in %":
            return 100 * (said.argmax(-1) == batch.y).float().mean().item()
        loss = loss_of(problem, said, batch.y).item()
    return math.sqrt(loss) if problem.outputs == 1 else loss / math.log(2)


def run(problem_name: str, setting: str, seed: int) -> dict[str, Any]:
    """Train and test one network; the row of its results."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    problem, began = PROBLEMS[problem_name], time.monotonic()
    net = Network(problem, setting)
    optimiser = torch.optim.Adam(net.parameters(), LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, UPDATES)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(UPDATES):
        batch = problem.draw(rng, BATCH, problem.short)
        loss = loss_of(problem, net(batch), batch.y)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    net.eval()
    return {
        "problem": problem_name,
        "setting": setting,
        "seed": seed,
        "score": problem.score,
        "short": f"{score_of(problem, net, problem.short, seed):.4f}",
        "long": f"{score_of(problem, net, problem.long, seed):.4f}",
        "updates": UPDATES,
        "seconds": f"{time.monotonic() - began:.1f}",
    }


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: Iterable[dict[str, str]]) -> str:
    """A line a setting: for each problem the mean over seeds, short and long; how many seeds."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault((row["problem"], row["setting"]), []).append(row)
    heads = [f"{name} {how.short} | {how.long}" for name, how in PROBLEMS.items()]
    cells: dict[str, list[str]] = {setting: [] for setting in SETTINGS}
    counts = []
    for problem, how in PROBLEMS.items():
        accuracy = "accuracy" in how.score
        digits = 1 if accuracy else 3 if how.outputs == 1 else 2
        for part in ("short", "long"):
            means = {
                setting: statistics.mean(float(row[part]) for row in own)
                for (name, setting), own in found.items()
                if name == problem
            }
            best = (max if accuracy else min)(means.values(), default=None)
            for setting, line in cells.items():
                value = means.get(setting)
                said = "–" if value is None else f"{value:.{digits}f}"
                line.append(f"**{said}**" if value == best else said)
        seeds = [len(found.get((problem, setting), ())) for setting in SETTINGS]
        least, most = min(seeds), max(seeds)
        counts += 2 * [str(least) if least == most else f"{least} to {most}"]
    lines = [f"| setting | {' | '.join(heads)} |", "|---|" + "--:|" * (2 * len(PROBLEMS))]
    lines += [f"| {setting} | {' | '.join(line)} |" for setting, line in cells.items()]
    return "\n".join((*lines, f"| *seeds* | {' | '.join(counts)} |"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file that takes the rows")
    parser.add_argument("--table", action="store_true", help="print the table alone")
    args = parser.parse_args()
    rows = read(args.out)
    done = {(row["problem"], row["setting"], int(row["seed"])) for row in rows}
    todo = [
        (problem, setting, seed)
        for seed in args.seeds
        for problem in args.problems
        for setting in args.settings
        if (problem, setting, seed) not in done and not args.table
    ]
    if todo:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(args.jobs) as pool:
            futures = [pool.submit(run, *each) for each in todo]
            for count, future in enumerate(as_completed(futures), start=1):
                row = future.result()
                with args.out.open("a", newline="") as file:
                    writer = csv.DictWriter(file, row)
                    if file.tell() == 0:
                        writer.writeheader()
                    writer.writerow(row)
                print(f"{count} of {len(todo)}:", *row.values(), flush=True)
    print(table(read(args.out)))


if __name__ == "__main__":
    main()
