"""Several runs at a time: each in its own process, none left behind, each heard of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riglstm.experiments import pool
from riglstm.experiments.plan import Planned, plan
from riglstm.experiments.pool import Ended, together
from riglstm.experiments.recipes import Recipe, Row, Setting
from riglstm.experiments.reproduce import reproduce
from riglstm.experiments.spec import RunSpec
from riglstm.experiments.tables import TABLES
from riglstm.experiments.worker import Job, read, written
from riglstm.train.config import Fit
from riglstm.train.deadline import NEVER, Deadline
from riglstm.train.folder import RunFolder
from train_helpers import last_step

TASK: dict[str, Any] = {
    **{"L": 1, "P": 2, "digits": 3, "input_size": 6, "batch_size": 16},
    **{"validation_size": 20, "test_size": 30},
}
FIT = Fit(updates=6, lr=0.03, evaluate_every=2, checkpoint_every=3, device="cpu", tensorboard=False)
JOB = Job(None, False, "", NEVER, 2, ("riglstm", "reproduce"))


def planned(folder: Path, **fit: Any) -> Planned:
    spec = RunSpec("copying", TASK, "lstm", 8, {}, replace(FIT, **fit), 0)
    return Planned(spec, folder, "new", "M=1", "lstm")


def use_script(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """In place of a run: a program that is told its folder, and knows when stdin ends."""
    start = "import json, os, sys, time\nfrom pathlib import Path\n"
    start += "told = json.loads(sys.stdin.readline())\nfolder = Path(told['planned']['folder'])\n"
    monkeypatch.setattr(pool, "WORKER", (sys.executable, "-c", start + script))


@pytest.fixture
def _heard() -> Iterator[None]:
    """Ctrl-C is heard, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(made: list[Path], times: int = 1) -> None:
    """Ctrl-C to this process as soon as all the files are there."""

    def wait() -> None:
        while not all(path.exists() for path in made):
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    threading.Thread(target=wait, daemon=True).start()


def test_a_job_arrives_as_it_was_sent(tmp_path: Path) -> None:
    job = replace(JOB, data_dir=tmp_path, deadline=Deadline(12.5))
    for given in (JOB, job):
        run, arrived = read(written(planned(tmp_path / "run"), given))
        assert arrived == replace(given, argv=list(given.argv))
        assert run._replace(spec=SPEC) == planned(tmp_path / "run")._replace(spec=SPEC)
        assert run.spec.resolved() == planned(tmp_path / "run").spec.resolved()


SPEC = planned(Path()).spec


def test_no_more_run_at_a_time_than_asked_for_and_all_are_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use_script(
        monkeypatch,
        "begin = time.monotonic(); print('hello', flush=True); time.sleep(0.2)\n"
        "threads = os.environ['OMP_NUM_THREADS']\n"
        "folder.write_text(json.dumps([begin, time.monotonic(), threads]))\n"
        "sys.exit(folder.name == '2')",
    )
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    ends: list[Ended] = []
    runs = [planned(tmp_path / str(i)) for i in range(5)]
    assert together(runs, replace(JOB, progress=True), ends.append) == 0
    assert {end.planned.folder.name: end.code for end in ends} == {
        **{str(i): 0 for i in range(5)},
        "2": 1,
    }
    assert {end.last for end in ends} == {"hello"}
    assert capfd.readouterr().err.splitlines() == ["lstm M=1 seed 0: hello"] * 5
    times = [json.loads(run.folder.read_text()) for run in runs]
    for begin, _, threads in times:
        assert sum(b <= begin < e for b, e, _ in times) <= 2
        assert threads == "4"


@pytest.mark.usefixtures("_heard")
def test_ctrl_c_lets_all_runs_save_and_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(
        monkeypatch,
        "folder.touch(); sys.stdin.read(); time.sleep(0.2)\n"
        "folder.with_suffix('.saved').write_text(str(os.getpid()))",
    )
    runs = [planned(tmp_path / name) for name in "abc"]
    interrupt_when([tmp_path / name for name in "ab"])
    with pytest.raises(KeyboardInterrupt, match="stopped, and all runs are saved"):
        together(runs, JOB, lambda end: None)
    for name in "ab":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{name}.saved").read_text()), 0)
    assert not (tmp_path / "c").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("_heard")
def test_a_second_ctrl_c_ends_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, "folder.write_text(str(os.getpid())); time.sleep(60)")
    interrupt_when([tmp_path / name for name in "ab"], times=2)
    with pytest.raises(KeyboardInterrupt, match="stopped at once, without saving"):
        together([planned(tmp_path / name) for name in "ab"], JOB, lambda end: None)
    for name in "ab":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_without_time_the_first_runs_are_begun_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, "folder.touch()")
    runs = [planned(tmp_path / name) for name in "abc"]
    assert together(runs, replace(JOB, deadline=Deadline.after(0.01)), lambda end: None) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_run_saves_and_ends_when_the_program_that_started_it_is_gone(tmp_path: Path) -> None:
    run = planned(tmp_path / "run", updates=10**6, log_every=5, evaluate_every=10**6)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(pool.WORKER, **pipes, stderr=subprocess.STDOUT, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{written(run, replace(JOB, progress=True))}\n")
    process.stdin.flush()
    while last_step(run.folder) < 5:
        assert process.poll() is None
        time.sleep(0.01)
    # As a killed process leaves its pipes.
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 130
    folder = RunFolder(run.folder)
    assert folder.state == "partial"
    assert list(folder.checkpoints.iterdir())
    record = folder.read_json(folder.run)
    assert (record["command"], record["jobs"]) == ("riglstm reproduce", 2)


def test_a_table_is_made_side_by_side_in_spite_of_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, settings = {"lstm": Row("LSTM", "lstm", 8)}, {"M=1": Setting("P=2", {"M": 1})}
    recipe = Recipe(rows, settings, ("P=4",), TASK, FIT, models=("lstm",))
    table = replace(TABLES["copying"], recipes={"quick": recipe})
    monkeypatch.setitem(TABLES, "copying", table)
    ask: dict[str, Any] = {"root": tmp_path, "out": tmp_path / "out", "device": "cpu"}
    broken = plan("copying", ["lstm"], [1], "quick", tmp_path)[0]
    folder = RunFolder(broken.folder)
    folder.begin(broken.spec.resolved(), command="", device="", resume=False)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-3.ckpt").write_text("half a file")
    made = reproduce("copying", ["lstm"], [0, 1], **ask, jobs=2)
    assert (made.failed, made.left) == (0, 1)
    (error,) = made.errors
    assert error.startswith(f"{broken.folder}: ")
    assert "no checkpoint" in error
    states = [p.state for p in plan("copying", ["lstm"], 2, "quick", tmp_path)]
    assert states == ["done", "partial"]
    assert "(1; 1 to run)" in made.paths[0].read_text()
    assert "lstm M=1 seed 0: update 2 of 6" in capfd.readouterr().err
