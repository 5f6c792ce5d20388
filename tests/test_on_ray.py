"""The Ray engine with a Ray of threads in Ray's place; tests/test_cluster.py has real nodes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest

from helpers import python
from riglstm.lab.cli import UsageError
from riglstm.lab.cli.main import main
from riglstm.lab.cli.reproduce import Engine, place
from riglstm.lab.tables import on_ray
from riglstm.lab.tables.executor import overview
from riglstm.lab.tables.on_ray import OnRay
from riglstm.lab.tables.plan import Planned
from riglstm.lab.tables.run import attempt
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.stopping import NEVER, Deadline, Interrupted, StopRequest
from test_executor import Heard, interrupt_when, several

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]

Outcome: TypeAlias = tuple[str, bool] | None
DONE = ("", True)


class RayError(Exception):
    """Ray's own errors."""


class FakeRay:
    """As much of Ray as the engine uses: a cluster of one node with two cores."""

    exceptions = SimpleNamespace(RayError=RayError, TaskCancelledError=CancelledError)

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2)
        self.stop = threading.Event()
        self.forced: list[bool] = []
        self.names: list[str] = []
        self.address = ""

    def init(self, address: str, **options: Any) -> None:
        if address == "auto" and not self.address:
            self.address = "begun here"
            raise ConnectionError("no cluster runs here")
        self.address = address

    def shutdown(self) -> None:
        self.threads.shutdown(cancel_futures=True)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0, "memory": 1e9}

    def remote(self, **share: Any) -> Callable[..., Any]:
        self.share = share

        def options(name: str) -> Any:
            self.names.append(name)
            return SimpleNamespace(remote=submit)

        def submit(*arguments: Any) -> Any:
            made = self.threads.submit(on_ray.make_run, *arguments)
            return SimpleNamespace(future=lambda: made, cancel=made.cancel)

        return lambda function: SimpleNamespace(options=options)

    def cancel(self, task: Any, force: bool) -> None:
        self.forced.append(force)
        task.cancel()
        self.stop.set()


@pytest.fixture
def ray(monkeypatch: Patch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    # What it sets is for Ray alone.
    for name in on_ray.SETTINGS:
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


def make_by(monkeypatch: Patch, make: Callable[[str], Outcome]) -> None:
    monkeypatch.setattr(on_ray, "make_run", lambda run, *_: make(run.folder.name))


def test_every_run_is_heard_of_with_its_error_and_the_cluster_is_left(
    ray, tmp_path, monkeypatch, capsys
):
    def make(name: str) -> Outcome:
        if name == "c":
            raise RayError("a long story\n  and the node has died\n")
        return None if name == "d" else ("no memory" if name == "b" else "", False)

    make_by(monkeypatch, make)
    ends = Heard()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RIGLSTM_DATA", "elsewhere")
    OnRay(gpus=0.25, cores=2).run(several(tmp_path / "runs", "abcd"), print, ends)
    assert ends == {"a": "", "b": "no memory", "c": "and the node has died"}
    assert ray.names == [f"run {name} seed 0" for name in "abcd"]
    variables = ray.share.pop("runtime_env")["env_vars"]
    assert (variables["OMP_NUM_THREADS"], variables["RIGLSTM_DATA"]) == ("2", "elsewhere")
    tries = {"max_retries": on_ray.TRIES, "max_calls": 1}
    assert ray.share == {"num_cpus": 2, "num_gpus": 0.25, **tries}
    # There was none to connect to; nodes look for the folder of the runs.
    assert ray.address == "local"
    assert (tmp_path / "runs").is_dir()
    said = capsys.readouterr().err
    assert "Ray: 2 cores and 0 GPUs; a run takes 2 and 0.25\n" in said
    assert "run c seed 0: a long story\n" in said


def test_ctrl_c_asks_all_runs_to_stop_and_waits_for_them(ray, tmp_path, monkeypatch):
    saved: list[str] = []

    def make(name: str) -> Outcome:
        if name == "a":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
        assert ray.stop.wait(20)
        saved.append(name)
        return "", False

    make_by(monkeypatch, make)
    with pytest.raises(KeyboardInterrupt, match="stopped, and all runs are saved"):
        OnRay().run(several(tmp_path, "abc"), print, Heard())
    assert sorted(saved) == ["a", "b"]
    assert set(ray.forced) == {False}


def test_a_cluster_that_does_not_answer_is_told_of(ray, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    words = "a cluster that answers at 10.0.0.1:6379, got none"
    with pytest.raises(ConnectionError, match=words):
        OnRay().run(several(tmp_path, "a"), print, Heard())


def make_run(run: Planned, make: Callable[..., object], begin_by: Deadline = NEVER) -> Outcome:
    return on_ray.make_run(run, make, sys.argv, os.getcwd(), begin_by)


def finish(spec: Any, folder: RunFolder, resume: bool) -> None:
    folder.write_json(folder.result, {})


def test_a_task_makes_its_run_where_the_driver_works(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "argv", ["a worker of Ray"])
    (run,) = several(Path("runs"), "a")
    (tmp_path / "runs").mkdir()
    assert on_ray.make_run(run, finish, ["riglstm", "sweep"], str(tmp_path), NEVER) == DONE
    assert RunFolder(tmp_path / "runs" / "a").state == "done"
    assert sys.argv == ["riglstm", "sweep"]


def test_a_task_says_how_its_run_failed(tmp_path):
    (run,) = several(tmp_path, "a")
    full = Mock(side_effect=OSError("the disk is full"))
    assert make_run(run, full) == ("the disk is full", False)
    # A bug is told by Ray, with its traceback.
    with pytest.raises(KeyError):
        make_run(run, Mock(side_effect=KeyError))


def test_a_node_that_does_not_see_the_folder_makes_no_run(tmp_path):
    (run,) = several(tmp_path / "gone", "a")
    made = make_run(run, finish)
    assert made is not None
    assert made[0].startswith(f"expected a folder that all nodes see, got {tmp_path / 'gone'}, ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_lost_process_still_holds_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "PAUSE", 0.01)
    # The first one finds it held, and passes it over.
    tried: list[Planned] = []

    def second(run: Planned, make: Callable[..., object]) -> None:
        tried.append(run)
        if len(tried) == 2:
            attempt(run, make)

    monkeypatch.setattr(on_ray, "attempt", second)
    assert make_run(*several(tmp_path, "a"), finish) == DONE


def test_a_task_that_ray_cancels_saves_its_run(tmp_path, capsys):
    def train(spec: Any, folder: RunFolder, resume: bool) -> None:
        with StopRequest(speaks=False) as request:
            folder.config.touch()
            while not request.made:
                time.sleep(0.01)
            raise Interrupted("stopped, and saved")

    interrupt_when([tmp_path / "a" / "config.json"])
    assert make_run(*several(tmp_path, "a"), train) == ("", False)
    assert capsys.readouterr().err == "stopped, and saved\n"


def test_without_time_a_task_that_is_not_among_the_first_is_left(tmp_path):
    assert make_run(*several(tmp_path, "a"), finish, Deadline.after(0.01)) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Engine(on="rey"), "--on must be processes, ray or ray://HOST:PORT, got 'rey'"),
        (Engine(gpus_per_run=0.5), "are shares of a Ray cluster"),
        (Engine(on="ray", jobs=4), "--jobs 4 is for one machine"),
        (Engine(on="ray", device="cuda"), "--device must be auto or cpu with --gpus-per-run 0"),
        (Engine("cuda:1", on="ray", gpus_per_run=1), "--device must be auto or cuda with"),
    ],
)
def test_what_does_not_go_together_is_refused(asked, words):
    with pytest.raises(UsageError, match=words):
        place(asked)


def test_a_share_of_a_gpu_says_the_device_and_how_many_runs_it_has(ray):
    assert place(Engine(jobs=3)) == (None, 3, "auto", NEVER)
    made = place(Engine(on="ray", gpus_per_run=0.25, cores_per_run=2))
    assert made == (OnRay("ray", 0.25, 2), 4, "cuda", NEVER)
    assert place(Engine(on="ray://head:10001")).device == "cpu"


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["reproduce", "copying", "--on", "ray"]) == 2
    said = "riglstm: this needs ray, which is not installed: pip install 'riglstm[ray]'\n"
    assert capsys.readouterr().err == said


def test_nothing_imports_ray_before_it_is_asked_for():
    code = "import sys, riglstm.lab.cli.main; sys.exit('ray' in sys.modules)"
    assert python("-c", code).returncode == 0


def test_the_view_of_all_runs_counts_them_and_has_a_line_for_each(tmp_path):
    runs = several(tmp_path, "1248")
    done, running, failed = (RunFolder(run.folder) for run in runs[:3])
    for folder in (done, running, failed):
        folder.path.mkdir()
        folder.config.write_text("{}")
    done.result.write_text("{}")
    failed.failed.write_text("{}")
    running.lock.touch()
    assert overview(runs) == [
        *("4 runs: 1 done, 1 running, 1 waiting, 1 failed", ""),
        "done     run 1 seed 0",
        "running  run 2 seed 0",
        "failed   run 4 seed 0",
        "waiting  run 8 seed 0",
    ]
