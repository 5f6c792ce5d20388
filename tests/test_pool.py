"""Several runs at a time: each in its own process, none left behind, each heard of."""

from __future__ import annotations

import contextlib
import io
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

from riglstm.lab.tables import pool, worker
from riglstm.lab.tables.entries import Recipe, Row, Setting
from riglstm.lab.tables.errors import FEWER_RUNS, in_words
from riglstm.lab.tables.plan import Planned, plan
from riglstm.lab.tables.pool import Ended, together
from riglstm.lab.tables.reproduce import reproduce
from riglstm.lab.tables.spec import RunSpec
from riglstm.lab.tables.tables import TABLES
from riglstm.lab.tables.worker import Job, read, written
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.stopping import NEVER, Deadline, Interrupted, OutOfTime
from train_helpers import last_step

pytestmark = pytest.mark.slow

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


def interrupt_when(made: list[Path], *signals: int) -> None:
    """Ctrl-C, or others, to this process as soon as all the files are there."""

    def wait() -> None:
        while not all(path.exists() for path in made):
            time.sleep(0.01)
        for number in signals or (signal.SIGINT,):
            os.kill(os.getpid(), number)
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
    interrupt_when([tmp_path / name for name in "ab"], signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="stopped at once, without saving"):
        together([planned(tmp_path / name) for name in "ab"], JOB, lambda end: None)
    for name in "ab":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_repeated_sigterm_changes_nothing(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "folder.touch(); sys.stdin.read(); time.sleep(0.6); (folder.parent / 'saved').touch()"
    use_script(monkeypatch, script)
    interrupt_when([tmp_path / "a"], first, signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="stopped, and all runs are saved"):
        together([planned(tmp_path / "a")], JOB, lambda end: None)
    assert (tmp_path / "saved").exists()


@pytest.mark.usefixtures("_heard")
def test_a_run_that_does_not_save_when_asked_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, "folder.touch(); sys.stdin.read(); sys.exit('the disk is full')")
    interrupt_when([tmp_path / "a"])
    words = r"^stopped; 1 of 1 runs ended with an error \(lstm M=1 seed 0: the disk is full\)$"
    with pytest.raises(KeyboardInterrupt, match=words):
        together([planned(tmp_path / "a")], JOB, lambda end: None)


def test_a_reader_of_the_output_that_goes_away_does_not_stop_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, "print('one', flush=True); time.sleep(0.1); print('two', flush=True)")
    ends: list[Ended] = []
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        work = threading.Thread(
            target=together,
            args=([planned(tmp_path / "a")], replace(JOB, progress=True), ends.append),
            daemon=True,
        )
        work.start()
        work.join(20)
        with contextlib.suppress(OSError):
            gone.close()
    assert [(end.code, end.last) for end in ends] == [(0, "two")]


def test_a_run_ends_with_its_process_and_takes_along_what_that_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(
        monkeypatch,
        "import subprocess; folder.write_text(str(subprocess.Popen(['sleep', '30']).pid))\n"
        "print('gone', flush=True); os.kill(os.getpid(), 9)",
    )
    ends: list[Ended] = []
    began = time.monotonic()
    together([planned(tmp_path / "a")], JOB, ends.append)
    assert time.monotonic() - began < 15
    assert [(end.code, end.last) for end in ends] == [(-9, "gone")]
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


def test_what_still_runs_shortly_before_the_deadline_is_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, "sys.stdin.read(); folder.touch(); sys.exit(130)")
    monkeypatch.setattr(pool, "TO_SAVE", 1.0)
    ends: list[Ended] = []
    job = replace(JOB, jobs=1, deadline=Deadline.after(2 / 60))
    runs = [planned(tmp_path / name) for name in "ab"]
    assert together(runs, job, ends.append) == 1
    assert job.deadline.left > 0
    # Out of time is no error.
    assert [(end.planned.folder.name, end.code) for end in ends] == [("a", 0)]


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
    made = reproduce("copying", ["lstm"], [0, 1], **ask, jobs=4)
    assert (made.failed, made.left) == (0, 1)
    (error,) = made.errors
    assert error.startswith(f"{broken.folder}: ")
    assert "no checkpoint" in error
    assert "Traceback" not in (said := capfd.readouterr().err)
    runs = plan("copying", ["lstm"], 2, "quick", tmp_path)
    assert [p.state for p in runs] == ["done", "partial"]
    # There were two to make.
    assert json.loads((runs[0].folder / "result.json").read_text())["jobs"] == 2
    assert "(1 run, 1 to run)" in made.paths[0].read_text()
    assert "lstm M=1 seed 0: update 2 of 6" in said


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (None, 0, ""),
        (OutOfTime("time is up"), 0, "time is up\n"),
        (Interrupted("stopped, and saved"), 130, "stopped, and saved\n"),
        (OSError("the disk is full"), 2, "the disk is full\n"),
        (MemoryError(), 2, f"out of memory (MemoryError); {FEWER_RUNS}\n"),
    ],
)
def test_a_run_ends_with_the_commands_exit_codes_and_a_line(
    end: BaseException | None,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def attempt(*_: object) -> None:
        if end is not None:
            raise end

    monkeypatch.setattr(worker, "attempt", attempt)
    monkeypatch.setattr(worker, "_stop_at_the_end_of_stdin", lambda: None)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{written(planned(tmp_path), JOB)}\n"))
    for name in ("stdout", "stderr", "argv"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    assert worker.main() == code
    assert capfd.readouterr().out == said


def test_a_run_out_of_memory_names_the_number_of_runs_and_a_bug_its_traceback() -> None:
    assert in_words(MemoryError(), FEWER_RUNS) == (
        "out of memory (MemoryError); fewer runs at a time need less (--jobs)"
    )
    assert in_words(ValueError("not raised by us")) is None
    assert in_words(KeyError("x")) is None
