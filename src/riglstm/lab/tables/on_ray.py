"""Runs on a Ray cluster, of one machine or of many: each is a task with its share of a node.

A task starts the process that `Processes` starts, and asks it to stop in the same way, by the end
of its stdin: whatever ends a task, a node that dies or a driver that is killed, its run saves or is
gone. Ray begins the task again on another node, where the run goes on from its last checkpoint.
All nodes see the folder of the runs, and have this package installed. The driver alone writes rows.

A worker of Ray gets the code of its task by value, with that of `RunProcess`. It would otherwise
import this package, and torch with it, for a process that starts another and waits.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from riglstm.lab.tables import executor
from riglstm.lab.tables.executor import POLL, TO_BEGIN, End, Ended, RunProcess, attend, pickled
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.run import Make
from riglstm.lab.train import progress
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
OVER = ("result.json", "failed.json")
"""Files of a run that is over: its result, or the reason why it has none."""
BY_VALUE = (sys.modules[__name__], executor, progress)
"""Modules whose code is in a task, so that a worker of Ray imports none of ours."""
PASSED = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that runs get from the driver, beside those that begin with RIGLSTM_."""


Outcome: TypeAlias = tuple[str, bool] | None
"""Of a task: its run's error, and whether the run is over; None: it was not begun."""


class Driver(NamedTuple):
    """What a task has to know of the program that asks for its run."""

    folder: str
    """Where it runs: paths of jobs may be relative."""
    token: str
    """A file that it has made beside the runs, for nodes to see."""
    variables: dict[str, str]
    deadline: float
    """As `time.time` counts."""


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
        with connected(self.address) as ray, shown(runs[0].folder.parent) as token:
            driver = Driver(os.getcwd(), token, variables(self.cores), self.deadline.at)
            at_a_time = self._room(ray)
            share = {"num_cpus": self.cores, "num_gpus": self.gpus, "max_retries": TRIES}
            for module in BY_VALUE:
                ray.cloudpickle.register_pickle_by_value(module)
            task = ray.remote(make_run).options(**share)
            tasks = [
                task.remote(driver, run.label, run.folder, pickled(run, make), number < at_a_time)
                for number, run in enumerate(runs)
            ]
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


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to the cluster, which is left as it was found."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray = importlib.import_module("ray")
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


@contextlib.contextmanager
def shown(folder: Path) -> Iterator[str]:
    """A file beside the runs, by which nodes know that they see the driver's folder."""
    path = folder.absolute() / f".ray-{uuid.uuid4().hex}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def variables(cores: int) -> dict[str, str]:
    """What a run's process has in its environment, whatever its node has."""
    own = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(cores))
    if (made_by := commit()) is not None:
        own["RIGLSTM_COMMIT"] = made_by
    given = os.environ.items()
    return own | {k: v for k, v in given if k in PASSED or k.startswith("RIGLSTM_")}


def _end(ray: Any, over: Future[Outcome], run: Planned) -> End | None:
    """What became of a task that is over; None where its run was not begun."""
    try:
        said = over.result()
    except ray.exceptions.TaskCancelledError:
        return None
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return run, lines[-1].strip() if lines else type(error).__name__
    if said is None:
        return None
    words, finished = said
    until = time.monotonic() + SEEN
    while finished and not is_over(run.folder) and time.monotonic() < until:
        time.sleep(POLL)
    return run, words


# The task, on a node: of this package it may use what is in `BY_VALUE` alone.


def make_run(driver: Driver, label: str, folder: Path, job: bytes, first: bool) -> Outcome:
    """Make a run on this node, if enough time is left.

    The first ones are begun in any case: each call gets further.
    """
    if not first and driver.deadline - time.time() < TO_BEGIN:
        return None
    folder = Path(driver.folder, folder)
    if not Path(driver.token).exists():
        error = (
            f"expected a folder that all nodes see, got {folder.parent}, which the node "
            f"{platform.node()} does not; --out must name one on a shared file system"
        )
        return error, False
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE)
        variables = {**os.environ, **driver.variables}
        process = RunProcess(label, folder, job, variables, driver.folder)
        stopped, error = _wait(process)
        finished = is_over(folder)
        # One that ends well, and has not finished its run, has found the folder held by another.
        if stopped or error or finished or driver.deadline - time.time() < TO_BEGIN:
            break
    return error, finished


def is_over(folder: Path) -> bool:
    """True if a run's folder holds its result, or the reason why there is none."""
    return any((folder / name).exists() for name in OVER)


def _wait(process: RunProcess) -> tuple[bool, str]:
    """Wait for the end of a run's process; whether it was asked to stop, and its error.

    Ray cancels a task by KeyboardInterrupt, which Python raises between two looks.
    """
    stopped = False
    with ThreadPoolExecutor(1) as thread:
        heard = thread.submit(process.hear)
        while not heard.done():
            try:
                wait([heard], POLL)
            except KeyboardInterrupt:
                stopped = True
                process.ask_to_stop()
    return stopped, heard.result()
