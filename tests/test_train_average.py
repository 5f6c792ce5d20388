"""Averaged weights: what is evaluated, chosen and saved while training goes on with its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from riglstm.lab.cli import UsageError, flags
from riglstm.lab.tasks.base import Batch, Split, Totals, means
from riglstm.lab.train.average import Average
from riglstm.lab.train.config import Fit
from riglstm.lab.train.evaluation import score
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.supervised import fit
from riglstm.lab.train.weights import load_weights
from train_helpers import assert_same, outcome
from train_task import QUICK, Halves, network, train

AVERAGED = replace(QUICK, average=0.9)


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

    def score(
        self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
    ) -> Totals:
        self.scored.append(self.look())
        totals = super().score(net, condition, split, share)
        return {**totals, "accuracy": torch.tensor(float(len(self.scored))).double()}


@pytest.mark.parametrize("average", [0.5, 0.999])
def test_the_mean_of_the_weights_is_scored_and_saved_and_training_keeps_its_own(
    average: float, tmp_path: Path
) -> None:
    task = Watched()
    config = replace(QUICK, average=average, decay="none")
    fit(task.net, task, config, 0, RunFolder(tmp_path), progress=False)
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
    saved = load_file(RunFolder(tmp_path).weights_of(60))
    assert_same(saved, task.scored[-1])
    assert len(task.places) == 1, "weights have moved, and captured graphs would not know"


def test_a_mean_changes_nothing_in_the_training_itself(tmp_path: Path) -> None:
    plain, averaged = train(tmp_path / "plain"), train(tmp_path / "averaged", AVERAGED)
    assert_same(averaged.state_dict(), plain.state_dict())
    logs = [outcome(tmp_path / name)["metrics"] for name in ("plain", "averaged")]
    training, validation = (
        [[line for line in log if f",{kind}/" in line] for log in logs]
        for kind in ("train", "validation")
    )
    assert training[0] == training[1]
    assert validation[0] != validation[1]


def test_the_saved_mean_scores_as_it_did_when_it_was_chosen(tmp_path: Path) -> None:
    task, folder = Halves(), RunFolder(tmp_path)
    result = fit(network(task), task, AVERAGED, 0, folder, progress=False)
    net = network(task, seed=1)
    for condition, chosen in result.chosen.items():
        load_weights(net, folder.weights_of(chosen.step))
        found = means(score(net, task, condition, "validation"))
        assert found["accuracy"] == chosen.value


class Stops(Halves):
    """Breaks down after three checkpoints, and between two of them."""

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        if step == 30:
            raise ZeroDivisionError
        return super().batch(seed, step, rows)


def test_an_averaged_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, AVERAGED)
    with pytest.raises(ZeroDivisionError):
        fit(network(Stops()), Stops(), AVERAGED, 0, RunFolder(parts), progress=False)
    net = train(parts, AVERAGED, resume=True)
    assert_same(outcome(parts), outcome(whole))
    # Once more, when all is done: the weights are those of the last update.
    over = train(parts, AVERAGED, resume=True)
    assert_same(over.state_dict(), net.state_dict())


def test_an_evaluation_that_fails_leaves_the_weights_of_the_training(tmp_path: Path) -> None:
    class Fails(Watched):
        def score(
            self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
        ) -> Totals:
            super().score(net, condition, split, share)
            raise ZeroDivisionError

    task, plain = Fails(), Watched()
    with pytest.raises(ZeroDivisionError):
        fit(task.net, task, AVERAGED, 0, RunFolder(tmp_path / "a"), progress=False)
    fit(plain.net, plain, QUICK, 0, RunFolder(tmp_path / "b"), progress=False)
    assert_same(task.net.state_dict(), plain.trained[12])


def test_buffers_are_left_alone() -> None:
    net = nn.BatchNorm1d(2)
    average = Average(net, 0.5)
    average.start()
    with torch.no_grad():
        net.weight += 1
    net(torch.randn(4, 2))
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    average.add(1)
    with average.in_place():
        assert net.weight[0].item() == pytest.approx(1 + 9 / 11)
        assert_same(dict(net.named_buffers()), buffers)
    assert net.weight[0] == 2


def test_the_command_line_has_the_average(capsys: pytest.CaptureFixture[str]) -> None:
    for word, value in (("0.99", 0.99), ("none", None)):
        assert flags.read("train", "", {"fit": Fit}, ["--average", word])["fit"].average == value
    with pytest.raises(SystemExit):
        flags.read("train", "", {"fit": Fit}, ["--help"])
    assert "--average FLOAT|none" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--average must be a number above 0 and below 1"):
        flags.read("train", "", {"fit": Fit}, ["--average", "1"])
