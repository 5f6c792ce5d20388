"""Runs: built, trained, tested by both rules, tested again from the folder, and put in a table."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from riglstm import models as registry
from riglstm.lab.cli.main import main
from riglstm.lab.tables import complexity, rows
from riglstm.lab.tables.entries import SMALL, Recipe, Row, Setting
from riglstm.lab.tables.finished import KEY, evaluate, finished, load
from riglstm.lab.tables.plan import FAILED, Planned, plan
from riglstm.lab.tables.recipes import RECIPES
from riglstm.lab.tables.reproduce import reproduce as make
from riglstm.lab.tables.run import build, run
from riglstm.lab.tables.spec import RunSpec
from riglstm.lab.tables.tables import TABLES
from riglstm.lab.train.config import PRINTED, Fit
from riglstm.lab.train.deadline import Deadline, Interrupted, OutOfTime
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.weights import load_weights, write_weights
from riglstm.models import MODELS
from train_helpers import last_step

TASK: dict[str, Any] = {
    **{"L": 1, "P": 2, "digits": 3, "input_size": 6, "conditions": ("P=4", "P=6")},
    **{"batch_size": 16, "validation_size": 20, "test_size": 30},
}
FIT = Fit(updates=6, lr=0.03, evaluate_every=2, checkpoint_every=3, device="cpu", tensorboard=False)
SPEC = RunSpec(
    *("copying", TASK, "riglstm", 12, {"num_cells": 3, "variant": "rand_cells"}, FIT), seed=1
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a model that draws, also when it is tested."""
    path = tmp_path_factory.mktemp("runs") / "run"
    run(SPEC, path, progress=False)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_at_quick_size(name: str) -> None:
    row = RECIPES["mnist"]["quick"].rows[name]
    options = {"L": 1, "P": 2, "input_size": SMALL.hidden, **row.task}
    spec = RunSpec("copying", options, row.model, row.hidden_size, dict(row.options), Fit(), 0)
    task, net = build(spec)
    batch = task.batch(0, 0, slice(2))
    loss, _ = task.loss(net, batch)
    assert loss.isfinite()


def test_every_row_of_every_table_without_files_is_built() -> None:
    for table in ("copying", "balls"):
        for planned in plan(table, list(RECIPES[table]["quick"].rows), 1, "quick", "nowhere"):
            task, net = build(planned.spec)
            trained_on = RECIPES[table]["quick"].settings[planned.setting].trained_on
            assert task.trained_on == trained_on
            assert set(task.conditions) == {trained_on, *RECIPES[table]["quick"].conditions}
            assert net.get_submodule("core")


def test_start_values_depend_on_the_seed_alone_and_leave_no_trace() -> None:
    before = torch.get_rng_state()
    first = build(SPEC)[1].state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again = build(SPEC)[1].state_dict()
    other = build(replace(SPEC, seed=2))[1].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_result_has_both_rules_and_its_cost(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    found = [(row["condition"], row["chosen_on"]) for row in result["rows"]]
    assert found == [
        *((c, "validation@P=2") for c in ("P=2", "P=4", "P=6")),
        *((c, f"validation@{c}") for c in ("P=4", "P=6")),
    ]
    for row in result["rows"]:
        assert row["step"] == result["chosen"][row["chosen_on"].removeprefix("validation@")]["step"]
        assert (row["model"], row["seed"], row["metric"]) == ("rand_cells", 1, "accuracy")
        assert 0 <= row["value"] <= 1
    assert result["updates"] == 6
    assert result["stopped"] == "updates"
    assert result["seconds"] > 0
    assert result["device"].startswith("CPU")
    assert result["parameters"] == sum(p.numel() for p in build(SPEC)[1].parameters())
    config = json.loads((folder / "config.json").read_text())
    assert RunSpec.from_json(config).digest() == SPEC.digest()
    assert config["task_options"]["loss_on"] == "all"
    said = {name: config["model_options"][name] for name in PRINTED}
    assert said == {"soft_update": True, "update_scale": 0.25, "update_bias": 4.0}


def test_evaluating_a_folder_gives_the_recorded_values(folder: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    recorded = json.loads((folder / "result.json").read_text())
    torch.manual_seed(7)
    again = evaluate(folder, "cpu")
    assert again["rows"] == recorded["rows"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == files


def test_other_conditions_are_tested_with_what_the_training_condition_chose(folder: Path) -> None:
    again = evaluate(folder, "cpu", conditions=["P=4", "P=9"])
    found = [(row["condition"], row["chosen_on"]) for row in again["rows"]]
    assert found == [
        ("P=4", "validation@P=2"),
        ("P=9", "validation@P=2"),
        ("P=4", "validation@P=4"),
    ]


def test_an_exported_file_alone_gives_the_recorded_values(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = json.loads((folder / "result.json").read_text())
    file = tmp_path / "weights" / "copying.safetensors"
    assert main(["export", str(folder), str(file)]) == 0
    assert f"written: {file}, 0.0 MB" in capsys.readouterr().out
    again = evaluate(file, "cpu")
    assert again["rows"] == [r for r in recorded["rows"] if r["chosen_on"] == "validation@P=2"]
    assert main(["evaluate", str(file), "--device", "cpu"]) == 0
    assert "This equals the recorded result." in capsys.readouterr().out
    spec, _, net = load(file, "cpu")
    assert spec.resolved() == json.loads((folder / "config.json").read_text())
    for name, weight in load(folder, "cpu")[2].state_dict().items():
        assert torch.equal(net.state_dict()[name], weight)
    with pytest.raises(ValueError, match="must say in its metadata which run it is of, got none"):
        evaluate(next((folder / "weights").iterdir()))
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="must hold weights as safetensors"):
        evaluate(file)


def test_a_file_of_the_papers_model_is_below_sixteen_megabytes(tmp_path: Path) -> None:
    spec = plan("mnist", ["riglstm"], 1, "paper", tmp_path)[0].spec
    core = build(replace(spec, task="copying", task_options={"input_size": 600}))[1]
    assert sum(4 * weight.numel() for weight in core.state_dict().values()) < 15e6


def test_load_gives_the_chosen_weights(folder: Path) -> None:
    spec, task, net = load(folder, "cpu")
    assert spec.digest() == SPEC.digest()
    assert not net.training
    step = json.loads((folder / "result.json").read_text())["chosen"][task.trained_on]["step"]
    expected = build(SPEC)[1]
    load_weights(expected, RunFolder(folder).weights_of(step))
    for name, weight in expected.state_dict().items():
        assert torch.equal(net.state_dict()[name], weight)


def test_a_run_keeps_its_name_when_options_are_added_that_it_does_not_use() -> None:
    run = plan("mnist", ["lstm"], 1, "paper")[0].spec
    # Of the code that had neither `average` nor `input_rate` nor `forget_bias`.
    assert run.digest() == "6ca53f0b"
    for used in (
        replace(run, fit=replace(run.fit, average=0.9)),
        replace(run, fit=replace(run.fit, input_rate=0.5)),
        replace(run, model_options={"forget_bias": 1.0}),
    ):
        assert used.digest() != run.digest()
    # Of the code that had two cells of RIM: the name in results/mnist.csv.
    assert plan("mnist", ["rim"], 1, "tuned")[0].spec.digest() == "9ef05c61"
    ours = plan("mnist", ["riglstm"], 1, "paper")[0].spec
    steady = replace(ours, model_options={**ours.model_options, "steady_start": True})
    assert steady.digest() != ours.digest()


def test_a_run_from_before_an_option_is_found_and_gone_on_with(
    folder: Path, tmp_path: Path
) -> None:
    from riglstm.lab.tables.plan import state

    old = tmp_path / "old"
    shutil.copytree(folder, old)
    config = json.loads((old / "config.json").read_text())
    new = json.loads(json.dumps(config))
    for part, names in (("fit", ("average", "input_rate")), ("model_options", ("forget_bias",))):
        for name in names:
            config[part].pop(name, None)
    (old / "config.json").write_text(json.dumps(config))
    assert state(SPEC, old) == "done"
    (old / "result.json").unlink()
    RunFolder(old).begin(new, command="", device="cpu", resume=True)
    new["fit"]["input_rate"] = 0.5
    with pytest.raises(ValueError, match=r"fit\.input_rate is 1\.0 there, 0\.5 here"):
        RunFolder(old).begin(new, command="", device="cpu", resume=True)


NAMES = {
    "mnist": "bb4f1c46",
    "cifar": "65984894",
    "balls": "24100b87",
    "copying": "a695ea96",
}
"""Digests of the first runs of RigLSTM, by the code whose default was the printed soft update."""


def printed(spec: RunSpec) -> bool:
    """Whether the layer that a run is of has the soft update as printed."""
    core: Any = registry.build(spec.model, 600, spec.hidden_size, **spec.model_options)
    update = (core.layer.selection.update_scale, core.layer.update_bias_start)
    return core.layer.soft_update and update == (1.0, None)


@pytest.mark.parametrize("said", [True, False], ids=["said", "not said"])
@pytest.mark.parametrize("table", NAMES)
def test_a_run_of_the_printed_soft_update_is_found_and_read_as_such(
    table: str, said: bool, folder: Path, tmp_path: Path
) -> None:
    """It was the default, which configurations had in numbers, or not at all."""
    first = plan(table, ["riglstm"], 1, "paper", tmp_path)[0]
    assert first.folder.name.endswith(NAMES[table])
    assert printed(first.spec)
    config = json.loads(json.dumps(first.spec.resolved()))
    assert {name: config["model_options"].pop(name) for name in PRINTED} == PRINTED
    if said:
        config["model_options"] |= PRINTED
    first.folder.mkdir()
    (first.folder / "config.json").write_text(json.dumps(config))
    assert plan(table, ["riglstm"], 1, "paper", tmp_path)[0].state == "partial"
    RunFolder(first.folder).begin(first.spec.resolved(), command="", device="", resume=True)
    read = RunSpec.from_json(config)
    assert printed(read)
    assert (read.digest(), read.resolved()) == (first.spec.digest(), first.spec.resolved())
    file = tmp_path / "old.safetensors"
    result = json.loads((folder / "result.json").read_text())
    write_weights(
        {"w": torch.zeros(1)}, file, {KEY: json.dumps({"config": config, "result": result})}
    )
    assert printed(finished(file).spec)
    usual = RunSpec("copying", {}, "riglstm", 600, {}, Fit(), 0)
    assert not printed(usual)
    with pytest.raises(ValueError, match=r"model_options\.update_scale is 1\.0 there, 0\.01 here"):
        RunFolder(first.folder).begin(usual.resolved(), command="", device="", resume=True)


def test_a_variant_without_a_soft_update_is_read_as_it_was() -> None:
    old = plan("ablation", ["no_soft_state_updating"], 1, "paper")[0].spec
    assert old.digest() == "f194a19e"
    config = old.resolved()
    assert "soft_update" not in config["model_options"]
    for name in ("update_scale", "update_bias"):
        del config["model_options"][name]
    read = RunSpec.from_json(config)
    assert read.digest() == old.digest()
    core: Any = registry.build(read.model, 600, read.hidden_size, **read.model_options)
    assert not core.layer.soft_update


def test_a_soft_update_is_one_run_in_whatever_words() -> None:
    def digest(**given: Any) -> str:
        return RunSpec("copying", {}, "riglstm", 600, given, Fit(), 0).digest()

    assert digest() == digest(update_scale=0.01, update_bias=4) == digest(update_scale="auto")
    paper = digest(soft_update="printed")
    assert paper == digest(update_scale=1, update_bias=None) != digest()
    assert digest(num_cells=5) != digest(num_cells=5, update_scale=0.01)
    assert digest(soft_update=False) not in (paper, digest())
    for given, message in (
        ({"soft_update": "printed", "update_scale": 0.5}, "update_scale must be 'auto' with soft_"),
        ({"num_cells": 0}, "num_cells must be a whole number of at least 1, got 0"),
        ({"num_cells": 7}, "hidden_size must be a multiple of num_cells = 7, got 600"),
    ):
        with pytest.raises(ValueError, match=message):
            digest(**given)


def test_a_run_that_is_not_done_has_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run: expected the file config\.json"):
        evaluate(tmp_path)
    RunFolder(tmp_path).begin(SPEC.resolved(), command="", device="", resume=False)
    with pytest.raises(ValueError, match=r"not done: expected result\.json.* by --resume first"):
        load(tmp_path)


GOOD = Row("LSTM", "lstm", 8)
BAD = Row("RIM", "rim", 12, {"num_cells": 3, "active_cells": 2}, fit={"lr": 1e38})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of two models, one of which diverges."""
    task = {name: value for name, value in TASK.items() if name != "conditions"}
    recipe = Recipe(
        {"lstm": GOOD, "rim": BAD},
        settings={"M=1": Setting("P=2", {"M": 1}), "M=2": Setting("P=2", {"M": 2})},
        conditions=("P=4", "P=6"),
        task=task,
        fit=FIT,
        models=("lstm", "rim"),
        seeds=1,
    )
    table = replace(TABLES["copying"], recipes={"quick": recipe})
    monkeypatch.setitem(TABLES, "copying", table)


@pytest.mark.usefixtures("tiny")
def test_a_table_is_made_in_spite_of_failures_and_made_again_from_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"root": tmp_path / "runs", "out": tmp_path / "out", "results": tmp_path / "r.csv"}
    ask: dict[str, Any] = {**where, "device": "cpu", "progress": False}
    half = plan("copying", None, 1, "quick", where["root"])[0]
    # As if it had been stopped before its first checkpoint.
    RunFolder(half.folder).begin(half.spec.resolved(), command="", device="", resume=False)
    made = make("copying", **ask)
    states = [p.state for p in plan("copying", None, 1, "quick", where["root"])]
    assert states == ["done", "failed", "done", "failed"]
    assert made.failed == 2
    assert re.search(r"\| M=1 +\| RIM +\| \(3, 2\) +(\| +1 failed ){3}", made.rendered.markdown)
    said = (
        "Failed: rim, M=1, seed 0: the loss of update 2 is not a finite number (copying-rim-seed0-"
    )
    assert said in made.rendered.markdown
    assert str(tmp_path) not in made.rendered.markdown
    assert [path.name for path in made.paths] == [f"copying-quick.{s}" for s in ("md", "csv")]
    assert made.paths[0].read_text() == made.rendered.markdown
    assert len(rows.read(where["results"])) == 2 * 5 + 2  # a row of each that failed
    assert made.rendered.rows == rows.read(made.paths[1]) == rows.read(where["results"])

    called: list[str] = []

    def count(spec: RunSpec, *args: Any, **options: Any) -> dict[str, Any]:
        called.append(spec.name)
        return {}

    monkeypatch.setattr("riglstm.lab.tables.attempt.run", count)
    again = make("copying", **ask)
    assert called == []
    assert again.rendered == made.rendered
    assert len(rows.read(where["results"])) == 2 * 5 + 2  # a row of each that failed
    # Models say what is trained, and never what the table has.
    for models in (["lstm"], ["rim"]):
        assert make("copying", models, **ask).rendered == made.rendered
    assert called == []
    make("copying", **ask, retry_failed=True)
    assert called == ["rim", "rim"]
    failed = [p for p in plan("copying", None, 1, "quick", where["root"]) if p.row == "rim"]
    assert [p.state for p in failed] == ["new", "new"]
    assert [list(p.folder.glob("*")) for p in failed] == [[], []]
    more = make("copying", ["lstm"], 2, **ask)
    assert called[2:] == ["lstm", "lstm"]
    assert "(1 run, 1 to run)" in more.rendered.markdown
    assert "- Not run yet: RIM.\n" in more.rendered.markdown


@pytest.mark.usefixtures("tiny")
def test_a_table_has_the_runs_of_all_seeds_that_were_made(tmp_path: Path) -> None:
    ask: dict[str, Any] = {"root": tmp_path / "runs", "out": tmp_path / "out"}
    ask |= {"device": "cpu", "progress": False}
    for planned in plan("copying", ["lstm"], 2, "quick", ask["root"]):
        if (planned.setting, planned.spec.seed) != ("M=2", 1):
            run(planned.spec, planned.folder, progress=False)
    made = make("copying", ["lstm"], 1, **ask)
    runs = {(row.setting, row.seed) for row in made.rendered.rows or ()}
    assert runs == {("M=1", 0), ("M=1", 1), ("M=2", 0)}
    assert "to run" not in made.rendered.markdown


@pytest.mark.usefixtures("tiny")
def test_what_failed_is_begun_anew(tmp_path: Path) -> None:
    ask: dict[str, Any] = {"root": tmp_path / "runs", "out": tmp_path / "out"}
    ask |= {"device": "cpu", "progress": False}
    make("copying", ["rim"], **ask)
    failed, _ = plan("copying", ["rim"], 1, "quick", ask["root"])
    assert failed.state == "failed"
    left, mine = (failed.folder / "checkpoints" / name for name in ("step-1.ckpt", "notes.txt"))
    left.parent.mkdir(exist_ok=True)
    left.touch()
    mine.touch()
    assert make("copying", ["rim"], **ask, retry_failed=True).failed == 2
    assert not left.exists()
    assert mine.exists()
    said = json.loads((failed.folder / FAILED).read_text())
    assert said["updates"] >= 1
    assert said["seconds"] > 0
    assert "resumed" not in json.loads((failed.folder / "run.json").read_text())


@pytest.mark.usefixtures("tiny")
def test_runs_one_by_one_stop_in_time_and_by_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask: dict[str, Any] = {"root": tmp_path / "runs", "out": tmp_path / "out", "again": "more"}
    ask |= {"device": "cpu", "models": ["lstm"], "name": "copying"}
    begun: list[str] = []
    ends: list[BaseException | None] = [None]

    def attempt(planned: Planned, *args: Any) -> None:
        begun.append(planned.setting)
        end = ends[len(begun) - 1]
        if end is not None:
            raise end

    monkeypatch.setattr("riglstm.lab.tables.reproduce.attempt", attempt)
    # Less than a minute is left: the first is begun, and no other.
    assert make(**ask, deadline=Deadline.after(0.5)).left == 2
    assert begun == ["M=1"]
    ends[0] = OutOfTime("time is up")
    begun.clear()
    assert make(**ask).left == 2
    assert begun == ["M=1"]
    assert "time is up\n" in capsys.readouterr().err
    for end, said in (
        (Interrupted("stopped, and saved"), "stopped, and saved"),
        (KeyboardInterrupt(), "stopped; what is done, or was saved, stays so; go on with: more"),
    ):
        ends[0] = end
        begun.clear()
        with pytest.raises(KeyboardInterrupt, match=f"^{said}$"):
            make(**ask)


@pytest.mark.usefixtures("tiny")
def test_ctrl_c_of_runs_side_by_side_leaves_a_table_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(*_: object) -> None:
        raise KeyboardInterrupt("all are saved")

    monkeypatch.setattr("riglstm.lab.tables.pool.together", together)
    with pytest.raises(KeyboardInterrupt, match=r"^all are saved; go on with: more$"):
        make("copying", root=tmp_path / "runs", out=tmp_path / "out", jobs=2, again="more")
    assert (tmp_path / "out" / "copying-quick.md").exists()


def test_a_stop_during_the_tests_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("riglstm.lab.tables.run.tested", stop)
        words = "^trained to the end, and saved; not tested yet; go on with: more$"
        with pytest.raises(Interrupted, match=words):
            run(SPEC, tmp_path, progress=False, again="more")
    assert last_step(tmp_path) == SPEC.fit.updates
    before = (tmp_path / "metrics.csv").read_bytes()
    assert run(SPEC, tmp_path, progress=False, resume=True)["updates"] == SPEC.fit.updates
    assert (tmp_path / "metrics.csv").read_bytes() == before
    result = json.loads((tmp_path / "result.json").read_text())
    home = result["rows"][0]["chosen_on"].removeprefix("validation@")
    del result["chosen"][home]
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=f"must say which weights {home} chose.*; train anew$"):
        load(tmp_path)


def test_times_parameters_and_memory_are_measured(tmp_path: Path) -> None:
    show: list[str] = []
    table = complexity.table(["lstm", "riglstm"], "quick", "cpu", show.append, (3, 2), 2)
    lstm, rig = complexity.subjects(["lstm", "riglstm"], torch.device("cpu"), 2)
    assert [line.partition(",")[0] for line in show] == ["measuring LSTM", "measuring RigLSTM"]
    # Embedding of two values, the core, and the read-out of ten classes.
    around = 2 * 600 + 600 * 10 + 10
    for subject, count in ((lstm, 2_884_800 + around), (rig, 3_353_000 + around)):
        found = complexity.measured(subject, torch.device("cpu"), (3, 2), 2, rounds=1)
        assert found.parameters == count
        assert found.memory > 4 * count
        assert min(found.ms) > 0
    assert re.search(r"\| RigLSTM +\| \(6, 4\) +\|", table.markdown)
    assert re.search(r"\| +3\.36M \| +3\.6M \|", table.markdown)
    assert "Tesla V100" in table.markdown


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(ValueError, match="models must be some of lstm, rim, riglstm, got 'gru'"):
        complexity.table(["gru"])
    with pytest.raises(ValueError, match="budget must be one of quick, paper, got 'all'"):
        complexity.table(budget="all")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The compiler's own remarks.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is depr:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning")
def test_on_a_gpu_steps_are_compiled_and_times_are_the_gpus() -> None:
    spec = RunSpec("copying", TASK, "rim", 12, {"num_cells": 3}, Fit(), 0)
    assert build(spec, "cuda")[1].get_submodule("core")._compiled is not None  # type: ignore[union-attr]
    assert build(spec, "cpu")[1].get_submodule("core")._compiled is None  # type: ignore[union-attr]
    table = complexity.table(None, "quick", "cuda", None, (2, 3), 2)
    assert torch.cuda.get_device_name() in table.markdown
