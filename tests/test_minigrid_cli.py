"""MiniGrid through the command line: train, evaluate, reproduce, report, list, bench."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

pytest.importorskip("minigrid", reason="needs the extra riglstm[rl]")
pytest.importorskip("matplotlib", reason="needs the extra riglstm[lab]")
from riglstm.lab.cli import UsageError
from riglstm.lab.cli.main import main
from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.runs import build
from riglstm.lab.minigrid.spec import GridSpec
from riglstm.lab.minigrid.table import comparable, read, tables
from riglstm.lab.report.minigrid import relative, unequal_training
from riglstm.lab.report.runs import without_copies
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
    assert "RigLSTM&#x27;s success relative to RIM&#x27;s" in text
    assert "What is missing" not in text
    assert "chosen on validation data" not in text, "there was none"
    assert len(list(figures.glob("*-minigrid-*.png"))) >= 1


def test_no_mean_is_over_runs_of_two_trainings(runs, tmp_path):
    """Two seeds of one training, and a later run of another with figures of its own."""
    for name in ("rim", "rim-copy"):
        shutil.copytree(runs / "rim", tmp_path / name)
    for name, seed, frames, value in (("a", 0, 64, 0.5), ("b", 1, 64, 0.7), ("c", 2, 128, 0.0)):
        folder = RunFolder(shutil.copytree(runs / "riglstm", tmp_path / name))
        config, result = folder.read_json(folder.config), folder.read_json(folder.result)
        # Another `checkpoint_every` is not another training.
        config["fit"] |= {"frames": frames, "checkpoint_every": 7 + seed}
        folder.write_json(folder.config, config | {"seed": seed})
        rows = [row | {"value": value} for row in result["rows"]]
        folder.write_json(folder.result, result | {"rows": rows})
    found = without_copies([read(path) for path in sorted(tmp_path.iterdir())])[0]
    (table,), notes = tables(found)
    assert table.lines[0].ours["S5"].text() == "50.0, 70.0 (2 runs)"
    (words,) = [note for note in notes if "left out" in note]
    assert "c: left out, trained otherwise than" in words
    assert "fit.frames is 64 there, 128 here" in words
    theirs = [r["value"] for r in read(tmp_path / "rim").rows if r["metric"] == "success"]
    bars = [bar[2] for bar in relative(comparable(found)[0])]
    assert bars == pytest.approx([60 - 100 * rate for rate in theirs])
    # As many seeds of both: the one begun last.
    shutil.rmtree(tmp_path / "b")
    for name, when in (("a", "2026-01-01"), ("c", "2026-01-02")):
        (tmp_path / name / "run.json").write_text(json.dumps({"started": when}))
    later = without_copies([read(path) for path in sorted(tmp_path.iterdir())])[0]
    assert tables(later)[0][0].lines[0].ours["S5"].text() == "0.0 (1 run)"
    assert unequal_training(comparable(found)[0]) == []
    (words,) = unequal_training(comparable(later)[0])
    assert "LavaGap: RIM (there) and RigLSTM (here) were trained otherwise: fit.frames is" in words


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
    asked: list[GridSpec] = []

    def run(spec: GridSpec, *args: object, **options: object) -> NoReturn:
        asked.append(spec)
        raise UsageError("this is enough")

    monkeypatch.setattr("riglstm.lab.minigrid.runs.run", run)
    assert main(["train", "minigrid", *(("--set", *given) if given else ()), "--seed", "9"]) == 2
    core: Any = build(asked[0], torch.device("cpu")).core
    layer = core.layer
    assert (layer.soft_update, layer.selection.update_scale, layer.update_bias) == update


def test_reproduce_trains_what_is_missing_and_prints_a_table(tmp_path, capsys):
    flags = "--families lavagap --models lstm --seeds 1 --frames 2048 --episodes 2 --workers 1"
    command = ["reproduce", "minigrid", *flags.split(), "--device", "cpu", "--out", str(tmp_path)]
    assert main(command) == 0
    first = capsys.readouterr()
    assert "**MiniGrid, LavaGap: episodes solved in %**" in first.out
    assert "run 1 of 1" in first.err
    assert main(command) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "run 1" not in again.err
    assert (tmp_path / "minigrid.md").read_text() in first.out


def test_minigrid_is_listed_and_comes_before_its_flags(capsys):
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in FAMILIES)
    assert main(["reproduce", "--seeds", "1", "minigrid"]) == 2
    assert "minigrid must come before its flags" in capsys.readouterr().err
