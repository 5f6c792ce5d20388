"""How jobs are timed against each other: compared, warmed up, then run in interleaved rounds.

Every job runs once in each round, so that whatever else the machine does falls on all of them;
what counts is the ratio within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference to what is expected, as a share of its largest value: float32, long sums."""
AGREEING = 0.95
"""Least share of sequences within TOLERANCE: rounding may turn a near tie into another choice,
and from there on that sequence is another one."""
WARM_UPS = 20
"""Calls on a GPU before anything is measured."""


class Job(NamedTuple):
    """One timed piece of work."""

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    """Returns results with sequences on dimension 1, for the comparison."""
    steps: int
    """Time steps in it."""
    ours: bool = True
    """Whether it must give what is expected."""
    check: Callable[[], tuple[float, float]] | None = None
    """Called before it is timed, where nothing else is expected; returns what `compare` does."""
    least: float = AGREEING
    """Share of sequences that must agree."""


class Timing(NamedTuple):
    """The measurements of one job."""

    seconds: tuple[float, ...]
    """One for each round; empty if the job does not give what is expected."""
    peak_bytes: int
    difference: float | None
    """As in `TOLERANCE`, over the sequences that agree; None: not compared."""
    agreeing: float | None
    """Share of the sequences that agree."""


@dataclass(frozen=True)
class Spread:
    """A median and the 10 % and 90 % points beside it."""

    median: float
    low: float
    high: float


class Meter(NamedTuple):
    """How a device is measured."""

    seconds: Callable[[Callable[[], object]], float]
    peak_bytes: Callable[[Callable[[], object]], int]
    """Memory at the highest point of a call, beyond what was held before it."""


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cpu_peak_bytes(run: Callable[[], object]) -> int:
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


def _cuda_seconds(run: Callable[[], object]) -> float:
    """Between two events around the call, what the host does in it included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _cuda_peak_bytes(run: Callable[[], object]) -> int:
    """After the first calls, in which kernels are compiled and the clock rises."""
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


METERS: dict[str, Meter] = {
    "cpu": Meter(_cpu_seconds, _cpu_peak_bytes),
    "cuda": Meter(_cuda_seconds, _cuda_peak_bytes),
}


def compare(
    got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = TOLERANCE
) -> tuple[float, float]:
    """Largest difference among the sequences that agree, and the share of those that do.

    A difference is a share of the largest value expected. NaN agrees with nothing.
    """
    shares = [
        (g - w).abs().amax(dim=(0, 2)) / w.abs().max() for g, w in zip(got, want, strict=True)
    ]
    worst = torch.stack(shares).amax(dim=0)  # (B)
    agree = worst <= tolerance
    return float((worst[agree] if agree.any() else worst).max()), float(agree.float().mean())


def measure(
    jobs: Sequence[Job],
    meter: Meter,
    *,
    rounds: int,
    expected: Callable[[], tuple[Tensor, ...]] | None = None,
    tick: Callable[[str], None] = lambda name: None,
) -> list[Timing]:
    """Compare our jobs with what is expected, measure memory, then time all that agree.

    `tick` gets the name of a job before each of its `runs(rounds, compared)`.
    """
    want = None if expected is None else expected()
    checks: list[tuple[float, float] | None] = []
    peaks: list[int] = []
    for job in jobs:
        check = None if job.check is None else job.check()
        if want is not None:
            tick(job.name)
            got = job.run()
            check = compare(got, want) if job.ours else None
        tick(job.name)
        peaks.append(meter.peak_bytes(job.run))
        checks.append(check)
    seconds: list[list[float]] = [[] for _ in jobs]
    for _ in range(rounds):
        for job, check, taken in zip(jobs, checks, seconds, strict=True):
            tick(job.name)
            if check is None or check[1] >= job.least:
                taken.append(meter.seconds(job.run))
    return [
        Timing(tuple(taken), peak, *(check or (None, None)))
        for taken, peak, check in zip(seconds, peaks, checks, strict=True)
    ]


def runs(rounds: int, compared: bool) -> int:
    """The number of times that `measure` runs a job, warm-up included."""
    return rounds + (2 if compared else 1)


def spread(values: Sequence[float]) -> Spread:
    """The median and the 10 % and 90 % points of some values."""
    points = torch.tensor((0.5, 0.1, 0.9), dtype=torch.float64)
    return Spread(*torch.tensor(values, dtype=torch.float64).quantile(points).tolist())


class Section(NamedTuple):
    """Jobs that are timed against each other: a part of a table."""

    table: str
    work: str
    B: int
    jobs: list[Job]
    bases: list[str]
    """Names of jobs; ratios are to the fastest of them."""
    rounds: int
    expected: Callable[[], tuple[Tensor, ...]] | None = None

    @property
    def runs(self) -> int:
        """The number of runs of all its jobs."""
        return len(self.jobs) * runs(self.rounds, self.expected is not None)


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    table: str
    work: str
    name: str
    B: int
    T: int
    ms: Spread | None
    """Milliseconds a step; None: not timed, because it differs from the reference."""
    base: str
    """What the ratio is to."""
    ratio: Spread | None
    """Over the rounds, of the ratio in a round."""
    peak_mb: float
    """Tensors held at the highest point of a run, beyond weights and input."""
    difference: float | None
    """Largest difference to the reference, as a share of its largest value; None: not compared."""
    agreeing: float | None
    """Share of the sequences that agree with the reference."""
    least: float
    """Of which so many must."""
    rounds: int


def rows(section: Section, meter: Meter, tick: Callable[[str], None]) -> list[Row]:
    """Measure the jobs of a section."""
    timings = measure(
        section.jobs,
        meter,
        rounds=section.rounds,
        expected=section.expected,
        tick=tick,
    )
    pairs = list(zip(section.jobs, timings, strict=True))
    base, base_timing = min(
        (pair for pair in pairs if pair[0].name in section.bases),
        key=lambda pair: spread(_ms(*pair)).median,
    )
    return [_row(section, base.name, _ms(base, base_timing), *pair) for pair in pairs]


def _ms(job: Job, timing: Timing) -> list[float]:
    return [1e3 * seconds / job.steps for seconds in timing.seconds]


def _row(section: Section, base: str, base_ms: list[float], job: Job, timing: Timing) -> Row:
    ms = _ms(job, timing)
    ratios = [a / b for a, b in zip(ms, base_ms, strict=True)] if ms else []
    return Row(
        table=section.table,
        work=section.work,
        name=job.name,
        B=section.B,
        T=job.steps,
        ms=spread(ms) if ms else None,
        base=base,
        ratio=spread(ratios) if ms else None,
        peak_mb=timing.peak_bytes / 1e6,
        difference=timing.difference,
        agreeing=timing.agreeing,
        least=job.least,
        rounds=len(ms),
    )
