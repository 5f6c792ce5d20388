"""The paper's figures, the recipes, the plan of a table's runs, and how a table is printed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from riglstm import VARIANTS, models
from riglstm.lab.tables import rows
from riglstm.lab.tables.paper import PAPER, value
from riglstm.lab.tables.plan import Planned, RunSpec, plan
from riglstm.lab.tables.recipes import NAMES, TABLES, Budget
from riglstm.lab.tables.result import ResultRow, csv_text
from riglstm.lab.tables.table import (
    Cell,
    Line,
    Table,
    TextTable,
    markdown,
    table_of_runs,
    text_table,
)
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder

PAPERS = Path(__file__).parents[2] / "shared" / "paper"
LABELS = {
    "mnist": "tab:mnist",
    "cifar": "tab:cifar",
    "ablation": "tab:mnist_ablation",
    "balls": "tab:ball-test",
    "copying": "tab:copying",
    "complexity": "tab:mnist-time",
}
NAMES_IN_LATEX = {"Transformers": "transformer", "RigLSTM": "riglstm"}


def latex_rows(label: str) -> list[tuple[str, list[str]]]:
    """A table of the paper: the name in each line, and its cells as they are printed."""
    sources = sorted(PAPERS.glob("*.txt"))
    if not sources:
        pytest.skip("the paper's LaTeX source is not here")
    source = re.sub(r"(\\\\|(?<!\\))%.*", r"\1", sources[0].read_text())
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", source, re.S)
    (table,) = (t for t in tables if f"\\label{{{label}}}" in t)
    found = []
    for line in table.split(r"\\"):
        plain = re.sub(r"\\(textbf|text)\{([^{}]*)\}", r"\2", re.sub(r"~?\\cite\{\w+\}", "", line))
        plain = re.sub(r"\\(midrule|toprule|cline\{[^}]*\})|[${}\\]", "", plain)
        name, *cells = (cell.strip() for cell in plain.split("&"))
        if cells and re.fullmatch(r"[\d.]+M?", cells[-1]):
            name = NAMES_IN_LATEX.get(name, name).removeprefix("RigLSTM_")
            found.append((name.lower(), [c for c in cells if c != "-" and "(" not in c]))
    return found


def our_rows(table: str) -> list[tuple[str, list[str]]]:
    """Our figures of the paper in the order of its lines."""
    if table == "balls":
        orders = {"4": ("4", "678", "curtain"), "678": ("678", "4", "curtain")}
        names = dict.fromkeys(row for _, row in PAPER["balls"])
        return [
            (row, [PAPER["balls"][s, row][c] for s, order in orders.items() for c in order])
            for row in names
        ]
    setting = {"copying": lambda s: [s.removeprefix("M=")]}.get(table, lambda s: [])
    return [(row, [*setting(s), *cells.values()]) for (s, row), cells in PAPER[table].items()]


@pytest.mark.parametrize("table", LABELS)
def test_the_papers_figures_are_those_of_its_source(table):
    assert latex_rows(LABELS[table]) == our_rows(table)


def test_the_tables_and_the_recipes_are_those_of_the_paper():
    assert set(NAMES) == set(PAPER)
    for table, found in PAPER.items():
        for cells in found.values():
            assert len(cells) == (5 if table == "complexity" else 3)
            assert all(value(printed) > 0 for printed in cells.values())
    assert value("3.6M") == 3.6e6
    assert len(PAPER["complexity"]) == 3
    for name, what in TABLES.items():
        recipe = what.recipes["paper"]
        wanted = {(setting, row) for setting in recipe.settings for row in recipe.rows}
        assert wanted == set(PAPER[name])
        assert recipe.models == tuple(recipe.rows)
        for (setting, _), cells in PAPER[name].items():
            conditions = {recipe.settings[setting].trained_on, *recipe.conditions}
            assert set(cells) <= conditions
    assert tuple(TABLES["ablation"].recipes["paper"].rows) == ("riglstm", *VARIANTS)
    # Sums of the paper's own: 100 epochs, each looked at.
    for name, images in (("mnist", 48_000), ("cifar", 40_000)):
        fit = TABLES[name].recipes["paper"].fit
        assert (fit.updates, fit.evaluate_every) == (100 * images / 64, images / 64)


def test_the_papers_models_have_the_papers_sizes():
    counted = {}
    for table in ("mnist", "cifar", "balls"):
        recipe = TABLES[table].recipes["paper"]
        for key, row in recipe.rows.items():
            inputs = {**recipe.task, **row.task}.get("input_size", 512)
            core = models.build(row.model, inputs, row.hidden_size, **row.options)
            counted[table, key] = sum(p.numel() for p in core.parameters())
    expected = {
        **{"lstm": 2_884_800, "gridlstm": 2_884_800, "rim": 1_777_800, "rmc": 152_000},
        **{"entnet": 90_806, "transformer": 3_313_408, "riglstm": 3_353_000},
    }
    for key, count in expected.items():
        assert counted["mnist", key] == count
        assert counted.get(("cifar", key), count) == count
    assert counted["mnist", "brim"] == 1_797_900
    assert counted["cifar", "brim"] == 1_089_000
    assert counted["balls", "lstm"] == counted["balls", "gridlstm"] == 4 * 250 * (512 + 250 + 2)
    cells = {key: row.cells for key, row in TABLES["mnist"].recipes["paper"].rows.items()}
    assert cells["riglstm"] == "(6, 5)"
    assert cells["rim"] == TABLES["copying"].recipes["paper"].rows["riglstm"].cells == "(6, 4)"
    assert cells["brim"] == "(6, 4), (3, 2)"
    assert cells["lstm"] == "–"
    assert TABLES["balls"].recipes["paper"].rows["riglstm"].cells == "(5, 2)"


def plans() -> list[tuple[str, Budget]]:
    return [(name, budget) for name in TABLES for budget in TABLES[name].recipes]


@pytest.mark.parametrize(("table", "budget"), plans())
def test_a_plan_is_the_same_every_time_and_fits_its_task(table, budget, tmp_path):
    recipe = TABLES[table].recipes[budget]
    first = plan(table, list(recipe.rows), 2, budget, tmp_path)
    assert first == plan(table, list(recipe.rows), 2, budget, tmp_path)
    assert len(first) == 2 * len(recipe.settings) * len(recipe.rows)
    assert len({p.folder for p in first}) == len(first)
    assert {p.state for p in first} == {"new"}
    assert [p.spec.seed for p in first] == sorted(p.spec.seed for p in first)
    for p in first:
        config: Any = p.spec.task_config()
        trained = recipe.settings[p.setting].trained_on
        if p.spec.task == "copying":
            assert trained == f"P={config.P}"
        elif p.spec.task == "balls":
            assert trained == config.balls
        else:
            assert trained == f"{config.size}x{config.size}"
        assert trained not in config.conditions or p.spec.task == "balls"
        again = RunSpec.from_json(json.loads(json.dumps(p.spec.resolved())))
        assert again.digest() == p.spec.digest()
        assert again.resolved() == p.spec.resolved()


def test_two_tables_share_the_run_that_both_have(tmp_path):
    (a,) = plan("mnist", ["riglstm"], 1, "paper", tmp_path)
    (b,) = plan("ablation", ["riglstm"], 1, "paper", tmp_path)
    assert a.folder == b.folder


def test_a_part_of_a_table_is_planned_from_the_first_seed_of_all_models_on(tmp_path):
    found = plan(
        *("copying", ["riglstm", "lstm"], [3, 1], "paper", tmp_path),
        settings=["M=8", "M=1"],
        precision="tf32",
    )
    assert [(p.spec.seed, p.setting, p.row) for p in found] == [
        (seed, setting, row)
        for seed in (1, 3)
        for setting in ("M=1", "M=8")
        for row in ("lstm", "riglstm")
    ]
    assert {p.spec.fit.precision for p in found} == {"tf32"}
    plain = plan("copying", ["lstm"], [1], "paper", tmp_path, settings=["M=1"])[0]
    assert plain.folder not in {p.folder for p in found}
    assert plain.spec.recipe() != found[0].spec.recipe()
    assert replace(plain.spec, seed=9).recipe() == plain.spec.recipe()
    flooded = replace(plain.spec, fit=replace(plain.spec.fit, flood=0.1))
    assert flooded.recipe() != plain.spec.recipe()


SPEC = RunSpec("copying", {"M": 2}, "riglstm", 72, {"variant": "all_h"}, Fit(), 3)


def test_what_is_only_said_differently_is_the_same_run():
    assert replace(SPEC, fit=Fit(device="cpu", capture=False)).digest() == SPEC.digest()
    assert replace(SPEC, task_options={"M": 2, "L": 10}).digest() == SPEC.digest()
    conditions = ["P=100", "P=200", "P=400"]
    assert replace(SPEC, task_options={"M": 2, "conditions": conditions}).digest() == SPEC.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "sorting"}, "task must be one of copying.*got 'sorting'"),
        ({"model": "no_such_model"}, "model must be one of lstm.*got 'no_such_model'"),
        ({"task_options": {"N": 2}}, "'N' is no task option of 'copying'; it takes L, M"),
        ({"model_options": {"cells": "top", "heads": 2}}, "'heads' is no model option"),
        ({"model_options": {"device": "cpu"}}, "'device' is no model option"),
        ({"seed": -1}, "seed must be a whole number from 0 to 4,294,967,295, got -1"),
    ],
)
def test_a_run_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)


def test_a_file_that_is_no_configuration_is_refused():
    with pytest.raises(ValueError, match=r"must have the fields task, .*got model; is this"):
        RunSpec.from_json({"model": "lstm"})
    data = SPEC.resolved()
    data["fit"]["momentum"] = 0.9
    with pytest.raises(ValueError, match="'momentum' is no training option"):
        RunSpec.from_json(data)


def finished(planned: Planned, figures: dict[tuple[str, str], float], **more: Any) -> None:
    """Write a run as if it had been made; figures by condition and by what chose them."""
    folder = RunFolder(planned.folder)
    folder.begin(planned.spec.resolved(), command="", device="", resume=False)
    result_figures = [
        {
            **{"condition": c, "metric": "accuracy", "value": v, "step": 500},
            "chosen_on": f"validation@{chooser}",
        }
        for (c, chooser), v in figures.items()
    ]
    chosen = {c: {"step": 500, "value": 0.5} for c, _ in figures}
    said = {"updates": 500, "seconds": 60.0, "device": "CPU (toy)", "commit": "abc"}
    folder.finish({"rows": result_figures, "chosen": chosen, **said, **more})


def test_a_table_is_built_from_the_folders_of_its_runs(tmp_path):
    asked = ("mnist", ["lstm", "riglstm"], 2, "quick", tmp_path)
    lstm0, rig0, lstm1, rig1 = plan(*asked)  # type: ignore[arg-type]
    home = {(c, "7x7"): 0.5 for c in ("7x7", "8x8", "10x10", "12x12")}
    away = {(c, c): 0.75 for c in ("8x8", "10x10", "12x12")}
    finished(lstm0, {**home, **away})
    finished(lstm1, {**home, **away, ("8x8", "7x7"): 0.52}, seconds=30.0)
    finished(rig0, {**home, **away})
    failed = RunFolder(rig1.folder)
    failed.begin(rig1.spec.resolved(), command="", device="", resume=False)
    cost = {"updates": 7, "seconds": 2.5}
    failed.write_json(failed.failed, {"reason": "the loss is not a number; try less", **cost})
    table, found = table_of_runs("mnist", plan(*asked), "quick")  # type: ignore[arg-type]
    lstm, rig = table.lines
    assert lstm.ours["8x8"].text() == "50.0, 52.0 (2 runs)"
    assert lstm.there["8x8"].text() == "75.0, 75.0 (2 runs)"
    assert lstm.there["7x7"] == lstm.ours["7x7"]
    assert rig.ours["8x8"].text() == "50.0 (1 run, 1 failed)"
    assert not lstm.paper
    notes = "\n".join(table.notes)
    assert "Recipe quick in fp32: 4 runs of 7 to 500 updates took 152 s in all, up to 1" in notes
    assert re.search(r"on CPU \(toy\), unknown\. Commits: .*abc", notes)
    assert "Seeds: 0, 1 (lstm, riglstm)." in notes
    assert f"Failed: riglstm 7x7 seed 1: the loss is not a number ({rig1.folder.name})." in notes
    assert "not comparable" in notes
    assert table.missing == "RIM"
    assert "Sequential MNIST at quick sizes, not the paper's, trained on 7x7" in table.title
    assert "reproduc" not in (notes + table.title).lower()
    assert len(found) == 3 * 7 + 1
    assert {row.run for row in found[:-1]} == {p.folder.name for p in (lstm0, lstm1, rig0)}
    assert found[0].metric == "accuracy@7x7"
    gone = found[-1]
    assert (gone.run, gone.metric, gone.value) == (rig1.folder.name, "failed", 1.0)
    assert (gone.chosen_on, gone.updates, gone.seconds) == ("", 7, 2.5)


def test_at_the_papers_size_its_figures_stand_beside_ours(tmp_path):
    yardsticks = {c: {"constant": 0.3} for c in ("4", "678", "curtain")}
    others = {"4": ("678", "curtain"), "678": ("4", "curtain")}
    for p in plan("balls", ["lstm"], 1, "paper", tmp_path):
        home = {(c, p.setting): 0.4 for c in (p.setting, *others[p.setting])}
        away = {(c, c): 0.35 for c in others[p.setting]}
        finished(p, {**home, **away}, yardsticks=yardsticks)
    planned = plan("balls", ["lstm"], 2, "paper", tmp_path)
    table, _ = table_of_runs("balls", planned, "paper")
    shown = text_table(table)
    assert shown.heads[:5] == ["trained on", "model", "4", "4, best run", "4, paper"]
    assert shown.heads[-1] == "curtain, best checkpoint at curtain"
    assert shown.lines[0][:5] == ["4", "LSTM", "40.0 (1 run, 1 to run)", "40.0", "39.23"]
    assert shown.lines[1][:5] == ["4", "no model: constant", "30.0", "–", "–"]
    assert shown.lines[2][4] == "54.53"
    assert shown.lines[2][-3:] == [f"{x} (1 run, 1 to run)" for x in ("35.0", "40.0", "35.0")]
    assert shown.title.endswith("rolled-out frames, less is better")
    assert any("best of five" in note for note in shown.notes)


def test_a_result_that_lacks_a_figure_or_has_it_twice_is_refused(tmp_path):
    (planned,) = plan("mnist", ["lstm"], 1, "quick", tmp_path)
    finished(planned, {("7x7", "7x7"): 0.5})
    with pytest.raises(ValueError, match="must have a figure for 8x8, chosen on 7x7, got none"):
        table_of_runs("mnist", [planned], "quick")
    file = planned.folder / "result.json"
    result = json.loads(file.read_text())
    file.write_text(json.dumps({**result, "rows": 2 * result["rows"]}))
    with pytest.raises(ValueError, match=r"must have a figure once, got 7x7, accuracy, .* twice"):
        table_of_runs("mnist", [planned], "quick")


def test_a_finished_run_of_another_seed_is_not_taken_for_this_one(tmp_path):
    one, other = plan("mnist", ["lstm"], 2, "quick", tmp_path)
    finished(other, {("7x7", "7x7"): 0.5})
    other.folder.rename(one.folder)
    with pytest.raises(ValueError, match="got another: seed is 1 there, 0 here; move it away"):
        table_of_runs("mnist", [one], "quick")


TABLE = Table(
    name="toy",
    title="Toys_1",
    measure="100 %",
    settings="M",
    conditions=("P=5", "P=10"),
    trained_on={"M=1": "P=5", "M=2": "P=5"},
    lines=(
        Line(
            *("M=1", "Rig_A"),
            ours={"P=5": Cell((99.0, 98.0, 97.0)), "P=10": Cell((1234.56,))},
            there={"P=5": Cell((99.0, 98.0, 97.0)), "P=10": Cell((90.0, 92.0), 1)},
            paper={"P=10": "99.06"},
            cells="(6, 4)",
        ),
        Line("M=1", "EntNet", ours={"P=5": Cell((97.0,))}),
        Line(
            *("M=2", "LSTM"),
            ours={"P=5": Cell(failed=2), "P=10": Cell(missing=1)},
            there={"P=5": Cell(failed=2), "P=10": Cell()},
        ),
    ),
    notes=("Chosen on P=5 & so on.",),
    missing="RIM",
)

FULL = """\
**Toys_1: 100 %**

| M   | model  | (N, K_a) |           P=5 (trained) |            P=10 | P=10, paper | P=10, best checkpoint at P=10 |
| --- | ------ | -------- | ----------------------: | --------------: | ----------: | ----------------------------: |
| M=1 | Rig_A  | (6, 4)   | **98.0 ± 1.0 (3 runs)** | 1,234.6 (1 run) |       99.06 | 90.0, 92.0 (2 runs, 1 failed) |
| M=1 | EntNet | –        |            97.0 (1 run) |         not run |           – |                             – |
| M=2 | LSTM   | –        |                2 failed |        1 to run |           – |                       not run |

- Chosen on P=5 & so on.
- Not run yet: RIM.
"""  # noqa: E501

BRIEF = """\
**Toys_1: 100 %**

| M   | model  | runs        | P=5 (trained) |    P=10 |
| --- | ------ | ----------- | ------------: | ------: |
| M=1 | Rig_A  | 3           |      **98.0** | 1,234.6 |
| M=1 | EntNet | 1           |          97.0 |       – |
| M=2 | LSTM   | 0, 2 failed |             – |       – |

- Not run yet: RIM.
"""


def test_a_table_is_printed_whole_and_brief():
    assert markdown(text_table(TABLE)) == FULL
    assert markdown(text_table(TABLE, brief=True)) == BRIEF


def test_the_best_run_is_the_lowest_where_lower_is_better():
    low = text_table(replace(TABLE, best=True, higher_is_better=False))
    assert low.lines[0][4] == "97.0"
    assert text_table(replace(TABLE, best=True)).lines[0][4] == "99.0"
    assert low.lines[2][4] == "–"
    assert (1, 3) in low.best


def test_what_a_file_says_is_no_markup_in_a_table():
    bad = "a|b](x) <b> `c` *d* _e_ f_g\nh $i$ \\"
    text = markdown(TextTable(bad, ["head", bad], [[bad, "1"]], 1, [bad]))
    assert text.count(r"a\|b\](x) \<b\> `c` \*d\* \_e\_ f_g h \$i\$ \\") == 4
    assert len(text.splitlines()) == 7
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in text.splitlines()[2:5])


ROW = ResultRow(
    *("copying", "riglstm", 0, "accuracy@P=100", 1 / 3, "validation@P=50", 500, 60.5),
    *("NVIDIA H200", "abc", "quick", "M=1", "tf32", 4, "87654321"),
    "copying-riglstm-seed0-12345678",
)


def test_result_rows_are_added_and_read_back(tmp_path):
    path = tmp_path / "results" / "copying.csv"
    other = replace(ROW, seed=1, device='a "device", with signs')
    rows.append(path, [ROW])
    before = path.read_text()
    # A last line without its end is not glued to the next.
    path.write_text(before.rstrip("\n"))
    rows.append(path, [ROW, other, other])
    assert path.read_text().startswith(before)
    assert rows.read(path) == [ROW, other]
    assert before.splitlines()[0].startswith(
        "table,model,seed,metric,value,chosen_on,updates,seconds,device,commit"
    )


def test_a_full_disk_at_the_first_write_leaves_a_file_that_can_be_written_to(tmp_path, monkeypatch):
    path = tmp_path / "results.csv"

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rows.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            rows.append(path, [ROW])
    assert path.read_bytes() == b""
    rows.append(path, [ROW])
    assert rows.read(path) == [ROW]


def test_who_adds_rows_waits_until_nobody_else_does(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="this system has no such locks")
    path = tmp_path / "results.csv"
    read = rows.read
    other = replace(ROW, seed=1)
    rows.append(path, [ROW])

    def busy(path: Path) -> list[ResultRow]:
        with path.open("ab") as second, pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return read(path)

    monkeypatch.setattr(rows, "read", busy)
    rows.append(path, [other])
    with path.open("ab") as second:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    "change",
    [
        *({"value": value} for value in (math.nan, math.inf, -0.1, 1.1, None, "0.5")),
        *({"seed": seed} for seed in (-1, 1.0, True)),
        {"metric": "perplexity@P=50"},
        {"chosen_on": "test@P=50"},
        {"jobs": 0},
    ],
)
def test_a_row_that_would_not_be_taken_is_not_written(change, tmp_path):
    path = tmp_path / "results.csv"
    (name,) = change
    with pytest.raises(rows.RowError, match=rf", column {name}: expected .*, got "):
        rows.append(path, [ROW, replace(ROW, **change)])
    assert not path.exists()


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (csv_text([ROW]), r"the new row of .*: expected 0.33.*, got 0.5"),
        ("a,b\n1,2\n", r"line 1: expected the columns table,model,.*got a,b"),
    ],
)
def test_a_file_that_rows_contradict_or_that_is_another_is_left_alone(there, message, tmp_path):
    path = tmp_path / "results.csv"
    path.write_text(there)
    with pytest.raises(rows.RowError, match=message):
        rows.append(path, [replace(ROW, value=0.5)])
    assert path.read_text() == there
