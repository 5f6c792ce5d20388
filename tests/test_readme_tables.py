"""README, the results' page, the guide and the figures say what the files in results/ do."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from riglstm.lab.cli.main import main
from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.report import outdated, publish, readme
from riglstm.lab.report.readme import BEGIN, END, NOTHING, block
from riglstm.lab.tables import agents, complexity, finals, rows
from riglstm.lab.tables.complexity import Measured
from riglstm.lab.tables.plan import folder_name, plan
from riglstm.lab.tables.recipes import MEMORIES, SEARCHED, TABLES, Recipe
from riglstm.lab.tables.result import FAILED, ResultRow
from riglstm.lab.tables.run import export, finished, load
from riglstm.lab.tables.search import Space, read_lines, read_space
from riglstm.lab.tables.table import Line, markdown, newest, tables, text_table
from riglstm.lab.tasks.datasets import DataError
from riglstm.lab.train.checkpoints import write_weights
from test_report import finish, noise, on_digits, without_digits

ROOT = Path(__file__).parents[1]
README = "Sequential MNIST"
"""The title of its table."""
LIMIT = 16_000_000
"""Bytes of a file of weights in the repository."""


def test_readme_and_figures_are_up_to_date_with_the_results():
    found = outdated(ROOT / "results", ROOT / "README.md", ROOT / "weights")
    assert not found, f"`riglstm report --results results` writes anew: {', '.join(found)}"


def tables_in(text: str) -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
    """Of each line of each table: title, cells up to the model's, the others by their head."""
    for title, body in re.findall(r"^\*\*([^*\n]+)\*\*\n\n((?:\|.*\n)+)", text, re.M):
        heads, _, *lines = ([c.strip(" *") for c in x.split("|")[1:-1]] for x in body.splitlines())
        for cells in lines:
            lead = heads.index("model") + 1
            found = list(zip(heads, cells, strict=True))[lead:]
            yield title.partition(":")[0], cells[:lead], found


def spread(values: Sequence[float]) -> str:
    """As tables print a cell."""
    count = f"({len(values)} run{'s' * (len(values) != 1)})"
    if len(values) < 3:
        return f"{', '.join(f'{v:.1f}' for v in values)} {count}"
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} {count}"


def test_every_mean_in_the_tables_is_that_of_the_rows():
    """Computed anew, from the files alone."""
    found: dict[tuple[str | bool, ...], dict[int, float]] = {}
    rules: dict[tuple[str | bool, ...], set[str]] = {}
    lines: list[dict[str, str]] = []
    for path in sorted((ROOT / "results").glob("*.csv")):
        with path.open(newline="") as file:
            lines += csv.DictReader(file)
    for row in lines:
        if row["metric"] == "failed" or row["table"] == "minigrid":
            continue
        what = TABLES[row["table"]]
        condition, chooser = (row[name].split("@")[1] for name in ("metric", "chosen_on"))
        home = what.recipes["paper"].settings[row["setting"]].trained_on
        rule = "training condition" if chooser == home else "shifted conditions"
        # What was searched has a table of its own, where each recipe counts by its own rule.
        if rule in (row["rule"] or rule):
            place = (what.title, row["budget"] == "searched", row["setting"], row["model"])
            rules.setdefault(place, set()).update((row["rule"] or rule).split(", "))
            figures = found.setdefault((*place, condition, chooser), {})
            figures[int(row["seed"])] = 100 * float(row["value"])
    seen: dict[str, set[tuple[str | bool, ...]]] = {"README.md": set(), "results/README.md": set()}
    for name, keys in seen.items():
        for of, lead, cells in tables_in((ROOT / name).read_text().split("## Complexity")[0]):
            title, searched = of.partition(",")[0], "search" in of
            what = next(table for table in TABLES.values() if table.title == title)
            recipe = what.recipes["paper"]
            setting, model = lead if len(lead) > 1 else (*recipe.settings, *lead)
            # A control is none of the paper's rows, but of another recipe's.
            known = [row for other in what.recipes.values() for row in other.rows.items()]
            key = {row.label: key for key, row in known}[model]
            home = recipe.settings[setting].trained_on
            for head, cell in cells:
                best, figure = head.endswith(", best run"), head.removesuffix(", best run")
                condition, _, chooser = figure.removesuffix(" (trained)").partition(", best checkp")
                of_rule = "shifted conditions" if chooser else "training condition"
                chooser = chooser.split()[-1] if chooser else home
                place = (title, searched, setting, key, condition, chooser)
                if place in found and of_rule not in rules[place[:4]]:
                    assert cell == "not run", place
                    continue
                if place not in found:
                    other = re.search(r"paper|updates|runs|K_a|budget|trial", head)
                    assert other or cell == "not run", head
                    continue
                values = [found[place][seed] for seed in sorted(found[place])]
                single = min(values) if best else np.mean(values)
                brief = best or name == "README.md"
                assert cell == (f"{single:.1f}" if brief else spread(values)), place
                keys.add(place)
    assert seen["results/README.md"] == found.keys()
    assert seen["README.md"] == {p for p in found if p[:2] == (README, True) and p[5] == "14x14"}


def test_the_page_has_the_recorded_success_rates():
    text = (ROOT / "results" / "README.md").read_text()
    found: dict[tuple[str, ...], list[float]] = {}
    for row in rows.read(ROOT / "results" / "minigrid.csv"):
        metric, _, level = row.metric.partition("@")
        if metric != "steps":
            actions = {"success": "drawn", "success_greedy": "most probable"}[metric]
            key = FAMILIES[row.setting].title, actions, MEMORIES[row.model].label, level
            found.setdefault(key, []).append(100 * row.value)
    lines = re.sub(r"\*\*MiniGrid, ([\w-]+):.*\*\*", r"**\1**", text.split("## MiniGrid")[1])
    for family, lead, cells in tables_in(lines):
        for head, cell in cells:
            assert cell == spread(found.pop((family, *lead, head.removesuffix(" (trained)"))))
    assert not found


def test_weights_in_the_repository_are_small_and_of_runs_in_the_results():
    files = list((ROOT / "weights").glob("*.safetensors"))
    if not files:
        pytest.skip("there are no weights in the repository yet")
    recorded = {
        (row.run, row.metric, row.chosen_on): row.value
        for row in rows.read_folder(ROOT / "results")
    }
    for file in files:
        assert file.stat().st_size < LIMIT, file.name
        result = finished(file).result
        assert result["rows"]
        for row in result["rows"]:
            figure = (result["run"], f"{row['metric']}@{row['condition']}", row["chosen_on"])
            assert recorded.get(figure) == row["value"], (file.name, figure)


@pytest.mark.parametrize("file", sorted((ROOT / "weights").glob("*.safetensors")), ids=str)
def test_weights_in_the_repository_load_without_data(file, monkeypatch):
    without_digits(monkeypatch, "no data here")
    spec, task, net = load(file, "cpu")
    assert file.stem == f"{spec.task}-{spec.model}"
    assert not net.training
    tokens = torch.zeros(9, 2, 1, dtype=torch.uint8)
    assert net(tokens).shape[-1] in (10, 11)
    if "mnist" in file.name:
        with pytest.raises(DataError, match="no data here"):
            task.ready()


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
        for condition, value in zip(("P=50", *HARDER), values, strict=True)
    ]


HARDER = ("P=100", "P=200", "P=400")
FOUND = [
    *run_of("riglstm", 0, (1.0, 0.99, 0.98, 0.97)),
    *run_of("riglstm", 1, (1.0, 1.0, 1.0, 0.98)),
    *run_of("lstm", 0, (1.0, 0.9, 0.5, 0.2)),
    *run_of("lstm", 0, (0.5, 0.5, 0.5, 0.5), recipe="older", budget="quick"),
]
FAILURE = replace(ROW, metric=FAILED, value=1.0, chosen_on="", seed=2, run="riglstm-2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository: rows, weights and a README."""
    monkeypatch.setattr("riglstm.lab.tasks.images.obtain", noise)
    monkeypatch.setattr(readme, "SIZE", 5)
    monkeypatch.setattr(readme, "STEP", 3)
    rows.append(tmp_path / "results" / "runs.csv", FOUND)
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    run = finish(tmp_path / "run", on_digits("riglstm"))
    export(run, tmp_path / "weights" / "digits.safetensors")
    return tmp_path


def places(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "results", folder / "README.md", folder / "weights"


def stale(folder: Path) -> set[str]:
    """What is not up to date, from the folder on."""
    return {str(Path(path).relative_to(folder)) for path in outdated(*places(folder))}


FIGURES = {
    f"results/figures/{name}.png" for name in ("copying-M1-shift", "digits-cells", "digits-scores")
}
TEXTS = {"README.md", "results/README.md"}


def test_what_is_published_is_up_to_date_until_a_row_or_a_weight_changes(
    folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    assert stale(folder) == FIGURES | TEXTS
    assert main(["report", "--results", "results"]) == 0
    assert "written: results/figures/copying-M1-shift.png, results/fig" in capsys.readouterr().out
    assert outdated(*places(folder)) == []
    readme = (folder / "README.md").read_text()
    assert readme.startswith(f"before\n{BEGIN}\n**Multi-digit copying")
    assert readme.endswith(f"{END}\nafter\n")
    page = (folder / "results" / "README.md").read_text()
    for name in FIGURES:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"](figures/{Path(name).name})" in page
    assert publish(*places(folder)) == []

    (folder / "results" / "NOTES.md").write_text("Mind the second row.\n")
    assert stale(folder) == {"results/README.md"}
    publish(*places(folder))
    page = (folder / "results" / "README.md").read_text()
    assert page.index("Mind the second row.") < page.index("**Multi-digit copying")

    file = folder / "results" / "runs.csv"
    kept = file.read_text()
    file.write_text(kept.replace("accuracy@P=400,0.97,", "accuracy@P=400,0.79,"))
    assert file.read_text() != kept
    assert stale(folder) == {"results/figures/copying-M1-shift.png", *TEXTS}
    file.write_text(kept)
    other = finish(folder / "other", on_digits("riglstm", 1))
    export(other, folder / "weights" / "digits.safetensors")
    assert stale(folder) == {name for name in FIGURES if "digits" in name}


def test_without_data_the_rest_is_published(folder, monkeypatch):
    without_digits(monkeypatch)
    said: list[str] = []
    publish(*places(folder), show=said.append)
    assert said == [
        f"digits-{kind}.png is not drawn: no digits here" for kind in ("cells", "scores")
    ]
    assert stale(folder) == {name for name in FIGURES if "digits" in name}


def cells(text: str, model: str) -> list[str]:
    """The line of a model in the first table that has one."""
    lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
    return next(line for line in lines if model in line)


def test_readmes_table_has_a_line_for_a_model_and_the_best_of_a_column_in_bold():
    text = block(tables(FOUND))
    assert text.startswith(
        "**Multi-digit copying, trained on P=50: test accuracy in %, by digit**\n\n| digits"
    )
    assert cells(text, "model")[1:] == ["model", "runs", "P=50 (trained)", *HARDER]
    assert cells(text, "LSTM")[2:6] == ["1", "**100.0**", "90.0", "50.0"]
    assert cells(text, "RigLSTM")[2:6] == ["2", "**100.0**", "**99.5**", "**99.0**"]
    assert "Recipe `paper`: [docs/reproducing.md](docs/reproducing.md)." in text
    found = readme.Results(Path("none"), tables(FOUND), [], Path("none"))
    assert "Not run yet: Sequential MNIST, Sequential CIFAR-10, Ablations" in readme.page(found, {})
    # 97.54 is printed as 97.5 is, and as good; alone in a setting nothing is best.
    nearly = [*FOUND[:8], *run_of("lstm", 0, (1.0, 0.9, 0.5, 0.9754))]
    assert cells(block(tables(nearly)), "LSTM")[6] == "**97.5**"
    elsewhere = run_of("lstm", 0, (1.0, 1.0, 1.0, 1.0), setting="M=8")
    assert "**1" not in block(tables([*FOUND[:8], *elsewhere]))
    quick = [replace(row, budget="quick") for row in FOUND]
    assert block(tables(quick)) == f"{NOTHING}\n"
    newer = run_of("riglstm", 0, (1.0, 1.0, 1.0, 1.0), recipe="22222222")
    assert cells(block(tables([*FOUND, *newer])), "RigLSTM")[2:4] == ["1", "**100.0**"]
    looked_for = block(tables([replace(row, budget="tuned") for row in FOUND[:12]]))
    assert "all conditions, the shifted ones included ([how](docs/recipes.md))." in looked_for


def test_what_has_no_run_is_named():
    (table,) = tables([*FOUND, FAILURE])
    assert table.missing == "GridLSTM, RIM; M=2, M=4, M=8"
    eight = run_of("lstm", 0, (0.9, 0.9, 0.9, 0.9), setting="M=8", recipe="33333333")
    (table,) = tables([*FOUND, *(replace(row, run="8") for row in eight)])
    assert table.missing == "GridLSTM, RIM; M=2, M=4; RigLSTM in M=8"
    whole = [
        replace(row, setting=setting, recipe=f"{setting}{model}", run=f"{setting}{row.run}")
        for setting in ("M=1", "M=2", "M=4", "M=8")
        for model in ("lstm", "gridlstm", "rim", "riglstm")
        for seed in range(3)
        for row in run_of(model, seed, (1.0, 1.0, 1.0, 1.0))
    ]
    (table,) = tables(whole)
    assert "Not run" not in markdown(text_table(table))
    # Runs of another budget are none of the table's.
    (table,) = tables([replace(r, budget="tuned") if r.model == "rim" else r for r in whole])
    assert table.missing == "RIM"


@pytest.mark.parametrize("average", [None, 0.9])
def test_captions_of_cells_say_the_seed_and_whether_weights_are_averaged(average, folder):
    digits = on_digits("riglstm", 3)
    run = finish(folder / "averaged", replace(digits, fit=replace(digits.fit, average=average)))
    export(run, folder / "weights" / "digits.safetensors")
    publish(*places(folder))
    page = (folder / "results" / "README.md").read_text()
    averaged = "" if average is None else ", averaged over updates by 0.9"
    assert page.count(f"riglstm, seed 3, trained on 4x4, weights of update 7{averaged}, ") == 2


def test_runs_that_failed_are_counted_until_they_have_figures():
    text = block(tables([*FOUND, FAILURE, replace(FAILURE, commit="def")]))
    assert cells(text, "RigLSTM")[2:4] == ["2, 1 failed", "**100.0**"]
    (table,) = tables([*FOUND, FAILURE])
    assert table.lines[-1].there["P=50"].text().endswith("(2 runs, 1 failed)")
    done = run_of("riglstm", 2, (1.0, 1.0, 1.0, 1.0))
    assert "failed" not in block(tables([*FOUND, FAILURE, *done]))
    # A table whose runs have all failed is there, too, and has no figure to draw.
    only = block(tables([FAILURE]))
    assert cells(only, "RigLSTM")[2:5] == ["0, 1 failed", "–", "–"]
    found = readme.Results(Path("none"), tables([FAILURE]), [], Path("none"))
    assert not list(readme._wanted(found))


def test_a_table_is_of_one_budget_and_precision_or_says_what_is_not():
    lstm = FOUND[8:12]
    newer = run_of("riglstm", 0, (1.0, 1.0, 1.0, 1.0), recipe="22222222", precision="fp32")
    later = [*FOUND, *newer, *(replace(row, recipe="33333333") for row in lstm)]
    (table,) = tables(later)
    # The last row is of tf32: the run in fp32 does not stand beside it.
    assert {line.made["precision"] for line in table.lines} == {"tf32"}
    assert table.notes[0].startswith("Recipe paper in tf32: 3 runs")
    assert "precision" not in block([table])
    (table,) = tables([*FOUND, *(replace(row, updates=1000) for row in newer)])
    text = markdown(text_table(table))
    assert text.splitlines()[2].split(" | ")[3:5] == ["precision", "updates"]
    assert "| fp32      | 1,000   |" in text
    assert "A model without such runs is shown by its own newest ones" in text
    assert cells(block([table]), "LSTM")[:4] == ["M=1", "LSTM", "tf32", "1"]


def test_cells_and_label_are_those_of_the_rows_own_budget(monkeypatch):
    table = TABLES["copying"]
    paper = table.recipes["paper"]
    riglstm = paper.rows["riglstm"]
    smaller = replace(riglstm, label="R", options={**riglstm.options, "active_cells": 2})
    tuned = replace(paper, rows={**paper.rows, "riglstm": smaller})
    recipes: dict[Any, Recipe] = {**table.recipes, "tuned": tuned}
    monkeypatch.setitem(TABLES, "copying", replace(table, recipes=recipes))

    def line(budget: str) -> Line:
        found = run_of("riglstm", 0, (1.0, 1.0, 1.0, 1.0), budget=budget)
        return tables(found)[0].lines[0]

    assert (line("paper").label, line("paper").cells) == ("RigLSTM", "(6, 4)")
    assert (line("tuned").label, line("tuned").cells) == ("R", "(6, 2)")


def test_what_was_changed_by_hand_is_stale(folder, monkeypatch):
    publish(*places(folder))
    figures = folder / "results" / "figures"
    picture = figures / "copying-M1-shift.png"
    kept = picture.read_bytes()
    picture.write_bytes(kept + b"more")
    assert outdated(*places(folder)) == [str(picture)]
    picture.write_bytes(kept)
    assert outdated(*places(folder)) == []
    sources = json.loads((figures / "sources.json").read_text())
    sources["digits-cells.png"]["caption"] = "all cells are awake"
    (figures / "sources.json").write_text(json.dumps(sources))
    assert str(figures / "digits-cells.png") in outdated(*places(folder))
    publish(*places(folder))
    table = replace(TABLES["copying"], title="Another title")
    monkeypatch.setitem(TABLES, "copying", table)
    assert str(picture) in outdated(*places(folder))


def test_figures_of_weights_do_not_go_because_a_folder_is_misspelt(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    publish(*places(folder))
    assert main(["report", "--results", "results", "--weights", "wieghts"]) == 2
    assert "--weights must be there, got wieghts, which is not" in capsys.readouterr().err
    assert outdated(*places(folder)) == []


def test_a_model_has_the_figures_of_its_kind(folder):
    for model in ("lstm", "rmc"):
        run = finish(folder / model, on_digits(model))
        export(run, folder / "weights" / f"{model}.safetensors")
    assert stale(folder) - FIGURES - TEXTS == {"results/figures/rmc-scores.png"}


def test_times_of_a_device_replace_its_older_ones_beside_those_of_others(folder, monkeypatch):
    file = folder / "results" / "complexity.json"

    def measure(device: str, ms: float, *models: str) -> None:
        def measured(name: str, *_: object) -> Measured:
            return Measured(device, name, name, {"19x19": ms}, 10**6, 10**8, 64, 1, "2", None)

        monkeypatch.setattr(complexity, "measured", measured)
        complexity.table(models, results=file)

    measure("CPU", 5.0, "lstm", "rim")
    measure("GPU", 6.0, "riglstm")
    measure("CPU", 7.0, "rim")
    publish(*places(folder))
    page = (folder / "results" / "README.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:5]] for line in page.splitlines()]
    found = [line for line in lines if line[:1] in (["lstm"], ["rim"], ["riglstm"])]
    assert [(line[0], *line[2:]) for line in found] == [
        ("lstm", "5.0", "66.4"),
        ("rim", "7.0", "661.2"),
        ("riglstm", "6.0", "1133.2"),
    ]
    other = folder / "results" / "runs.csv"
    with pytest.raises(ValueError, match=r"runs.csv must be a new file, or one that .* wrote"):
        complexity.table(["lstm"], results=other)


def test_a_file_that_was_exported_again_knows_its_run(folder):
    again = export(folder / "weights" / "digits.safetensors", folder / "copy.safetensors")
    assert finished(again).result["run"] == "run"


@pytest.mark.parametrize(
    "said", ["not JSON", "[]", '{"config": {}}', '{"config": {}, "result": 3}']
)
def test_metadata_of_another_program_is_refused(said, tmp_path, capsys):
    file = tmp_path / "x.safetensors"
    write_weights({"a": torch.zeros(1)}, file, {"riglstm": said})
    assert main(["evaluate", str(file)]) == 2
    assert "must say in its metadata, under riglstm, the configuration and the result of a run" in (
        capsys.readouterr().err
    )
    write_weights({"a": torch.zeros(1)}, file, {"riglstm": '{"config": {}, "result": {}}'})
    assert main(["evaluate", str(file)]) == 2
    assert capsys.readouterr().err.endswith("got an empty one; export it anew\n")


def strangers(found: Sequence[ResultRow]) -> list[str]:
    """Runs that the recipes of today would not make again."""
    # Rows of one run differ in the figure alone: each run is looked at once.
    runs = {replace(row, metric="", value=0.0, chosen_on="") for row in newest(found)}
    return sorted({row.run for row in runs if (row.setting, row.recipe) not in recipes_of(row)})


@cache
def choices(table: str, model: str) -> tuple[Space, dict[str, str]]:
    """A table's space, and by rule the trial that it has chosen for a model."""
    space = read_space(ROOT / "protocol" / f"{table}.toml")
    lines = read_lines(ROOT / "results" / "trials" / f"{space.searched.name}.jsonl")
    return space, finals.choices(space, model, lines)


def recipes_of(row: ResultRow) -> set[tuple[str, str]]:
    """Settings and recipes of the runs that a row's table, model and seed have today."""
    if row.table == "minigrid":
        *_, agent = agents.plan([row.setting], [row.model], row.seed + 1, "", PPO())
        assert agent.folder.name == row.run
        return {(row.setting, agent.spec.recipe())}
    if row.budget == SEARCHED:
        space, chosen = choices(row.table, row.model)
        assert row.rule
        assert dict.fromkeys(row.rules, row.trial).items() <= chosen.items()
        made = finals.spec(space, row.model, row.trial, row.setting, row.seed)
        assert folder_name(made) == row.run
        return {(row.setting, made.recipe())}
    runs = plan(
        *(row.table, [row.model], [row.seed], row.budget),  # type: ignore[arg-type]
        precision=row.precision,  # type: ignore[arg-type]
    )
    return {(p.setting, p.spec.recipe()) for p in runs}


def test_the_recipes_make_the_runs_of_the_results_again():
    assert not strangers(rows.read_folder(ROOT / "results"))
    (run,) = plan("copying", ["riglstm"], [0], "paper", settings=["M=1"], precision="tf32")
    row = replace(ROW, recipe=run.spec.recipe())
    assert strangers([row]) == []
    assert strangers([replace(row, precision="fp32")]) == ["run"]
    assert strangers([replace(row, setting="M=2")]) == ["run"]


def test_figures_whose_weights_are_gone_leave_the_page(folder):
    publish(*places(folder))
    (folder / "weights" / "digits.safetensors").unlink()
    assert stale(folder) == {"results/README.md"}
    publish(*places(folder))
    assert "digits-cells" not in (folder / "results" / "README.md").read_text()
    assert outdated(*places(folder)) == publish(*places(folder)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("accuracy@P=400,0.97,", "accuracy@P=400,much,", "value: expected a number, got 'much'"),
        ("accuracy@P=400,0.97,", "accuracy@P=40O,0.97,", "metric: expected one of failed, acc"),
        ("copying,riglstm,0,", "copying,rig|lstm,0,", "model: expected one of lstm, "),
        ("copying,riglstm,0,", "coping,riglstm,0,", "table: expected one of mnist, "),
        ("copying,riglstm,0,", f"copying,riglstm,{'9' * 999},", "seed: expected a number from 0"),
        ("NVIDIA H200", "x" * 200_000, "expected a CSV file of results, got field larger"),
        ("NVIDIA H200", '"NVIDIA H200', "expected a CSV file of results, got "),
        ("NVIDIA H200,", "", "expected 18 columns, got 17"),
        ("table,", "", "line 1: expected the columns table,model,"),
        (",tf32,", ",fp8,", "precision: expected one of fp32, "),
        ("NVIDIA H200", "\udcff", "expected a CSV file of results, got 'utf-8'"),
    ],
)
def test_rows_that_cannot_be_are_listed_with_their_places(old, new, said, tmp_path):
    file = tmp_path / "runs.csv"
    rows.append(file, FOUND)
    text = file.read_text().replace(old, new, 1)
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(rows.RowError) as error:
        rows.read_folder(tmp_path)
    assert said in str(error.value)
    assert str(error.value).startswith(f"results that cannot be taken:\n  {file}")
    assert str(error.value).endswith("\nmend or remove these lines")
    assert len(str(error.value)) < 10_000


def test_rows_that_cannot_be_stop_the_command_before_anything_is_written(
    folder, monkeypatch, capsys
):
    file = folder / "results" / "runs.csv"
    file.write_text(file.read_text().replace("accuracy@P=400,0.97,", "accuracy@P=400,1.97,"))
    monkeypatch.chdir(folder)
    assert main(["report", "--results", "results"]) == 2
    assert "value: expected a share from 0 to 1, got 1.97" in capsys.readouterr().err
    assert "old" in (folder / "README.md").read_text()
    assert not (folder / "results" / "README.md").exists()


def test_rows_that_contradict_each_other_are_listed_across_files(folder):
    rows.append(folder / "results" / "more.csv", [replace(FOUND[0], commit="other")])
    assert len(rows.read_folder(folder / "results")) == len(FOUND) + 1
    rows.append(folder / "results" / "most.csv", [replace(FOUND[0], value=0.5)])
    contradiction = r"most.csv, line 2, column value: expected 1\.0, which .*more.csv, line 2 has"
    with pytest.raises(rows.RowError, match=contradiction):
        rows.read_folder(folder / "results")
    (folder / "results" / "most.csv").unlink()
    (folder / "results" / "most.csv").mkdir()
    with pytest.raises(rows.RowError, match=r"most.csv: expected a CSV file of results, got .*"):
        rows.read_folder(folder / "results")


def test_a_readme_without_marks_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="must have a line <!-- results: begin -->"):
        outdated(tmp_path, tmp_path / "README.md", tmp_path)


def test_figures_by_the_other_rule_that_were_not_kept_are_not_called_not_run():
    (table,) = tables(FOUND)
    text = markdown(text_table(table))
    assert "no figure" in text
    assert "not run" not in text
    line = replace(table.lines[0], made={"trial": "4"})
    assert "not run" in markdown(text_table(replace(table, lines=(line,))))
