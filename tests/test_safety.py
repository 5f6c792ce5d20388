"""Other people's files stay as they are, and a training goes on whatever becomes of its output."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import train_task
from helpers import files_below, put, python
from riglstm.lab.cli.main import main, unbreakable_output
from riglstm.lab.tables import reproduce as reproducing
from riglstm.lab.tables import run
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.stopping import StopRequest

SOURCE = Path(__file__).parents[1] / "src"
SMALL = [*train_task.SMALL, "--updates", "6", "--checkpoint-every", "2"]


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


OTHERS = {
    "checkpoints/epoch-3.pt": b"mine",
    "checkpoints/step-3.ckpt": b"mine",
    "thesis.part": b"mine",
    "lock": b"",
    "riglstm.lock": b"",
    "config.json": b'{"task": "translation", "seed": "none"}',
    "config.json.7.part": b"mine",
    "weights/step-3.safetensors": b"mine",
    "metrics.csv": b"mine",
    "run.json": b"{}",
    "result.json": b"{}",
}


@pytest.mark.parametrize(
    "names", [[name] for name in OTHERS if name != "riglstm.lock"] + [[*OTHERS]]
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_is_no_run_is_refused_and_stays_as_it_is(names, resume, tmp_path, capsys):
    put(tmp_path, {name: OTHERS[name] for name in names})
    before = tree(tmp_path)
    assert main([*SMALL, "--out", str(tmp_path), *(["--resume"] if resume else [])]) == 2
    assert (
        "must be a new or empty folder, or that of a run, got one that" in capsys.readouterr().err
    )
    assert tree(tmp_path) == before
    # Below the command line, too.
    with pytest.raises(ValueError, match="give another folder"), RunFolder(tmp_path).held():
        pass
    assert tree(tmp_path) == before


def test_the_folder_of_a_start_that_was_killed_is_a_new_one(tmp_path):
    put(tmp_path, {"riglstm.lock": b"", "config.json.7.part": b"{"})
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("*.part"))


def test_a_run_deletes_only_what_it_has_made(tmp_path):
    out = tmp_path / "run"
    RunFolder(out).begin({"task": "", "fit": {}, "seed": 0}, command="", device="", resume=False)
    mine = ("checkpoints/best.pt", "weights/step-one.safetensors", "draft.part", "notes.txt")
    made = ["checkpoints/step-3.ckpt", *(f"weights/step-{n}.safetensors" for n in (3, 6, 9))]
    halves = [f"{name}.3.part" for name in (*made, "run.json")]
    put(out, dict.fromkeys(mine, b"mine") | dict.fromkeys((*made, *halves), b"the run's"))
    folder, kept = RunFolder(out), {*mine, "config.json", "run.json"}
    result = {"chosen": {"P=5": {"step": 6, "value": 0.5}, "P=10": {"step": 9, "value": 0.25}}}
    with folder.held():
        left = {*files_below(out)}
        assert left == {*kept, *made, "riglstm.lock"}, "what a kill left half-written goes first"
        folder.finish(result)
    assert folder.read_json(folder.result) == result
    assert {*files_below(out)} == {*kept, *made[2:], "result.json"}
    folder.empty()
    assert {*files_below(out)} == {*mine, "config.json"}, "it is still a run's folder"


def test_a_run_that_fails_stays_if_it_has_a_checkpoint_and_leaves_nothing_else(
    tmp_path, monkeypatch, capsys
):
    out, fails = tmp_path / "some" / "run", Mock(side_effect=MemoryError)
    with monkeypatch.context() as patch:
        patch.setattr("riglstm.lab.train.loop.Training.run", fails)
        assert main([*SMALL, "--out", str(out)]) == 2
    assert "out of memory" in capsys.readouterr().err
    assert tree(tmp_path) == {}
    # The folder takes the corrected command.
    monkeypatch.setattr(run, "tested", fails)
    assert main([*SMALL, "--hidden-size", "4", "--out", str(out)]) == 2
    assert RunFolder(out).state == "partial"
    assert list((out / "checkpoints").iterdir())


def test_a_run_that_is_done_is_tidied_up_shown_and_exported_over_a_file_only_if_told_to(
    tmp_path, capsys
):
    out, file = tmp_path / "run", tmp_path / "w.safetensors"
    assert main([*SMALL, "--out", str(out)]) == 0
    before = tree(out)
    # As a kill in the last clean-up leaves it.
    spare = ("checkpoints/step-6.ckpt", "weights/step-1.safetensors", "run.json.7.part")
    put(out, dict.fromkeys((*spare, "riglstm.lock"), b""))
    capsys.readouterr()
    assert main([*SMALL, "--out", str(out), "--resume"]) == 0
    said = capsys.readouterr().out
    assert "done already" in said
    assert "chosen on validation@P=3" in said
    assert tree(out) == before
    assert main([*SMALL, "--out", str(out), "--lr", "0.5", "--resume"]) == 2
    assert "holds another run, which is done: fit.lr is" in capsys.readouterr().err
    file.write_bytes(b"mine")
    assert main(["export", str(out), str(file)]) == 2
    assert f"FILE must be a new one, got {file}, which is there; --force" in capsys.readouterr().err
    assert file.read_bytes() == b"mine"
    assert main(["export", str(out), str(file), "--force"]) == 0
    assert main(["evaluate", str(file), "--device", "cpu"]) == 0


def test_other_files_in_the_place_of_results_demos_and_benches_are_refused(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, dict.fromkeys(("report.html", "bench.json"), b"mine"))
    before = tree(tmp_path)
    monkeypatch.setattr(reproducing, "run", lambda *args, **_: pytest.fail("trained"))
    for words, said in (
        (
            ["reproduce", "copying", "--out", "x", "--results", "report.html"],
            "expected the columns",
        ),
        (["demo", "--out", "."], "--out must be a new folder, or that of a demo, got ."),
        (["bench", "--quick", "--json", "bench.json"], "--json must name a new file, or one that"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
        assert tree(tmp_path) == before


class Gone(io.StringIO):
    """A stream that takes some writes, and then fails."""

    encoding = "utf-8"

    def __init__(self, number: int, after: int) -> None:
        super().__init__()
        self.number, self.left = number, after

    def write(self, text: str) -> int:
        if self.left == 0:
            raise OSError(self.number, os.strerror(self.number))
        self.left -= 1
        return super().write(text)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO, None])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_training_goes_on_without_its_output(name, number, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        # None: the stream was closed.
        gone: Any = number and Gone(number, after=2 if name == "stdout" else 0)
        patch.setattr(sys, name, gone)
        assert main([*SMALL, "--out", str(tmp_path / "run")]) == 0
        assert gone is None or gone.left == 0
        assert getattr(sys, name) is gone
        assert main(["evaluate", "no/such/run"]) == 2
    assert RunFolder(tmp_path / "run").state == "done"


def test_a_terminal_without_our_signs_gets_others(tmp_path, monkeypatch):
    with (tmp_path / "said").open("w", encoding="ascii") as ascii_only:
        monkeypatch.setattr(sys, "stdout", ascii_only)
        with unbreakable_output():
            print("a – b ─")
    assert (tmp_path / "said").read_text() == "a ? b ?\n"


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", ["2>&- >&-", "2>/dev/full >/dev/full", "2>&1 | head -1", "| head -1", "2>&-", ">&-"]
)
def test_a_shell_may_close_fill_and_leave_the_streams(ending, tmp_path):
    words = " ".join([sys.executable, "-m", "riglstm", *SMALL, "--out", str(tmp_path / "run")])
    made = subprocess.run(
        ["bash", "-c", f"{words} {ending}; echo code ${{PIPESTATUS[0]}} >&3"],
        env={**ENVIRONMENT, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.dup2(os.open(tmp_path / "code", os.O_CREAT | os.O_WRONLY), 3),
        pass_fds=(3,),
    )
    assert (tmp_path / "code").read_text() == "code 0\n", made.stderr
    assert RunFolder(tmp_path / "run").state == "done"
    assert "Traceback" not in made.stdout + made.stderr
    assert "Exception ignored" not in made.stdout + made.stderr


@pytest.mark.parametrize("way", ["module", "script"])
def test_ctrl_c_while_torch_is_loaded_shows_no_traceback(way, tmp_path):
    slow, script = tmp_path / "path" / "torch.py", tmp_path / "riglstm"
    slow.parent.mkdir()
    slow.write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    script.write_text("from riglstm.lab.cli.main import main\nmain()\n")
    where = os.pathsep.join(map(str, (slow.parent, SOURCE)))
    words = ["-m", "riglstm"] if way == "module" else [str(script)]
    made = python(*words, "list", env={**os.environ, "PYTHONPATH": where}, timeout=60)
    assert made.stderr == ""
    assert made.returncode == -signal.SIGINT


def test_who_imports_the_layer_keeps_ctrl_c(tmp_path):
    code = "import sys, signal; sys.modules['torch'] = None\ntry:\n import riglstm\n"
    code += "except ImportError:\n print(signal.getsignal(2) is signal.default_int_handler)"
    assert python("-c", code, env=ENVIRONMENT, check=True).stdout == "True\n"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has none")
def test_what_nohup_has_silenced_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(speaks=False) as request:
            signal.raise_signal(signal.SIGHUP)
            assert not request.made
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
