"""The package as a user gets it: a wheel, in an environment that holds torch and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def test_wheel_runs_the_readme_example_with_torch_alone(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("riglstm-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    # All of torch need not be compiled to bytecode for what is imported here.
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", constraints, wheel)
    installed = run(python, "-m", "pip", "list", "--format", "freeze").lower()
    assert "torch==" in installed
    assert not re.search(r"^(numpy|tyro|rich|onnx|gymnasium)==", installed, re.M)
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
