"""The command line from a checkout, on machines that lack what is not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

RUNNER = """
import contextlib, importlib.abc, importlib.metadata, io, json, sys

missing = {missing}

class Veil(importlib.abc.MetaPathFinder):
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in missing
        return None if hidden else self.finder.find_spec(name, path, target)

class Unknown(importlib.metadata.Distribution):
    @classmethod
    def from_name(cls, name):
        if name.replace("-", "_") in missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

found = importlib.metadata.Distribution.from_name
importlib.metadata.Distribution.from_name = Unknown.from_name
sys.meta_path[:] = map(Veil, sys.meta_path)
import pytest
from riglstm.lab.cli.main import main

said = []
for args in {commands}:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(args)
        except SystemExit as end:
            code = end.code or 0
    said.append((code, out.getvalue(), err.getvalue()))
heavy = [n for n in ("lightning_fabric", "matplotlib", "tensorboard") if n in sys.modules]
print(json.dumps({{"said": said, "heavy": heavy}}))
"""


def run_without(
    missing: set[str], commands: list[list[str]], cwd: Path
) -> tuple[list[tuple[int, str, str]], list[str]]:
    """Code, stdout and stderr of each command, in one process, and the heavy packages it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER.format(missing=missing, commands=commands)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return [(code, out, err) for code, out, err in found["said"]], found["heavy"]


def test_with_torch_alone_it_explains_itself_and_says_what_training_needs(tmp_path: Path) -> None:
    extras = {"lightning_fabric", "safetensors", "tqdm", "numpy", "pooch", "rich", "tyro"}
    extras |= {"matplotlib", "tensorboard", "gymnasium", "minigrid"}
    verbs = ["demo", "train", "evaluate", "reproduce", "report", "bench", "data", "list"]
    helps = [["--help"], *([verb, "--help"] for verb in verbs), ["train", "mnist", "--help"]]
    works = [*helps, ["--version"], ["list"], ["data", "--data-dir", "none-here"]]
    works.append(["bench", "--quick", "--tables", "stream"])
    fails = {
        "training needs lightning_fabric, which is not installed": ["train", "copying"],
        "needs numpy, which is not installed": ["report", "."],
        "--tables harness needs lightning_fabric": ["bench", "--quick"],
    }
    said, heavy = run_without(extras, [*works, *fails.values()], tmp_path)
    for args, (code, out, err) in zip(works, said, strict=False):
        assert (code, err) == (0, ""), args
        assert out
    for message, (code, _, err) in zip(fails, said[len(works) :], strict=True):
        assert code == 2
        assert message in err
        assert "pip install 'riglstm[train]'" in err
        assert len(err.splitlines()) == 1
    assert heavy == []


def test_it_trains_and_tests_with_torch_and_lightning_alone(tmp_path: Path) -> None:
    missing = {"tyro", "pooch", "gymnasium", "minigrid", "matplotlib", "rich", "tensorboard"}
    tiny = ["--hidden-size", "6", "--L", "1", "--P", "2", "--digits", "2", "--conditions", "P=3"]
    sizes = ["--input-size", "4", "--validation-size", "4", "--test-size", "8", "--updates", "3"]
    fit = ["--evaluate-every", "2", "--out", "run", "--device", "cpu", "--set", "num_cells=2"]
    said, _ = run_without(
        missing,
        [
            ["train", "copying", *tiny, *sizes, *fit],
            ["evaluate", "run", "--device", "cpu"],
            ["report", "run"],
            ["data", "mnist", "--data-dir", "none-here"],
            ["demo", "--updates", "2", "--hidden-size", "4", "--num-cells", "2", "--out", "demo"],
        ],
        tmp_path,
    )
    trained, evaluated, drawn, fetched, shown = said
    assert trained[0] == 0, trained
    assert "written to run" in trained[1]
    assert evaluated[0] == 0, evaluated
    assert "This equals the recorded result." in evaluated[1]
    assert drawn[0] == 2
    assert "drawing needs matplotlib, which is not installed: pip install" in drawn[2]
    assert fetched[0] == 2
    assert "downloading needs the package pooch" in fetched[2]
    assert len(fetched[2].splitlines()) == 1
    assert shown[0] == 0, shown
    assert "digits right" in shown[1]
    assert "The page needs matplotlib: pip install 'riglstm[train]'" in shown[1]


def test_it_runs_as_a_module_and_a_reader_may_leave_early() -> None:
    command = f"{sys.executable} -m riglstm list | head -1"
    said = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert said.stdout == "tasks: riglstm train NAME\n"
    assert said.stderr == ""
