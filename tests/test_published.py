"""README, the results' page and the figures say what the files in results/ do, and can be stale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from riglstm.cli.main import main
from riglstm.experiments import rows, summary
from riglstm.experiments.finished import export, finished
from riglstm.experiments.rows import ResultRow
from riglstm.report import outdated, publish, published
from riglstm.report.readme import BEGIN, END, NOTHING, block
from riglstm.tasks.files import DataError
from test_report import finish, noise, on_digits

ROOT = Path(__file__).parents[1]
LIMIT = 16_000_000
"""Bytes of a file of weights in the repository."""


def test_readme_and_figures_are_up_to_date_with_the_results() -> None:
    stale = outdated(ROOT / "results", ROOT / "README.md", ROOT / "weights")
    assert not stale, f"`riglstm report --results results` writes anew: {', '.join(stale)}"


def test_weights_in_the_repository_are_small_and_of_runs_in_the_results() -> None:
    files = list((ROOT / "weights").glob("*.safetensors"))
    if not files:
        pytest.skip("there are no weights in the repository yet")
    known = {row.run for row in summary.read_all(ROOT / "results")}
    for file in files:
        assert file.stat().st_size < LIMIT, file.name
        assert finished(file).result["run"] in known, file.name


ROW = ResultRow(
    *("copying", "riglstm", 0, "accuracy@P=50", 0.9, "validation@P=50", 40_000, 600.0),
    *("NVIDIA H200", "abc", "paper", "M=1", "tf32", 4, "11111111", "run"),
)


def run_of(model: str, seed: int, values: tuple[float, ...], **changes: object) -> list[ResultRow]:
    """The figures of a run, chosen on the training condition."""
    return [
        replace(
            ROW,
            model=model,
            seed=seed,
            metric=f"accuracy@{condition}",
            value=value,
            run=f"{model}-{seed}",
            **changes,  # type: ignore[arg-type]
        )
        for condition, value in zip(("P=50", "P=100", "P=200", "P=400"), values, strict=True)
    ]


FOUND = [
    *run_of("riglstm", 0, (1.0, 0.99, 0.98, 0.97)),
    *run_of("riglstm", 1, (1.0, 1.0, 1.0, 0.98)),
    *run_of("lstm", 0, (1.0, 0.9, 0.5, 0.2)),
    *run_of("lstm", 0, (0.5, 0.5, 0.5, 0.5), recipe="older", budget="quick"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository: rows, weights and a README."""
    monkeypatch.setattr("riglstm.tasks.images.obtain", noise)
    monkeypatch.setattr(published, "SIZE", 5)
    monkeypatch.setattr(published, "STEP", 3)
    rows.append(tmp_path / "results" / "runs.csv", FOUND)
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    run = finish(tmp_path / "run", on_digits("riglstm"), {"4x4": 0.5, "5x5": 0.25})
    export(run, tmp_path / "weights" / "digits.safetensors")
    return tmp_path


def places(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "results", folder / "README.md", folder / "weights"


def names(folder: Path, paths: list[str]) -> set[str]:
    return {str(Path(path).relative_to(folder)) for path in paths}


FIGURES = {
    f"results/figures/{n}" for n in ("copying-shift.png", "digits-cells.png", "digits-scores.png")
}
TEXTS = {"README.md", "results/README.md"}


def test_what_is_published_is_up_to_date_until_a_row_or_a_weight_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert names(folder, outdated(*places(folder))) == FIGURES | TEXTS
    assert main(["report", "--results", "results"]) == 0
    assert "written: results/figures/copying-shift.png, results/fig" in capsys.readouterr().out
    assert outdated(*places(folder)) == []
    readme = (folder / "README.md").read_text()
    assert readme.startswith(f"before\n{BEGIN}\n| trained on")
    assert readme.endswith(f"{END}\nafter\n")
    page = (folder / "results" / "README.md").read_text()
    for name in FIGURES:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"](figures/{Path(name).name})" in page
    assert publish(*places(folder)) == []

    file = folder / "results" / "runs.csv"
    kept = file.read_text()
    file.write_text(kept.replace("accuracy@P=400,0.97,", "accuracy@P=400,0.79,"))
    assert file.read_text() != kept
    stale = names(folder, outdated(*places(folder)))
    assert stale == {"results/figures/copying-shift.png", *TEXTS}
    file.write_text(kept)
    other = finish(folder / "other", on_digits("riglstm", 1), {"4x4": 0.5, "5x5": 0.25})
    export(other, folder / "weights" / "digits.safetensors")
    stale = names(folder, outdated(*places(folder)))
    assert stale == {name for name in FIGURES if "digits" in name}
    (folder / "weights" / "digits.safetensors").unlink()
    publish(*places(folder))
    assert outdated(*places(folder)) == []
    assert not list((folder / "results" / "figures").glob("digits*"))


def test_without_data_the_rest_is_published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise DataError("no digits here")

    monkeypatch.setattr("riglstm.tasks.images.obtain", gone)
    said: list[str] = []
    publish(*places(folder), show=said.append)
    assert said == [
        f"digits-{kind}.png is not drawn: no digits here" for kind in ("cells", "scores")
    ]
    left = names(folder, outdated(*places(folder)))
    assert left == {name for name in FIGURES if "digits" in name}


def test_readmes_table_has_means_the_papers_figures_and_what_is_below_them() -> None:
    text = block(summary.sheets(FOUND))
    assert text.splitlines()[0] == "| trained on → tested on | RigLSTM | LSTM |"
    assert text.splitlines()[2] == (
        "| Multi-digit copying: P=50 → P=100, P=200, P=400 "
        "| 99.5 ± 0.7 / 99.0 ± 1.4 / 97.5 ± 0.7 (2)<br>*99.1 / 98.9 / 97.7* "
        "| 90.0 / 50.0 / 20.0 (1)<br>*45.4 / 25.2 / 16.1* |"
    )
    assert "RigLSTM is below the paper's in Multi-digit copying, P=400: by 0.2." in text
    better = [replace(row, value=1.0) for row in FOUND]
    assert "No figure of RigLSTM here is below" in block(summary.sheets(better))
    quick = [replace(row, budget="quick") for row in FOUND]
    assert block(summary.sheets(quick)) == f"{NOTHING}\n"


def test_the_newest_recipe_counts_and_the_ablations_have_a_line() -> None:
    newer = run_of("riglstm", 0, (1.0, 1.0, 1.0, 1.0), recipe="22222222")
    text = block(summary.sheets([*FOUND, *newer]))
    assert "| 100.0 / 100.0 / 100.0 (1)<br>" in text
    variant = run_of("no_soft_state_updating", 0, (0.9, 0.8, 0.7, 0.6), table="ablation")
    text = block(summary.sheets([*FOUND, *variant]))
    assert (
        "Ablations on sequential MNIST (P=100, P=200, P=400): no_soft_state_updating 80.0" in text
    )


def test_a_readme_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="must have a line <!-- results: begin -->"):
        outdated(tmp_path, tmp_path / "README.md", tmp_path)


def test_sources_hold_no_path_of_a_machine(folder: Path) -> None:
    publish(*places(folder))
    text = (folder / "results" / "figures" / "sources.json").read_text()
    assert str(folder) not in text
    assert {len(source["digest"]) for source in json.loads(text).values()} == {64}
