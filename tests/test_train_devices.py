"""Several processes share a run: on loopback, on a CPU."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import free_port, python
from riglstm.lab.train.stopping import Interrupted
from train_helpers import assert_same, finish, last_step, outcome, start, weights_of_both
from train_task import QUICK, Halves, network, slowly, train

pytestmark = pytest.mark.slow


def worker(rank: int, port: int, target: Callable[..., None], *arguments: object) -> None:
    """As torchrun starts it."""
    torch.set_num_threads(1)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    target(*arguments)


def both(target: Callable[..., None], *arguments: object) -> list[ForkServerProcess]:
    """Two processes of one run."""
    port = free_port()
    return [start(worker, rank, port, target, *arguments) for rank in (0, 1)]


def shared(path: Path, dropout: bool = True, batch_size: int = 8, flood: float = 0.0) -> None:
    """Train, and leave what each process has."""
    task = Halves(batch_size=batch_size, twist=slowly)
    net = network(task)
    net.dropout = net.dropout if dropout else nn.Identity()
    rank = os.environ["RANK"]
    try:
        config = replace(QUICK, flood=flood)
        train(path / "run", config, task=task, net=net, resume=True)
    except Interrupted:
        sys.exit(130)
    except ValueError as error:
        (path / f"error-{rank}").write_text(str(error))
        sys.exit(2)
    torch.save(net.state_dict(), path / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes, left alone."""
    path = tmp_path_factory.mktemp("pair")
    assert [finish(process) for process in both(shared, path)] == [0, 0]
    return path


@pytest.mark.parametrize("flood", [0.0, 0.6])
def test_two_processes_end_with_the_same_weights_close_to_those_of_one(flood, tmp_path):
    # Each process drops other things, so with dropout two would not be one. The flood is above the
    # loss of one half of many a batch, and below that of the other.
    assert [finish(process) for process in both(shared, tmp_path, False, 8, flood)] == [0, 0]
    net = network(Halves())
    net.dropout = nn.Identity()
    train(tmp_path / "one", replace(QUICK, flood=flood), net=net)
    for name, weight in weights_of_both(tmp_path).items():
        torch.testing.assert_close(net.state_dict()[name], weight, rtol=0, atol=1e-5)
    one, two = outcome(tmp_path / "one"), outcome(tmp_path / "run")
    assert one["files"] == two["files"]
    for a, b in zip(one["metrics"][1:], two["metrics"][1:], strict=True):
        (*name_a, value_a), (*name_b, value_b) = a.split(","), b.split(",")
        assert name_a == name_b
        assert float(value_a) == pytest.approx(float(value_b), abs=1e-4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_two_processes_that_are_stopped_go_on_to_the_same_end(number, pair, tmp_path):
    processes = both(shared, tmp_path)
    while all(p.is_alive() for p in processes) and last_step(tmp_path / "run") < 21:
        time.sleep(0.001)
    if number == signal.SIGKILL:
        for process in processes:
            process.kill()
    else:
        # One of them is told, and both stop.
        assert processes[1].pid is not None
        os.kill(processes[1].pid, number)
    assert {finish(process) for process in processes} == {-9 if number == signal.SIGKILL else 130}
    assert [finish(process) for process in both(shared, tmp_path)] == [0, 0]
    assert_same(weights_of_both(tmp_path), weights_of_both(pair))
    assert outcome(tmp_path / "run")["metrics"] == outcome(pair / "run")["metrics"]


def test_a_batch_that_cannot_be_shared_evenly_is_refused(tmp_path):
    processes = both(shared, tmp_path, True, 7)
    assert [finish(process) for process in processes] == [2, 2]
    said = (tmp_path / "error-0").read_text()
    assert "the batch must be a multiple of the number of processes, 2" in said
    assert "got parts of [(4,), (3,)]; change batch_size or devices" in said


def test_devices_2_starts_the_second_process_itself(tmp_path):
    script = Path(__file__).with_name("train_task.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
    words = ("-W", "error", str(script), str(tmp_path), "2")
    done = python(*words, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    # Nothing of Lightning's, and nothing twice.
    assert done.stdout == ""
    steps = [f"update {step} of 60" for _ in range(2) for step in (12, 24, 36, 48, 60)]
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == steps
    assert_same(weights_of_both(tmp_path / "first"), weights_of_both(tmp_path / "second"))
    assert len(list((tmp_path / "second" / "checkpoints").iterdir())) == 2
    # Both runs of the command are made by the same two processes.
    assert [(tmp_path / f"started-by-{rank}").read_text() for rank in (0, 1)] == ["1", "0"]
