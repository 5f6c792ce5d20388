"""The random search: spaces as data, fair draws, trials without test data, lines that add up."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from riglstm.lab.cli.main import main
from riglstm.lab.tables import search
from riglstm.lab.tables.executor import InProcess
from riglstm.lab.tables.run import run
from riglstm.lab.tables.search import Space, options, plan, read_space, spec, winners
from riglstm.models import options_of

ROOT = Path(__file__).parents[1]
SPACES = sorted((ROOT / "protocol").glob("*.toml"))
SEARCHES = [path for path in SPACES if not path.stem.startswith("leads")]

TINY = """
table = "copying"
setting = "M=1"
budget = "quick"
models = ["lstm", "riglstm"]
trials = 3
evaluations = 2
final_seeds = [1, 2]
[final_updates]
"M=1" = 2
"M=2" = 4
[final_seeds_of]
riglstm = [1]
[every]
"task.validation_size" = 20
"task.test_size" = 20
[shared]
"fit.updates" = [4, 6]
"fit.lr" = {log = [1e-3, 1e-2]}
"model.forget_bias" = [0.0, 1.0, 3.0]
[own.riglstm]
"model.steady_start" = [true, false]
[named.start]
"task.start_range" = 0.1
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def sweep(space: Path, *more: str) -> int:
    """The exit code of the command on a space, beside which its runs and results lie."""
    beside = ("--out", str(space.with_name("runs")), "--results", str(space.with_name("results")))
    return main(["sweep", str(space), "--device", "cpu", *beside, *more])


@pytest.mark.parametrize("path", SPACES, ids=[path.stem for path in SPACES])
def test_every_space_of_the_protocol_can_be_built(path):
    space = read_space(path)
    assert space.searched.labels()


@pytest.mark.parametrize("path", SEARCHES, ids=[path.stem for path in SEARCHES])
def test_models_of_a_search_differ_in_their_own_options_alone(path):
    space = read_space(path)
    if space.source is not None:
        assert (space.trials, space.named) == (0, {})
        return
    assert space.trials == 8
    for label in [label for label in space.labels() if label != "0"]:
        common = []
        for model in space.models:
            own = space.own.get(model, {})
            made = spec(space, model, label)
            fit = {k: v for k, v in vars(made.fit).items() if f"fit.{k}" not in own}
            task = {k: v for k, v in made.task_options.items() if k != "input_size"}
            common.append((fit, task))
            for name, value in options(space, model, label).items():
                if name.startswith("model.") and name in space.shared:
                    assert value == options(space, space.models[0], label).get(name, value)
        fit, task = common[0]
        shared = fit.keys() & set.intersection(*({*f} for f, _ in common))
        assert all({k: f[k] for k in shared} == {k: fit[k] for k in shared} for f, _ in common)
        assert all(t == task for _, t in common)


def test_draws_depend_on_the_option_and_the_trial_alone(tiny):
    space = read_space(tiny)
    for label in ("1", "2"):
        lstm, rig = (options(space, model, label) for model in ("lstm", "riglstm"))
        assert lstm.items() < rig.items()
        assert rig.keys() - lstm.keys() == {"model.steady_start"}
    many = Space(**{**vars(space), "trials": 31})
    drawn = [options(many, "lstm", str(i)) for i in range(1, 31)]
    # One in each of 31 equal parts of the range, but for that of trial 0, which draws none.
    places = sorted(31 * math.log10(trial["fit.lr"] / 1e-3) for trial in drawn)
    # Step sizes are rounded to three digits, which moves one by a tenth of its part at the most.
    assert all(k - 0.1 <= place <= k + 2.1 for k, place in enumerate(places))
    biases = [trial["model.forget_bias"] for trial in drawn]
    assert min(biases.count(value) for value in (0.0, 1.0, 3.0)) >= 9


def test_trial_0_is_the_recipe_with_updates_as_drawn_and_an_unknown_option_is_left_out(tiny):
    space = read_space(tiny)
    first = options(space, "riglstm", "0")
    updates = options(space, "lstm", "0")["fit.updates"]
    assert first == {"task.validation_size": 20, "task.test_size": 20, "fit.updates": updates}
    assert updates in (4, 6)
    assert "forget_bias" not in options_of("transformer")
    mnist = read_space(ROOT / "protocol" / "mnist.toml")
    assert not [n for n in options(mnist, "transformer", "1") if n.endswith("forget_bias")]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"M=1"', '"M=3"', "setting must be some of M=1, M=2, got 'M=3'"),
        ('"lstm", ', '"lstn", ', "models must be some of .*, got 'lstn'"),
        ("[own.riglstm]", "[own.rim]", "own.rim must be at most 4 options of one of"),
        (
            "[own.riglstm]",
            "[own.riglstm]\na = [1]\nb = [1]\nc = [1]\nd = [1]",
            "riglstm must be at mo",
        ),
        ('"fit.lr"', '"fit.rate"', "unexpected keyword argument 'rate'"),
        ('"fit.lr"', '"training.lr"', "must begin with task or fit or model, got 'training.lr'"),
        ("trials = 3", "trails = 3", "its fields must be some of table, .*, got 'trails'"),
        ("trials = 3", "trials = -3", "trials must be a whole number from 0 on, got -3"),
        ("evaluations = 2", "evaluations = 0", "evaluations must be a whole number from 1 on"),
        ("{log = [1e-3, 1e-2]}", "{lin = [1e-3, 1e-2]}", "fit.lr must be a list of values, or"),
        ("{log = [1e-3, 1e-2]}", "[]", "fit.lr must be a list of values, or"),
        ("{log = [1e-3, 1e-2]}", "{log = [1e-2, 1e-3]}", "fit.lr must be a list of values, or"),
        (
            '"model.forget_bias"',
            '"model.forgot"',
            "model.forgot is an option of none of lstm, rigl",
        ),
        ("[true, false]", '["maybe"]', "steady_start must be"),
        ('table = "copying"', "table =", "Invalid value"),
        ("final_seeds = [1, 2]", "final_seeds = [0, 2]", "one that no trial had, got 0"),
        ("final_seeds = [1, 2]", "", "final_updates and final_seeds must both be there"),
        ("riglstm = [1]", "riglstn = [1]", "final_seeds_of must be some of .*, got 'riglstn'"),
        ('"M=2" = 4', '"M=3" = 4', "final_updates must be some of M=1, M=2, got 'M=3'"),
        ('"M=2" = 4', '"M=2" = 0', "final_updates must be a whole number from 1 on, got 0"),
        ("trials = 3", 'trials = 3\nrules = ["test"]', "rules must be some of .*, got 'test'"),
        ("trials = 3", 'trials = 3\nrecipe_of = ["tiny2", "lstm"]', "No such file"),
    ],
)
def test_a_wrong_space_is_explained(before, after, message, tiny):
    assert before in TINY
    tiny.write_text(TINY.replace(before, after))
    with pytest.raises(ValueError, match=message):
        read_space(tiny)


def test_a_trial_leaves_a_line_by_both_rules_and_no_test_figure(tiny, tmp_path, monkeypatch):
    space = read_space(tiny)
    (trial,) = plan(space, ["lstm"], ["start"], tmp_path / "runs", "cpu")
    assert (trial.setting, trial.trial) == ("M=1", "start")
    assert search.line(space, trial) is None
    scored = []
    monkeypatch.setattr("riglstm.lab.tables.run._test", lambda *args: scored.append(args))
    result = run(trial.spec, trial.folder)
    assert (result["rows"], scored) == ([], [])
    said = search.line(space, trial)
    assert said is not None
    assert said["options"]["task.start_range"] == 0.1
    assert said["validation"]["step"] == result["chosen"]["P=6"]["step"]
    assert said["validation"]["P=6"] == said["best"]["P=6"]["value"]
    assert {*said["validation"]} - {"step"} == {"P=6", "P=12", "P=24", "P=48"} == {*said["best"]}
    assert said["metric"] == "accuracy"
    path = tmp_path / "rows" / "lines.jsonl"
    search.append(path, said)
    lines = search.read_lines(path)
    assert lines == [json.loads(json.dumps(said))]
    assert plan(space, ["lstm"], ["start"], tmp_path / "runs", "cpu", lines) == []


def test_a_trial_that_diverges_says_when_and_why_and_is_never_chosen(tiny, monkeypatch, capsys):
    monkeypatch.setattr("riglstm.lab.cli.sweep.Processes", lambda _, until: InProcess(until))
    tiny.write_text(f'{TINY}"fit.lr" = 1e38\n')
    assert sweep(tiny, "--models", "lstm", "--trials", "start") == 0
    words = "the loss of update 2 is not a finite number"
    assert f"lstm, trial start: failed: {words}" in capsys.readouterr().err
    (said,) = search.read_lines(tiny.with_name("results") / "trials" / "tiny.jsonl")
    assert said["failed"].startswith(words)
    assert said["updates"] > 0
    assert winners([said], [said["run"]]) == {}


def test_a_run_has_one_line_and_the_first_stays(tmp_path):
    path, one = tmp_path / "lines.jsonl", {"run": "a", "model": "lstm", "trial": "0"}
    for seconds in (1, 2):
        search.append(path, {**one, "seconds": seconds})
    assert search.read_lines(path) == [{**one, "seconds": 1}]


@pytest.mark.parametrize(
    ("name", "trials", "message"),
    [
        ("taking", "trials = 0", "recipe_of must name a space with trials, got one that has"),
        ("other", "trials = 0", "recipe_of must name a space with trials, got one that has"),
        ("tiny", "trials = 2", "must have trials = 0 and nothing named, got the trials 0, 1"),
        ("tiny", "trials = 0\nnamed.a = {}", "and nothing named, got the trials a"),
    ],
)
def test_a_recipe_is_taken_from_a_space_that_has_trials_and_for_one_that_has_none(
    name, trials, message, tiny
):
    def space(of: str, trials: str = "trials = 0") -> str:
        return (
            f'table = "copying"\nsetting = "M=1"\nbudget = "quick"\nmodels = ["lstm"]\n'
            f'recipe_of = ["{of}", "lstm"]\n{trials}\n'
        )

    taking = tiny.with_name("taking.toml")
    taking.write_text(space("tiny"))
    assert read_space(taking).source is not None
    tiny.with_name("other.toml").write_text(space("taking"))
    taking.write_text(space(name, trials))
    with pytest.raises(ValueError, match=message):
        read_space(taking)


def test_two_trials_that_are_one_run_are_made_once(tiny, tmp_path):
    space = read_space(tiny)
    named = {"a": {"model.steady_start": True}, "b": {"model.steady_start": False}}
    both = Space(**{**vars(space), "named": named})
    assert len(plan(both, ["riglstm"], ["a", "b"], tmp_path, "cpu")) == 2
    assert len(plan(both, ["lstm"], ["a", "b"], tmp_path, "cpu")) == 1


def test_the_two_rules_choose_by_the_data_that_they_name():
    def said(trial: str, home: float, *shifted: float) -> dict[str, Any]:
        best = {"P=6": {"step": 1, "value": home}}
        best |= {f"P={i}": {"step": 2, "value": value} for i, value in enumerate(shifted)}
        return {
            **{"model": "lstm", "trial": trial, "run": trial, "trained_on": "P=6"},
            **{"validation": {"step": 1, "P=6": home}, "best": best},
        }

    def best(**options: Any) -> list[str]:
        found = winners(lines, ("0", "1", "NaN"), **options)
        return [line["trial"] for line in found["lstm"].values()]

    lines = [said("NaN", math.nan, math.nan), said("0", 0.9, 0.1, 0.2), said("1", 0.8, 0.5, 0.4)]
    lines += [{"model": "lstm", "trial": "2", "failed": "NaN"}, said("of another space", 1.0, 1.0)]
    assert best() == ["0", "1"]
    assert best(higher_is_better=False) == ["1", "0"]
    lines = [said("0", 0.9)]
    assert best() == ["0", "0"]
    # Of equals not the one that ended first.
    lines = [said("1", 0.9, 0.5), said("0", 0.9, 0.5)]
    assert best() == ["0", "0"]


def trial(model: str, label: str, score: float, **changes: Any) -> dict[str, Any]:
    """A line of a trial; names of options have their dot in place of two underscores."""
    given = {name.replace("__", "."): value for name, value in changes.items()}
    said = {"model": model, "trial": label, "run": f"{model}-{label}", "options": given}
    found = {"trained_on": "7x7", "metric": "accuracy", "validation": {"7x7": score}}
    return said | (found if score else {"failed": "the loss is not a finite number"})


def test_a_panel_is_an_option_that_was_drawn_and_a_mark_a_trial_that_has_a_score():
    from riglstm.lab.report.curves import draw_slices, slices

    lines = [
        trial("lstm", "0", 0.4, fit__warmup=3),
        trial("lstm", "1", 0.6, fit__warmup=3, fit__lr=0.001, fit__decay="none"),
        trial("lstm", "2", 0.0, fit__warmup=3, fit__lr=0.002, fit__decay="late"),
        trial("rim", "1", 0.5, fit__warmup=3, fit__lr=0.001, fit__decay="none", model__size=4),
        trial("rim", "by-hand", 0.7, fit__warmup=9, fit__lr=0.3, fit__decay="none"),
    ]
    what = slices("tiny", lines)
    assert what is not None
    assert what.options == ["fit.lr", "fit.decay"]
    assert [(one.model, one.score) for one in what.trials] == [
        ("lstm", 0.6),
        ("rim", 0.5),
        ("rim", 0.7),
    ]
    assert (what.condition, what.left_out) == ("7x7", 2)
    first, second, *unused = draw_slices(what).axes
    assert [axes.get_title() for axes in (first, second)] == what.options
    assert not any(axes.get_visible() for axes in unused)
    # The best of each model is large.
    marks = [(mark.get_ydata()[0], mark.get_markersize() > 6) for mark in second.lines]
    assert marks == [(0.6, True), (0.5, False), (0.7, True)]
    assert [tick.get_text() for tick in second.get_xticklabels()] == ["none"]
    # Of trials that have names alone nothing was drawn.
    assert slices("tiny", lines[-1:]) is None


def test_a_space_that_is_not_there_and_a_wrong_trial_are_refused(tiny, capsys):
    assert main(["sweep", "nowhere.toml"]) == 2
    assert "SPACE must be a TOML file, got nowhere.toml" in capsys.readouterr().err
    assert main(["sweep", str(tiny), "--trials", "strat"]) == 2
    assert "did you mean start?" in capsys.readouterr().err
    assert main(["sweep", str(tiny), "--results", str(tiny)]) == 2
    assert "--results must be a folder, got" in capsys.readouterr().err


def test_trials_that_end_with_an_error_are_named_and_the_command_fails(
    tiny, tmp_path, monkeypatch, capsys
):
    script = "import sys; sys.exit('the disk is full')"
    monkeypatch.setattr("riglstm.lab.tables.executor.WORKER", ("-c", script))
    assert sweep(tiny, "--models", "lstm", "--trials", "0") == 2
    said = capsys.readouterr()
    assert "1 trials ended with an error" in said.err
    assert re.search(rf"lstm M=1 trial 0 seed 0, in {tmp_path}/runs/.*: the disk is full", said.err)
    assert "written" not in said.out
    assert not (tmp_path / "results").exists()


def test_data_that_is_not_there_is_said_before_the_first_trial(tiny, tmp_path, capsys):
    tiny.write_text('table = "mnist"\nsetting = "7x7"\nbudget = "quick"\nmodels = ["lstm"]\n')
    assert sweep(tiny, "--data-dir", str(tmp_path)) == 2
    assert "mnist" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", ["mine", "[]\n", '{"run": 1}\n', "{", "\xff"])
def test_a_file_of_other_lines_is_refused_before_the_first_trial_and_left_alone(
    content, tiny, tmp_path, capsys
):
    path = tmp_path / "results" / "trials" / "tiny.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    assert sweep(tiny) == 2
    assert "must hold the trials of a search" in capsys.readouterr().err
    assert path.read_bytes() == content.encode("latin-1")
    assert not (tmp_path / "runs").exists()


def test_every_line_is_of_a_trial_of_its_space_and_names_commit_and_device():
    files = sorted((ROOT / "results" / "trials").glob("*.jsonl"))
    assert files
    for path in files:
        space = read_space(ROOT / "protocol" / f"{path.stem}.toml")
        for said in search.read_lines(path):
            made = spec(space, said["model"], said["trial"], said["seed"])
            assert said["run"].rpartition("-")[2] == made.digest()
            assert re.fullmatch("[0-9a-f]{40}", said["commit"])
            assert said["device"]
            assert said["updates"] == made.fit.updates
            assert said["seconds"] > 0
