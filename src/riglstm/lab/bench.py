"""RigLSTM beside nn.LSTM: the sizes, the ways each is run, and the figures of one size.

On a GPU each layer is called plainly and replayed from a CUDA graph: cuDNN launches many kernels a
sequence, so that a plain call of it measures the host as much as the GPU. Every piece of work runs
once in each round, so that whatever else the machine does falls on all of them.

Shapes: T steps, B sequences, D input features.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from riglstm.checks import fitting_cells
from riglstm.lab.train.config import Precision, autocast, products
from riglstm.layer import RigLSTM
from riglstm.scan import resolve

Run: TypeAlias = Callable[[], tuple[Tensor, ...]]
Key = TypeVar("Key")

LSTM, OURS = "nn.LSTM", "RigLSTM"
CAPTURED, ONEDNN_OFF = " captured", ", oneDNN off"
FIGURES = (LSTM, LSTM + CAPTURED, LSTM + ONEDNN_OFF, OURS, OURS + CAPTURED)
"""The names of what is timed, in the order of columns."""

WARM_UPS = {"cpu": 1, "cuda": 5}
"""Untimed calls: kernels are compiled, launches cached, and a GPU's clock rises."""

LIMITS: dict[Precision, float] = {"tf32": 2e-3, "bf16": 2e-2, "fp32": 1e-4}
"""How far from what is expected outputs may be, as a share of the largest."""
AGREEING = 0.75
"""Least share of sequences within the limit: rounding may turn a near tie into another choice, and
from there on that sequence is another one."""
STEPS, SEQUENCES = 2, 16
"""Steps, and least sequences, that are compared with float64 before ours is timed."""


@dataclass(frozen=True)
class Case:
    """A size at which both are timed."""

    hidden_size: int
    B: int
    T: int = 196
    input_size: int | None = None
    """None: as wide as the layer."""
    precision: Precision = "fp32"
    works: tuple[str, ...] = ("inference", "training")
    captured: bool = False
    """Whether they are also replayed from a CUDA graph."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of RigLSTM."""


def _small(hidden_size: int, **options: str) -> Case:
    """A small batch of few features, in training."""
    return Case(hidden_size, 32, 100, 20, "tf32", ("training",), options=options)


_on_gpu = partial(Case, captured=True)
_RULES: tuple[dict[str, str], ...] = ({"views": "soft"}, {"cells": "random"})

CASES: dict[str, dict[str, tuple[Case, ...]]] = {
    "cpu": {
        "speed": (Case(600, 64, 32), *(Case(H, B, 100, 20) for H in (60, 64) for B in (1, 32))),
    },
    "cuda": {
        "speed": (
            *(_on_gpu(600, 64, precision=p) for p in LIMITS),
            *(_on_gpu(600, B, precision=p) for B in (1, 16, 256, 512) for p in ("tf32", "bf16")),
            *(
                _on_gpu(H, 64, precision=p)
                for H in (60, 128, 256, 1024, 1200)
                for p in ("tf32", "bf16")
            ),
        ),
        "widths": tuple(map(_small, (32, 60, 64, 100, 128, 256, 512, 600, 1000, 1200))),
        "rules": tuple(_small(H, **rule) for H in (60, 256) for rule in _RULES),
    },
}
"""By kind of device and table."""
QUICK: dict[str, dict[str, tuple[Case, ...]]] = {
    kind: {table: (Case(12, 4, 4, captured=kind == "cuda"),) for table in tables}
    for kind, tables in CASES.items()
}


def measure(
    table: str, case: Case, work: str, device: torch.device, rounds: int, seed: int = 0
) -> dict[str, Any]:
    """A case timed, as a row for a file; what fails is recorded, and the rest is timed.

    `us`: microseconds a step, over the rounds, by a name of FIGURES; `failed`: why a figure is
    missing, by the same names; `backend`: what RigLSTM's `auto` runs.
    """
    D = case.hidden_size if case.input_size is None else case.input_size
    backend, failed, ready = "", dict[str, str](), dict[str, Run]()
    seconds: dict[str, list[float]] = {}
    torch.manual_seed(seed)
    try:
        ours = RigLSTM(D, case.hidden_size, device=device, **case.options)
        dtype = next(ours.parameters()).dtype
        backend = resolve(ours.backend, device, ours.selection, ours.cell_size, dtype, case.B)
        x = torch.randn(case.T, case.B, D, device=device, requires_grad=True)
        with products(case.precision, device):
            for name, make in _ways(case, work, ours, x).items():
                try:
                    run = make()
                    for _ in range(WARM_UPS[device.type]):
                        run()
                    ready[name] = run
                except Exception as error:
                    failed[name] = _said(error)
            seconds = interleave(ready, SECONDS[device.type], rounds)
    except Exception as error:
        failed |= dict.fromkeys(ready or (OURS,), _said(error))
    us = {name: spread([1e6 * s / case.T for s in found]) for name, found in seconds.items()}
    return {
        "table": table,
        "work": work,
        "hidden_size": case.hidden_size,
        "num_cells": fitting_cells(case.hidden_size),
        "input_size": D,
        "B": case.B,
        "T": case.T,
        "precision": case.precision,
        "options": dict(case.options),
        "backend": backend,
        "us": us,
        "failed": failed,
    }


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _ways(case: Case, work: str, ours: RigLSTM, x: Tensor) -> dict[str, Callable[[], Run]]:
    """Each way in which each layer is run; ours has been found right."""
    device, precision = x.device, case.precision
    # cuDNN is fastest in bfloat16 itself: autocast would copy its weights at each call.
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    lstm = in_one_piece(nn.LSTM(x.shape[2], case.hidden_size, device=device, dtype=dtype))
    for layer in (ours, lstm):
        # Without gradients, too, cuDNN saves all that a backward pass needs while it trains.
        layer.train(work == "training")
    check(ours, x.shape[1], precision, work == "training")
    run_lstm = partial(WORK[work], lstm, x.detach().to(dtype).requires_grad_())

    def run_ours() -> tuple[Tensor, ...]:
        with autocast(precision, device):
            return WORK[work](ours, x)

    def replayed(run: Run) -> Run:
        again = captured(run)
        _agree(again()[0], run()[0], precision, "a graph's output and the plain call's")
        return again

    ways: dict[str, Callable[[], Run]] = {LSTM: lambda: run_lstm, OURS: lambda: run_ours}
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        # By torch's own kernels of a CPU, which are faster for some sizes.
        ways[LSTM + ONEDNN_OFF] = lambda: onednn(False)(run_lstm)
    if case.captured:
        ways[LSTM + CAPTURED] = lambda: replayed(run_lstm)
        ways[OURS + CAPTURED] = lambda: replayed(run_ours)
    return ways


def infer(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """One call on the whole sequence, without gradients."""
    with torch.no_grad():
        return (layer(x)[0],)


def train(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Forward, and backward to the input and all weights."""
    y, _ = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))


WORK: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, ...]]] = {
    "inference": infer,
    "training": train,
}


def captured(run: Run) -> Run:
    """The work as one CUDA graph: a call replays it, into the same tensors."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    # This context also puts the stream back where a capture fails.
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        # What autograd's thread does is part of it, what others do is no mistake.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = run()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


@contextlib.contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    """Switch oneDNN. torch.backends.mkldnn.flags would also set, and warn about, TF32."""
    before, *_ = torch.backends.mkldnn.set_flags(enabled, None, None, None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before, None, None, None)


def in_one_piece(lstm: nn.LSTM) -> nn.LSTM:
    """The layer with its weights as cuDNN wants them, in bfloat16 as well.

    There nn.LSTM leaves them in pieces, as its list of cuDNN's dtypes is older than cuDNN's
    bfloat16, and they are copied at each call: a handicap that is not cuDNN's.
    """
    known = torch.backends.cudnn.CUDNN_TENSOR_DTYPES
    before = set(known)
    known.add(torch.bfloat16)
    try:
        lstm.flatten_parameters()
    finally:
        known.intersection_update(before)
    return lstm


def check(layer: RigLSTM, B: int, precision: Precision, training: bool) -> None:
    """Raise ValueError if the first steps of a layer, of B sequences, are not those of float64."""
    device = next(layer.parameters()).device
    parts = torch.randn(-(-SEQUENCES // B), STEPS, B, layer.input_size, device=device)
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    with torch.set_grad_enabled(training):
        torch.manual_seed(0)  # `random` rules draw the same for both.
        with autocast(precision, device):
            got = torch.cat([layer(part)[0] for part in parts], dim=1)
        torch.manual_seed(0)
        want = torch.cat([exact(part.double())[0] for part in parts], dim=1)
    _agree(got, want, precision, "the first steps and float64's")


def _agree(got: Tensor, want: Tensor, precision: Precision, what: str) -> None:
    """Compare outputs (T, B, H), sequence by sequence. NaN agrees with nothing."""
    worst = (got.detach() - want.detach()).abs().amax(dim=(0, 2)) / want.detach().abs().max()
    share = float((worst <= LIMITS[precision]).double().mean())
    if share < AGREEING:
        raise ValueError(
            f"{what} must agree within {LIMITS[precision]:g} in {AGREEING:.0%} of the sequences, "
            f"got {share:.0%}, and {float(worst.max()):.1g}"
        )


def ratios(us: Mapping[str, float]) -> dict[str, float | None]:
    """Our time over nn.LSTM's, by medians; below one RigLSTM is faster. None: one is missing.

    "best" has each in the fastest way that it was run.
    """

    def fastest(who: str) -> float | None:
        return min((value for name, value in us.items() if name.startswith(who)), default=None)

    pairs = {
        "plain": (us.get(OURS), us.get(LSTM)),
        "captured": (us.get(OURS + CAPTURED), us.get(LSTM + CAPTURED)),
        "best": (fastest(OURS), fastest(LSTM)),
    }
    return {
        name: a / b if a is not None and b is not None else None for name, (a, b) in pairs.items()
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of some values, and low and high, the 10 % and 90 % points beside it."""
    points = torch.tensor((0.5, 0.1, 0.9), dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return dict(zip(("median", "low", "high"), found, strict=True))


def interleave(
    work: Mapping[Key, Callable[[], object]],
    seconds: Callable[[Callable[[], object]], float],
    rounds: int,
) -> dict[Key, list[float]]:
    """The seconds of each piece of work, one figure a round."""
    found: dict[Key, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            found[name].append(seconds(run))
    return found


def by_clock(clock: Callable[[], float], run: Callable[[], object]) -> float:
    """The seconds of a call by a clock."""
    start = clock()
    run()
    return clock() - start


def _cuda_seconds(run: Callable[[], object]) -> float:
    """Between two events around the call, what the host does in it included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


SECONDS: dict[str, Callable[[Callable[[], object]], float]] = {
    "cpu": partial(by_clock, time.perf_counter),
    "cuda": _cuda_seconds,
}
"""The seconds of a call, by device."""
