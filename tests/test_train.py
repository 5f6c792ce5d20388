"""What `fit` does in one process: the updates, the log, the choice, the ends of a run."""

from __future__ import annotations

import ast
import copy
import csv
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import riglstm.lab.train
from riglstm.lab.tasks.base import Batch, Split, Totals, means
from riglstm.lab.train.capture import captured
from riglstm.lab.train.choice import Choice, Chosen
from riglstm.lab.train.config import Fit, rate
from riglstm.lab.train.devices import pick
from riglstm.lab.train.evaluation import score
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.meter import Meter
from riglstm.lab.train.progress import Progress
from riglstm.lab.train.supervised import Diverged, fit
from riglstm.lab.train.weights import load_weights
from train_task import CPU, QUICK, Halves, network


def logged(path: Path) -> dict[str, dict[int, float]]:
    """metrics.csv by name and step."""
    found: dict[str, dict[int, float]] = {}
    with (path / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["name"], {})[int(row["step"])] = float(row["value"])
    return found


def by_hand(
    net: nn.Module, task: Halves, config: Fit, seed: int
) -> Iterator[tuple[int, tuple[float, float]]]:
    """The training that `fit` must amount to; gives the step, its loss and its gradient's norm."""
    adam = torch.optim.Adam(net.parameters(), config.lr, fused=True)
    for step in range(config.updates):
        for group in adam.param_groups:
            group["lr"] = rate(config, step)
        loss, _ = task.loss(net, task.batch(seed, step))
        adam.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        norm = flat.double().norm().item()
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), config.clip_norm)
        adam.step()
        yield step + 1, (loss.item(), norm)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_an_update_is_clipped_adam_at_the_scheduled_step_size(
    clip_norm: float | None, tmp_path: Path
) -> None:
    config = replace(QUICK, clip_norm=clip_norm)
    task = Halves()
    net, other = (network(task) for _ in range(2))
    net.dropout = other.dropout = nn.Identity()
    fit(net, task, config, 3, RunFolder(tmp_path), progress=False)
    updates = dict(by_hand(other, task, config, 3))
    # Or else the norm could be that of what is clipped, and nobody would know.
    assert max(norm for _, norm in updates.values()) > 0.1
    for got, want in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(got, want)
    found = logged(tmp_path)
    assert found["train/loss"].keys() == {*range(7, 60, 7), 60}
    for step, loss in found["train/loss"].items():
        since = range(57 if step == 60 else step - 6, step + 1)
        losses, norms = zip(*(updates[s] for s in since), strict=True)
        assert loss == pytest.approx(sum(losses) / len(since), rel=1e-12)
        assert found["gradient_norm"][step] == pytest.approx(sum(norms) / len(since), rel=1e-5)
        assert found["gradient_norm_max"][step] == pytest.approx(max(norms), rel=1e-5)
        assert found["lr"][step] == rate(config, step - 1)


def test_a_checkpoint_before_there_were_norms_is_gone_on_with() -> None:
    meter = Meter()
    meter.replace(torch.tensor([[2.0, 0.5], [4.0, 0.7]]))
    meter.add(torch.tensor(6.0), torch.tensor(0.9), torch.tensor(0.25))
    assert len(meter) == 3
    figures = meter.take()
    assert (figures.loss, figures.metric) == pytest.approx((4.0, 0.7))
    assert math.isnan(figures.norm)
    assert math.isnan(figures.largest)
    assert len(meter) == 0


def test_the_step_size_rises_then_falls() -> None:
    linear = Fit(updates=110, warmup=10, lr=2.0, decay="linear")
    assert [rate(linear, step) for step in (0, 4, 9, 10, 60, 109)] == pytest.approx(
        [0.2, 1.0, 2.0, 2.0, 1.0, 0.02]
    )
    cosine = replace(linear, decay="cosine")
    assert [rate(cosine, step) for step in (9, 10, 35, 60, 85)] == pytest.approx(
        [2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)]
    )
    late = replace(linear, decay="late")
    assert [rate(late, step) for step in (4, 10, 90, 100, 109)] == pytest.approx(
        [1.0, 2.0, 2.0, 1.0, 0.1]
    )
    assert {rate(replace(linear, decay="none"), step) for step in range(10, 110)} == {2.0}


class Scripted(Halves):
    """Its scores are given, evaluation by evaluation."""

    def __init__(self, **scores: list[float]) -> None:
        super().__init__()
        self.scores = {name.replace("_", "="): iter(values) for name, values in scores.items()}

    def score(
        self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
    ) -> Totals:
        value = torch.tensor(next(self.scores[condition]), dtype=torch.float64)
        return {"loss": value, "accuracy": 4 * value, "count": torch.tensor(4.0).double()}


def test_weights_are_chosen_by_the_training_condition_and_by_each_condition(
    tmp_path: Path,
) -> None:
    task = Scripted(T_6=[0.5, 0.7, 0.7, 0.6, 0.1], T_10=[0.3, 0.2, 0.4, 0.4, 0.1])
    net = network(task)
    seen: dict[int, dict[str, Tensor]] = {}

    original = task.batch

    def batch(seed: int, step: int, rows: slice = slice(None)) -> Batch:
        seen[step] = copy.deepcopy(net.state_dict())
        return original(seed, step, rows)

    task.batch = batch  # type: ignore[method-assign]
    result = fit(net, task, QUICK, 0, RunFolder(tmp_path), progress=False)
    assert result.chosen == {"T=6": Chosen(24, 0.7, 0.175), "T=10": Chosen(36, 0.4, 0.1)}
    folder = RunFolder(tmp_path)
    for step in (24, 36):
        saved = load_file(folder.weights_of(step))
        for name, weight in seen[step].items():
            assert torch.equal(saved[name], weight)
    assert {file.name for file in folder.weights.iterdir()} == {
        "step-24.safetensors",
        "step-36.safetensors",
    }
    other = network(task, seed=9)
    load_weights(other, folder.weights_of(24))
    assert all(torch.equal(w, seen[24][name]) for name, w in other.state_dict().items())


def test_what_the_checkpoint_before_the_last_refers_to_is_kept(tmp_path: Path) -> None:
    task = Scripted(T_6=[0.1, 0.2, 0.3, 0.4, 0.5], T_10=[0.1] * 5)
    config = replace(QUICK, checkpoint_every=12)
    fit(network(task), task, config, 0, RunFolder(tmp_path), progress=False)
    assert {file.name for file in (tmp_path / "checkpoints").iterdir()} == {
        "step-48.ckpt",
        "step-60.ckpt",
    }
    assert {file.name for file in (tmp_path / "weights").iterdir()} == {
        "step-12.safetensors",
        "step-48.safetensors",
        "step-60.safetensors",
    }


def test_a_choice_prefers_the_lower_loss_then_the_earlier_of_equals_and_numbers_to_nan() -> None:
    error, even = Choice("a", higher_is_better=False, patience=2), {"a": 1.0, "b": 1.0}
    assert error.hear(1, {"a": math.nan, "b": 1.0}, even)
    assert error.hear(2, {"a": 3.0, "b": 1.0}, even)
    assert not error.hear(3, {"a": 3.0, "b": math.nan}, even)
    assert not error.exhausted
    assert error.hear(4, {"a": 4.0, "b": 0.5}, even)
    assert error.exhausted
    assert error.best == {"a": Chosen(2, 3.0, 1.0), "b": Chosen(4, 0.5, 1.0)}
    perfect = Choice("a", higher_is_better=True, patience=4)
    for step, (value, loss) in enumerate(
        [(0.9, 0.1), (1.0, 0.3), (1.0, 0.2), (1.0, 0.2), (1.0, math.nan), (0.9, 0.0)], 1
    ):
        assert perfect.hear(step, {"a": value}, {"a": loss}) == (step <= 3)
    assert perfect.best == {"a": Chosen(3, 1.0, 0.2)}
    # The metric has not improved for four evaluations.
    assert perfect.exhausted
    # In a run from before losses were asked for, the earlier of equals stays.
    old = Choice("a", higher_is_better=True, patience=None)
    old.load_state_dict({"best": {"a": (7, 0.9)}, "waited": 0})
    assert not old.hear(8, {"a": 0.9}, {"a": 0.5})
    assert old.hear(9, {"a": 1.0}, {"a": 0.5})
    again = Choice("a", higher_is_better=True, patience=None)
    again.load_state_dict(old.state_dict())
    assert again.best == {"a": Chosen(9, 1.0, 0.5)}


def test_a_run_out_of_patience_stops(tmp_path: Path) -> None:
    # The other condition improves all the time, and does not count.
    task = Scripted(T_6=[0.2, 0.5, 0.4, 0.5, 0.9], T_10=[0.1, 0.2, 0.3, 0.4, 0.5])
    config = replace(QUICK, patience=2)
    result = fit(network(task), task, config, 0, RunFolder(tmp_path), progress=False)
    assert result.stopped == "patience"
    assert result.updates == 48
    assert result.chosen == {"T=6": Chosen(24, 0.5, 0.125), "T=10": Chosen(48, 0.4, 0.1)}
    assert max(logged(tmp_path)["validation/accuracy@T=6"]) == 48
    again = fit(network(task), task, config, 0, RunFolder(tmp_path), resume=True, progress=False)
    assert again == result


class Failing(Halves):
    """In one update the loss is no number, or it is one, and its gradient is not."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__()
        self.step, self.what, self.seen = step, what, 0

    def loss(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        self.seen += 1
        loss, metric = super().loss(net, batch)
        if self.seen == self.step and self.what == "loss":
            loss = loss * math.nan
        if self.seen == self.step and self.what == "gradient":
            bias = net.get_parameter("head.bias")
            loss = loss + (bias - bias.detach()).sqrt().sum()
        return loss, metric


@pytest.mark.parametrize(
    ("step", "saved"), [(5, "there is no checkpoint from before it"), (25, "step-18.ckpt")]
)
def test_a_loss_that_is_no_number_stops_the_run(step: int, saved: str, tmp_path: Path) -> None:
    with pytest.raises(Diverged) as error:
        fit(
            network(Halves()),
            Failing(step, "loss"),
            QUICK,
            0,
            RunFolder(tmp_path),
            progress=False,
        )
    for words in (
        f"the loss of update {step} is not a finite number",
        saved,
        "Train anew, into another folder, with a smaller --lr (now 0.01)",
    ):
        assert words in str(error.value)
    assert not list(tmp_path.glob("checkpoints/step-27.ckpt"))


def test_a_gradient_that_is_no_number_never_gets_into_a_checkpoint(tmp_path: Path) -> None:
    task = Failing(18, "gradient")
    # At update 18 a checkpoint is due, and the loss is still a number.
    with pytest.raises(Diverged, match=r"a weight after update 18 is not .*step-9.ckpt"):
        fit(network(task), task, QUICK, 0, RunFolder(tmp_path), progress=False)
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["step-9.ckpt"]


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path: Path) -> None:
    task = Halves()
    ends: list[dict[str, Tensor]] = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(ends))
        net = network(task)
        before = torch.get_rng_state()
        fit(net, task, QUICK, seed, RunFolder(tmp_path / name), progress=False)
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(net.state_dict())
    assert all(torch.equal(w, ends[1][name]) for name, w in ends[0].items())
    assert not all(torch.equal(w, ends[2][name]) for name, w in ends[0].items())


def test_how_often_a_run_is_looked_at_does_not_change_it(tmp_path: Path) -> None:
    task = Halves()
    ends: list[dict[str, Tensor]] = []
    for name, every in (("a", 7), ("b", 60)):
        # A model that draws in eval mode too.
        net = network(task, model="riglstm", hidden_size=6, num_cells=3, variant="rand_cells")
        config = replace(
            QUICK, updates=21, evaluate_every=every, checkpoint_every=every, log_every=every
        )
        fit(net, task, config, 0, RunFolder(tmp_path / name), progress=False)
        ends.append(net.state_dict())
    assert all(torch.equal(w, ends[1][name]) for name, w in ends[0].items())


def test_bf16_trains_weights_of_fp32_under_autocast(tmp_path: Path) -> None:
    task = Halves()
    seen = Counter[torch.dtype]()

    def spy(module: nn.Module, given: Any, output: Tensor) -> None:
        seen[output.dtype] += 1

    net = network(task)
    assert isinstance(net.head, nn.Module)
    net.head.register_forward_hook(spy)
    fit(net, task, replace(QUICK, precision="bf16"), 0, RunFolder(tmp_path), progress=False)
    assert set(seen) == {torch.bfloat16}
    assert seen.total() == 60 + 5 * 2
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    last = logged(tmp_path)["validation/loss@T=10"][60]
    again = means(score(net, task, "T=10", "validation", precision="bf16"))["loss"]
    assert again == last


def test_data_that_cannot_be_had_are_missed_before_training(tmp_path: Path) -> None:
    class Missing(Halves):
        def ready(self) -> None:
            raise ValueError("no data")

        def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
            raise AssertionError("training began")

    with pytest.raises(ValueError, match="no data"):
        fit(network(Halves()), Missing(), QUICK, 0, RunFolder(tmp_path), progress=False)


def test_tf32_is_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tf32 is a mode of NVIDIA GPUs, got device cpu; use fp32"):
        fit(
            network(Halves()),
            Halves(),
            replace(QUICK, precision="tf32"),
            0,
            RunFolder(tmp_path),
            progress=False,
        )


def test_what_was_trained_in_tf32_is_scored_on_a_cpu_in_fp32() -> None:
    task = Halves()
    net = network(task)
    scores = [score(net, task, "T=6", "test", precision=p) for p in ("fp32", "tf32")]
    assert scores[0] == scores[1]


def test_generators_of_other_devices_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reseeded(seed: int) -> None:
        raise AssertionError("all GPUs were seeded")

    net = network(Halves())
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded)
    fit(net, Halves(), QUICK, 0, RunFolder(tmp_path), progress=False)


def test_the_environment_is_as_it_was_after_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Launches(Halves):
        def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
            os.environ["LOCAL_RANK"] = "0"
            os.environ["MASTER_PORT"] = "1"
            os.environ.pop("NODE_RANK", None)
            return super().batch(seed, step, rows)

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", "2")
    monkeypatch.setenv("NODE_RANK", "0")
    before = dict(os.environ)
    fit(network(Halves()), Launches(), QUICK, 0, RunFolder(tmp_path), progress=False)
    assert dict(os.environ) == before


def test_what_is_left_is_said_with_evaluations_and_a_speed_once_it_is_known(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1000.0, 1100.0, 1150.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    progress = Progress(100, Halves.metric, shown=True)
    progress.start(40)
    progress.evaluation(50, {"T=6": 0.5}, 0.0)
    progress.evaluation(70, {"T=6": 0.5}, 2.0)
    assert capfd.readouterr().err.splitlines() == [
        "update 50 of 100: validation T=6 accuracy 50%; 0:08:20 left",
        "update 70 of 100: validation T=6 accuracy 50%; 2 updates/s, 0:02:30 left",
    ]


def test_a_slow_run_says_soon_how_long_it_will_take(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = Progress(100, Halves.metric, shown=True)
    progress.start(0)
    for step in range(1, 6):
        now = 12.0 * step
        progress.tick(step)
    progress.evaluation(6, {"T=6": 0.5}, 2.0)
    progress.tick(7)
    first, second = capfd.readouterr().err.splitlines()
    assert first == "update 3 of 100; 0:19:24 left"
    assert second.startswith("update 6 of 100: validation T=6")
    quick = Progress(100, Halves.metric, shown=True)
    quick.start(0)
    quick.evaluation(1, {"T=6": 0.5}, 2.0)
    now += 100
    quick.tick(2)
    Progress(100, Halves.metric, shown=False).tick(2)
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updates": 0}, "updates must be a whole number from 1 on, got 0"),
        ({"log_every": 2.5}, "log_every must be a whole number from 1 on, got 2.5"),
        ({"warmup": 10, "updates": 10}, "warmup must be below updates = 10, got 10"),
        ({"lr": 0.0}, "lr must be a number above 0, got 0.0"),
        ({"clip_norm": math.nan}, "clip_norm must be a number above 0, got nan"),
        ({"average": 0.0}, "average must be a number above 0 and below 1, got 0.0"),
        ({"average": 1.0}, "average must be a number above 0 and below 1, got 1.0"),
        ({"average": math.nan}, "average must be a number above 0 and below 1, got nan"),
        ({"patience": 0}, "patience must be a whole number from 1 on, got 0"),
        ({"decay": "steps"}, "decay must be one of none, linear, cosine, late, got 'steps'"),
        ({"precision": "fp16"}, "precision must be one of fp32, tf32, bf16, got 'fp16'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fit(**options)


def test_a_device_is_picked_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick(Fit()) == CPU
    with pytest.raises(ValueError, match="needs 1 GPUs, and torch sees 0; use fewer"):
        pick(Fit(device="cuda"))
    for name in ("meta", "gpu"):
        with pytest.raises(ValueError, match=f"must be auto, cpu, cuda or cuda:N, got '{name}'"):
            pick(Fit(device=name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick(Fit()) == torch.device("cuda:0")
    assert pick(Fit(device="cuda:3")) == torch.device("cuda:3")
    with pytest.raises(ValueError, match="expected device cuda, got cuda:1"):
        pick(Fit(device="cuda:1", devices=2))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick(Fit(devices=2)) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="needs 8 GPUs, and torch sees 4"):
        pick(Fit(devices=8))


def test_off_a_terminal_there_is_one_line_for_each_evaluation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(network(Halves()), Halves(), QUICK, 0, RunFolder(tmp_path))
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"update {step} of 60" for step in (12, 24, 36, 48, 60)
    ]
    assert "validation T=6 accuracy " in lines[-1]
    assert lines[-1].endswith("updates/s, 0:00:00 left")


def test_on_a_terminal_there_is_a_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    fit(network(Halves()), Halves(), QUICK, 0, RunFolder(tmp_path))
    out, err = capfd.readouterr()
    assert out == ""
    assert "100%" in err
    assert "60/60" in err
    assert "loss" in err
    assert "accuracy" in err


def test_tensorboard_gets_what_the_log_has(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        # Of TensorBoard's own making, at its import.
        warnings.simplefilter("ignore", DeprecationWarning)
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = replace(QUICK, tensorboard=True)
    fit(network(Halves()), Halves(), config, 0, RunFolder(tmp_path), progress=False)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = logged(tmp_path)
    assert set(events.Tags()["scalars"]) == set(found)
    for name, values in found.items():
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(values, rel=1e-6)


class Doubler:
    """Stands in for a captured core, on a machine without a GPU."""

    def __init__(self, core: nn.Module, x: Tensor) -> None:
        self.core = core
        core(x)

    def __call__(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return 2 * x, state


def test_only_training_calls_like_the_first_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riglstm.lab.train.capture.graphed", Doubler)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    core = network(Halves()).core
    assert isinstance(core, nn.Module)
    x = torch.randn(6, 4, 3)
    plain = core(x)[0]
    with captured(core, wanted=True):
        with torch.no_grad():
            assert torch.equal(core(x)[0], plain)
        assert torch.equal(core(x)[0], 2 * x)
        assert core(torch.randn(7, 4, 3))[0].shape == (7, 4, 8)
        assert core(x.clone().requires_grad_())[0].shape == (6, 4, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert core(x)[0].shape == (6, 4, 8)
        core.eval()
        assert torch.equal(core(x)[0], plain)
        core.train()
        assert torch.equal(core(x)[0], 2 * x)
    assert torch.equal(core(x)[0], plain)
    with captured(core, wanted=False):
        assert torch.equal(core(x)[0], plain)


def test_only_training_itself_needs_lightning() -> None:
    """What reads folders and options must not wait for Lightning to load."""
    heavy = ("supervised", "learner", "callbacks", "checkpoints", "reinforced")
    for path in Path(riglstm.lab.train.__file__).parent.glob("*.py"):
        if path.stem in heavy:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                assert node.module.split(".")[-1] not in (*heavy, "pytorch_lightning"), path.name
            elif isinstance(node, ast.Import):
                assert all(alias.name != "pytorch_lightning" for alias in node.names), path.name
