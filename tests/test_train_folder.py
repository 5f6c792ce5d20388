"""A run's folder: what is in it, that nothing in it is ever half there, and who works in it."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import riglstm
from riglstm.lab.tables import run as runs
from riglstm.lab.tables.plan import Planned, RunSpec
from riglstm.lab.tables.run import attempt, evaluate, run
from riglstm.lab.train import folder as folders
from riglstm.lab.train.checkpoints import load_weights, save_weights
from riglstm.lab.train.config import Fit, launched, rank
from riglstm.lab.train.folder import BusyError, RunFolder, atomic_write
from riglstm.lab.train.progress import Log
from test_executor import TASK
from train_task import Halves, network

CONFIG: dict[str, Any] = {
    "task": "copying",
    "task_options": {"P": 5, "conditions": ["P=10"]},
    "fit": {"lr": 0.1, "device": "cpu"},
    "seed": 1,
}
FIT = Fit(updates=4, evaluate_every=2, checkpoint_every=2, device="cpu", tensorboard=False)
SPEC = RunSpec("copying", {**TASK, "conditions": ("P=4",)}, "lstm", 8, {}, FIT, seed=1)


def begun(path: Path) -> RunFolder:
    folder = RunFolder(path / "run")
    assert folder.state == "new"
    folder.begin(CONFIG, command="riglstm train copying", device="CPU", resume=False)
    return folder


def test_a_run_begins_with_what_it_is_and_what_it_runs_on_and_goes_on_as_itself(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("RIGLSTM_MULTIPROCESSORS", "22")
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    folder = begun(tmp_path)
    assert folder.state == "partial"
    assert folder.read_json(folder.config) == CONFIG
    run = folder.read_json(folder.run)
    assert run["versions"]["riglstm"] == riglstm.__version__
    assert run["versions"]["torch"] == torch.__version__
    assert run["command"] == "riglstm train copying"
    assert run["device"] == "CPU"
    assert run["share"] == {"RIGLSTM_MULTIPROCESSORS": "22"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", run["started"])
    assert "resumed" not in run
    assert socket.gethostname() not in json.dumps(run)
    # Where a run is computed may change; it is no other run for that.
    elsewhere = {**CONFIG, "fit": {"lr": 0.1, "device": "cuda", "devices": 8}}
    for _ in range(2):
        folder.begin(elsewhere, command="again", device="GPU", resume=True)
    resumed = folder.read_json(folder.run)
    assert [session["device"] for session in resumed.pop("resumed")] == ["GPU", "GPU"]
    assert resumed == run
    assert folder.read_json(folder.config) == CONFIG


def test_a_folder_is_not_taken_from_another_run(tmp_path):
    folder = begun(tmp_path)
    with pytest.raises(ValueError, match="holds a run that was stopped; go on with it by --resume"):
        folder.begin(CONFIG, command="", device="", resume=False)
    other = {**CONFIG, "task_options": {"P": 50, "conditions": ("P=10",)}, "extra": True}
    del other["seed"]
    words = "holds another run: task_options.P is 5 there, 50 here; seed is 1 there, None here; "
    with pytest.raises(ValueError, match=f"{words}extra is None there, True here; go on with its"):
        folder.begin(other, command="", device="", resume=True)
    folder.finish({"rows": []})
    assert folder.state == "done"
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds a run that is done"):
            folder.begin(CONFIG, command="", device="", resume=resume)


def test_the_second_process_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank() == 1
    folder = RunFolder(tmp_path / "run")
    with folder.held():
        folder.begin(CONFIG, command="", device="", resume=False)
        folder.finish({"rows": []})
        assert not folder.path.exists(), "a lock"
    log = Log(folder, 0, tensorboard=True)
    log.add(1, {"loss": 1.0})
    log.flush()
    log.close()
    assert not (tmp_path / "run").exists()


def test_a_rank_counts_where_torchrun_gave_it(monkeypatch):
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    # One process that trains alone must write.
    assert (rank(), launched()) == (0, None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (rank(), launched()) == (1, None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert (rank(), launched()) == (3, 4)


def test_a_folder_is_held_by_one_at_a_time(tmp_path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with first.held():
        with first.held():
            first.write_json(first.config, CONFIG)
        half = first.path / "metrics.csv.123.part"
        half.touch()
        with (
            pytest.raises(BusyError, match=r"run is being trained in by another process; .* wait"),
            second.held(),
        ):
            pass
        # It is the other's, who may be writing it.
        assert half.exists()
    with second.held():
        assert not half.exists()
    assert list(first.path.iterdir()) == [first.config]
    # A folder that was held for nothing is not left behind, if it was not there before.
    (tmp_path / "old").mkdir()
    for path, stays in ((tmp_path / "new", False), (tmp_path / "old", True)):
        with RunFolder(path).held():
            assert path.exists()
        assert path.exists() == stays


@pytest.mark.skipif(sys.platform == "win32", reason="without locks, runs do without")
def test_a_file_system_without_locks_is_done_without(tmp_path, monkeypatch):
    import fcntl

    none = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", none)
    with RunFolder(tmp_path / "run").held():
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "sub" / "file"
    with atomic_write(path) as file:
        file.write(b"first")
        assert not path.exists()
    with contextlib.suppress(ZeroDivisionError), atomic_write(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]


def test_a_log_that_is_resumed_drops_what_is_damaged_or_came_after_the_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    log = Log(folder, 0, tensorboard=False)
    log.add(5, {"train/loss": 0.1 + 0.2, "validation/accuracy@L=2,P=5": 1.0})
    with folder.metrics.open("ab") as file:
        file.write(b"\0\0\0\n\n\xff\xfe,1\n-1,a,2\n")
    log.add(10, {"train/loss": 0.25})
    log.add(15, {"train/loss": 0.125})
    with folder.metrics.open("a") as file:
        file.write("1")
    Log(folder, 10, tensorboard=False)
    assert folder.metrics.read_text() == (
        "step,name,value\n"
        "5,train/loss,0.30000000000000004\n"
        '5,"validation/accuracy@L=2,P=5",1.0\n'
        "10,train/loss,0.25\n"
    )


def test_weights_come_back_as_they_were(tmp_path):
    net, other = network(Halves(), seed=1), network(Halves(), seed=2)
    path = tmp_path / "weights.safetensors"
    save_weights(net, path)
    load_weights(other, path)
    assert all(torch.equal(w, other.state_dict()[name]) for name, w in net.state_dict().items())
    with pytest.raises(ValueError, match="holds the weights of another network"):
        load_weights(network(Halves(), hidden_size=4), path)
    with pytest.raises(ValueError, match="got no such file"):
        load_weights(other, tmp_path / "nothing")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="must hold weights as safetensors"):
        load_weights(other, path)


def test_the_commit_is_that_of_this_code(tmp_path, monkeypatch):
    inside = Path(folders.__file__).parent
    asked = ["git", "-C", str(inside), "rev-parse", "HEAD"]
    head = subprocess.run(asked, capture_output=True, text=True, check=False)
    tracked = ["git", "-C", str(inside), "ls-files", "--error-unmatch", "folder.py"]
    if head.returncode or subprocess.run(tracked, capture_output=True, check=False).returncode:
        assert folders.commit() is None
    else:
        assert folders.commit() in (head.stdout.strip(), head.stdout.strip() + "+changes")
    # An installed copy inside somebody else's repository is not of that repository's commit.
    copy = tmp_path / "repository" / "environment" / "folder.py"
    copy.parent.mkdir(parents=True)
    copy.touch()
    subprocess.run(["git", "-C", str(tmp_path / "repository"), "init", "-q"], check=True)
    monkeypatch.setattr(folders, "__file__", str(copy))
    assert folders.commit() is None
    monkeypatch.setenv("RIGLSTM_COMMIT", "0123abc")
    assert folders.commit() == "0123abc"


def test_a_result_names_all_devices_and_commits_of_its_run(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    for commit, resume in (("first", False), (None, True)):
        monkeypatch.setattr("riglstm.lab.train.folder.commit", lambda commit=commit: commit)
        folder.begin(SPEC.resolved(), command="", device="NVIDIA H200", resume=resume)
    monkeypatch.setattr("riglstm.lab.train.folder.commit", lambda: "second")
    monkeypatch.setattr(runs, "device_name", lambda device: "CPU")
    result = run(SPEC, folder.path, resume=True)
    assert result["device"] == "NVIDIA H200, then CPU"
    assert result["commit"] == "first, then unknown, then second"
    assert folder.read_json(folder.result) == result


def test_data_that_cannot_be_had_are_missed_before_there_is_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"mnist: expected .* got none or not all"):
        run(replace(SPEC, task="mnist", task_options={}), tmp_path / "run", tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_a_run_holds_its_folder_until_it_is_tested_and_is_tested_again_elsewhere(
    tmp_path, monkeypatch
):
    real, refused = runs._test, []

    def test(*arguments: Any) -> Any:
        with pytest.raises(BusyError):
            run(SPEC, tmp_path / "run", resume=True)
        refused.append(True)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "_test", test)
        result = run(SPEC, tmp_path / "run")
    assert len(refused) == 2
    assert not (tmp_path / "run" / "riglstm.lock").exists()
    # A run of tf32 is tested on a CPU, and not trained there.
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    config["fit"]["precision"] = "tf32"
    file.write_text(json.dumps(config))
    assert evaluate(tmp_path / "run", "cpu")["rows"] == result["rows"]
    tf32 = replace(SPEC, fit=replace(SPEC.fit, precision="tf32"))
    with pytest.raises(ValueError, match="tf32 is a mode of NVIDIA GPUs"):
        run(tf32, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("now", "words", "resumed"),
    [
        ("held", "another process is training it; passed over\n", []),
        ("done", "it is done already; passed over\n", []),
        ("failed", "it is failed already; passed over\n", []),
        ("partial", None, [True]),
    ],
)
def test_a_table_looks_at_what_became_of_a_run_since_it_was_planned(
    now, words, resumed, tmp_path, capsys
):
    started: list[bool] = []

    def make(spec: RunSpec, folder: RunFolder, *, resume: bool) -> None:
        assert folder.holding
        started.append(resume)

    folder = RunFolder(tmp_path / "run")
    with folder.held() if now == "held" else contextlib.nullcontext():
        if now != "held":
            folder.begin(SPEC.resolved(), command="", device="", resume=False)
        if now == "done":
            folder.finish({"rows": []})
        if now == "failed":
            folder.write_json(folder.failed, {"reason": ""})
        attempt(Planned(SPEC, folder.path, "M=1", "lstm"), make)
    assert capsys.readouterr().err == (f"{folder.path}: {words}" if words else "")
    assert started == resumed
