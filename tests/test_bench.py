"""The benchmark: who is timed, how, and a small run of all of it."""

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from riglstm import RigLSTM
from riglstm.lab.bench import contestants as timed
from riglstm.lab.bench.contestants import WORK, Contestant, contestants, growth, job, onednn
from riglstm.lab.bench.harness import overhead
from riglstm.lab.bench.timing import (
    METERS,
    Job,
    Meter,
    Section,
    compare,
    rows,
    runs,
    spread,
)
from riglstm.lab.cli import bench
from riglstm.lab.cli.main import main
from riglstm.lab.tasks.base import Batch
from riglstm.lab.train.devices import commit
from train_task import QUICK, Halves, network


def test_all_our_contestants_do_the_same_work() -> None:
    torch.manual_seed(0)
    who = contestants(6, 8, 2, ["batched", "reference"], "cpu")
    x = torch.randn(5, 3, 6, requires_grad=True)
    ours = [w for w in who if w.ours]
    assert [w.name for w in ours] == ["RigLSTM batched", "RigLSTM reference"]
    for work in WORK.values():
        difference, agreeing = compare(*(work(w.layer, x) for w in ours))
        assert difference < 1e-5
        assert agreeing == 1
    for w in who:
        with torch.no_grad():
            assert compare(WORK["streaming"](w.layer, x), WORK["inference"](w.layer, x))[1] == 1


def test_all_but_training_is_timed_in_eval_mode_on_the_same_weights() -> None:
    # In training mode cuDNN saves for a backward pass, whether torch records one or not.
    seen = []

    class Layer(torch.nn.LSTM):
        def forward(self, x: Tensor, hx: Any = None) -> Any:
            seen.append((self.training, self.weight_ih_l0))
            return super().forward(x, hx)

    layer = Layer(3, 4)
    who = Contestant("nn.LSTM", layer, ours=False)
    x = torch.randn(2, 2, 3, requires_grad=True)
    for work, modes in (("inference", {False}), ("streaming", {False}), ("training", {True})):
        for run in (job(who, work, x).run, timed.in_turn(who, "fp32", work, [x])):
            seen.clear()
            run()
            assert {training for training, _ in seen} == modes
            assert all(weight is layer.weight_ih_l0 for _, weight in seen)
    assert layer.training


def test_the_two_modes_of_nn_lstm_run_with_onednn_on_and_off() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    before = torch.backends.mkldnn.enabled
    for enabled in (True, False):
        with onednn(enabled):
            assert torch.backends.mkldnn.enabled is enabled
        assert torch.backends.mkldnn.enabled is before
    modes = {w.name: w.onednn for w in contestants(6, 8, 2, [], "cpu") if not w.ours}
    assert modes == {"nn.LSTM, oneDNN on": True, "nn.LSTM, oneDNN off": False}


def test_comparing_counts_the_sequences_that_differ_and_a_spread_has_the_outer_tenths() -> None:
    s = spread([float(i) for i in range(11)])
    assert (s.median, s.low, s.high) == (5, 1, 9)
    want = torch.ones(3, 4, 2)
    got = want.clone()
    got[1, 0, 0] += 1e-6
    got[2, 1, 1] += 1
    got[0, 2, 0] = float("nan")
    difference, agreeing = compare((got,), (want,))
    assert difference == pytest.approx(1e-6, rel=0.1)
    assert agreeing == 0.5


def fake_meter(seconds: dict[str, list[float]], order: list[str]) -> Meter:
    """Says what a job is told to take, and writes down who ran."""

    def take(run: Any) -> float:
        order.append(run())
        return seconds[order[-1]].pop(0)

    return Meter(take, lambda run: 3_000_000)


def named(name: str, steps: int = 1, ours: bool = False) -> Job:
    return Job(name, lambda: name, steps, ours)  # type: ignore[arg-type, return-value]


def test_rounds_are_interleaved_and_ratios_taken_round_by_round_to_the_fastest_base() -> None:
    order: list[str] = []
    heard: list[str] = []
    meter = fake_meter({"slow": [9, 9, 9], "fast": [1, 2, 4], "ours": [3, 4, 12]}, order)
    jobs = [named("slow"), named("fast"), named("ours")]
    section = Section("t", "inference", 1, jobs, ["slow", "fast"], 3)
    *_, ours = rows(section, meter, heard.append)
    assert order == ["slow", "fast", "ours"] * 3
    assert len(heard) == 3 * runs(3, compared=False)
    assert ours.ratio is not None
    assert ours.ms is not None
    found = (ours.base, ours.ratio.median, ours.ms.median, ours.peak_mb)
    assert found == ("fast", 3, 4000, 3)


def test_a_job_that_differs_from_the_reference_is_not_timed() -> None:
    def job(name: str, value: float) -> Job:
        return Job(name, lambda: (torch.full((2, 4, 3), value),), 2)

    def expected() -> tuple[Tensor, ...]:
        return (torch.ones(2, 4, 3),)

    right, wrong = job("right", 1.0), job("wrong", 1.1)
    section = Section("t", "inference", 4, [right, wrong], ["right"], 2, expected)
    good, bad = rows(section, METERS["cpu"], lambda name: None)
    assert good.rounds == 2
    assert (bad.rounds, bad.ms, bad.ratio, bad.agreeing) == (0, None, None, 0)
    assert bad.difference == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("work", ["inference", "training"])
def test_ours_is_timed_on_a_gpu_if_it_is_near_float64_and_repeats(work: str) -> None:
    torch.manual_seed(0)
    layer = RigLSTM(6, 8, num_cells=2, backend="reference")
    x, before = torch.randn(5, 4, 6, requires_grad=True), torch.get_float32_matmul_precision()
    who = Contestant("ours", layer)
    try:
        difference, share = timed.sound(who, "fp32", work, x)
        assert share == 1
        assert 0 < difference < 1e-5
        layer.register_forward_hook(lambda layer, given, out: (1.001 * out[0], out[1]))
        assert timed.sound(who, "bf16", work, x)[1] == 1
        # The hook is the copy's, too: what is wrong is wrong in float64.
        layer.register_forward_hook(
            lambda layer, given, out: (out[0] + 1e-3 * (out[0].dtype == torch.float32), out[1])
        )
        assert timed.sound(who, "fp32", work, x)[1] == 0
        layer.register_forward_hook(lambda layer, given, out: (out[0] + torch.rand(()), out[1]))
        assert timed.sound(who, "bf16", work, x) == (math.inf, 0)
    finally:
        torch.set_float32_matmul_precision(before)

    def job(name: str, share: float) -> Job:
        return Job(name, lambda: (torch.ones(1),), 2, True, lambda: (0.5, share), 0.8)

    jobs = [job("near", 0.9), job("far", 0.7)]
    near, far = rows(Section("t", work, 4, jobs, ["near"], 2), METERS["cpu"], lambda name: None)
    assert (near.rounds, near.agreeing, near.difference) == (2, 0.9, 0.5)
    assert (far.rounds, far.ms, far.least) == (0, None, 0.8)


def test_growth_is_measured_a_step() -> None:
    who = contestants(6, 8, 2, ["batched"], "cpu")[2]
    section = growth("g", "inference", who, [torch.randn(T, 1, 6) for T in (2, 4)], 1)
    assert [(j.name, j.steps) for j in section.jobs] == [("T = 2", 2), ("T = 4", 4)]
    assert section.bases == ["T = 2"]


def test_peak_memory_counts_what_is_held_at_once() -> None:
    megabyte = 250_000

    def hold_two_then_one() -> None:
        two = [torch.empty(megabyte), torch.empty(megabyte)]
        del two
        torch.empty(megabyte)

    assert METERS["cpu"].peak_bytes(hold_two_then_one) == 2_000_000


def test_the_quick_benchmark_prints_every_row_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    tables = ("--tables", "batch", "stream", "growth")
    assert main(["bench", "--device", "cpu", "--quick", *tables, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    written = json.loads(path.read_text())
    machine = written["machine"]
    assert (machine["torch"], machine["threads"]) == (torch.__version__, torch.get_num_threads())
    assert machine["processor"]
    assert written["commit"] == commit()
    assert written["options"]["quick"] is True
    assert written["harness"] == []
    table = written["rows"]
    assert [(r["table"], r["work"]) for r in table if r["name"] == "RigLSTM reference"] == [
        ("batch", "inference"),
        ("batch", "training"),
        ("stream", "streaming"),
        ("stream", "inference"),
    ]
    for row in table:
        assert row["name"] in out
        assert row["ms"]["low"] <= row["ms"]["median"] <= row["ms"]["high"]
        if row["name"] == row["base"]:
            assert row["ratio"]["median"] == 1
        if row["table"] != "growth":
            assert row["name"].startswith("nn.LSTM") or row["agreeing"] == 1
    assert {r["T"] for r in table if r["table"] == "growth"} == {4, 8}


def test_a_benchmark_that_is_cut_off_leaves_the_tables_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bench.json"
    earlier = '{"options": {}, "machine": {}, "rows": []}'
    path.write_text(earlier)
    told = []

    def cut(name: str, *others: Any) -> str:
        told.append(name)
        if len(told) == 2:
            raise KeyboardInterrupt
        return name

    monkeypatch.setattr(bench, "table", cut)
    flags = ("--device", "cpu", "--quick", "--tables", "batch", "stream", "--json", str(path))
    with pytest.raises(KeyboardInterrupt):
        bench.main(flags)
    assert path.read_text() == earlier
    part = tmp_path / "bench.json.part"
    assert {row["table"] for row in json.loads(part.read_text())["rows"]} == {"batch"}
    monkeypatch.undo()
    bench.main(flags)
    assert {row["table"] for row in json.loads(path.read_text())["rows"]} == {"batch", "stream"}
    assert not part.exists()


def test_the_harness_table_has_the_overhead_of_each_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "--quick", "--tables", "harness", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert written["rows"] == []
    assert [row["model"] for row in written["harness"]] == ["riglstm", "lstm"]
    for row in written["harness"]:
        assert (row["updates"], row["rounds"]) == (2, 2)
        assert min(row["bare"]["low"], row["harness"]["low"]) > 0
        assert f"{100 * (row['ratio']['median'] - 1):+.1f} %" in out
    assert "harness: copying, width 12, B = 4, 2 rounds of 2 updates" in out


def test_a_busy_machine_is_said_to_be_one() -> None:
    assert "Other programs are at work" in bench.headline({"device": "cpu", "load": 1.0}, "abc", 7)
    idle = bench.headline({"device": "cpu", "load": 0.1}, "abc", 7)
    assert idle == "device cpu, load 0.1\ncommit abc, 7 rounds"


class Counting(Halves):
    """Which batches were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[int] = Counter()

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        self.asked[step] += 1
        return super().batch(seed, step, rows)

    def score(self, *arguments: Any) -> Any:
        raise AssertionError("no evaluation is timed")


def test_both_make_the_same_updates_in_turns_and_those_that_count_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = Counting()
    # The clock says how many batches were asked for; each takes "one second".
    monkeypatch.setattr(time, "perf_counter", lambda: float(task.asked.total()))
    nets: list[nn.Module] = []
    turns: list[str] = []

    def build() -> nn.Module:
        net = network(task)
        net.dropout = nn.Identity()
        nets.append(net)
        return net

    found = overhead(task, build, QUICK, updates=4, rounds=2, warmup=2, tick=turns.append)
    assert turns == ["bare", "fit", "bare", "fit"]
    assert task.asked == dict.fromkeys(range(7), 4)
    for other in nets[1:]:
        for got, want in zip(other.parameters(), nets[0].parameters(), strict=True):
            assert torch.equal(got, want)
    assert (found.updates, found.rounds) == (4, 2)
    assert found.bare.median == found.harness.median == 1000.0
    assert found.ratio.median == 1.0


@pytest.mark.parametrize("watched", [False, True])
def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere(
    watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: watched)
    ticker = bench.Ticker(2)
    ticker.tick("training", "LSTM")
    ticker.clear()
    out, err = capsys.readouterr()
    assert out == ""
    assert (err.startswith("\r1/2"), "training: LSTM" in err, err.endswith("\r")) == (watched,) * 3
