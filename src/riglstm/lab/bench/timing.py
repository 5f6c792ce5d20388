"""How pieces of work are timed against each other, in interleaved rounds.

Every one runs once in each round, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

Key = TypeVar("Key")

WARM_UPS = 20
"""Calls on a GPU before its memory is measured."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of some values, and low and high, the 10 % and 90 % points beside it."""
    points = torch.tensor((0.5, 0.1, 0.9), dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return dict(zip(("median", "low", "high"), found, strict=True))


class Meter(NamedTuple):
    """How a device is measured."""

    seconds: Callable[[Callable[[], object]], float]
    peak_bytes: Callable[[Callable[[], object]], int]
    """Memory at the highest point of a call, beyond what was held before it."""


def interleave(
    work: Mapping[Key, Callable[[], object]], meter: Meter, rounds: int
) -> dict[Key, list[float]]:
    """The seconds of each piece of work, one figure a round."""
    seconds: dict[Key, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            seconds[name].append(meter.seconds(run))
    return seconds


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
