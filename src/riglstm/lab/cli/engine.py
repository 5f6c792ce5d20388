"""The flags that say what makes many runs: this machine, or a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from riglstm.lab.cli import UsageError, flags
from riglstm.lab.tables import on_ray
from riglstm.lab.tables.executor import Executor
from riglstm.lab.train.stopping import Deadline

PROCESSES = "processes"


@dataclass(frozen=True)
class Engine:
    """What makes the runs."""

    on: str = PROCESSES
    """processes of this machine; ray: its Ray cluster, or that of RAY_ADDRESS, begun where there is
    none; or the Ray cluster ray://HOST:PORT. All nodes of a cluster have to see --out."""
    gpus_per_run: float = 0.0
    """Share of a GPU that each run takes on Ray, such as 0.25; 0: it trains on cores."""
    cores_per_run: int = 1
    """Cores that each run takes on Ray, and its threads."""


class Place(NamedTuple):
    """Where runs are made."""

    executor: Executor | None
    """None: on this machine."""
    jobs: int
    """How many share a device."""
    device: str


def place(engine: Engine, jobs: int, device: str, deadline: Deadline) -> Place:
    """Where the runs of a command are made; refuses what does not go together."""
    flags.check_at_least("jobs", jobs, 1)
    flags.check_at_least("cores_per_run", engine.cores_per_run, 1)
    share = engine.gpus_per_run
    if engine.on == PROCESSES:
        if share or engine.cores_per_run != 1:
            raise UsageError(
                "--gpus-per-run and --cores-per-run are shares of a Ray cluster, got "
                f"--on {PROCESSES}; use --jobs, or --on ray"
            )
        return Place(None, jobs, device)
    if engine.on != on_ray.HERE and not engine.on.startswith("ray://"):
        raise UsageError(f"--on must be {PROCESSES}, ray or ray://HOST:PORT, got {engine.on!r}")
    if jobs != 1:
        raise UsageError(
            f"--jobs {jobs} is for one machine; with --on ray, --gpus-per-run or --cores-per-run "
            "say how many runs a node has room for"
        )
    if not 0 <= share <= 1:
        raise UsageError(f"--gpus-per-run must be from 0 to 1, got {share}")
    kind = "cuda" if share else "cpu"
    if device not in ("auto", kind):
        raise UsageError(
            f"--device must be auto or {kind} with --gpus-per-run {share:g}, got {device}: Ray "
            "gives a run its part of a GPU, or none"
        )
    on_ray.available()
    executor = on_ray.OnRay(engine.on, share, engine.cores_per_run, deadline)
    return Place(executor, int(1 / share + 1e-9) if share else 1, kind)
