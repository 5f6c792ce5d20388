"""The benchmark: what is timed, how, and a small run of all of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from riglstm import RigLSTM
from riglstm.lab import bench as speed
from riglstm.lab.bench import (
    LSTM,
    OURS,
    Case,
    Run,
    check,
    interleave,
    measure,
    ratios,
    spread,
)
from riglstm.lab.cli import bench
from riglstm.lab.cli.main import main
from riglstm.lab.train.folder import commit

CPU = torch.device("cpu")
CASE = Case(12, B=4, T=3, input_size=5, captured=True)
EVERY = {"nn.LSTM", "nn.LSTM captured", "RigLSTM", "RigLSTM captured"}


def repeated(run: Run) -> Run:
    """`captured` for a CPU: a replay does the work anew, into the tensors of the first."""
    results = run()

    def replay() -> tuple[Tensor, ...]:
        for own, new in zip(results, run(), strict=True):
            own.copy_(new)
        return results

    return replay


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What is captured, by a stand-in."""
    seen: list[Run] = []

    def captured(run: Run) -> Run:
        seen.append(run)
        return repeated(run)

    monkeypatch.setattr(speed, "captured", captured)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    return seen


@pytest.mark.parametrize("work", ["inference", "training"])
def test_both_layers_are_timed_plain_and_captured_on_the_same_work(work, graphs):
    row = measure("speed", CASE, work, CPU, rounds=3)
    assert set(row["us"]) == EVERY
    assert row["failed"] == {}
    assert (row["table"], row["work"], row["backend"], row["num_cells"]) == (
        "speed",
        work,
        "batched",
        6,
    )
    assert all(0 < s["low"] <= s["median"] <= s["high"] for s in row["us"].values())
    lstm, ours = (run() for run in graphs)
    assert lstm[0].shape == ours[0].shape == (3, 4, 12)
    # Of training, the gradients of the input and of all weights are part of it.
    weights = [len(list(layer(5, 12).parameters())) for layer in (nn.LSTM, RigLSTM)]
    learned = [1 + n for n in weights] if work == "training" else [0, 0]
    assert [len(lstm) - 1, len(ours) - 1] == learned


def test_all_but_training_is_timed_in_eval_mode(graphs, monkeypatch):
    # In training mode cuDNN saves for a backward pass, whether torch records one or not.
    modes = set()
    for work, run in list(speed.WORK.items()):

        def seen(layer: nn.Module, x: Tensor, work: str = work, run: Any = run) -> Any:
            modes.add((work, type(layer), layer.training))
            return run(layer, x)

        monkeypatch.setitem(speed.WORK, work, seen)
        measure("speed", CASE, work, CPU, rounds=1)
    kinds = (nn.LSTM, RigLSTM)
    assert modes == {(work, kind, work == "training") for work in speed.WORK for kind in kinds}


def test_a_capture_that_fails_is_recorded_and_the_rest_is_timed(graphs, monkeypatch):
    def captured(run: Run) -> Run:
        raise RuntimeError("operation not permitted when\nstream is capturing")

    monkeypatch.setattr(speed, "captured", captured)
    row = measure("speed", CASE, "inference", CPU, rounds=2)
    assert set(row["us"]) == {"nn.LSTM", "RigLSTM"}
    said = "RuntimeError: operation not permitted when stream is capturing"
    assert row["failed"] == dict.fromkeys(EVERY - set(row["us"]), said)


def test_a_case_that_fails_as_a_whole_is_recorded(monkeypatch):
    case = replace(CASE, options={"views": "none"})
    row = measure("rules", case, "training", CPU, rounds=2)
    assert row["us"] == {}
    assert "views must be one of" in row["failed"][OURS]
    monkeypatch.setattr(speed, "interleave", lambda *args: 1 / 0)
    row = measure("widths", replace(CASE, captured=False), "training", CPU, rounds=2)
    assert row["us"] == {}
    assert row["failed"][OURS] == row["failed"][LSTM] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"cells": "random"}, {"views": "soft"}])
@pytest.mark.parametrize("B", [1, 5])
def test_ours_is_timed_only_if_it_is_near_float64(training, options, B):
    torch.manual_seed(0)
    layer = RigLSTM(6, 8, num_cells=2, **options)
    check(layer, B, "fp32", training)
    # The hook is the copy's, too: what is wrong is wrong in float32 alone.
    layer.register_forward_hook(
        lambda layer, given, out: (out[0] + 1e-3 * (out[0].dtype == torch.float32), out[1])
    )
    check(layer, B, "bf16", training)
    with pytest.raises(ValueError, match=r"float64's must agree within 0\.0001 in 75% .* got 0%"):
        check(layer, B, "fp32", training)


def test_on_a_cpu_nn_lstm_has_the_faster_of_its_two_modes(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    before = torch.backends.mkldnn.enabled
    modes = []
    run = speed.onednn(False)(lambda: modes.append(torch.backends.mkldnn.enabled))
    run()
    run()
    assert (modes, torch.backends.mkldnn.enabled) == ([False, False], before)
    row = measure("speed", replace(CASE, captured=False), "inference", CPU, rounds=1)
    assert set(row["us"]) == {"nn.LSTM", "nn.LSTM, oneDNN off", "RigLSTM"}
    found = ratios({"nn.LSTM": 4, "nn.LSTM, oneDNN off": 2, "RigLSTM": 3})
    assert found == {"plain": 0.75, "captured": None, "best": 1.5}


def test_ratios_are_of_both_plain_of_both_captured_and_of_each_at_its_best():
    us: dict[str, float] = {LSTM: 18, LSTM + " captured": 10, OURS: 9, OURS + " captured": 8}
    assert tuple(ratios(us).values()) == (0.5, 0.8, 0.8)
    del us[OURS + " captured"]
    assert tuple(ratios(us).values()) == (0.5, None, 0.9)
    assert tuple(ratios({LSTM: 1}).values()) == (None, None, None)


def test_a_spread_has_the_outer_tenths_and_rounds_are_interleaved():
    s = spread([float(i) for i in range(11)])
    assert s == {"median": 5, "low": 1, "high": 9}
    order: list[str] = []

    def seconds(run: Callable[[], object]) -> float:
        order.append(str(run()))
        return float(len(order))

    found = interleave({"a": lambda: "a", "b": lambda: "b"}, seconds, 3)
    assert order == ["a", "b"] * 3
    assert found == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_the_quick_benchmark_prints_every_row_and_writes_them(tmp_path, capsys):
    path = tmp_path / "bench.json"
    flags = ["--device", "cpu", "--quick", "--tables", "speed", "--json", str(path)]
    assert main(["bench", *flags]) == 0
    out = capsys.readouterr().out
    written = json.loads(path.read_text())
    machine = written["machine"]
    assert (machine["torch"], machine["threads"]) == (torch.__version__, torch.get_num_threads())
    assert machine["processor"]
    assert written["commit"] == commit()
    assert written["options"]["quick"] is True
    assert [(r["table"], r["work"]) for r in written["rows"]] == [
        ("speed", "inference"),
        ("speed", "training"),
    ]
    (table,) = bench.speed_tables(written)
    assert table in out
    assert "captured" not in table


def test_a_benchmark_that_is_cut_off_leaves_the_rows_it_has_measured(tmp_path, monkeypatch, capsys):
    path = tmp_path / "bench.json"

    def cut(table: str, case: Case, work: str, *others: Any) -> Any:
        if work == "training":
            raise KeyboardInterrupt
        return measure(table, replace(case, options={"views": "none"}), work, *others)

    monkeypatch.setattr(bench, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        bench.main(("--device", "cpu", "--quick", "--tables", "speed", "--json", str(path)))
    (row,) = json.loads(path.read_text())["rows"]
    assert row["work"] == "inference"
    assert "failed: speed, RigLSTM, Case(hidden_size=12, " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_a_busy_machine_is_said_to_be_one():
    assert "Other programs are at work" in bench.headline({"device": "cpu", "load": 1.0}, "abc", 7)
    idle = bench.headline({"device": "cpu", "load": 0.1}, "abc", 7)
    assert idle == "device cpu, load 0.1\ncommit abc, 7 rounds"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("work", ["inference", "training"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_on_a_gpu_both_are_captured(work, precision):
    case = Case(600, 8, T=9, precision=precision, captured=True)
    row = measure("speed", case, work, torch.device("cuda"), rounds=2)
    assert (set(row["us"]), row["failed"]) == (EVERY, {})
