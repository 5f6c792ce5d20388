"""Runs on a Ray cluster, of one machine or of many: each is a task with its share of a node.

`attempt` makes the run in the worker's own process. Ray cancels a task as Ctrl-C would: the run
saves and ends. A task whose node dies begins again on another, where the run goes on from its last
checkpoint. All nodes see the folder of the runs, and have this package installed. The driver alone
writes rows.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from riglstm.lab.tables.executor import POLL, TO_BEGIN, End, Ended, attend, in_words
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.run import Make, attempt
from riglstm.lab.train.folder import commit
from riglstm.lab.train.progress import say
from riglstm.lab.train.stopping import NEVER, Deadline

HERE = "ray"
"""The address of this machine's cluster, or of RAY_ADDRESS; one is begun where there is none."""
TRIES = 5
"""Times that a run is begun again whose node was lost, or whose folder another process holds."""
PAUSE = 3.0
"""Seconds before such a folder is tried again: the process of a lost driver may yet be saving."""
SEEN = 60.0
"""Seconds after which a network file system shows what another node has written."""
OBJECTS = 80 * 2**20
"""Bytes of the object store of a cluster that is begun here: tasks give and take a few lines."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Lines of two runs may be alike.
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    # What a run without a share of a GPU may see is said by --device.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
PASSED = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that runs get from the driver, beside those that begin with RIGLSTM_."""


Outcome: TypeAlias = tuple[str, bool] | None
"""Of a task: its run's error, and whether the run is over; None: it was not begun."""


@dataclass(frozen=True)
class OnRay:
    """As many runs at a time as the nodes of a cluster have room for."""

    address: str = HERE
    """Or ray://HOST:PORT."""
    gpus: float = 0.0
    """Share of a GPU for each run."""
    cores: int = 1
    """Cores for each run, and its threads."""
    deadline: Deadline = NEVER

    def run(self, runs: Sequence[Planned], make: Make, ended: Ended) -> None:
        """Make runs."""
        if not runs:
            return
        runs[0].folder.parent.mkdir(parents=True, exist_ok=True)
        with connected(self.address) as ray:
            at_a_time = self._room(ray)
            task = ray.remote(
                num_cpus=self.cores,
                num_gpus=self.gpus,
                max_retries=TRIES,
                # A process that has made a run on a GPU ends, and frees what it holds there; on
                # cores it makes the next one, without loading torch again.
                max_calls=int(self.gpus > 0),
                runtime_env={"env_vars": self._variables()},
            )(make_run)
            tasks = []
            for number, run in enumerate(runs):
                # The first ones are begun in any case: each call gets further.
                begin_by = NEVER if number < at_a_time else self.deadline
                asked = (run, make, sys.argv, os.getcwd(), begin_by)
                tasks.append(task.options(name=run.label).remote(*asked))
            of = {task.future(): run for task, run in zip(tasks, runs, strict=True)}

            def close(at_once: bool) -> None:
                for task in tasks:
                    ray.cancel(task, force=at_once)

            attend(set(of), lambda over: _end(ray, over, of[over]), close, ended, self.deadline)

    def _room(self, ray: Any) -> int:
        """How many runs the cluster has room for now; nodes may come and go."""
        there = ray.cluster_resources()
        cores, gpus = there.get("CPU", 0), there.get("GPU", 0)
        say(f"Ray: {cores:g} cores and {gpus:g} GPUs; a run takes {self.cores} and {self.gpus:g}")
        return max(1, int(min(cores / self.cores, gpus / self.gpus if self.gpus else cores)))

    def _variables(self) -> dict[str, str]:
        """What a run has in its environment, whatever its node has."""
        own = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(self.cores))
        if (made_by := commit()) is not None:
            own["RIGLSTM_COMMIT"] = made_by
        given = os.environ.items()
        return own | {k: v for k, v in given if k in PASSED or k.startswith("RIGLSTM_")}


def imported() -> Any:
    """Ray, which reads some of `SETTINGS` when it is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    return importlib.import_module("ray")


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to the cluster, which is left as it was found."""
    ray = imported()
    how: dict[str, Any] = {"log_to_driver": True, "logging_level": "ERROR"}
    try:
        ray.init("auto" if address == HERE else address, **how)
    except ConnectionError as error:
        if address != HERE or "RAY_ADDRESS" in os.environ:
            where = address if address != HERE else os.environ["RAY_ADDRESS"]
            raise ConnectionError(
                f"--on ray needs a cluster that answers at {where}, got none ({error}); "
                "`ray start --head` begins one"
            ) from None
        ray.init("local", include_dashboard=False, object_store_memory=OBJECTS, **how)
    try:
        yield ray
    finally:
        ray.shutdown()


def _end(ray: Any, task: Future[Outcome], run: Planned) -> End | None:
    """What became of a task that is over; None where its run was not begun."""
    try:
        said = task.result()
    except ray.exceptions.TaskCancelledError:
        return None
    except ray.exceptions.RayError as error:
        say(f"{run.label}: {error}")
        lines = [line for line in str(error).splitlines() if line.strip()]
        return run, lines[-1].strip() if lines else type(error).__name__
    if said is None:
        return None
    words, over = said
    until = time.monotonic() + SEEN
    while over and not _is_over(run) and time.monotonic() < until:
        time.sleep(POLL)
    if over and not _is_over(run):
        words = f"its node made it, and {run.folder} is not seen here; --out must be shared"
    return run, words


def _is_over(run: Planned) -> bool:
    return run.state in ("done", "failed")


def make_run(
    run: Planned, make: Make, command: list[str], place: str, begin_by: Deadline
) -> Outcome:
    """Make a run on this node, if there is time to begin it; `place`: where the driver works."""
    if begin_by.left < TO_BEGIN:
        return None
    root = Path(place, run.folder).parent
    if not root.is_dir():
        error = (
            f"expected a folder that all nodes see, got {root}, which the node "
            f"{platform.node()} does not; --out must name one on a shared file system"
        )
        return error, False
    try:
        os.chdir(place)
        sys.argv = command
        for number in range(TRIES):
            if number:
                time.sleep(PAUSE)
            attempt(run, make)
            # Else it has found the folder held by another.
            if _is_over(run):
                break
    except KeyboardInterrupt as stop:
        say(str(stop) or "stopped; what is done, or was saved, stays so")
    except Exception as error:
        said = in_words(error)
        if said is None:
            raise
        return said, False
    return "", _is_over(run)
