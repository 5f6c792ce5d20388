"""Beyond one machine: tables on Ray, and one run on several nodes by torchrun.

The nodes are two network namespaces of this machine: real processes, real sockets.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import nodes
from helpers import python
from nodes import Node
from riglstm.lab.tables.plan import plan
from riglstm.lab.tables.result import HEAD
from train_helpers import last_step, weights_of_both

pytestmark = pytest.mark.slow
MISSING = nodes.missing()
WITHOUT_RAY = find_spec("ray") is None and "needs ray, which is not installed"

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
    "RAY_USAGE_STATS_ENABLED": "0",
    # A cluster answers to those who know its token: here one that is made for these tests.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
TABLE = ("reproduce", "copying", "--models", "lstm", "--seeds", "2", "--results", "rows.csv")
"""Four runs of the quick copying table."""
OTHER = ("seconds", "commit")
"""Columns that may differ where a run is made twice."""


def wait_until(done: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until, "it takes too long"
        assert process is None or process.poll() is None, "it ended too early"
        time.sleep(0.05)


@pytest.fixture
def pair() -> Iterator[Sequence[Node]]:
    if MISSING:
        pytest.skip(MISSING)
    with nodes.two_nodes() as made:
        yield made


@pytest.fixture
def cluster(pair: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """A Ray cluster of two nodes, with one core each."""
    if WITHOUT_RAY:
        pytest.skip(WITHOUT_RAY)
    # The names of Ray's sockets are long, and may have a hundred characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus", "1")
        ray += ("--object-store-memory", str(80 * 2**20), "--disable-usage-stats")
        for node in pair:
            join = ("--address", f"{pair[0].address}:6379")
            if node == pair[0]:
                join = ("--head", "--port", "6379", "--include-dashboard", "false")
                join += ("--temp-dir", folder)
            node.run(*ray, *join, "--node-ip-address", node.address, env=ENVIRONMENT)
        yield pair
        for node in reversed(pair):
            node.kill()


def start(node: Node, path: Path, *flags: str) -> subprocess.Popen[str]:
    """The table's command, on a node of a Ray cluster."""
    command = (sys.executable, "-m", "riglstm", *TABLE, "--on", "ray", *flags)
    # A driver finds its cluster by this variable.
    env = {**ENVIRONMENT, "RAY_ADDRESS": f"{nodes.SUBNET}.1:6379"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return node.start(*command, cwd=path, env=env, **pipes)


def rows(path: Path) -> list[tuple[str, ...]]:
    """The rows of a table, in order."""
    with (path / "rows.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    kept = [name for name in HEAD if name not in OTHER]
    return sorted(tuple(row[name] for name in kept) for row in found)


def figures(path: Path) -> dict[str, list[str]]:
    """Every line of every run's log, but for times."""
    return {
        file.parent.name: [
            line for line in file.read_text().splitlines() if "per_second" not in line
        ]
        for file in (path / "runs").glob("*/metrics.csv")
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same table, one run after another in one process."""
    path = tmp_path_factory.mktemp("alone")
    python("-m", "riglstm", *TABLE, "--device", "cpu", cwd=path, env=ENVIRONMENT, check=True)
    return path


def trained_on(node: Node, path: Path) -> list[Path]:
    """Folders of runs that a node trains now."""
    runs = plan("copying", ["lstm"], 2, "quick", path / "runs")
    return [run.folder for run in runs if node.processes(f"ray::{run.label}")]


def test_two_ray_nodes_lose_no_run_to_a_dead_node_a_stop_or_a_killed_driver(
    cluster, alone, tmp_path
):
    first, second = cluster
    driver = start(first, tmp_path)
    # Both nodes train, and the second one dies in the middle of a run that has a checkpoint.
    wait_until(lambda: bool(trained_on(first, tmp_path)), driver)
    wait_until(lambda: any(last_step(p) >= 150 for p in trained_on(second, tmp_path)), driver)
    lost = trained_on(second, tmp_path)
    second.kill()
    assert any((path / "config.json").exists() for path in lost)
    # Its run goes on elsewhere, after those that wait. Ctrl-C lets what is trained then save.
    results = lambda: list((tmp_path / "runs").glob("*/result.json"))  # noqa: E731
    there = len(results())
    wait_until(lambda: len(results()) > there, driver)
    wait_until(lambda: any(last_step(p) >= 150 for p in trained_on(first, tmp_path)), driver)
    (stopped,) = trained_on(first, tmp_path)
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate(timeout=120)
    assert "stopped, and all runs are saved; go on with: " in said
    assert not (stopped / "riglstm.lock").exists(), "it was killed"
    # The next driver is killed.
    driver = start(first, tmp_path)
    wait_until(lambda: any(last_step(p) >= 250 for p in trained_on(first, tmp_path)), driver)
    driver.kill()
    driver.communicate()
    assert len(results()) < 4
    again = start(first, tmp_path)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert rows(tmp_path) == rows(alone)
    assert figures(tmp_path) == figures(alone)


TRAIN = (
    *("train", "copying", "--model", "lstm", "--hidden-size", "8", "--L", "2", "--P", "3"),
    *("--digits", "2", "--input-size", "4", "--batch-size", "4", "--conditions", "P=4"),
    *("--validation-size", "8", "--test-size", "8", "--device", "cpu", "--no-tensorboard"),
    *("--updates", "80", "--lr", "1e-2", "--evaluate-every", "12", "--checkpoint-every", "9"),
    *("--log-every", "7", "--out", "run", "--resume"),
)
RANK = (str(Path(__file__).with_name("train_ranks.py")), *TRAIN)


def torchrun(node: Node, path: Path) -> subprocess.Popen[str]:
    """Start a node's part of the run, as docs/many-gpus.md says."""
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes.SUBNET}.1:29400")
    how = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "test", "--max-restarts", "3")
    # A real node has a name that leads to its address; a namespace has the machine's.
    host = str(node.address == f"{nodes.SUBNET}.1")
    here = ("--local-addr", node.address, "--rdzv-conf", f"is_host={host}")
    return node.start(
        *(sys.executable, "-m", "torch.distributed.run", *how, *meet, *here, *RANK),
        cwd=path,
        env={
            **ENVIRONMENT,
            "GLOO_SOCKET_IFNAME": f"cable{int(node.address[-1]) - 1}",
            # Shared, the store of the first round is one that a node which comes later never finds.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the same run in one process."""
    path = tmp_path_factory.mktemp("one")
    python(*RANK, cwd=path, env=ENVIRONMENT, check=True)
    found: dict[str, torch.Tensor] = torch.load(path / "rank-0.pt")
    return found


@pytest.mark.parametrize("lost", ["nothing", "a rank", "a node"])
def test_two_torchrun_nodes_train_one_run_whatever_is_killed(lost, pair, one, tmp_path):
    started = [torchrun(node, tmp_path) for node in pair]
    if lost != "nothing":
        wait_until(lambda: last_step(tmp_path / "run") >= 28, started[0])
    if lost == "a rank":
        ranks = pair[1].processes(RANK[0]).items()
        # Not the agent, which starts it again.
        for pid in (pid for pid, words in ranks if "torch.distributed.run" not in words):
            os.kill(pid, signal.SIGKILL)
    elif lost == "a node":
        pair[1].kill()
        started[1].communicate()
        started[1] = torchrun(pair[1], tmp_path)
    for process in started:
        said, _ = process.communicate(timeout=180)
        assert process.returncode == 0, said
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(record.get("resumed", [])) == (lost != "nothing")
    found = weights_of_both(tmp_path)
    for name, weight in one.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)
