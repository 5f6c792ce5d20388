"""The tables: which jobs are timed against each other, and the rows that come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from riglstm.lab.bench.contestants import REFERENCE, Contestant, job
from riglstm.lab.bench.timing import Job, Meter, Spread, Timing, measure, runs, spread


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
        """How many runs of a job it takes."""
        return len(self.jobs) * runs(self.rounds, self.expected is not None)


def against_lstm(
    table: str, work: str, who: Sequence[Contestant], x: Tensor, rounds: int
) -> Section:
    """All contestants on the same input x (T, B, D); ratios are to the faster nn.LSTM."""
    reference = next(w for w in who if w.name == REFERENCE)
    return Section(
        table,
        work,
        B=x.shape[1],
        jobs=[job(w, work, x) for w in who],
        bases=[w.name for w in who if not w.ours],
        rounds=rounds,
        expected=job(reference, work, x).run,
    )


def growth(table: str, work: str, who: Contestant, xs: Sequence[Tensor], rounds: int) -> Section:
    """One contestant at several lengths; ratios are to the first."""
    jobs = [job(who, work, x)._replace(name=f"T = {x.shape[0]}") for x in xs]
    return Section(table, work, xs[0].shape[1], jobs, [jobs[0].name], rounds)


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
    """Measure a section."""
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
