"""Many runs: one after another or each in its own process, none left behind, each heard of."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from riglstm.lab.tables import executor
from riglstm.lab.tables.executor import (
    LESS_MEMORY,
    InProcess,
    Processes,
    attend,
    make_runs,
)
from riglstm.lab.tables.plan import Planned, RunSpec, plan
from riglstm.lab.tables.recipes import TABLES, Recipe, Row, Setting
from riglstm.lab.tables.reproduce import reproduce
from riglstm.lab.tables.run import attempt, run
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.stopping import Deadline, Interrupted, OutOfTime
from train_helpers import last_step

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]

slow = pytest.mark.slow

TASK: dict[str, Any] = {
    **{"L": 1, "P": 2, "digits": 3, "input_size": 6, "batch_size": 16},
    **{"validation_size": 20, "test_size": 30},
}
FIT = Fit(updates=6, lr=0.03, evaluate_every=2, checkpoint_every=3, device="cpu", tensorboard=False)
TWO = Processes(2)


def planned(folder: Path, **fit: Any) -> Planned:
    spec = RunSpec("copying", TASK, "lstm", 8, {}, replace(FIT, **fit), 0)
    return Planned(spec, folder, "M=1", "lstm")


def several(root: Path, names: str) -> list[Planned]:
    return [planned(root / name)._replace(row="run", setting=name) for name in names]


class Heard(dict[str, str]):
    """The error of each run that is over, by the name of its folder."""

    def __call__(self, run: Planned, error: str) -> None:
        self[run.folder.name] = error


def use_script(monkeypatch: Patch, script: str) -> None:
    """In place of a run: a program that is told its folder, and knows when stdin ends."""
    start = "import json, os, sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"
    monkeypatch.setattr(executor, "WORKER", ("-c", start + script))


def interrupt_when(made: list[Path], *signals: int) -> None:
    """Ctrl-C, or others, to this process as soon as all the files are there."""

    def wait() -> None:
        while not all(path.exists() for path in made):
            time.sleep(0.01)
        for number in signals or (signal.SIGINT,):
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    threading.Thread(target=wait, daemon=True).start()


def assert_gone(*pids: str) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_no_more_run_at_a_time_than_asked_for_and_all_are_heard_of(tmp_path, monkeypatch, capfd):
    use_script(
        monkeypatch,
        "begin = time.monotonic(); print('hello', flush=True); time.sleep(0.2)\n"
        "threads = os.environ['OMP_NUM_THREADS']\n"
        "folder.write_text(json.dumps([begin, time.monotonic(), threads]))\n"
        "sys.exit(folder.name == 'c')",
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    ends = Heard()
    Processes(2).run(several(tmp_path, "abcde"), print, ends)
    assert ends == {"a": "", "b": "", "c": "hello", "d": "", "e": ""}
    said = capfd.readouterr().err.splitlines()
    assert sorted(said) == [f"run {name} seed 0: hello" for name in "abcde"]
    times = [json.loads((tmp_path / name).read_text()) for name in "abcde"]
    for begin, _, threads in times:
        assert sum(b <= begin < e for b, e, _ in times) <= 2
        assert threads == "4"


def test_ctrl_c_lets_all_runs_save_and_leaves_none_behind(tmp_path, monkeypatch):
    use_script(
        monkeypatch,
        "folder.touch(); sys.stdin.buffer.read(); time.sleep(0.2)\n"
        "folder.with_suffix('.saved').write_text(str(os.getpid()))",
    )
    interrupt_when([tmp_path / name for name in "ab"])
    with pytest.raises(KeyboardInterrupt, match="stopped, and all runs are saved"):
        TWO.run(several(tmp_path, "abc"), print, Heard())
    assert_gone(*((tmp_path / f"{name}.saved").read_text() for name in "ab"))
    assert not (tmp_path / "c").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_ctrl_c_ends_runs_at_once(tmp_path, monkeypatch):
    use_script(monkeypatch, "folder.write_text(str(os.getpid())); time.sleep(60)")
    interrupt_when([tmp_path / name for name in "ab"], signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped at once, without saving"):
        TWO.run(several(tmp_path, "abc"), print, Heard())
    assert_gone(*((tmp_path / name).read_text() for name in "ab"))
    assert not (tmp_path / "c").exists()


def test_a_run_that_does_not_save_when_asked_is_told_of(tmp_path, monkeypatch):
    use_script(monkeypatch, "folder.touch(); sys.stdin.buffer.read(); sys.exit('the disk is full')")
    interrupt_when([tmp_path / "a"])
    words = r"^stopped; 1 runs ended with an error \(run a seed 0: the disk is full\)$"
    with pytest.raises(KeyboardInterrupt, match=words):
        TWO.run(several(tmp_path, "a"), print, Heard())


def test_an_error_in_the_table_lets_the_other_runs_save(tmp_path, monkeypatch):
    use_script(
        monkeypatch,
        "if folder.name == 'a': sys.exit()\nsys.stdin.buffer.read(); folder.touch(); sys.exit(130)",
    )

    full = Mock(side_effect=OSError("the disk is full"))
    with pytest.raises(OSError, match="the disk is full"):
        TWO.run(several(tmp_path, "ab"), print, full)
    assert (tmp_path / "b").exists()


@pytest.mark.parametrize("seconds", [math.inf, 0.1])
def test_an_error_in_the_table_waits_for_runs_that_are_made_elsewhere(
    seconds, tmp_path, monkeypatch
):
    """As on a cluster, where no pool of threads waits for them, and who is asked twice dies."""
    over, saving = Future[Any](), Future[Any]()
    threading.Timer(0.3, over.set_result, [None]).start()
    monkeypatch.setattr(executor, "TO_SAVE", 0.0)
    deadline = Deadline(time.time() + seconds)
    asked: list[bool] = []

    def close(at_once: bool) -> None:
        asked.append(at_once)
        threading.Timer(0.2, saving.set_result, [None]).start()

    (run,) = several(tmp_path, "a")
    full = Mock(side_effect=OSError("the disk is full"))
    with pytest.raises(OSError, match="the disk is full"):
        attend({over, saving}, lambda future: (run, ""), close, full, deadline)
    assert asked == [False]
    assert saving.done()


def test_a_reader_of_the_output_that_goes_away_does_not_stop_the_table(tmp_path, monkeypatch):
    use_script(monkeypatch, "print('one', flush=True); time.sleep(0.1); sys.exit('two')")
    ends = Heard()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        work = threading.Thread(
            target=Processes(1).run, args=(several(tmp_path, "a"), print, ends), daemon=True
        )
        work.start()
        work.join(20)
        with contextlib.suppress(OSError):
            gone.close()
    assert ends == {"a": "two"}


def test_a_killed_run_costs_itself_alone_and_takes_along_what_it_has_started(tmp_path, monkeypatch):
    use_script(
        monkeypatch,
        "if folder.name == 'b': sys.exit()\n"
        "import subprocess; folder.write_text(str(subprocess.Popen(['sleep', '30']).pid))\n"
        "os.kill(os.getpid(), 9)",
    )
    ends = Heard()
    began = time.monotonic()
    TWO.run(several(tmp_path, "ab"), print, ends)
    assert time.monotonic() - began < 15
    assert ends == {"a": "exit code -9", "b": ""}
    child = Path("/proc") / (tmp_path / "a").read_text() / "stat"

    def lives() -> bool:
        try:
            # Z, X: dead, and waiting for the system to clear it away.
            return child.read_text().rpartition(") ")[2][0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    # It was sent the signal; a busy machine may take a moment to let it die of it.
    while lives() and time.monotonic() - began < 20:
        time.sleep(0.05)
    assert not lives()


def test_what_still_runs_shortly_before_the_deadline_is_asked_to_stop(tmp_path, monkeypatch):
    use_script(monkeypatch, "sys.stdin.buffer.read(); folder.touch(); sys.exit(130)")
    monkeypatch.setattr(executor, "TO_SAVE", 1.0)
    ends = Heard()
    deadline = Deadline.after(2 / 60)
    Processes(1, deadline).run(several(tmp_path, "ab"), print, ends)
    assert deadline.left > 0
    # Out of time is no error.
    assert ends == {"a": ""}


def test_without_time_the_first_runs_are_begun_and_no_others(tmp_path, monkeypatch):
    use_script(monkeypatch, "folder.touch()")
    Processes(2, Deadline.after(0.01)).run(several(tmp_path, "abc"), print, Heard())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    made = Heard()
    InProcess(Deadline.after(0.01)).run(several(tmp_path, "def"), lambda *_, **__: None, made)
    assert made == {"d": ""}


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Interrupted("stopped, and saved"), "stopped, and saved"),
        (KeyboardInterrupt(), "stopped; what is done, or was saved, stays so"),
    ],
)
def test_a_stop_between_runs_says_how_to_go_on(end, said, tmp_path):
    runs = [planned(tmp_path / name) for name in "ab"]
    with pytest.raises(KeyboardInterrupt, match=f"^{said}; go on with: more$"):
        make_runs(runs, Mock(side_effect=end), InProcess(), print, "more")


def test_a_run_that_is_out_of_time_is_the_last(tmp_path, capsys):
    runs = [planned(tmp_path / name) for name in "ab"]
    ended: list[Path] = []
    make = Mock(side_effect=OutOfTime("time is up"))
    assert make_runs(runs, make, InProcess(), ended.append) == []
    assert ended == []
    assert capsys.readouterr().err == f"run 1 of 2: {tmp_path / 'a'}\ntime is up\n"


@slow
def test_a_run_saves_and_ends_when_the_program_that_started_it_is_gone(tmp_path):
    wanted = planned(tmp_path / "run", updates=10**6, log_every=5, evaluate_every=10**6)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = (sys.executable, *executor.WORKER)
    process = subprocess.Popen(command, **pipes, stderr=subprocess.STDOUT)
    assert process.stdin is not None
    assert process.stdout is not None
    make = partial(attempt, wanted, partial(run, jobs=2))
    process.stdin.write(pickle.dumps((make, ["riglstm", "reproduce"])))
    process.stdin.flush()
    while last_step(wanted.folder) < 5:
        assert process.poll() is None
        time.sleep(0.01)
    # As a killed process leaves its pipes.
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 130
    folder = RunFolder(wanted.folder)
    assert folder.state == "partial"
    assert list(folder.checkpoints.iterdir())
    record = folder.read_json(folder.run)
    assert (record["command"], record["jobs"]) == ("riglstm reproduce", 2)


@slow
def test_a_table_is_made_side_by_side_in_spite_of_a_crash(tmp_path, monkeypatch, capfd):
    rows, settings = {"lstm": Row("LSTM", "lstm", 8)}, {"M=1": Setting("P=2", {"M": 1})}
    recipe = Recipe(rows, settings, ("P=4",), TASK, FIT, models=("lstm",))
    table = replace(TABLES["copying"], recipes={"quick": recipe})
    monkeypatch.setitem(TABLES, "copying", table)
    broken = plan("copying", ["lstm"], [1], "quick", tmp_path)[0]
    folder = RunFolder(broken.folder)
    folder.begin(broken.spec.resolved(), command="", device="", resume=False)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-3.ckpt").write_text("half a file")
    asked = plan("copying", ["lstm"], [0, 1], "quick", tmp_path)
    made = reproduce("copying", asked, "quick", tmp_path, jobs=4)
    assert (made.failed, made.left) == (0, 1)
    (error,) = made.errors
    assert error.startswith(f"lstm M=1 seed 1, in {broken.folder}: ")
    assert "no checkpoint" in error
    assert "Traceback" not in (said := capfd.readouterr().err)
    runs = plan("copying", ["lstm"], 2, "quick", tmp_path)
    assert [p.state for p in runs] == ["done", "partial"]
    # There were two to make.
    assert json.loads((runs[0].folder / "result.json").read_text())["jobs"] == 2
    assert "(1 run, 1 to run)" in made.rendered.markdown
    assert "lstm M=1 seed 0: update 2 of 6" in said


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (None, 0, ""),
        (OutOfTime("time is up"), 0, "time is up\n"),
        (Interrupted("stopped, and saved"), 130, "stopped, and saved\n"),
        (OSError("the disk is full"), 2, "the disk is full\n"),
        (MemoryError(), 2, f"out of memory (MemoryError); {LESS_MEMORY}\n"),
    ],
)
def test_a_run_ends_with_the_commands_exit_codes_and_a_line(end, code, said, monkeypatch, capfd):
    make = partial(print, end="") if end is None else Mock(side_effect=end)
    monkeypatch.setattr(executor.pickle, "load", lambda _: (make, ["riglstm"]))
    monkeypatch.setattr(executor, "_stop_at_the_end_of_stdin", lambda: None)
    monkeypatch.setattr(executor.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for name in ("stdout", "stderr", "argv"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    assert executor.main() == code
    assert capfd.readouterr().out == said
