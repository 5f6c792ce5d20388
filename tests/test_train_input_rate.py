"""What an update is made of: a step size of its own for what cells are chosen by, tables of tokens
and maps to views, a decay of all weights but biases, and a flood."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from riglstm.lab.tasks.base import Batch
from riglstm.lab.tasks.copying import Copying, CopyingTask
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.supervised import fit
from riglstm.models import build
from train_helpers import assert_same
from train_task import QUICK, train

ONE = Fit(updates=1, lr=1e-3, evaluate_every=1, checkpoint_every=1, device="cpu", tensorboard=False)
OF_INPUT = {"tables.weight", "core.layer.weight_in_l0", "core.layer.bias_in_l0"}


def problem(model: str = "riglstm") -> tuple[CopyingTask, nn.Module]:
    config = Copying(L=2, P=3, input_size=12, batch_size=4, validation_size=2, conditions=())
    task = config.open(torch.device("cpu"))
    torch.manual_seed(0)
    options = {"num_cells": 3} if model == "riglstm" else {}
    return task, task.network(build(model, 12, 12, **options))  # type: ignore[arg-type]


def steps(config: Fit, folder: Path, model: str = "riglstm") -> dict[str, tuple[Tensor, Tensor]]:
    """Each parameter before and after."""
    task, net = problem(model)
    before: dict[str, Tensor] = copy.deepcopy(dict(net.named_parameters()))
    fit(net, task, config, 0, RunFolder(folder), progress=False)
    return {n: (before[n].detach(), p.detach()) for n, p in net.named_parameters()}


def moved(config: Fit, folder: Path, model: str = "riglstm") -> dict[str, float]:
    """How far one update moves each parameter at the most; Adam's first step is the step size."""
    return {n: float((a - b).abs().max()) for n, (a, b) in steps(config, folder, model).items()}


def test_tables_and_views_step_by_their_factor_and_all_else_as_before(tmp_path: Path) -> None:
    plain = moved(ONE, tmp_path / "plain")
    slow = moved(replace(ONE, input_rate=0.125), tmp_path / "slow")
    assert plain.keys() > OF_INPUT
    for name, far in plain.items():
        expected = far * (0.125 if name in OF_INPUT else 1)
        # A weight near one rounds a step of 1e-4 by some 1e-8.
        assert slow[name] == pytest.approx(expected, rel=1e-2), name
        assert far > 0


def test_of_an_lstm_it_is_the_tables(tmp_path: Path) -> None:
    plain = moved(ONE, tmp_path / "plain", "lstm")
    slow = moved(replace(ONE, input_rate=0.125), tmp_path / "slow", "lstm")
    different = {name for name in plain if slow[name] < 0.5 * plain[name]}
    assert different == {"tables.weight"}


def test_weights_decay_by_their_own_step_size_and_biases_do_not(tmp_path: Path) -> None:
    plain = steps(replace(ONE, input_rate=0.5), tmp_path / "plain")
    less = steps(replace(ONE, input_rate=0.5, weight_decay=8.0), tmp_path / "less")
    for name, (before, after) in plain.items():
        rate = ONE.lr * (0.5 if name in OF_INPUT else 1)
        free = "bias" in name or "update_offset" in name
        decay = 0 if free else 8 * rate
        torch.testing.assert_close(less[name][1], after - decay * before, rtol=0, atol=1e-6)
        assert free or (before.abs().max() * decay > 1e-5), name


def test_below_the_flood_an_update_goes_up_the_gradient_and_above_it_down(tmp_path: Path) -> None:
    plain = steps(ONE, tmp_path / "plain")
    above = steps(replace(ONE, flood=1e-3), tmp_path / "above")
    below = steps(replace(ONE, flood=1e3), tmp_path / "below")
    for name, (before, after) in plain.items():
        torch.testing.assert_close(above[name][1], after, rtol=0, atol=0)
        torch.testing.assert_close(below[name][1], 2 * before - after, rtol=0, atol=1e-6)
        assert (after - before).abs().max() > 1e-4, name
    # What is logged is the loss itself.
    logs = ((tmp_path / run / "metrics.csv").read_text() for run in ("plain", "above", "below"))
    want, *others = (next(line for line in log.splitlines() if "loss" in line) for log in logs)
    assert want.startswith("1,train/loss,")
    assert others == [want, want]


def test_a_run_with_groups_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"input_rate": 0.125, "weight_decay": 0.1}
    config = replace(ONE, updates=6, evaluate_every=3, checkpoint_every=3, **groups)
    task, whole = problem()
    fit(whole, task, config, 0, RunFolder(tmp_path / "whole"), progress=False)
    task, net = problem()
    draw = task.batch

    def stops(seed: int, step: int, rows: slice = slice(None)) -> Batch:
        if step == 4:
            raise ZeroDivisionError
        return draw(seed, step, rows)

    monkeypatch.setattr(task, "batch", stops)
    with pytest.raises(ZeroDivisionError):
        fit(net, task, config, 0, RunFolder(tmp_path / "parts"), progress=False)
    task, parts = problem()
    fit(parts, task, config, 0, RunFolder(tmp_path / "parts"), resume=True, progress=False)
    assert_same(parts.state_dict(), whole.state_dict())


def test_where_there_is_nothing_of_the_kind_a_factor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="input_rate must be 1 for a network without tables of"):
        train(tmp_path, replace(QUICK, input_rate=0.5))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), "1", True])
def test_a_factor_is_a_number_above_zero_and_a_decay_none_below(factor: float) -> None:
    with pytest.raises(ValueError, match="input_rate must be a number above 0, got"):
        Fit(input_rate=factor)
    with pytest.raises(ValueError, match="average must be a number above 0 and below 1, got"):
        Fit(average=factor)
    if factor != 0:
        with pytest.raises(ValueError, match="weight_decay must be a number from 0 on, got"):
            Fit(weight_decay=factor)
        with pytest.raises(ValueError, match="flood must be a number from 0 on, got"):
            Fit(flood=factor)
