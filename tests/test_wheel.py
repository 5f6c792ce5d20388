"""The package as a user gets it: a wheel, in an environment that holds torch and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import distribution, distributions, version
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def readme_example() -> str:
    example = re.search(
        r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert example
    return example[1]


def test_readme_drop_in_example_has_six_lines_at_most() -> None:
    assert len([line for line in readme_example().splitlines() if line]) <= 6


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


def test_wheel_runs_the_readme_example_with_torch_alone(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("riglstm-*.whl")
    packages = needs(wheel, tmp_path / "wheel.json")
    del packages["riglstm"]
    assert packages == needs("torch", tmp_path / "torch.json")
    # Of the others, those that are here will do, which may be older.
    assert packages["torch"] == version("torch")
    python = environment(tmp_path / "empty", wheel, set(packages))
    script = tmp_path / "example.py"
    script.write_text(readme_example() + "print(tuple(output.shape), rnn)\n")
    quiet = "ignore:Failed to initialize NumPy"  # torch's own, where there is no NumPy
    said = run(python, "-W", "error", "-W", quiet, "-I", script)
    assert said.startswith("(50, 8, 60) RigLSTM(20, 60")
    demo = [python, "-I", "-m", "riglstm", "demo"]
    broken = subprocess.run(demo, capture_output=True, text=True, cwd=tmp_path)
    assert broken.returncode == 2
    assert "riglstm[train]" in broken.stderr
    # What a flag means is read from the source, which a wheel has to carry.
    said = run(python, "-W", quiet, "-I", "-m", "riglstm", "list")
    assert "copying" in said
