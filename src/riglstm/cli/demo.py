"""`riglstm demo`: RigLSTM against nn.LSTM on a small copying problem."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from riglstm import RigLSTM
from riglstm.cli import UsageError
from riglstm.cli._copying import Batch, Copier, accuracy, copying_batch, train


@dataclass(frozen=True)
class Demo:
    """Train RigLSTM and nn.LSTM of the same width to repeat digits after a dormant phase.

    Both get the same sequences and the same number of updates; then both are tested on phases
    longer than any in training. Takes about two minutes on a CPU.

    Example: riglstm demo --seed 1 --test-lengths 10 100
    """

    steps: int = 1200
    """Updates of each model."""
    seed: int = 0
    """Of the weights and of the training sequences; the test sequences are always the same."""
    hidden_size: int = 64
    """Width of both models."""
    num_cells: int = 4
    """Cells that share RigLSTM's width."""
    digits: int = 4
    """L, the digits to remember."""
    symbols: int = 4
    """S, the kinds of digits; guessing gets 1/S of them right."""
    train_length: tuple[int, int] = (5, 10)
    """P, the length of the dormant phase: shortest and longest in training."""
    test_lengths: tuple[int, ...] = (10, 20, 40, 80)
    """Lengths of the dormant phase in the test."""
    test_sequences: int = 500
    """Test sequences at each length."""
    batch_size: int = 64
    """Sequences in an update."""
    lr: float = 1e-2
    """Adam's step size, for both models."""
    clip_norm: float = 1.0
    """Limit of the gradient's norm."""
    update_scale: float | None = None
    """Factor on the logits of RigLSTM's soft update; None: 1/√d. The paper has 1."""
    update_bias: float | None = 4.0
    """Start value of the soft update's bias towards the new state; None: none, as in the paper."""
    device: str = "cpu"
    """Where to train."""
    threads: int = 1
    """CPU threads; products this small gain nothing from more."""


INPUT_SIZE = 16
TEST_SEED = 2**31
"""Far from the seeds of training that anyone would give."""


def run(config: Demo) -> None:
    """Train both, test both, print the table."""
    _check(config)
    try:
        nets = _networks(config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = Console(highlight=False)
    console.print(
        f"copying: {config.digits} digits of {config.symbols} kinds, a dormant phase, the digits "
        f"again; {config.steps} updates of {config.batch_size} sequences for each model"
    )
    table = Table(title=f"digits right, seed {config.seed}", title_justify="left")
    table.add_column("")
    for heading in ("parameters", "seconds", *(f"P = {P}" for P in config.test_lengths)):
        table.add_column(heading, justify="right")
    columns = (
        *(TextColumn("{task.description:<8}"), BarColumn(), TextColumn("{task.fields[said]}")),
        *(TimeRemainingColumn(), TextColumn("left")),
    )
    with _threads(config.threads), Progress(*columns, console=console) as progress:
        tasks = {
            name: progress.add_task(name, total=config.steps, start=False, said="") for name in nets
        }
        for name, net in nets.items():
            task = tasks[name]
            progress.start_task(task)

            def report(loss: float, right: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, said=f"loss {loss:.3f}, {right:4.0%} right")

            seconds = _train(net, config, report)
            parameters = sum(p.numel() for p in net.parameters())
            shares = [f"{share:.1%}" for share in _test(net, config)]
            table.add_row(name, f"{parameters}", f"{seconds:.0f}", *shares)
    console.print(table)
    shortest, longest = config.train_length
    console.print(
        f"P: steps of the dormant phase; in training {shortest} to {longest}. "
        f"Guessing gets {1 / config.symbols:.0%}.\n"
        f"Soft update: update_scale={_update_scale(config):.3g}, update_bias={config.update_bias}; "
        "in the paper 1 and None.\n"
        "This is one seed of a toy problem: it shows that the layer trains,\n"
        "and is no evidence for either model."
    )


def _check(config: Demo) -> None:
    counts = ("steps", "hidden_size", "num_cells", "digits", "symbols", "test_sequences")
    for name in (*counts, "batch_size", "threads"):
        if getattr(config, name) < 1:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} must be at least 1, got {getattr(config, name)}")
    for flag, value in (("lr", config.lr), ("clip-norm", config.clip_norm)):
        if not value > 0:
            raise UsageError(f"--{flag} must be above 0, got {value}")
    if min(config.test_lengths, default=0) < 1:
        raise UsageError(
            f"--test-lengths must be one or more numbers of steps, got {config.test_lengths}"
        )
    shortest, longest = config.train_length
    if not 1 <= shortest <= longest:
        raise UsageError(
            "--train-length must be a shortest and a longest number of steps, from 1 on, "
            f"got {shortest} {longest}"
        )
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"--device must be one that torch can use here, got {config.device!r}: {reason}"
        ) from error


def _networks(config: Demo) -> dict[str, Copier]:
    """Both models; the weights of each depend on the seed alone."""
    sizes = INPUT_SIZE, config.hidden_size
    cores: dict[str, Callable[[], nn.Module]] = {
        "nn.LSTM": lambda: nn.LSTM(*sizes),
        "RigLSTM": lambda: RigLSTM(
            *sizes,
            num_cells=config.num_cells,
            update_scale=_update_scale(config),
            update_bias=config.update_bias,
        ),
    }
    nets = {}
    for name, core in cores.items():
        torch.manual_seed(config.seed)
        nets[name] = Copier(core(), config.symbols, *sizes).to(config.device)
    return nets


def _update_scale(config: Demo) -> float:
    d = config.hidden_size / config.num_cells
    return d**-0.5 if config.update_scale is None else config.update_scale


def _train(net: Copier, config: Demo, report: Callable[[float, float], None]) -> float:
    """Train one model; returns the seconds it took."""
    (shortest, longest), L = config.train_length, config.digits
    gen = torch.Generator().manual_seed(config.seed)

    def draw() -> Batch:
        P = int(torch.randint(shortest, longest + 1, (), generator=gen))
        return copying_batch(L, config.symbols, P, config.batch_size, gen)

    start = time.perf_counter()
    train(
        net,
        draw,
        L,
        steps=config.steps,
        lr=config.lr,
        clip_norm=config.clip_norm,
        report=report,
    )
    return time.perf_counter() - start


def _test(net: Copier, config: Demo) -> list[float]:
    """Share of digits right at each test length, on sequences that never change."""
    L, S, B = config.digits, config.symbols, config.test_sequences
    gen = torch.Generator()
    return [
        accuracy(net, copying_batch(L, S, P, B, gen.manual_seed(TEST_SEED)), L)
        for P in config.test_lengths
    ]


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
