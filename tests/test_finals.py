"""The final runs of a search: what chose them, what they leave, and where they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from riglstm import VARIANTS
from riglstm.lab.cli.main import main
from riglstm.lab.tables import finals, rows, search
from riglstm.lab.tables.finals import choices, lacking, plan
from riglstm.lab.tables.plan import folder_name
from riglstm.lab.tables.recipes import AT_HOME, SEARCHED, SHIFTED, SMALL, block_zoneout
from riglstm.lab.tables.result import ResultRow
from riglstm.lab.tables.search import Space, read_space, spec
from riglstm.lab.tables.table import tables
from riglstm.models import build
from test_search import TINY, sweep

ROOT = Path(__file__).parents[1]
WITH_FINALS = [
    path for path in sorted((ROOT / "protocol").glob("*.toml")) if "leads" not in path.stem
]
BOTH = f"{AT_HOME}, {SHIFTED}"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.partition("[named")[0])
    return path


def lines_of(space: Space, model: str, **scores: tuple[float, float]) -> list[dict[str, Any]]:
    """The lines of all trials of a model; `scores`: at home and at the shift, by `t` and label."""

    def said(label: str, home: float, shifted: float) -> dict[str, Any]:
        best = {"P=6": {"step": 1, "value": home}, "P=12": {"step": 2, "value": shifted}}
        return {
            **{"model": model, "trial": label, "run": folder_name(spec(space, model, label))},
            **{"trained_on": "P=6", "validation": {"step": 1, "P=6": home}, "best": best},
        }

    return [said(label, *scores[f"t{label}"]) for label in space.labels()]


def test_each_rule_has_its_recipe_and_one_run_serves_both_where_they_agree(tiny):
    space = read_space(tiny)
    lines = lines_of(space, "lstm", t0=(0.1, 0.1), t1=(0.9, 0.2), t2=(0.5, 0.6))
    lines += lines_of(space, "riglstm", t0=(0.1, 0.1), t1=(0.2, 0.2), t2=(0.5, 0.6))
    assert choices(space, "lstm", lines) == {AT_HOME: "1", SHIFTED: "2"}
    assert choices(space, "riglstm", lines) == {AT_HOME: "2", SHIFTED: "2"}
    made = plan(space, space.models, lines, tiny.parent, "cpu")
    assert [(f.row, f.setting, f.spec.seed, f.trial, f.rule) for f in made] == [
        ("lstm", "M=2", 1, "1", AT_HOME),
        ("riglstm", "M=2", 1, "2", BOTH),
        ("lstm", "M=2", 2, "1", AT_HOME),
        ("lstm", "M=1", 1, "1", AT_HOME),
        ("riglstm", "M=1", 1, "2", BOTH),
        ("lstm", "M=1", 2, "1", AT_HOME),
        ("lstm", "M=2", 1, "2", SHIFTED),
        ("lstm", "M=2", 2, "2", SHIFTED),
        ("lstm", "M=1", 1, "2", SHIFTED),
        ("lstm", "M=1", 2, "2", SHIFTED),
    ]
    names = [final.folder.name for final in made]
    assert len({*names}) == len(names)
    done = {(f.folder.name, rule) for f in made[1:] for rule in f.rule.split(", ")}
    assert plan(space, space.models, lines, tiny.parent, "cpu", done) == made[:1]


def test_a_trial_is_known_by_its_run_and_not_by_the_label_in_its_line(tiny):
    space = read_space(tiny)
    lines = lines_of(space, "lstm", t0=(0.1, 0.1), t1=(0.9, 0.2), t2=(0.5, 0.6))
    for label in ("0", "gone"):
        other = [{**said, "trial": label} for said in lines]
        assert choices(space, "lstm", other) == {AT_HOME: "1", SHIFTED: "2"}
        assert plan(space, ["lstm"], other, tiny.parent, "cpu")


def test_a_final_run_is_its_trial_for_longer_with_another_seed_and_test_data(tiny):
    space = read_space(tiny)
    trial, final = spec(space, "riglstm", "1"), finals.spec(space, "riglstm", "1", "M=2", 3)
    fit = replace(trial.fit, updates=4 * trial.fit.updates, test=True)
    data = {**trial.task_options, "M": 2}
    assert final == replace(trial, task_options=data, fit=fit, seed=3)
    assert trial.fit.test is False
    # The table's own recipe has eight digits in other batches with another step size.
    copying = read_space(ROOT / "protocol" / "copying.toml")
    four, eight = (finals.spec(copying, "riglstm", "0", f"M={M}", 1) for M in (4, 8))
    assert eight == replace(
        four,
        task_options={**four.task_options, "M": 8},
        fit=replace(four.fit, updates=2 * four.fit.updates),
    )


@pytest.mark.parametrize("path", WITH_FINALS, ids=[path.stem for path in WITH_FINALS])
def test_every_search_has_final_runs_with_seeds_that_no_trial_had(path):
    space = read_space(path)
    assert space.setting in space.final_updates
    assert len(space.final_seeds) >= 3
    seeds = {*space.final_seeds, *(s for own in space.final_seeds_of.values() for s in own)}
    # Nor had the leads, whose trials the spaces were made from.
    spaces = [read_space(path) for path in (ROOT / "protocol").glob("*.toml")]
    assert not seeds & {seed for one in spaces for seed in one.seeds}
    lines = [search.read_lines(path) for path in (ROOT / "results" / "trials").glob("*.jsonl")]
    assert not seeds & {said["seed"] for own in lines for said in own}


def test_ablations_take_riglstms_recipe_and_no_two_of_them_are_one_model():
    space = read_space(ROOT / "protocol" / "ablation.toml")
    lines = search.read_lines(ROOT / "results" / "trials" / "mnist.jsonl")
    mnist = read_space(ROOT / "protocol" / "mnist.toml")
    chosen = choices(space, "rand_h", lines)
    assert chosen.items() < choices(mnist, "riglstm", lines).items()
    (label,) = chosen.values()
    made = {model: finals.spec(space, model, label, "14x14", 1) for model in space.models}
    assert set(made) == {"riglstm", *VARIANTS, "block_zoneout"}
    whole = finals.spec(mnist, "riglstm", label, "14x14", 1)
    for one in made.values():
        assert (one.fit, one.task_options) == (whole.fit, whole.task_options)
        for name in ("num_cells", "active_cells", "forget_bias", "gate_scale"):
            assert one.model_options[name] == whole.model_options[name]
    # What a layer computes by, in which the words of its options are gone.
    layers = {m: build(s.model, 600, 600, **s.model_options).layer for m, s in made.items()}
    seen = {m: (layer.selection, layer.input_views) for m, layer in layers.items()}
    assert len({*map(str, seen.values())}) == len(seen)
    assert seen["riglstm"][0].K_x < seen["riglstm"][0].K
    assert seen["riglstm"][0].K_h < seen["riglstm"][0].N - 1


def test_block_zoneout_is_an_lstm_of_which_some_blocks_keep_their_state():
    row = block_zoneout(SMALL)
    torch.manual_seed(0)
    layer = build(row.model, 72, row.hidden_size, **row.options).layer.double()
    x = torch.randn(7, 3, 72, dtype=torch.float64)
    h, c = (torch.randn(1, 3, 72, dtype=torch.float64) for _ in range(2))
    (trace,) = layer.trace(x, (h, c))
    weights, h, c = layer.weights(), h[0], c[0]
    for t in range(len(x)):
        both = torch.cat((x[t], h), dim=1)
        gates = torch.stack([both @ weights.W[n] + weights.b[n] for n in range(6)], dim=1)
        f, i, o, g = gates.chunk(4, dim=2)  # (B, N, d) each
        new_c = f.sigmoid() * c.unflatten(1, (6, 12)) + i.sigmoid() * g.tanh()
        awake = trace.active[t].unsqueeze(-1)
        assert awake.sum() == 3 * 5
        h = torch.where(awake, o.sigmoid() * new_c.tanh(), h.unflatten(1, (6, 12))).flatten(1)
        c = torch.where(awake, new_c, c.unflatten(1, (6, 12))).flatten(1)
        torch.testing.assert_close(trace.output[t], h, rtol=1e-12, atol=1e-12)


def test_a_model_that_lacks_trials_is_refused_with_the_command_that_makes_them(
    tiny, tmp_path, capsys
):
    space = read_space(tiny)
    lines = lines_of(space, "lstm", t0=(0.1, 0.1), t1=(0.9, 0.2), t2=(0.5, 0.6))
    assert lacking(space, "lstm", lines, tmp_path) == ""
    failed = [{**said, "failed": "NaN"} for said in lines]
    said = lacking(space, "lstm", failed, tmp_path)
    assert "lstm must have a trial that did not fail, got 3" in said
    for said in lines[:2]:
        search.append(tmp_path / "results" / "trials" / "tiny.jsonl", said)
    assert sweep(tiny, "--finals", "--models", "lstm") == 2
    assert (
        "lstm must have all its 3 trials before its final runs, got 2; make the other 1 with: "
        f"riglstm sweep {tiny} --models lstm"
    ) in capsys.readouterr().err
    assert sweep(tiny, "--finals", "--models", "lstm", "--trials", "0") == 2
    assert "got --trials as well" in capsys.readouterr().err
    assert sweep(tiny, "--rules", AT_HOME) == 2
    assert "got them without --finals" in capsys.readouterr().err
    assert sweep(tiny, "--finals", "--rules", "home") == 2
    assert "training condition" in capsys.readouterr().err
    leads = str(ROOT / "protocol" / "leads-mnist.toml")
    assert main(["sweep", leads, "--finals"]) == 2
    assert "must have final_updates, got none" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


ROW = ResultRow(
    **{"table": "mnist", "model": "lstm", "seed": 1, "metric": "accuracy@16x16", "value": 0.5},
    **{"chosen_on": "validation@14x14", "updates": 9, "seconds": 1.0, "device": "CPU"},
    **{"commit": "c", "budget": SEARCHED, "setting": "14x14", "precision": "tf32", "jobs": 1},
    **{"recipe": "a", "run": "run", "trial": "5", "rule": AT_HOME},
)


def test_what_the_other_rule_chose_before_is_not_trained_again(tiny, tmp_path, capsys):
    space, results = read_space(tiny), tmp_path / "results"
    lines = lines_of(space, "lstm", t0=(0.1, 0.1), t1=(0.4, 0.2), t2=(0.5, 0.6))
    for said in lines:
        search.append(results / "trials" / "tiny.jsonl", said)
    made = plan(space, ["lstm"], lines, tmp_path, "cpu")
    for final in made:
        row = replace(
            ROW,
            **{"table": "copying", "seed": final.spec.seed, "setting": final.setting},
            **{"metric": "accuracy@P=6", "chosen_on": "validation@P=6", "trial": "2"},
            **{"recipe": final.spec.recipe(), "run": final.folder.name, "rule": SHIFTED},
        )
        rows.append(results / "copying.csv", [row])
    twice = plan(replace(space, rules=(AT_HOME, AT_HOME)), ["lstm", "lstm"], lines, tmp_path, "cpu")
    assert {final.rule for final in twice} == {AT_HOME}
    before = (results / "copying.csv").read_text()
    assert sweep(tiny, "--finals", "--models", "lstm", "--rules", SHIFTED) == 0
    assert (results / "copying.csv").read_text() == before
    assert sweep(tiny, "--finals", "--models", "lstm") == 0
    assert "0 final runs to make" in capsys.readouterr().out
    found = {(row.run, row.rule) for row in rows.read(results / "copying.csv")}
    assert found == {(f.folder.name, r) for f in made for r in (AT_HOME, SHIFTED)}


def cells(found: Sequence[ResultRow]) -> tuple[str, str]:
    """At 16x16, by both rules."""
    table, *_ = tables(found)  # What was not searched has its own.
    (line,) = table.lines
    return line.ours["16x16"].figures(), line.there["16x16"].figures()


def test_a_column_of_a_rule_has_the_recipe_of_that_rule_alone():
    there = replace(ROW, chosen_on="validation@16x16", value=0.6)
    other = {"recipe": "b", "run": "other", "trial": "4", "rule": SHIFTED}
    found = [ROW, there, replace(ROW, value=0.7, **other), replace(there, value=0.8, **other)]
    older = [
        replace(r, budget="tuned", trial="", rule="", recipe="c", run="older", value=0.1)
        for r in (ROW, there)
    ]
    assert cells(found) == ("50.0", "80.0")
    assert cells([*older, *found]) == ("50.0", "80.0")
    # A recipe that nobody searched, or that both rules chose, counts in both.
    assert cells(older) == ("10.0", "10.0")
    assert cells([replace(row, rule=BOTH) for row in found[:2]]) == ("50.0", "60.0")
    (table,) = tables(found)
    assert table.lines[0].made["trial"] == f"5 ({AT_HOME}), 4 ({SHIFTED})"


def test_a_mean_has_no_two_recipes_where_a_rule_has_chosen_anew():
    rows_of_both = [
        replace(ROW, seed=seed, run=f"{seed}", value=0.5, rule=BOTH, chosen_on=f"validation@{at}")
        for seed in (1, 2)
        for at in ("14x14", "16x16")
    ]
    anew = replace(ROW, run="anew", recipe="b", trial="4", value=0.9)
    assert cells([*rows_of_both, anew]) == ("90.0", "50.0, 50.0")
    # The other way round nothing of the older recipe is left, nor are its runs counted.
    (table,) = tables([anew, *rows_of_both])
    assert table.lines[0].ours["16x16"].figures() == "50.0, 50.0"
    assert table.lines[0].made["trial"] == "5"
    assert any("2 runs of" in note for note in table.notes)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"trial": ""}, "trial"),
        ({"rule": "test"}, "rule"),
        ({"rule": ""}, "rule"),
        ({"budget": "tuned"}, "trial"),
        ({"budget": "tuned", "trial": ""}, "rule"),
    ],
)
def test_rows_of_a_search_name_trial_and_rule_and_no_others_do(change, wrong):
    assert not list(rows.faults(ROW))
    assert wrong in dict(rows.faults(replace(ROW, **change)))


@pytest.mark.slow
def test_the_command_goes_from_trials_to_rows_and_on_where_it_stopped(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["sweep", str(tiny), "--device", "cpu", "--jobs", "2", "--out", "runs"]
    trials = Path("results/trials/tiny.jsonl")
    assert main([*words, "--models", "lstm", "--trials", "0", "1"]) == 0
    first = trials.read_text()
    assert main([*words, "--models", "lstm"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("2 trials to make") < shown.index("1 trials to make")
    assert "lstm, training condition" in shown
    assert trials.read_text().startswith(first)
    said = search.read_lines(trials)
    space, table = read_space(tiny), Path("results/copying.csv")
    chosen = choices(space, "lstm", said)
    # The other model has no trial yet, and was not asked for by name.
    assert main([*words, "--finals"]) == 0
    shown = capsys.readouterr().out
    assert "riglstm must have all its 3 trials before its final runs, got 0" in shown
    assert f"{4 * len({*chosen.values()})} final runs to make" in shown
    found = rows.read(table)
    assert {row.budget for row in found} == {SEARCHED}
    assert {(row.trial, rule) for row in found for rule in row.rule.split(", ")} == {
        (trial, rule) for rule, trial in chosen.items()
    }
    assert {(row.setting, row.seed) for row in found} == {
        (f"M={M}", s) for M in (1, 2) for s in (1, 2)
    }
    updates = {said["trial"]: said["updates"] for said in said}
    for row in found:
        assert row.updates == {"M=1": 2, "M=2": 4}[row.setting] * updates[row.trial]
        assert row.device
        assert row.seconds > 0
    # A row that was lost is there again from the folder; nothing is trained twice.
    before = table.read_text()
    last = found[-1].run
    table.write_text("".join(line for line in before.splitlines(True) if last not in line))
    assert main([*words, "--finals", "--models", "lstm"]) == 0
    assert "1 final runs to make" in capsys.readouterr().out
    assert sorted(table.read_text().splitlines()) == sorted(before.splitlines())
    assert main([*words, "--finals", "--models", "lstm"]) == 0
    assert "0 final runs to make" in capsys.readouterr().out
