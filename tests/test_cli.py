"""The command line: what every verb prints, what it refuses, and how it says so."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import riglstm
from riglstm.lab.cli import (
    bench,
    data,
    evaluate,
    flags,
    main,
    reproduce,
    text,
    train,
)
from riglstm.lab.tables import reproduce as reproducing
from riglstm.lab.tables.executor import LESS_MEMORY
from riglstm.lab.tables.plan import RunSpec
from riglstm.lab.tables.recipes import NAMES
from riglstm.lab.tasks import TASKS
from riglstm.lab.tasks.datasets import DataError
from riglstm.lab.train import Fit
from riglstm.lab.train.stopping import NEVER, OutOfTime
from riglstm.models import MODELS
from riglstm.scan import BACKENDS

Patch = pytest.MonkeyPatch
Ask: TypeAlias = Callable[..., str]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """What a command prints: its output, or with another exit code than 0 its errors."""

    def said(*args: str, code: int = 0) -> str:
        assert main.main(args) == code
        out, err = capsys.readouterr()
        return err if code else out

    return said


def row(condition: str, chosen_on: str, value: float, metric: str = "accuracy") -> dict[str, Any]:
    return {
        **{"table": None, "model": "lstm", "seed": 0, "condition": condition, "metric": metric},
        **{"value": value, "chosen_on": f"validation@{chosen_on}", "step": 40},
    }


RESULT: dict[str, Any] = {
    "rows": [row("P=4", "P=4", 1.0), row("P=8", "P=4", 0.5), row("P=8", "P=8", 0.625)],
    "chosen": {"P=4": {"step": 40, "value": 1.0}},
    **{"updates": 60, "seconds": 90.0, "parameters": 123, "device": "CPU"},
}


@pytest.mark.parametrize("args", [(), *((verb,) for verb in main.VERBS)])
def test_every_help_shows_an_example(args, ask):
    assert f"Example: riglstm {args[0] if args else 'demo'}" in ask(*args, "--help")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_help_of_its_own_with_an_example_that_can_be_read(task, ask, asked):
    lines = ask("train", task, "--help").splitlines()
    groups = [line for line in lines if line.endswith(":") and line[0] != " "]
    assert groups == ["task:", "model:", "training:", "run:", "help:"]
    ask(*next(line for line in lines if line.startswith("Example: ")).split()[2:])
    assert asked[0]["spec"].task == task


def test_help_names_every_verb_and_list_every_name_that_they_take(ask, monkeypatch):
    out = ask("--help")
    assert all(f"  {verb} " in out for verb in main.VERBS)
    assert ask("--version") == f"riglstm {riglstm.__version__}\n"
    listed = ask("list")
    assert listed.startswith("tasks: riglstm train NAME\n")
    words = set(listed.split())
    assert {*TASKS, *NAMES, *MODELS, *riglstm.VARIANTS, *BACKENDS, "auto", "P=400"} <= words
    # Of several processes only the first speaks, and a table is made by one.
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    assert ask("list") == ""
    monkeypatch.setenv("RANK", "0")
    err = ask("reproduce", "mnist", code=2)
    assert "got several processes from torchrun; start it once, with" in err


COUNTS = ("--digits", "--size", "--sequence")
WITH_OUT = (
    *("demo", "report .", "train copying", "train minigrid"),
    *("reproduce copying", "reproduce minigrid"),
)
PLACED = (*WITH_OUT, "bench", "evaluate .", "sweep .")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "say what to do: demo, train, evaluate, export, reproduce, sweep, report, bench"),
        ("trian", "got 'trian'; did you mean train?"),
        ("demo --num-cells 0", "--num-cells must be a whole number from 1 on, got 0"),
        ("train", "train must be followed by a task, one of copying, mnist"),
        ("train copy", "got 'copy'; did you mean copying?"),
        ("train copying --model lsmt", "got 'lsmt'; did you mean lstm?"),
        ("train copying --set num_cells", "--set must be like num_cells=4, got 'num_"),
        ("train copying --set num_cell=4", "riglstm has no option 'num_cell'; it takes"),
        ("train copying --model lstm --set x=4", "no option 'x'; it takes forget_bias"),
        ("train copying --set num_cells=x", "--set num_cells: expected a whole number"),
        ("train copying --set device=cpu", "riglstm has no option 'device'"),
        ("train copying --seed -1", "seed must be a whole number from 0 to 4,294,967,295, "),
        ("reproduce mnist --models", "--models: expected at least one argument"),
        ("evaluate no/such/run", "RUN must be the folder of a run, or an exported file, got"),
        ("export no/run x.safetensors", "RUN must be the folder of a run, got no/run"),
        ("export . x.bin", "FILE must end in .safetensors, got x.bin"),
        ("evaluate .", "expected the file config.json in it, got none"),
        ("reproduce mnits", "TABLE must be one of mnist, cifar, ablation, balls, copying"),
        ("reproduce mnist --models no_such_model", "--models must be one of lstm"),
        ("report", "report needs PATHS, folders of runs, or --results, a folder, got neither"),
        ("report --results no/such", "must be there, got no/such, which is not"),
        ("report no/such/runs", "no/such/runs must be the folder of a run"),
        ("reproduce mnist --seeds 0", "--seeds must be a whole number from 1 on, or none, got 0"),
        ("reproduce mnist --seed-list -1", "the seed must be a whole number from 0 to"),
        ("reproduce mnist --seeds 2 --seed-list 1", "one of them, got both"),
        ("reproduce copying --settings M=3", "--settings must be one of M=1, M=2"),
        ("sweep x --gpus-per-run 2", "--gpus-per-run must be a number from 0 to 1, got 2"),
        ("reproduce mnist --minutes 0", "minutes must be a number above 0, got 0"),
        ("reproduce complexity --seeds 2", "is measured, and takes no --seeds"),
        ("train copying --seed 4294967296", "a whole number from 0 to 4,294,967,295, got 42949"),
        ("data minst", "NAMES must be one of mnist, cifar, all, got 'minst'"),
        ("bench --json .", "--json must name a new file, or one that a bench wrote, got ."),
        ("bench --tables widths", "must name some of speed on cpu, got widths"),
        *((f"{verb} --device x", "--device must be auto, cpu, cuda or cuda:N") for verb in PLACED),
        ("train copying --devices 1000 --device cpu", "devices must be at most"),
        ("train copying --L 99999999999999999999999", "--L: expected a whole number, got '999"),
        (
            "train copying --set num_cells=1000000000000",
            "must be a multiple of num_cells = 1000000000000, got 600",
        ),
        ("train copying --out '~nobody-at-all/x'", "--out: expected a path or none, got"),
        ("bench --rounds 0", "--rounds must be a whole number from 1 on, or none, got 0"),
        *((f"{verb} --out ''", "--out: expected a path") for verb in WITH_OUT),
        ("train copying --set variant=al_cells", "; did you mean all_cells?"),
        ("train copying --set backend=refrence", "; did you mean reference?"),
        ("train copying --set cels=top", "; did you mean cells?"),
        ("train copying --precision bf61", "; did you mean bf16?"),
        ("train copying --decay cosin", "; did you mean cosine?"),
        *((f"report . {flag} -1", f"{flag} must be a whole number from") for flag in COUNTS),
        ("explore --weights none", "which is not there; the repository of riglstm has a"),
        ("explore --port 65536", "--port must be a whole number from 0 to 65,535, got 65536"),
    ],
)
def test_a_wrong_request_is_explained_in_one_line_ends_with_2_and_leaves_nothing(
    command, message, ask, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    err = ask(*shlex.split(command), code=2)
    assert message in err
    assert err.startswith("riglstm: ")
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def missing_package(args: Sequence[str]) -> None:
    import lightning_fabric.plugins  # noqa: F401


def out_of_memory(args: Sequence[str]) -> None:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:113] . DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 1 bytes. Error code 12 (Cannot allocate memory)"
    )


def full_disk(args: Sequence[str]) -> None:
    raise OSError(28, "No space left on device", "runs/x")


def interrupted(args: Sequence[str]) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("verb", "code", "begins", "ends"),
    [
        (
            lambda args: RunSpec("copying", {}, "no_such_model", 6, {}, Fit(), 0),
            *(2, "riglstm: the model must be one of", "got 'no_such_model'"),
        ),
        (
            missing_package,
            *(2, "riglstm: this needs lightning_fabric, which is not installed: pip install "),
            "install 'riglstm[lab]'",
        ),
        (out_of_memory, 2, "riglstm: out of memory (", f"; {LESS_MEMORY}"),
        (full_disk, 2, "riglstm: [Errno 28] No space left on device", "'runs/x'"),
        (interrupted, 130, "\nriglstm: stopped by Ctrl-C", "; nothing was saved"),
    ],
)
def test_what_went_wrong_is_one_line_and_an_exit_code(verb, code, begins, ends, monkeypatch, ask):
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    monkeypatch.setitem(main.VERBS, "demo", verb)
    err = ask("demo", code=code)
    assert err.startswith(begins)
    assert err.endswith(f"{ends}\n")


@pytest.mark.parametrize("module", ["somewhere", "riglstm.x"])
def test_a_bug_is_shown_whole(module, monkeypatch):
    # C code has no frame: the last one may be ours, and it is a bug all the same.
    inside: dict[str, Any] = {"__name__": module}
    exec("def bug(args):\n    int('x')", inside)
    monkeypatch.setitem(main.VERBS, "demo", inside["bug"])
    with pytest.raises(ValueError, match="invalid literal"):
        main.main(["demo"])


def test_the_command_that_goes_on_is_the_one_that_was_given(monkeypatch):
    args = ["copying", "--out", "my runs"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/riglstm"])
    assert flags.again("train", args, "--resume") == (
        "riglstm train copying --out 'my runs' --resume"
    )
    assert flags.again("train", [*args, "--resume"], "--resume").count("--resume") == 1
    monkeypatch.setattr(sys, "argv", ["/somewhere/riglstm/__main__.py"])
    assert flags.again("demo", []) == f"{sys.executable} -m riglstm demo"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert flags.again("demo", []) == "torchrun … -m riglstm demo"


@pytest.fixture
def asked(monkeypatch: Patch, tmp_path: Path) -> list[dict[str, Any]]:
    """What `train` asks to be run, in a folder of its own; nothing is, and `--no-test` is heard."""
    asked: list[dict[str, Any]] = []

    def run(spec: RunSpec, path: Path, data_dir: Path | None, **options: Any) -> dict[str, Any]:
        asked.append({"spec": spec, "path": path, "data_dir": data_dir, **options})
        return RESULT if spec.fit.test else {**RESULT, "rows": []}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "run", run)
    return asked


def test_train_asks_for_the_run_that_its_flags_say(asked, ask):
    words = (
        "train copying --P 6 --P-from none --model brim --hidden-size 12 "
        "--set num_cells=6,3 dropout=0.5 --set active-cells=none --lr 0.01 --clip-norm none "
        "--devices 2 --seed 7 --data-dir d --conditions P=9"
    )
    out = ask(*words.split())
    (run,) = asked
    spec = run["spec"]
    assert (spec.task, spec.model, spec.hidden_size, spec.seed) == ("copying", "brim", 12, 7)
    assert spec.model_options == {"num_cells": (6, 3), "dropout": 0.5, "active_cells": None}
    assert spec.fit == Fit(lr=0.01, clip_norm=None, devices=2)
    config = spec.task_config()
    assert (config.P, config.P_from, config.conditions) == (6, None, ("P=9",))
    assert run["path"] == Path("runs/copying/brim-s7")
    assert (run["data_dir"], run["resume"]) == (Path("d"), False)
    assert run["again"].endswith(f"{words} --resume")
    assert "written to runs/copying/brim-s7" in out
    assert "chosen on validation@P=4" in out


def test_a_run_whose_time_is_up_says_how_to_go_on_and_ends_well(monkeypatch, ask, tmp_path):
    def run(*args: Any, **options: Any) -> None:
        raise OutOfTime(f"{options['deadline'].left:.0f} s; go on with: {options['again']}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "run", run)
    said = ask("train", "copying", "--minutes", "9").splitlines()[-1]
    assert said.startswith("time is up: 540 s; go on with: ")
    assert said.endswith("train copying --minutes 9 --resume")


def test_a_variant_has_a_folder_of_its_own_and_no_test_no_legend(asked, ask):
    out = ask("train", "mnist", "--set", "variant=all_cells", "--no-test")
    assert asked[0]["path"] == Path("runs/mnist/all_cells-s0")
    assert "60 updates: not tested\n" in out
    assert "honest rule" not in out


def test_train_never_touches_a_run_that_is_there(asked, ask, tmp_path):
    config = RunSpec("copying", {}, "lstm", 6, {}, Fit(), 0).resolved()
    for path in (done := tmp_path / "done", partial := tmp_path / "partial"):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
    (done / "result.json").write_text(json.dumps(RESULT))
    err = ask("train", "copying", "--out", str(done), code=2)
    assert f"{done} holds a run that is done; `riglstm evaluate {done}` shows its result" in err
    err = ask("train", "copying", "--out", str(partial), code=2)
    assert f"{partial} holds a run that was stopped; go on with it by --resume" in err
    assert not asked
    same = ("--model", "lstm", "--hidden-size", "6", "--resume")
    ask("train", "copying", "--out", str(partial), *same)
    assert asked[0]["resume"]


def test_the_result_is_shown_by_both_rules():
    title, _, head, _, *lines = text.result_table(RESULT, "title").splitlines()[:6]
    assert (title, head.split("|")[1].strip()) == ("**title**", "test accuracy")
    assert lines[0].split() == ["|", "P=4", "|", "100.0%", "(40)", "|", "100.0%", "(40)", "|"]
    assert lines[1].split() == ["|", "P=8", "|", "50.0%", "(40)", "|", "62.5%", "(40)", "|"]
    # A condition without a choice of its own has a dash.
    lone = text.result_table({"rows": [row("P=9", "P=4", 0.25, metric="bce")]}, "").splitlines()
    assert ["|", "P=9", "|", "0.2500", "(40)", "|", "–", "|"] in map(str.split, lone)


def test_the_verdict_names_the_largest_difference():
    other = {**RESULT, "device": "GPU", "rows": [row("P=4", "P=4", 1.0), row("P=8", "P=4", 0.75)]}
    assert evaluate.verdict(other, RESULT) == (
        "This differs from the recorded result, most at P=8, chosen on validation@P=4: "
        "recorded 0.5 on CPU, now 0.75 on GPU. Another device rounds otherwise."
    )
    assert evaluate.verdict(RESULT, RESULT) == "This equals the recorded result."
    strange = {**RESULT, "rows": [row("P=99", "P=4", 0.0)]}
    assert "None of these conditions is in the recorded result" in evaluate.verdict(strange, RESULT)


def catch_tables(monkeypatch: Patch, **end: Any) -> list[Any]:
    """What `reproduce` asks for; nothing is made."""
    asked: list[Any] = []

    def fake(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return reproducing.Reproduced(reproducing.Rendered("| the table |\n", []), **end)

    monkeypatch.setattr(reproduce, "reproduce", fake)
    return asked


def test_reproduce_plans_first_and_ends_with_the_table(monkeypatch, ask, tmp_path):
    asked = catch_tables(monkeypatch, failed=1)
    out = ask("reproduce", "copying", "--models", "lstm", "--out", str(tmp_path))
    assert out.startswith(f"copying, quick, in {tmp_path}: 2 runs: 0 done, 0 running, 2 waiting")
    table = tmp_path / "copying-quick.md"
    assert out.index("| the table |") < out.index(f"written: {table}")
    assert table.read_text() == "| the table |\n"
    assert "1 failed, as the notes say; a run whose folder is deleted begins anew" in out
    ((args, options),) = asked
    assert [(p.row, p.setting) for p in args[1]] == [("lstm", "M=1"), ("lstm", "M=2")]
    assert args[2:] == ("quick", tmp_path, None)
    assert options["again"].endswith(f"reproduce copying --models lstm --out {tmp_path}")
    assert (options["jobs"], options["deadline"]) == (1, NEVER)


def test_a_part_of_a_table_is_asked_for_and_what_is_left_is_said(monkeypatch, ask, tmp_path):
    asked = catch_tables(monkeypatch, left=3)
    flags = "--settings M=2 --seed-list 1 4 --precision bf16 --jobs 3 --minutes 9"
    command = ("reproduce", "copying", *flags.split(), "--out", str(tmp_path))
    out = ask(*command)
    assert out.startswith(f"copying, quick, in {tmp_path}: 6 runs: ")
    assert "3 runs are not done; go on with: " in out
    ((args, options),) = asked
    assert {p.spec.seed for p in args[1]} == {1, 4}
    assert {(p.setting, p.spec.fit.precision) for p in args[1]} == {("M=2", "bf16")}
    assert options["jobs"] == 3
    assert 500 < options["deadline"].left <= 540
    catch_tables(monkeypatch, errors=("runs/a: ValueError: no", "runs/b: exit code -9"))
    err = ask(*command, code=2)
    assert "2 runs ended with an error" in err
    assert "  runs/b: exit code -9" in err


def test_data_lists_downloads_and_checks(monkeypatch, ask, tmp_path):
    there = ["mnist"]
    fetched: list[str] = []

    def find(name: str, data_dir: Path | None) -> Path:
        if name not in there:
            raise DataError("none")
        return tmp_path / name

    def load(name: str, data_dir: Path | None) -> None:
        if find(name, data_dir).name == "cifar":
            raise DataError("it is damaged")

    monkeypatch.setattr(data, "find", find)
    monkeypatch.setattr(data, "load", load)
    monkeypatch.setattr(data, "fetch", lambda name, *_, **__: fetched.append(name))
    words = ("data", "--data-dir", str(tmp_path))
    out = ask(*words)
    assert f"in {tmp_path / 'mnist'}" in out
    assert "not there" in next(line for line in out.splitlines() if "cifar" in line)
    ask(*words, "cifar")
    assert fetched == ["cifar"]
    ask(*words, "all")
    assert fetched[1:] == ["mnist", "cifar"]
    ask(*words, "--check", "mnist")
    assert "cifar" not in ask(*words, "--check")
    there.append("cifar")
    way_out = f"`riglstm data cifar --data-dir {tmp_path}` gets it"
    assert f"cifar: missing or damaged; {way_out}" in ask(*words, "--check", code=2)
    there.clear()
    assert "mnist, cifar: missing or damaged" in ask(*words, "--check", code=2)


def test_the_demo_trains_both_models_alike_and_ends_with_a_curve_and_a_page(ask, tmp_path):
    sizes = ("--updates", "2", "--hidden-size", "4", "--num-cells", "2", "--seed", "7")
    for again in (False, True):
        out = ask("demo", *sizes, "--out", str(tmp_path))
        assert out.count("trained already") == 2 * again
    lstm, rig = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/config.json")))
    assert (rig["model"], rig["fit"]["updates"], rig["seed"]) == ("riglstm", 2, 7)
    assert lstm["model"] == "lstm"
    assert all(rig[part] == lstm[part] for part in ("task_options", "fit", "seed"))
    assert "**digits right, seed 7**" in out
    assert "no evidence" in out
    assert f"the page: {tmp_path / 'report.html'}" in out
    (curve,) = (line.removeprefix("the curve: ") for line in out.splitlines() if "curve:" in line)
    assert Path(curve).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") >= 3
    assert page.index("riglstm: cells awake at P=80") < page.index("against the shift")
    assert all(f"P={P}" in page for P in (10, 20, 40, 80))
    for model in ("riglstm", "lstm"):
        assert f">{model}<" in page


def test_a_gpu_has_tables_of_its_own(monkeypatch, ask):
    monkeypatch.setattr(bench, "pick", lambda fit: torch.device("cuda", 0))
    asked: list[Any] = []
    monkeypatch.setattr(bench, "run", lambda *given: asked.append(given))
    ask("bench", "--device", "cuda")
    assert list(asked[0][0]) == ["speed", "widths", "rules"]
    assert str(asked[0][1]) == "cuda:0"
