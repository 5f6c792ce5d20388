"""Tasks that are not ours: of packages that are installed, and of scripts that register them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import train_task
from riglstm.lab import tasks
from riglstm.lab.cli import main
from riglstm.lab.tables.plan import RunSpec
from riglstm.lab.train.config import Fit

Patch = pytest.MonkeyPatch

MODULE = '''
from dataclasses import dataclass

import train_task
from riglstm.lab.tasks.base import Metric


class Task(train_task.Halves):
    metric = Metric("gain", higher_is_better=False, scale=1, unit="")

    def loss(self, net, batch):
        loss, _ = super().loss(net, batch)
        return loss, -loss.detach()

    def score(self, *args):
        totals = super().score(*args)
        return {"loss": totals["loss"], "gain": -totals["loss"], "count": totals["count"]}


@dataclass(frozen=True)
class Options:
    """Which half of a sequence is larger."""

    batch_size: int = 8
    """Sequences an update."""

    def open(self, device, data_dir=None, show=None):
        return Task(device, self.batch_size)
'''
SHORT = ["--hidden-size", "4", "--model", "lstm", "--updates", "12", "--evaluate-every", "4"]
SHORT += ["--checkpoint-every", "4", "--device", "cpu", "--no-tensorboard"]


@dataclass(frozen=True)
class Halves:
    """Which half of a sequence is larger."""

    conditions: tuple[str, ...] = ("T=10",)
    """Where the model is tested."""

    def open(self, device: torch.device, data_dir: Any = None, show: Any = None) -> Any:
        return train_task.Halves(device)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: Patch) -> Iterator[None]:
    """No test sees what another has registered or installed."""
    monkeypatch.setattr(tasks, "_registered", {})
    tasks._installed.cache_clear()
    yield
    tasks._installed.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder of packages that Python searches."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def install(site: Path, package: str, points: dict[str, str], module: str = MODULE) -> None:
    """Put a package there, as pip would leave it: a module, and what is said of it."""
    (site / f"{package}.py").write_text(module)
    said = site / f"{package}-1.5.dist-info"
    said.mkdir()
    (said / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    lines = "\n".join(f"{name} = {value}" for name, value in points.items())
    (said / "entry_points.txt").write_text(f"[riglstm.tasks]\n{lines}\n")


def exit_code(*args: str | Path) -> int:
    return main.main([str(arg) for arg in args])


def rows(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())["rows"]


def test_a_packages_task_is_trained_resumed_tested_exported_and_drawn(site, capsys, monkeypatch):
    install(site, "larger", {"larger": "larger:Options"})
    assert exit_code("list") == 0
    assert "  larger                  Which half of a sequence" in capsys.readouterr().out
    assert exit_code("train", "larger", "--help") == 0
    out = capsys.readouterr().out
    assert "--batch-size INT            Sequences an update. (default: 8)" in out
    assert exit_code("train", "larger", *SHORT, "--out", "whole") == 0

    batch = train_task.Halves.batch

    def stop(self: Any, seed: int, step: int, rows: slice = slice(None)) -> Any:
        if step == 6:
            raise KeyboardInterrupt
        return batch(self, seed, step, rows)

    with monkeypatch.context() as patched:
        patched.setattr(train_task.Halves, "batch", stop)
        assert exit_code("train", "larger", *SHORT, "--out", "cut") == main.STOPPED
    assert exit_code("report", "cut", "--out", "cut.html") == 0
    assert exit_code("train", "larger", *SHORT, "--out", "cut", "--resume") == 0
    assert rows(Path("cut")) == rows(Path("whole"))
    assert [row["metric"] for row in rows(Path("whole"))] == ["gain"] * 3
    assert all(row["value"] < 0 for row in rows(Path("whole")))
    record = json.loads(Path("whole", "run.json").read_text())
    assert record["versions"]["larger"] == "1.5"

    capsys.readouterr()
    assert exit_code("export", "whole", "whole.safetensors") == 0
    for run in ("whole", "whole.safetensors"):
        assert exit_code("evaluate", run, "--device", "cpu", "--conditions", "T=6", "T=20") == 0
        out = capsys.readouterr().out
        assert "This equals the recorded result." in out
        assert "T=20" in out
    assert exit_code("report", "whole", "cut", "--out", "page.html") == 0
    page = Path("page.html").read_text()
    assert "larger, trained on T=6" in page
    assert "less is better" in page


def test_a_registered_task_is_found_and_can_be_registered_again_by_the_same_cell():
    tasks.register("larger", Halves)
    assert tasks.find("larger") is Halves
    assert tasks.names() == [*tasks.TASKS, "larger"]
    spec = RunSpec("larger", {"conditions": ["T=10"]}, "lstm", 4, {}, Fit(), 0)
    assert spec.task_config() == Halves()
    assert RunSpec.from_json(spec.resolved()).digest() == spec.digest()
    # A notebook's cell that is run again makes the class anew.
    again = dataclass(frozen=True)(type("Halves", (Halves,), {"__module__": __name__}))
    tasks.register("larger", again)
    assert tasks.find("larger") is again


def test_a_name_twice_is_refused(site, capsys):
    install(site, "first", {"larger": "first:Options", "copying": "first:Options"})
    install(site, "second", {"larger": "second:Options"})
    with pytest.raises(ValueError, match="must be new, got 'copying', which riglstm has; take"):
        tasks.register("copying", Halves)
    with pytest.raises(ValueError, match="must be new, got 'minigrid', which riglstm has; take"):
        tasks.register("minigrid", Halves)
    message = "'larger' of first 1.5 from first:Options and second 1.5 from second:Options cannot"
    assert exit_code("train", "larger") == 2
    assert message in capsys.readouterr().err
    # Ours is ours, whoever has a task of that name.
    assert tasks.find("copying") is tasks.TASKS["copying"]
    assert exit_code("list") == 0
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "point", "message"),
    [
        ("import no_such_module", "broken:Options", "ModuleNotFoundError: No module named 'no_s"),
        ("1 / 0", "broken:Options", "ZeroDivisionError: division by zero"),
        (MODULE, "broken:Option", "AttributeError: module 'broken' has no attribute 'Option'"),
        (MODULE, "broken:Task", "TypeError: must be called with a dataclass type or instance; rep"),
    ],
)
def test_a_broken_package_is_named_with_the_reason_and_breaks_no_other_task(
    site, capsys, module, point, message
):
    install(site, "broken", {"lost": point}, module)
    install(site, "larger", {"larger": "larger:Options"})
    sys.modules.pop("broken", None)
    begun = f"the task 'lost' of broken 1.5 from {point} cannot be loaded: "
    assert exit_code("train", "lost") == 2
    said = capsys.readouterr().err
    assert begun in said
    assert message in said
    assert "Traceback" not in said
    for args in (["list"], ["train", "--help"]):
        assert exit_code(*args) == 0
        out = capsys.readouterr().out
        assert begun in out
        assert "Which half of a sequence is larger." in out
        assert "Remember digits" in out


def test_options_that_clash_with_flags_or_cannot_be_flags_are_refused(capsys):
    @dataclass(frozen=True)
    class Clash(Halves):
        lr: float = 0.1

    @dataclass(frozen=True)
    class Odd(Halves):
        where: complex = 1j

    tasks.register("clash", Clash)
    tasks.register("odd", Odd)
    assert exit_code("train", "clash", "--help") == 2
    assert "lr is a flag of task and of training; rename the field" in capsys.readouterr().err
    assert exit_code("train", "odd", "--help") == 2
    assert "a flag must be int, float, bool, str, Path, a Literal" in capsys.readouterr().err


def test_a_run_whose_task_is_not_there_says_what_to_install(site, tmp_path, capsys, monkeypatch):
    tasks.register("larger", Halves)
    assert exit_code("train", "larger", *SHORT, "--out", "run") == 0
    monkeypatch.setattr(tasks, "_registered", {})
    capsys.readouterr()
    assert exit_code("evaluate", "run") == 2
    said = capsys.readouterr().err
    assert "run/config.json: the task must be one of copying, mnist, " in said
    assert "got 'larger'; one of your own is found once its package is installed, or after" in said


def test_our_own_tasks_are_found_without_a_look_at_what_is_installed(monkeypatch):
    monkeypatch.setattr(tasks, "entry_points", None)
    assert [tasks.find(name) for name in tasks.TASKS] == list(tasks.TASKS.values())
