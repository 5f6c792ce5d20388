"""The package where little is installed: a wheel beside torch alone, and the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distribution, distributions, version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needs(package: Path | str, report: Path) -> dict[str, str]:
    """All that pip would install with a package where there is nothing, and their versions."""
    nothing = ("--dry-run", "--ignore-installed", "--quiet", "--report", report)
    run(sys.executable, "-m", "pip", "install", *nothing, "-c", ROOT / "constraints.txt", package)
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {one["name"].lower(): one["version"] for one in found}


def environment(folder: Path, wheel: Path, packages: set[str]) -> Path:
    """The Python of an environment with a wheel and these packages.

    They are the files of the environment that runs the tests: to unpack torch and to compile
    it to bytecode again would take most of the test's time.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    here = {d.name.lower() for d in distributions()}
    said = f"expected {sorted(packages)} where the tests run, got no {sorted(packages - here)}"
    assert packages <= here, f"{said}; make that environment anew"
    for package in packages:
        files = distribution(package).files
        assert files
        # What lies above, in bin and the like, is not imported.
        for name in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution(package).locate_file(name))
    return python


def test_wheel_runs_the_readme_example_with_torch_alone(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("riglstm-*.whl")
    pages = {f"riglstm/lab/{name}" for name in ("report/page.html", "explore/page/index.html")}
    assert pages <= set(ZipFile(wheel).namelist())
    packages = needs(wheel, tmp_path / "wheel.json")
    del packages["riglstm"]
    assert packages == needs("torch", tmp_path / "torch.json")
    # Of the others, those that are here will do, which may be older.
    assert packages["torch"] == version("torch")
    python = environment(tmp_path / "empty", wheel, set(packages))
    example = re.compile(r"```python\n(import torch\n.*?)```", re.S)
    (code,) = example.findall((ROOT / "README.md").read_text())
    script = tmp_path / "example.py"
    script.write_text(code + "print(tuple(output.shape), rnn)\n")
    quiet = "ignore:Failed to initialize NumPy"  # torch's own, where there is no NumPy
    said = run(python, "-W", "error", "-W", quiet, "-I", script)
    assert said.startswith("(50, 8, 60) RigLSTM(20, 60")
    demo = [python, "-I", "-m", "riglstm", "demo"]
    broken = subprocess.run(demo, capture_output=True, text=True, cwd=tmp_path)
    assert broken.returncode == 2
    assert "riglstm[lab]" in broken.stderr
    # What a flag means is read from the source, which a wheel has to carry.
    said = run(python, "-W", quiet, "-I", "-m", "riglstm", "list")
    assert "copying" in said


RUNNER = """
import contextlib, io, json, sys

# What stands there as None cannot be imported, nor found.
sys.modules.update(dict.fromkeys({missing}))
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
heavy = [n for n in ("lightning_fabric", "matplotlib", "tensorboard") if sys.modules.get(n)]
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


def test_with_torch_alone_it_explains_itself_and_says_what_training_needs(tmp_path):
    extras = {"lightning_fabric", "safetensors", "tqdm", "numpy", "pooch"}
    extras |= {"matplotlib", "tensorboard", "gymnasium", "minigrid"}
    verbs = ["demo", "train", "evaluate", "reproduce", "report", "bench", "explore", "data", "list"]
    helps = [["--help"], *([verb, "--help"] for verb in verbs), ["train", "mnist", "--help"]]
    works = [*helps, ["--version"], ["list"], ["data", "--data-dir", "none-here"]]
    works.append(["bench", "--quick", "--tables", "speed"])
    fails = {
        "this needs lightning_fabric, which is not installed": ["train", "copying"],
        "this needs numpy, which is not installed": ["report", "."],
    }
    said, heavy = run_without(extras, [*works, *fails.values()], tmp_path)
    for args, (code, out, err) in zip(works, said, strict=False):
        assert (code, err) == (0, ""), args
        assert out
    for message, (code, _, err) in zip(fails, said[len(works) :], strict=True):
        assert code == 2
        assert message in err
        assert "pip install 'riglstm[lab]'" in err
        assert len(err.splitlines()) == 1
    assert heavy == []


def test_it_trains_and_tests_with_torch_and_lightning_alone(tmp_path):
    missing = {"pooch", "gymnasium", "minigrid", "matplotlib", "tensorboard"}
    tiny = ["--hidden-size", "6", "--L", "1", "--P", "2", "--digits", "2", "--conditions", "P=3"]
    sizes = ["--input-size", "4", "--validation-size", "4", "--test-size", "8", "--updates", "3"]
    fit = ["--evaluate-every", "2", "--out", "run", "--device", "cpu", "--set", "num_cells=2"]
    demo = ["demo", "--updates", "2", "--hidden-size", "4", "--num-cells", "2", "--out", "demo"]
    needs = "riglstm: this needs {}, which is not installed: pip install 'riglstm[lab]'\n"
    no_figures, no_downloads = needs.format("matplotlib"), needs.format("pooch")
    asked = [
        (["train", "copying", *tiny, *sizes, *fit], 0, "written to run", ""),
        (["evaluate", "run", "--device", "cpu"], 0, "This equals the recorded result.", ""),
        (["report", "run"], 2, "", no_figures),
        (["data", "mnist", "--data-dir", "none-here"], 2, "", no_downloads),
        (demo, 2, "digits right", no_figures),
    ]
    said, _ = run_without(missing, [args for args, *_ in asked], tmp_path)
    for (args, code, printed, error), (ended, out, err) in zip(asked, said, strict=True):
        assert ended == code, (args, err)
        assert printed in out
        assert err.endswith(error)
    assert said[3][2] == no_downloads, "in one line"
