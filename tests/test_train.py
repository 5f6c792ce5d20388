"""What `fit` does in one process: updates, log, choice, averaged weights, the ends of a run."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import riglstm.lab.train
from riglstm.lab.tasks.balls import FEATURES, BallsNetwork
from riglstm.lab.tasks.base import Batch, Totals, means
from riglstm.lab.tasks.copying import Copying, CopyingTask
from riglstm.lab.train import graphed
from riglstm.lab.train.checkpoints import Choice, Chosen
from riglstm.lab.train.config import Fit, check_products, pick, rate, score
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.graphed import GraphedModule, captured
from riglstm.lab.train.progress import Progress
from riglstm.lab.train.stopping import NEVER, Deadline, Diverged, OutOfTime
from riglstm.models import build
from train_helpers import assert_same, logged, outcome
from train_task import CPU, QUICK, Halves, fitted, network, train


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
def test_an_update_is_clipped_adam_at_the_scheduled_step_size(clip_norm, tmp_path):
    config = replace(QUICK, clip_norm=clip_norm)
    task = Halves()
    net, other = (network(task) for _ in range(2))
    net.dropout = other.dropout = nn.Identity()
    train(tmp_path, config, 3, net=net)
    updates = dict(by_hand(other, task, config, 3))
    # Or else the norm could be that of what is clipped, and nobody would know.
    assert max(norm for _, norm in updates.values()) > 0.1
    assert_same(net.state_dict(), other.state_dict())
    found = logged(tmp_path)
    assert found["train/loss"].keys() == {*range(7, 60, 7), 60}
    for step, loss in found["train/loss"].items():
        since = range(57 if step == 60 else step - 6, step + 1)
        losses, norms = zip(*(updates[s] for s in since), strict=True)
        assert loss == pytest.approx(sum(losses) / len(since), rel=1e-12)
        assert found["gradient_norm"][step] == pytest.approx(sum(norms) / len(since), rel=1e-5)
        assert found["gradient_norm_max"][step] == pytest.approx(max(norms), rel=1e-5)
        assert found["lr"][step] == rate(config, step - 1)


def test_the_step_size_rises_then_falls():
    root = math.sqrt(0.5)
    rates: dict[str, dict[int, float]] = {
        "none": dict.fromkeys(range(9, 110), 2.0),
        "linear": {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 60: 1.0, 109: 0.02},
        "cosine": {9: 2.0, 10: 2.0, 35: 1 + root, 60: 1.0, 85: 1 - root},
        "late": {4: 1.0, 10: 2.0, 90: 2.0, 100: 1.0, 109: 0.1},
    }
    for decay, expected in rates.items():
        config = Fit(updates=110, warmup=10, lr=2.0, decay=decay)  # type: ignore[arg-type]
        assert {step: rate(config, step) for step in expected} == pytest.approx(expected)


ONE = Fit(updates=1, lr=1e-3, evaluate_every=1, checkpoint_every=1, device="cpu", tensorboard=False)


def problem() -> tuple[CopyingTask, nn.Module]:
    """A network with a table of tokens and maps to views."""
    config = Copying(L=2, P=3, input_size=12, batch_size=4, validation_size=2, conditions=())
    task = config.open(CPU)
    torch.manual_seed(0)
    return task, task.network(build("riglstm", 12, 12, num_cells=3))


def steps(config: Fit, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Each parameter before and after the run."""
    task, net = problem()
    before: dict[str, Tensor] = copy.deepcopy(dict(net.named_parameters()))
    train(folder, config, task=task, net=net)
    return {n: (before[n].detach(), p.detach()) for n, p in net.named_parameters()}


OF_INPUT = {"tables.weight", "core.layer.weight_in_l0", "core.layer.bias_in_l0"}


def test_tables_and_views_step_by_their_factor_and_all_else_as_before(tmp_path):
    # How far one update moves each parameter at the most; Adam's first step is the step size.
    plain, slow = (
        {n: float((a - b).abs().max()) for n, (a, b) in steps(config, tmp_path / name).items()}
        for name, config in (("plain", ONE), ("slow", replace(ONE, input_rate=0.125)))
    )
    assert plain.keys() > OF_INPUT
    for name, far in plain.items():
        expected = far * (0.125 if name in OF_INPUT else 1)
        # A weight near one rounds a step of 1e-4 by some 1e-8.
        assert slow[name] == pytest.approx(expected, rel=1e-2), name
        assert far > 0


def test_a_factor_is_refused_where_there_is_nothing_of_the_kind(tmp_path):
    with pytest.raises(ValueError, match="input_rate must be 1 for a network without tables of"):
        train(tmp_path, replace(QUICK, input_rate=0.5))


def test_weights_decay_by_their_own_step_size_and_biases_do_not(tmp_path):
    plain = steps(replace(ONE, input_rate=0.5), tmp_path / "plain")
    less = steps(replace(ONE, input_rate=0.5, weight_decay=8.0), tmp_path / "less")
    for name, (before, after) in plain.items():
        lr = ONE.lr * (0.5 if name in OF_INPUT else 1)
        free = "bias" in name or "update_offset" in name
        decay = 0 if free else 8 * lr
        torch.testing.assert_close(less[name][1], after - decay * before, rtol=0, atol=1e-6)
        assert free or (before.abs().max() * decay > 1e-5), name


def test_below_the_flood_an_update_goes_up_the_gradient_and_above_it_down(tmp_path):
    plain = steps(ONE, tmp_path / "plain")
    above = steps(replace(ONE, flood=1e-3), tmp_path / "above")
    below = steps(replace(ONE, flood=1e3), tmp_path / "below")
    for name, (before, after) in plain.items():
        torch.testing.assert_close(above[name][1], after, rtol=0, atol=0)
        torch.testing.assert_close(below[name][1], 2 * before - after, rtol=0, atol=1e-6)
        assert (after - before).abs().max() > 1e-4, name
    # What is logged is the loss itself.
    losses = [logged(tmp_path / run)["train/loss"] for run in ("plain", "above", "below")]
    assert losses[0] == losses[1] == losses[2]


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path, monkeypatch):
    reseeded = Mock(side_effect=AssertionError("generators of other devices were seeded"))
    ends: list[dict[str, Tensor]] = []
    # Libraries set variables of the environment in a process's first training.
    train(tmp_path / "first")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(ends))
        net, before = network(Halves()), (torch.get_rng_state(), dict(os.environ))
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "manual_seed_all", reseeded)
            train(tmp_path / name, QUICK, seed, net=net)
        assert_same((torch.get_rng_state(), dict(os.environ)), before)
        ends.append(net.state_dict())
    assert_same(ends[0], ends[1])
    assert not all(torch.equal(w, ends[2][name]) for name, w in ends[0].items())


def test_how_often_a_run_is_looked_at_does_not_change_it(tmp_path):
    ends: list[dict[str, Tensor]] = []
    for name, every in (("a", 7), ("b", 60)):
        # A model that draws in eval mode too.
        net = network(Halves(), model="riglstm", hidden_size=6, num_cells=3, variant="rand_cells")
        often = {"evaluate_every": every, "checkpoint_every": every, "log_every": every}
        train(tmp_path / name, replace(QUICK, updates=21, **often), net=net)
        ends.append(net.state_dict())
    assert_same(ends[0], ends[1])


def test_bf16_trains_weights_of_fp32_under_autocast(tmp_path):
    seen = Counter[torch.dtype]()

    def spy(module: nn.Module, given: Any, output: Tensor) -> None:
        seen[output.dtype] += 1

    net = network(Halves())
    net.get_submodule("head").register_forward_hook(spy)
    train(tmp_path, replace(QUICK, precision="bf16"), net=net)
    assert seen == {torch.bfloat16: 60 + 5 * 2}
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    again = means(score(net, Halves(), "T=10", "validation", precision="bf16"))["loss"]
    assert again == logged(tmp_path)["validation/loss@T=10"][60]


class Scripted(Halves):
    """Its scores are given, evaluation by evaluation."""

    def __init__(self, **scores: list[float]) -> None:
        super().__init__()
        self.scores = {name.replace("_", "="): iter(values) for name, values in scores.items()}

    def score(self, net: nn.Module, condition: str, *rest: Any) -> Totals:
        value = torch.tensor(next(self.scores[condition]), dtype=torch.float64)
        return {"loss": value, "accuracy": 4 * value, "count": torch.tensor(4.0).double()}


def test_weights_are_chosen_by_the_training_condition_and_by_each_condition(tmp_path):
    seen: dict[int, dict[str, Tensor]] = {}

    def look(update, net, loss):
        seen[update - 1] = copy.deepcopy(net.state_dict())
        return loss

    task = Scripted(T_6=[0.5, 0.7, 0.7, 0.6, 0.1], T_10=[0.3, 0.2, 0.4, 0.4, 0.1])
    task.twist = look
    folder = RunFolder(tmp_path)
    result = fitted(tmp_path, task=task)
    assert result.chosen == {"T=6": Chosen(24, 0.7, 0.175), "T=10": Chosen(36, 0.4, 0.1)}
    for step in (24, 36):
        assert_same(load_file(folder.weights_of(step)), dict(seen[step]))
    assert {*folder.weights.iterdir()} == {folder.weights_of(24), folder.weights_of(36)}


def test_what_the_checkpoint_before_the_last_refers_to_is_kept(tmp_path):
    task = Scripted(T_6=[0.1, 0.2, 0.3, 0.4, 0.5], T_10=[0.1] * 5)
    train(tmp_path, replace(QUICK, checkpoint_every=12), task=task)
    steps = {"checkpoints": {"48", "60"}, "weights": {"12", "48", "60"}}
    for folder, kept in steps.items():
        found = {file.stem.removeprefix("step-") for file in (tmp_path / folder).iterdir()}
        assert found == kept


def test_a_choice_prefers_the_lower_loss_then_the_earlier_of_equals_and_numbers_to_nan():
    error, even = Choice("a", higher_is_better=False, patience=2), {"a": 1.0, "b": 1.0}
    assert error.add(1, {"a": math.nan, "b": 1.0}, even)
    assert error.add(2, {"a": 3.0, "b": 1.0}, even)
    assert not error.add(3, {"a": 3.0, "b": math.nan}, even)
    assert not error.exhausted
    assert error.add(4, {"a": 4.0, "b": 0.5}, even)
    assert error.exhausted
    assert error.best == {"a": Chosen(2, 3.0, 1.0), "b": Chosen(4, 0.5, 1.0)}
    perfect = Choice("a", higher_is_better=True, patience=4)
    for step, (value, loss) in enumerate(
        [(0.9, 0.1), (1.0, 0.3), (1.0, 0.2), (1.0, 0.2), (1.0, math.nan), (0.9, 0.0)], 1
    ):
        assert perfect.add(step, {"a": value}, {"a": loss}) == (step <= 3)
    assert perfect.best == {"a": Chosen(3, 1.0, 0.2)}
    # The metric has not improved for four evaluations.
    assert perfect.exhausted


def test_a_run_out_of_patience_stops(tmp_path):
    # The other condition improves all the time, and does not count.
    task = Scripted(T_6=[0.2, 0.5, 0.4, 0.5, 0.9], T_10=[0.1, 0.2, 0.3, 0.4, 0.5])
    config = replace(QUICK, patience=2)
    result = fitted(tmp_path, config, task=task)
    assert (result.stopped, result.updates) == ("patience", 48)
    assert result.chosen == {"T=6": Chosen(24, 0.5, 0.125), "T=10": Chosen(48, 0.4, 0.1)}
    assert max(logged(tmp_path)["validation/accuracy@T=6"]) == 48
    again = fitted(tmp_path, config, task=task, resume=True)
    assert again == result


class Watched(Halves):
    """Knows the network's weights before each update and in each evaluation; the last is best."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(self)
        self.trained: list[dict[str, Tensor]] = []
        self.scored: list[dict[str, Tensor]] = []
        self.places: set[tuple[int, ...]] = set()

    def look(self) -> dict[str, Tensor]:
        self.places.add(tuple(p.data_ptr() for p in self.net.parameters()))
        return copy.deepcopy(self.net.state_dict())

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        self.trained.append(self.look())
        return super().batch(seed, step, rows)

    def score(self, *arguments: Any) -> Totals:
        self.scored.append(self.look())
        totals = super().score(*arguments)
        return {**totals, "accuracy": torch.tensor(float(len(self.scored))).double()}


@pytest.mark.parametrize("average", [0.5, 0.999])
def test_the_mean_of_the_weights_is_scored_and_saved_and_training_keeps_its_own(average, tmp_path):
    task, config = Watched(), replace(QUICK, decay="none")
    train(tmp_path / "a", replace(config, average=average), task=task, net=task.net)
    plain = train(tmp_path / "b", config)
    assert_same(task.net.state_dict(), plain.state_dict())
    assert logged(tmp_path / "a")["train/loss"] == logged(tmp_path / "b")["train/loss"]
    weights = [*task.trained, task.net.state_dict()]
    mean = {name: w.double() for name, w in weights[0].items()}
    expected = [mean]
    for n in range(1, QUICK.updates + 1):
        beta = min(average, (1 + n) / (10 + n))
        mean = {name: beta * m + (1 - beta) * weights[n][name] for name, m in mean.items()}
        expected.append(mean)
    for evaluation, scored in enumerate(task.scored):
        step = QUICK.evaluate_every * (evaluation // 2 + 1)
        for name, weight in scored.items():
            torch.testing.assert_close(weight.double(), expected[step][name], rtol=0, atol=1e-6)
        apart = max((w - weights[step][name]).abs().max() for name, w in scored.items())
        assert apart > 1e-3, "too near to the training's own weights to tell"
    assert_same(load_file(RunFolder(tmp_path / "a").weights_of(60)), dict(task.scored[-1]))
    assert len(task.places) == 1, "weights have moved, and captured graphs would not know"


def test_a_run_with_groups_and_a_mean_is_resumed_bit_for_bit(tmp_path):
    more = {"input_rate": 0.125, "weight_decay": 0.1, "average": 0.9}
    config = replace(ONE, updates=6, evaluate_every=3, checkpoint_every=3, **more)
    stop = Deadline.after(1e-6)
    for name, deadline in (("whole", NEVER), *[("parts", stop)] * 2, ("parts", NEVER)):
        task, net = problem()
        with pytest.raises(OutOfTime) if deadline is stop else contextlib.nullcontext():
            train(tmp_path / name, config, task=task, net=net, resume=True, deadline=deadline)
    assert_same(outcome(tmp_path / "parts"), outcome(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("step", "what", "bad", "saved"),
    [
        (5, "loss", "the loss of update 5", "there is no checkpoint from before it"),
        (25, "loss", "the loss of update 25", "step-18.ckpt"),
        # At update 18 a checkpoint is due, and the loss is still a number.
        (18, "gradient", "a weight after update 18", "step-9.ckpt"),
    ],
)
def test_what_is_no_number_stops_the_run_and_never_gets_into_a_checkpoint(
    step, what, bad, saved, tmp_path
):
    def spoil(update, net, loss):
        if update != step:
            return loss
        bias = net.get_parameter("head.bias")
        # The latter is a number, and its gradient is not.
        return loss * math.nan if what == "loss" else loss + (bias - bias.detach()).sqrt().sum()

    with pytest.raises(Diverged) as error:
        train(tmp_path, task=Halves(twist=spoil))
    way_out = "Train anew, into another folder, with a smaller --lr"
    for words in (f"{bad} is not a finite number", saved, way_out):
        assert words in str(error.value)
    files = (tmp_path / "checkpoints").glob("*")
    assert all(int(file.stem.removeprefix("step-")) < step for file in files)


def steep(updates: range) -> Halves:
    """In some updates the loss is a number, and the gradient's norm overflows."""
    return Halves(twist=lambda update, net, loss: loss * (1e30 if update in updates else 1))


@pytest.mark.parametrize(("log_every", "lost"), [(1, 10), (5, 14), (100, 54)])
def test_a_run_that_learns_nothing_any_more_has_diverged(log_every, lost, monkeypatch, tmp_path):
    monkeypatch.setattr("riglstm.lab.train.loop.LOST", 10)
    # With nothing in between, it is seen when the log is written.
    config = replace(QUICK, log_every=log_every, evaluate_every=60, checkpoint_every=60)
    train(tmp_path / "nine", config, task=steep(range(7, 16)))
    with pytest.raises(Diverged, match=f"norm in each of the last {lost} updates is not"):
        train(tmp_path / "all", config, task=steep(range(7, 61)))


def test_speed_and_what_is_left_are_said_now_and_then_and_with_evaluations(capfd, monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = Progress(100, "update", 40, shown=True)
    for step in range(41, 46):
        now = 12.0 * (step - 40)
        progress.move(step, "loss 2")
    now = 100.0
    progress.line(70, "validation T=6 accuracy 50%")
    Progress(100, "update", 0, shown=False).line(2)
    assert capfd.readouterr().err.splitlines() == [
        "update 43 of 100: loss 2; 0.0833 updates/s, 0:11:24 left",
        "update 70 of 100: validation T=6 accuracy 50%; 0.3 updates/s, 0:01:40 left",
    ]


def test_there_is_a_bar_on_a_terminal_and_elsewhere_a_line_for_each_evaluation(
    tmp_path, capfd, monkeypatch
):
    train(tmp_path / "lines")
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line.split(":")[0] for line in lines] == [
        f"update {step} of 60" for step in (12, 24, 36, 48, 60)
    ]
    assert "validation T=6 accuracy " in lines[-1]
    assert lines[-1].endswith("updates/s, 0:00:00 left")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    train(tmp_path / "bar")
    out, err = capfd.readouterr()
    assert out == ""
    for words in ("100%", "60/60", "loss", "accuracy"):
        assert words in err


def test_tensorboard_gets_what_the_log_has(tmp_path):
    with warnings.catch_warnings():
        # Of TensorBoard's own making, at its import.
        warnings.simplefilter("ignore", DeprecationWarning)
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path, replace(QUICK, tensorboard=True))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = logged(tmp_path)
    assert set(events.Tags()["scalars"]) == set(found)
    for name, values in found.items():
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updates": 0}, "updates must be a whole number from 1 on, got 0"),
        ({"log_every": 2.5}, "log_every must be a whole number from 1 on, got 2.5"),
        ({"warmup": 10, "updates": 10}, "warmup must be below updates = 10, got 10"),
        ({"lr": 0.0}, "lr must be a number above 0, got 0.0"),
        ({"clip_norm": math.inf}, "clip_norm must be a number above 0, or none, got inf"),
        ({"average": 0.0}, "average must be a number above 0 and below 1, or none, got 0.0"),
        ({"average": 1.0}, "average must be a number above 0 and below 1, or none, got 1.0"),
        ({"average": math.nan}, "average must be a number above 0 and below 1, or none, got nan"),
        ({"input_rate": "1"}, "input_rate must be a number above 0, got '1'"),
        ({"input_rate": True}, "input_rate must be a number above 0, got True"),
        ({"weight_decay": -1.0}, "weight_decay must be a number from 0 on, got -1.0"),
        ({"flood": math.nan}, "flood must be a number from 0 on, got nan"),
        ({"patience": 0}, "patience must be a whole number from 1 on, or none, got 0"),
        ({"decay": "steps"}, "decay must be one of none, linear, cosine, late, got 'steps'"),
        ({"precision": "fp16"}, "precision must be one of fp32, tf32, bf16, got 'fp16'"),
        ({"device": "meta"}, "device must be auto, cpu, cuda or cuda:N, got 'meta'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Fit(**options)


def test_a_device_is_picked_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick(Fit()) == CPU
    with pytest.raises(ValueError, match="needs 1 GPUs, and torch sees 0; use fewer"):
        pick(Fit(device="cuda"))
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


def test_a_gpu_whose_products_are_unfinished_is_refused(monkeypatch):
    check_products(CPU)
    bmm = torch.bmm

    def unfinished(a: Tensor, b: Tensor) -> Tensor:
        made = bmm(a, b)
        if a.dtype == torch.float16:
            made[:, :128, :128] = 0
        return made

    monkeypatch.setattr(torch, "bmm", unfinished)
    with pytest.raises(ValueError, match=r"products on cpu come out wrong.* unset CUDA_MPS"):
        check_products(CPU)


class Doubler(GraphedModule):
    """Stands in for a captured module, on a machine without a GPU: it gives twice its input."""

    def __init__(self, module: nn.Module, *given: Any, **named: Any) -> None:
        self.kind = graphed._kind(given, named)
        module(*given, **named)

    def __call__(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return 2 * x, state


def test_only_training_calls_like_the_first_are_captured(monkeypatch):
    monkeypatch.setattr(graphed, "GraphedModule", Doubler)
    net = network(Halves())
    core, x = net.get_submodule("core"), torch.randn(6, 4, 3)
    plain = core(x)[0]
    with captured(net):
        with torch.no_grad():
            assert torch.equal(core(x)[0], plain)
        assert torch.equal(core(x)[0], 2 * x)
        assert core(torch.randn(7, 4, 3))[0].shape == (7, 4, 8)
        assert core(x, core.initial_state(4))[0].shape == (6, 4, 8)
        assert core(x, state=None)[0].shape == (6, 4, 8)
        assert core(x.clone().requires_grad_())[0].shape == (6, 4, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert core(x)[0].shape == (6, 4, 8)
        core.eval()
        assert torch.equal(core(x)[0], plain)
        core.train()
        assert torch.equal(core(x)[0], 2 * x)
    assert torch.equal(core(x)[0], plain)


def test_the_balls_are_captured_whole_for_one_length_of_roll_out(monkeypatch):
    monkeypatch.setattr(graphed, "GraphedModule", Doubler)
    net, frames = BallsNetwork(build("lstm", FEATURES, 8)), torch.rand(3, 2, 64, 64)
    with captured(net):
        doubled, own_steps = net(frames, 2)
        assert torch.equal(doubled, 2 * frames)
        assert own_steps == 2
        assert net(frames, 1).shape == (4, 2, 64, 64)


def test_a_capture_ends_with_its_training_and_a_refused_one_is_refused_again(monkeypatch):
    made: list[weakref.ref[Any]] = []

    def refusing_once(module: Any, *given: Any) -> Doubler:
        if not made:
            made.append(weakref.ref(module))
            raise RuntimeError("no")
        doubler = Doubler(module, *given)
        made.append(weakref.ref(doubler))
        return doubler

    monkeypatch.setattr(graphed, "GraphedModule", refusing_once)
    net, x = network(Halves()), torch.randn(6, 4, 3)
    core = net.get_submodule("core")
    gc.disable()
    try:
        with captured(net):
            with pytest.raises(RuntimeError, match="could not be captured"):
                core(x)
            assert torch.equal(core(x)[0], 2 * x)
            assert made[-1]() is not None
        assert made[-1]() is None, "graphs hold memory after their training"
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_small_riglstm_learns_to_copy(tmp_path):
    """By the code that `riglstm train` runs; a single seed, with a margin."""
    task = Copying(
        L=3, P=5, digits=4, conditions=(), batch_size=32, input_size=16, loss_on="answer"
    ).open(CPU)
    torch.manual_seed(0)
    # Its soft update starts at the new state.
    options = {"num_cells": 4, "update_scale": 24**-0.5, "update_bias": 4.0}
    net = task.network(build("riglstm", task.input_size, 96, **options))
    before = means(score(net, task, "P=5", "test"))
    assert before["accuracy"] < 0.4
    rates = {"lr": 1e-2, "warmup": 36, "decay": "linear"}
    config = replace(ONE, updates=360, evaluate_every=360, checkpoint_every=360, **rates)
    train(tmp_path, config, task=task, net=net)
    # On data that chose nothing. 0.25 is guessing; who remembers two digits of three gets 0.75.
    assert means(score(net, task, "P=5", "test"))["accuracy"] > 0.95


def test_only_the_loop_itself_needs_lightning():
    """What reads folders and options must not wait for Lightning to load."""
    for path in Path(riglstm.lab.train.__file__).parent.glob("*.py"):
        heavy = ("lightning_fabric import", "train.loop import")
        assert path.stem == "loop" or not any(name in path.read_text() for name in heavy), path
