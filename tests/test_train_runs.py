"""Runs with their tests: in several sessions, on other devices, and beside other processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riglstm.lab.tables import run as runs
from riglstm.lab.tables.plan import Planned, RunSpec, state
from riglstm.lab.tables.run import Make, attempt, evaluate, run
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import BusyError, RunFolder

TASK: dict[str, Any] = {
    **{"L": 1, "P": 2, "digits": 3, "input_size": 6, "conditions": ("P=4",)},
    **{"batch_size": 16, "validation_size": 20, "test_size": 30},
}
FIT = Fit(updates=4, evaluate_every=2, checkpoint_every=2, device="cpu", tensorboard=False)
SPEC = RunSpec("copying", TASK, "lstm", 8, {}, FIT, seed=1)


def planned(path: Path) -> Planned:
    return Planned(SPEC, path, state(SPEC, path), "M=1", "lstm")


def test_a_result_names_all_devices_and_commits_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr("riglstm.lab.train.devices.commit", lambda: "first")
    folder.begin(SPEC.resolved(), command="", device="NVIDIA H200", resume=False)
    monkeypatch.setattr("riglstm.lab.train.devices.commit", lambda: None)
    folder.begin(SPEC.resolved(), command="", device="NVIDIA H200", resume=True)
    monkeypatch.setattr("riglstm.lab.train.devices.commit", lambda: "second")
    monkeypatch.setattr(runs, "device_name", lambda device: "CPU")
    result = run(SPEC, folder.path, resume=True, progress=False)
    assert result["device"] == "NVIDIA H200, then CPU"
    assert result["commit"] == "first, then unknown, then second"
    assert folder.read_json(folder.result) == result


def test_a_run_of_tf32_is_tested_on_a_cpu_and_not_trained_there(tmp_path: Path) -> None:
    result = run(SPEC, tmp_path / "run", progress=False)
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    config["fit"]["precision"] = "tf32"
    file.write_text(json.dumps(config))
    assert evaluate(tmp_path / "run", "cpu")["rows"] == result["rows"]
    tf32 = replace(SPEC, fit=replace(FIT, precision="tf32"))
    with pytest.raises(ValueError, match="tf32 is a mode of NVIDIA GPUs"):
        run(tf32, tmp_path / "other", progress=False)
    assert not (tmp_path / "other").exists()


def test_a_run_holds_its_folder_until_it_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = runs._test, []

    def test(*arguments: Any) -> float:
        with pytest.raises(BusyError):
            run(SPEC, tmp_path / "run", resume=True, progress=False)
        refused.append(True)
        return real(*arguments)

    monkeypatch.setattr(runs, "_test", test)
    run(SPEC, tmp_path / "run", progress=False)
    assert len(refused) == 3
    assert not (tmp_path / "run" / "riglstm.lock").exists()


def note(calls: list[bool]) -> Make:
    """In place of a run: notes whether it goes on with an older one."""

    def make(spec: RunSpec, folder: RunFolder, *, resume: bool) -> None:
        assert folder.holding
        calls.append(resume)

    return make


def test_a_table_passes_over_a_run_that_another_process_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_, started = planned(tmp_path / "run"), list[bool]()
    with RunFolder(run_.folder).held():
        attempt(run_, note(started))
    said = capsys.readouterr().err
    assert said == f"{run_.folder}: another process is training it; passed over\n"
    assert started == []


@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_table_passes_over_a_run_that_ended_after_it_was_planned(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_, started = planned(tmp_path / "run"), list[bool]()
    folder = RunFolder(run_.folder)
    folder.begin(SPEC.resolved(), command="", device="", resume=False)
    if end == "done":
        folder.finish({"rows": []})
    else:
        folder.write_json(folder.failed, {"reason": ""})
    attempt(run_, note(started))
    said = capsys.readouterr().err
    assert said == f"{folder.path}: it is {end} by now, by another process; passed over\n"
    assert started == []
    if end == "failed":
        # Asked for anew, it is tried anew.
        attempt(planned(folder.path), note(started))
        assert started == [True]
        assert not folder.failed.exists()


def test_a_table_goes_on_with_a_run_that_was_begun_after_it_was_planned(
    tmp_path: Path,
) -> None:
    run_, started = planned(tmp_path / "run"), list[bool]()
    RunFolder(run_.folder).begin(SPEC.resolved(), command="", device="", resume=False)
    attempt(run_, note(started))
    assert started == [True]
