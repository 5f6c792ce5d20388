"""MiniGrid through the command line: train, evaluate, reproduce, report, list, bench."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("minigrid", reason="needs the extra riglstm[rl]")
pytest.importorskip("matplotlib", reason="needs the extra riglstm[lab]")
from riglstm.lab.cli import UsageError
from riglstm.lab.cli.main import main
from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.report.minigrid import relative, results
from riglstm.lab.tables import agents, rows
from riglstm.lab.tables.plan import RunSpec
from riglstm.lab.tables.result import read_record
from riglstm.lab.tables.run import build
from riglstm.lab.tables.table import TextTable
from riglstm.lab.train.folder import RunFolder

TINY = (
    "--frames 64 --envs 4 --steps 16 --window 8 --minibatch 32 --epochs 1 --episodes 2 "
    "--workers 1 --device cpu --no-tensorboard"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RigLSTM and RIM on a family of short episodes."""
    root = tmp_path_factory.mktemp("runs")
    for model in ("riglstm", "rim"):
        flags = ["--family", "lavagap", "--model", model, "--out", str(root / model)]
        assert main(["train", "minigrid", *flags, *TINY.split()]) == 0
    return root


def test_a_finished_run_is_tested_again_and_not_trained(runs, capsys):
    out = str(runs / "riglstm")
    assert main(["train", "minigrid", "--family", "lavagap", "--out", out, *TINY.split()]) == 2
    assert "holds a run that is done; `riglstm evaluate" in capsys.readouterr().err
    assert main(["evaluate", out, "--conditions", "S6", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "S6" in said
    assert "S5" not in said
    assert "This equals the recorded result." in said


def test_report_draws_the_papers_figure(runs, tmp_path, capsys):
    page, figures = tmp_path / "report.html", tmp_path / "figures"
    assert main(["report", str(runs), "--out", str(page), "--figures", str(figures)]) == 0
    text = page.read_text()
    assert "RigLSTM&#39;s success relative to RIM&#39;s" in text
    assert "What is missing" not in text
    assert "chosen on validation data" not in text, "there was none"
    assert len(list(figures.glob("*-minigrid-*.png"))) >= 1


def test_no_mean_is_over_runs_of_two_trainings(runs, tmp_path):
    """Two seeds of one training, begun after a run of another with figures of its own."""
    shutil.copytree(runs / "rim", tmp_path / "rim")
    for name, seed, frames, value in (("a", 0, 64, 0.5), ("b", 1, 64, 0.7), ("c", 2, 128, 0.0)):
        folder = RunFolder(shutil.copytree(runs / "riglstm", tmp_path / name))
        config, result = folder.read_json(folder.config), folder.read_json(folder.result)
        config["fit"] |= {"frames": frames}
        folder.write_json(folder.config, config | {"seed": seed})
        figures = [row | {"value": value} for row in result["rows"]]
        folder.write_json(folder.result, result | {"rows": figures, "updates": frames // 64})
        folder.write_json(folder.run, {"started": f"2026-01-0{9 - frames // 64}"})
    found = [read_record(path) for path in sorted(tmp_path.iterdir())]
    missing: list[str] = []
    (table, *_) = results(found, missing)
    assert isinstance(table, TextTable)
    assert table.lines[0][:3] == ["drawn", "RigLSTM", "50.0, 70.0 (2 runs)"]
    assert missing == [
        f"{tmp_path / 'c'}: left out, a later run of its memory was trained otherwise"
    ]
    theirs = [r["value"] for r in found[-1].rows if r["metric"] == "success"]
    kept = [row for run in found if run.path.name != "c" for row in agents.rows(run, run.path.name)]
    assert [bar[2] for bar in relative(kept)] == pytest.approx([60 - 100 * v for v in theirs])
    results(found[2:], missing)
    assert "LavaGap: RIM (there) and RigLSTM (here) were trained otherwise: fit.fr" in missing[-1]
    # Where memories were trained for longer than others, a column says so.
    (other,) = agents.tables([row for run in found[2:] for row in agents.rows(run, run.path.name)])
    assert other.differing() == ["updates"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--set bidirectional=true", "expected a memory that streams"),
        ("--set update_scale=0.5", "update_scale must be 'auto' with soft_update='printed'"),
        ("--frames 63", "frames must be those of one update at least, 64 = envs · steps, got 63"),
        ("--family door-key", "--family must be one of"),
        ("--model transformer", "--model must be one of"),
    ],
)
def test_a_run_that_cannot_be_begins_no_folder(flags, message, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "minigrid", "--out", str(out), *TINY.split(), *flags.split()]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "update"),
    [
        ((), (True, 1.0, None)),
        (("soft_update=true",), (True, 1 / 16, 4.0)),
        (("soft_update=true", "update_scale=0.5", "update_bias=none"), (True, 0.5, None)),
        (("variant=no_soft_state_updating",), (False, 1.0, None)),
    ],
)
def test_an_agents_soft_update_is_the_printed_one_unless_another_is_asked_for(
    given, update, monkeypatch
):
    asked: list[RunSpec] = []

    def run(spec: RunSpec, *args: object, **options: object) -> NoReturn:
        asked.append(spec)
        raise UsageError("this is enough")

    monkeypatch.setattr("riglstm.lab.cli.train.run", run)
    assert main(["train", "minigrid", *(("--set", *given) if given else ()), "--seed", "9"]) == 2
    net: Any = build(asked[0])[1]
    layer = net.core.layer
    assert (layer.soft_update, layer.selection.update_scale, layer.update_bias) == update


def test_reproduce_trains_what_is_missing_and_prints_a_table(tmp_path, capsys):
    flags = "--families lavagap --models lstm --seeds 1 --frames 2048 --episodes 2 --workers 1"
    command = ["reproduce", "minigrid", *flags.split(), "--device", "cpu", "--out", str(tmp_path)]
    command += ["--results", str(tmp_path / "results.csv")]
    assert main(command) == 0
    first = capsys.readouterr()
    assert "**MiniGrid, LavaGap: episodes solved in %**" in first.out
    assert "run 1 of 1" in first.err
    assert main(command) == 0
    again = capsys.readouterr()
    assert again.out.partition("\n")[2] == first.out.partition("\n")[2]
    assert "run 1" not in again.err
    assert (tmp_path / "minigrid.md").read_text() in first.out
    found = rows.read(tmp_path / "results.csv")
    assert [row.metric for row in found[:3]] == ["success@S5", "success_greedy@S5", "steps@S5"]
    other = replace(found[0], metric="success@5x5", chosen_on="", value=1.5)
    assert [name for name, _ in rows.faults(other)] == ["metric", "chosen_on", "value"]


def test_agents_are_trained_at_a_time_and_stop_in_time(tmp_path, capsys):
    flags = "--families lavagap --models lstm rim --seeds 1 --frames 4096 --episodes 1 --workers 1"
    command = ["reproduce", "minigrid", *flags.split(), "--device", "cpu", "--out", str(tmp_path)]
    assert main([*command, "--minutes", "0.01"]) == 0
    said = capsys.readouterr().out
    assert said.count("1 to run") == 12
    assert "2 runs are not done; go on with: riglstm reproduce minigrid --families" in said
    assert main([*command, "--jobs", "2"]) == 0
    assert "to run" not in capsys.readouterr().out
    assert {len(list(path.glob("result.json"))) for path in tmp_path.glob("minigrid-*")} == {1}


def test_minigrid_is_listed_and_comes_before_its_flags(capsys):
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in FAMILIES)
    assert main(["reproduce", "--seeds", "1", "minigrid"]) == 2
    assert "minigrid must come before its flags" in capsys.readouterr().err
