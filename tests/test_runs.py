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
from safetensors.torch import load_file

from riglstm.lab.cli.main import main
from riglstm.lab.tables import complexity, rows
from riglstm.lab.tables.executor import Processes
from riglstm.lab.tables.plan import Planned, RunSpec, plan
from riglstm.lab.tables.recipes import SMALL, TABLES, Recipe, Row, Setting
from riglstm.lab.tables.reproduce import Reproduced, reproduce
from riglstm.lab.tables.run import build, evaluate, load, run, training
from riglstm.lab.train.checkpoints import write_weights
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.stopping import Interrupted
from riglstm.models import MODELS
from test_executor import FIT, TASK
from train_helpers import last_step

SPEC = RunSpec(
    *("copying", {**TASK, "conditions": ("P=4", "P=6")}),
    *("riglstm", 12, {"num_cells": 3, "variant": "rand_cells"}, FIT, 1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a model that draws, also when it is tested."""
    path = tmp_path_factory.mktemp("runs") / "run"
    run(SPEC, path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_at_quick_size(name):
    row = TABLES["mnist"].recipes["quick"].rows[name]
    options = {"L": 1, "P": 2, "input_size": SMALL.hidden, **row.task}
    spec = RunSpec("copying", options, row.model, row.hidden_size, dict(row.options), Fit(), 0)
    task, net = build(spec)
    batch = task.batch(0, 0, slice(2))
    loss, _ = task.loss(net, batch)
    assert loss.isfinite()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_run_on_a_gpu_begins_with_products_that_are_known(kind, monkeypatch, tmp_path):
    asked: list[torch.device] = []
    monkeypatch.setattr("riglstm.lab.tables.run.check_products", asked.append)
    monkeypatch.setattr("riglstm.lab.tables.run.device_name", str)
    folder, device = RunFolder(tmp_path / "run"), torch.device(kind)
    with folder.held(), training(folder, SPEC.resolved(), device, resume=False):
        assert folder.read_json(folder.run)["device"] == kind
    assert asked == [device] * (kind == "cuda")


def test_start_values_depend_on_the_seed_alone_and_leave_no_trace():
    before = torch.get_rng_state()
    first = build(SPEC)[1].state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again = build(SPEC)[1].state_dict()
    other = build(replace(SPEC, seed=2))[1].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_result_has_both_rules_and_its_cost(folder):
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
    said = {"soft_update": True, "update_scale": 0.25, "update_bias": 4.0}
    assert said.items() <= config["model_options"].items()


def test_evaluating_a_folder_gives_the_recorded_values(folder):
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    recorded = json.loads((folder / "result.json").read_text())
    torch.manual_seed(7)
    again = evaluate(folder, "cpu")
    assert again["rows"] == recorded["rows"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == files


def test_other_conditions_are_tested_with_what_the_training_condition_chose(folder):
    again = evaluate(folder, "cpu", conditions=["P=4", "P=9"])
    found = [(row["condition"], row["chosen_on"]) for row in again["rows"]]
    assert found == [
        ("P=4", "validation@P=2"),
        ("P=9", "validation@P=2"),
        ("P=4", "validation@P=4"),
    ]


def test_equal_weights_are_equal_bytes(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        write_weights({"w": torch.zeros(2)}, file, {str(n): "said" for n in range(10)})
        assert load_file(file)["w"].tolist() == [0, 0]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_exported_file_alone_gives_the_recorded_values(folder, tmp_path, capsys):
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
    assert not net.training
    for name, weight in load(folder, "cpu")[2].state_dict().items():
        assert torch.equal(net.state_dict()[name], weight)
    with pytest.raises(ValueError, match="must say in its metadata, under riglstm"):
        evaluate(next((folder / "weights").iterdir()))
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="must hold weights as safetensors"):
        evaluate(file)


NAMES = [
    *(("mnist", "lstm", "paper", "6ca53f0b"), ("mnist", "riglstm", "paper", "bb4f1c46")),
    *(("mnist", "rim", "tuned", "9ef05c61"), ("cifar", "riglstm", "paper", "65984894")),
    *(("balls", "riglstm", "paper", "24100b87"), ("copying", "riglstm", "paper", "a695ea96")),
    *(("ablation", "rand_cells", "paper", "6f0c67e6"), ("mnist", "riglstm", "quick", "4088c700")),
    ("ablation", "no_soft_state_updating", "paper", "f194a19e"),
]


@pytest.mark.parametrize(("table", "row", "budget", "digest"), NAMES)
def test_a_run_keeps_its_name_when_options_are_added_that_it_does_not_use(
    table, row, budget, digest
):
    """By the names rows and trials in results/ are found, which are older than some options."""
    found = plan(table, [row], 1, budget)[0]
    assert found.folder.name.endswith(f"-seed0-{digest}")
    for part, option in (("fit", {"average": 0.9}), ("fit", {"input_rate": 0.5})):
        other = replace(getattr(found.spec, part), **option)
        assert replace(found.spec, **{part: other}).digest() != digest
    options = {**found.spec.model_options, "forget_bias": 1.0}
    assert replace(found.spec, model_options=options).digest() != digest


def test_a_soft_update_is_one_run_whatever_words():
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


def test_a_run_that_is_not_done_has_no_result(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run: expected the file config\.json"):
        evaluate(tmp_path)
    RunFolder(tmp_path).begin(SPEC.resolved(), command="", device="", resume=False)
    with pytest.raises(ValueError, match=r"not done: expected result\.json.* by --resume first"):
        load(tmp_path)


class Table:
    """The table `tiny`, made in a folder."""

    def __init__(self, root: Path) -> None:
        self.runs = root / "runs"

    def plan(self, models: list[str] | None = None, seeds: int = 1) -> list[Planned]:
        return plan("copying", models, seeds, "quick", self.runs, "cpu")

    def make(self, models: list[str] | None = None, seeds: int = 1, **options: Any) -> Reproduced:
        asked = self.plan(models, seeds)
        return reproduce("copying", asked, "quick", self.runs, **options)

    def states(self) -> list[str]:
        return [p.state for p in self.plan()]


GOOD = Row("LSTM", "lstm", 8)
BAD = Row("RIM", "rim", 12, {"num_cells": 3, "active_cells": 2}, fit={"lr": 1e38})


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table of two models, one of which diverges."""
    recipe = Recipe(
        {"lstm": GOOD, "rim": BAD},
        settings={"M=1": Setting("P=2", {"M": 1}), "M=2": Setting("P=2", {"M": 2})},
        conditions=("P=4", "P=6"),
        task=TASK,
        fit=FIT,
        models=("lstm", "rim"),
        seeds=1,
    )
    table = replace(TABLES["copying"], recipes={"quick": recipe})
    monkeypatch.setitem(TABLES, "copying", table)
    return Table(tmp_path)


def test_a_table_is_made_in_spite_of_failures_and_made_again_from_what_is_there(
    tiny, tmp_path, monkeypatch
):
    results = tmp_path / "r.csv"
    half = tiny.plan()[0]
    # As if it had been stopped before its first checkpoint.
    RunFolder(half.folder).begin(half.spec.resolved(), command="", device="", resume=False)
    made = tiny.make(results=results)
    assert tiny.states() == ["done", "failed", "done", "failed"]
    assert (made.failed, made.left) == (2, 0)
    assert re.search(r"\| M=1 +\| RIM +\| \(3, 2\) +(\| +1 failed ){3}", made.rendered.markdown)
    said = "Failed: rim M=1 seed 0: the loss of update 2 is not a finite number (copying-rim-seed0-"
    assert said in made.rendered.markdown
    assert str(tmp_path) not in made.rendered.markdown
    assert len(rows.read(results)) == 2 * 5 + 2  # a row of each that failed
    assert made.rendered.rows == rows.read(results)

    called: list[str] = []
    monkeypatch.setattr(
        "riglstm.lab.tables.reproduce.run", lambda spec, *_, **__: called.append(spec.name)
    )
    # Models say what is trained, and never what the table has.
    for models in (None, ["lstm"], ["rim"]):
        assert tiny.make(models, results=results).rendered == made.rendered
    assert len(rows.read(results)) == 2 * 5 + 2
    assert called == []
    more = tiny.make(["lstm"], 2)
    assert called == ["lstm", "lstm"]
    assert "(1 run, 1 to run)" in more.rendered.markdown
    # What failed is begun anew where its folder is gone.
    for planned in tiny.plan(["rim"]):
        shutil.rmtree(planned.folder)
    assert "- Not run yet: RIM.\n" in tiny.make(["lstm"]).rendered.markdown
    tiny.make(["rim"])
    assert called[2:] == ["rim", "rim"]


def test_a_table_has_the_runs_of_all_seeds_that_were_made(tiny):
    for planned in tiny.plan(["lstm"], 2):
        if (planned.setting, planned.spec.seed) != ("M=2", 1):
            run(planned.spec, planned.folder)
    made = tiny.make(["lstm"])
    runs = {(row.setting, row.seed) for row in made.rendered.rows}
    assert runs == {("M=1", 0), ("M=1", 1), ("M=2", 0)}
    assert "to run" not in made.rendered.markdown


def test_a_stop_shows_the_table_and_says_how_to_go_on(tiny, tmp_path, monkeypatch, capsys):
    results = tmp_path / "r.csv"

    def stop(self: Processes, runs: list[Planned], make: Any, ended: Any) -> None:
        run(runs[0].spec, runs[0].folder)
        ended(runs[0], "")
        assert len(rows.read(results)) == 5, "figures are not kept run by run"
        raise KeyboardInterrupt("all are saved")

    monkeypatch.setattr(Processes, "run", stop)
    with pytest.raises(KeyboardInterrupt, match=r"^all are saved; go on with: more$"):
        tiny.make(jobs=2, again="more", results=results)
    assert re.search(r"\| LSTM .*\(1 run\)", capsys.readouterr().out)


def test_a_stop_during_the_tests_costs_no_training(tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("riglstm.lab.tables.run.tested", stop)
        words = "^trained to the end, and saved; not tested yet; go on with: more$"
        with pytest.raises(Interrupted, match=words):
            run(SPEC, tmp_path, again="more")
    assert last_step(tmp_path) == SPEC.fit.updates
    before = (tmp_path / "metrics.csv").read_bytes()
    assert run(SPEC, tmp_path, resume=True)["updates"] == SPEC.fit.updates
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_times_parameters_and_memory_are_measured(tmp_path):
    show: list[str] = []
    table = complexity.table(["lstm", "riglstm"], "quick", "cpu", show.append, (3, 2), 2)
    assert [line.partition(",")[0] for line in show] == ["measuring LSTM", "measuring RigLSTM"]
    # Embedding of two values, the core, and the read-out of ten classes; four bytes of each, and
    # what a call holds.
    around = 2 * 600 + 600 * 10 + 10
    for label, count in (("LSTM", 2_884_800 + around), ("RigLSTM", 3_353_000 + around)):
        (line,) = (x for x in table.splitlines() if x.startswith(f"| {label}"))
        *_, said, _, memory, _ = (cell.strip() for cell in line.split("|")[1:-1])
        assert said == f"{count / 1e6:.2f}M"
        assert float(memory[:-1]) > 4 * count / 1e6 - 0.5
    assert re.search(r"\| RigLSTM +\| \(6, 4\) +\|", table)
    assert "Tesla V100" in table


def test_peak_memory_counts_what_is_held_at_once():
    megabyte = 250_000

    def hold_two_then_one() -> None:
        two = [torch.empty(megabyte), torch.empty(megabyte)]
        del two
        torch.empty(megabyte)

    assert complexity.cpu_peak_bytes(hold_two_then_one) == 2_000_000


def test_what_cannot_be_measured_is_said():
    with pytest.raises(
        ValueError, match="models must be some of lstm, rim, riglstm, got 'no_such_model'"
    ):
        complexity.table(["no_such_model"])
    with pytest.raises(ValueError, match="budget must be one of quick, paper, got 'all'"):
        complexity.table(budget="all")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The compiler's own remarks.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is depr:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning")
def test_on_a_gpu_steps_are_compiled_and_times_are_the_gpus():
    spec = RunSpec("copying", TASK, "rim", 12, {"num_cells": 3}, Fit(), 0)
    assert build(spec, "cuda")[1].get_submodule("core")._compiled is not None  # type: ignore[union-attr]
    assert build(spec, "cpu")[1].get_submodule("core")._compiled is None  # type: ignore[union-attr]
    table = complexity.table(None, "quick", "cuda", sizes=(2, 3), batch_size=2)
    assert torch.cuda.get_device_name() in table
