"""The examples: each runs as it stands, and what it prints is a result."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from riglstm.lab.tasks.base import Task

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(folder: Path, *command: str | Path, path: Path | None = None) -> str:
    """What a command prints, in a folder of its own; `path`: where Python looks for packages."""
    # Where the package is not installed, as in a checkout, it is found as it is here.
    places = [str(path)] if path else []
    env = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table(printed: str) -> dict[str, list[float]]:
    """The numbers of each line that begins with a name; the first line is the head."""
    found = (re.match(r"(\D*?)  +([\d.]+.*)", line) for line in printed.splitlines()[1:])
    return {
        line[1]: [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line[2])]
        for line in found
        if line
    }


@pytest.mark.slow
def test_forecaster_stays_good_on_long_streams(tmp_path):
    lines = table(run(tmp_path, EXAMPLES / "forecaster.py"))
    assert list(lines) == ["RigLSTM", "LSTM", "last value"]
    for name in ("RigLSTM", "LSTM"):
        # Noise alone has 0.1, and the last value, repeated, more than 0.5.
        assert all(0.1 < error < 0.25 for error in lines[name][:3]), lines
    assert all(error > 0.5 for error in lines["last value"]), lines
    assert (tmp_path / "forecaster.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("example", ["classifier", "sb3_agent"])
def test_it_is_right_on_sequences_longer_than_those_it_learned_from(example, tmp_path):
    """A guess is right in a third of the classifier's cases, and in half of the agent's."""
    if example == "sb3_agent":
        pytest.importorskip("sb3_contrib", reason="needs the extra riglstm[sb3]")
    lines = table(run(tmp_path, EXAMPLES / f"{example}.py"))
    assert list(lines) == ["RigLSTM", "LSTM"]
    assert all(share > 90 for line in lines.values() for share in line[:2]), lines


@pytest.mark.slow
def test_own_task_is_installed_by_pip_and_learned(tmp_path):
    site = tmp_path / "site"
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    run(tmp_path, "-m", "pip", "install", *quiet, "--target", site, EXAMPLES / "own_task")
    assert "adding" in run(tmp_path, "-m", "riglstm", "list", path=site)
    said = (EXAMPLES / "own_task" / "riglstm_adding.py").read_text()
    (command,) = re.findall(r"^ +riglstm (train .*)$", said, re.M)
    place = ("--device", "cpu", "--no-tensorboard")
    run(tmp_path, "-m", "riglstm", *command.split(), *place, path=site)
    result = json.loads((tmp_path / "runs/adding/riglstm-s0/result.json").read_text())
    errors = {row["condition"]: row["value"] for row in result["rows"][:3]}
    # Who says 1, whatever the numbers, has an error of 1/6.
    assert errors["length=20"] < 0.01, errors
    assert errors["length=40"] < 0.05, errors
    again = run(tmp_path, "-m", "riglstm", "evaluate", "runs/adding/riglstm-s0", path=site)
    assert "This equals the recorded result." in again
    run(tmp_path, "-m", "riglstm", "report", "runs", "--out", "page.html", path=site)
    assert "adding, trained on length=20" in (tmp_path / "page.html").read_text()


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def test_notebook_has_the_code_of_its_script_and_the_outputs_of_all_of_it():
    script = (EXAMPLES / "forecaster.py").read_text(encoding="utf-8")
    _, *parts = re.split(r"^# %%$", script, flags=re.M)
    code = cells(EXAMPLES / "forecaster.ipynb", "code")
    assert ["".join(cell["source"]) for cell in code] == [part.strip() for part in parts]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    printed = "".join(line for o in outputs if o["output_type"] == "stream" for line in o["text"])
    lines = table(printed)
    assert list(lines) == ["RigLSTM", "LSTM", "last value"]
    assert all(0.1 < error < 0.25 for error in lines["RigLSTM"][:3])
    (picture,) = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert base64.b64decode(picture).startswith(b"\x89PNG")


def test_the_page_on_own_tasks_shows_what_the_example_has():
    page = (ROOT / "docs" / "own-tasks.md").read_text(encoding="utf-8")
    own = EXAMPLES / "own_task"
    (entry_point,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    assert entry_point in (own / "pyproject.toml").read_text()
    said = (own / "riglstm_adding.py").read_text()
    (command,) = re.findall(r"^ +(riglstm train .*)$", said, re.M)
    assert f"\n{command}\n" in page
    called = ", ".join(f'"{word}"' for word in command.split()[1:])
    assert f"main([{called}])" in page
    contract = {name for name in vars(Task) if not name.startswith("_")} | set(Task.__annotations__)
    listed = set(re.findall(r"^\| `(\w+)", page, re.M))
    assert listed == contract
