"""A run that is killed, stopped or damaged ends as one that was left alone."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from riglstm.lab.train.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from riglstm.lab.train.config import Fit
from riglstm.lab.train.stopping import SIGNALS, Deadline, Interrupted, OutOfTime
from train_helpers import assert_same, finish, last_step, outcome, start
from train_task import QUICK, Halves, fitted, network, slowly, train


def resume(path: Path, config: Fit = QUICK) -> None:
    torch.set_num_threads(1)
    train(path, config, resume=True)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone")
    assert finish(start(resume, path)) == 0
    return path


class NearWhen:
    """A deadline near when `happened` says so, whatever the time is; remembers what was asked."""

    def __init__(self, happened: Callable[[], bool]) -> None:
        self.happened = happened
        self.pauses: list[float] = []

    def near(self, pause: float) -> bool:
        self.pauses.append(pause)
        return self.happened()


def test_a_run_that_stops_in_time_again_and_again_ends_as_one_left_alone(tmp_path, left_alone):
    seconds, state = 0.0, {}
    for updates in (2, 12, 9, 17):
        left = iter(range(updates - 1))
        deadline = NearWhen(lambda left=left: next(left, None) is None)  # type: ignore[misc]
        with pytest.raises(OutOfTime, match=r"stopped, and saved; .* go on with: more"):
            train(tmp_path, resume=True, again="more", deadline=deadline)
        newest = max((tmp_path / "checkpoints").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        state = read_checkpoint(newest)
        assert state["seconds"] > seconds
        seconds = state["seconds"]
    assert state["step"] == 40
    assert 0 < state["pause"] < seconds
    at_the_end = NearWhen(lambda: last_step(tmp_path) == QUICK.updates)
    with pytest.raises(OutOfTime, match="trained to the end, and saved; not tested yet"):
        train(tmp_path, resume=True, deadline=at_the_end)
    # What is left is testing, and is done in any case: else no call would ever do it.
    train(tmp_path, resume=True, deadline=Deadline.after(1e-6))
    found, expected = outcome(tmp_path), outcome(left_alone)
    for one in (found, expected):
        del one["checkpoints"], one["files"]
    assert_same(found, expected)


@pytest.mark.parametrize(("conditions", "rules"), [(("T=6", "T=10"), 2), (("T=6",), 1)])
def test_time_for_the_tests_is_kept_free_and_a_checkpoint_knows_it(conditions, rules, tmp_path):
    task, deadline = Halves(), NearWhen(lambda: False)
    # Ten times as much test as validation data.
    task.size = lambda split: 640 if split == "test" else 64  # type: ignore[method-assign]
    task.conditions = conditions
    once = replace(QUICK, updates=2, warmup=0, evaluate_every=2, checkpoint_every=2)
    train(tmp_path, once, task=task, deadline=deadline)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    pause = read_checkpoint(checkpoint)["pause"]
    assert pause > 0
    assert deadline.pauses[-1] == pytest.approx(rules * 10 * pause)


def test_another_evaluation_has_to_fit_in_the_time_that_is_left(tmp_path):
    minute = Deadline.after(1)
    assert not minute.near(20)
    assert minute.near(30)
    assert not Deadline().near(1e9)
    with pytest.raises(ValueError, match=r"minutes must be a number above 0, got -1"):
        Deadline.after(-1)
    # Without any time one update is made.
    for updates in (1, 2):
        with pytest.raises(OutOfTime):
            train(tmp_path, resume=True, deadline=Deadline.after(1e-6))
        assert (tmp_path / "checkpoints" / f"step-{updates}.ckpt").exists()


def interrupted(path: Path, say: Path) -> None:
    torch.set_num_threads(1)
    config = replace(QUICK, checkpoint_every=1000)
    try:
        train(path, config, task=Halves(twist=slowly), resume=True, again="riglstm train --resume")
    except Interrupted as error:
        say.write_text(str(error))
        sys.exit(130)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_is_stopped_saves_and_says_how_to_resume(number, tmp_path, left_alone):
    path, say = tmp_path / "run", tmp_path / "said"
    process = start(interrupted, path, say)
    while process.is_alive() and last_step(path) < 14:
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert finish(process) == 130
    (saved,) = (path / "checkpoints").iterdir()
    assert say.read_text() == (
        f"stopped, and saved; the last checkpoint is {saved}; go on with: riglstm train --resume"
    )
    assert 14 <= read_checkpoint(saved)["step"] < 60
    assert finish(start(interrupted, path, say)) == 0
    got, want = outcome(path), outcome(left_alone)
    assert_same(got["metrics"], want["metrics"])
    assert want["weights"].items() <= got["weights"].items()
    got, want = (one["checkpoints"]["step-60.ckpt"] for one in (got, want))
    for part in ("net", "optimizer", "rng"):
        assert_same(got[part], want[part])


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, r"stopped at once, without saving; .*step-18.ckpt"),
        # As by whoever ends all processes of a job.
        (signal.SIGTERM, r"stopped, and saved; .*step-21.ckpt"),
    ],
)
def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_changes_nothing(
    number, words, tmp_path, capfd
):
    def twice(update, net, loss):
        if update == 21:
            signal.raise_signal(number)
            signal.raise_signal(number)
        return loss

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=words):
        train(tmp_path, task=Halves(twist=twice))
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err.count("stopping after this update") == 1


def test_ctrl_c_in_the_last_evaluation_is_heard(tmp_path, left_alone):
    class Late(Halves):
        def score(self, net, condition, *rest):
            if (self.update, condition) == (QUICK.updates, "T=10"):
                signal.raise_signal(signal.SIGINT)
            return super().score(net, condition, *rest)

    words = r"^trained to the end, and saved; not tested yet; go on with: riglstm --resume$"
    with pytest.raises(Interrupted, match=words):
        train(tmp_path, task=Late(), again="riglstm --resume")
    assert_same(outcome(tmp_path), outcome(left_alone))


def test_a_checkpoint_that_was_not_written_is_not_named(tmp_path, monkeypatch):
    real, calls = torch.save, itertools.count(1)

    def save(*arguments: Any) -> None:
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        real(*arguments)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(Interrupted, match=r"without saving; the last checkpoint is .*step-9.ckpt$"):
        train(tmp_path)
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["step-9.ckpt"]


@pytest.fixture
def copy(left_alone: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left_alone, tmp_path / "copy"))


def test_a_run_that_is_over_is_not_trained_again(copy):
    before = outcome(copy)
    net = network(Halves(), seed=5)
    result = fitted(copy, net=net, resume=True)
    assert_same(outcome(copy), before)
    assert_same(net.state_dict(), before["checkpoints"]["step-60.ckpt"]["net"])
    assert (result.updates, result.stopped) == (60, "updates")
    assert result.seconds > 0
    assert set(result.chosen) == {"T=6", "T=10"}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def other_seed(file: Path) -> None:
    content = read_checkpoint(file)
    content["run"]["config"]["seed"] = 3
    write_checkpoint(content, file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, r"step-60.ckpt is damaged, or no checkpoint \(its sha256 is another"),
        (
            lambda file: write_checkpoint({"run": 3, "net": os.path.join}, file),
            r"step-60.ckpt is damaged, or no checkpoint \(Weights only load failed",
        ),
        (lambda file: write_checkpoint({"run": 3}, file), "step-60.ckpt is no checkpoint"),
        (other_seed, r"step-60.ckpt is of another run \(config.seed is 3 there, 0 here\)"),
    ],
)
def test_an_unusable_checkpoint_is_named_and_the_one_before_it_used(
    damage, words, copy, left_alone, capsys
):
    damage(copy / "checkpoints" / "step-60.ckpt")
    train(copy, resume=True)
    said = capsys.readouterr().err
    assert re.search(words, said)
    assert "going on from step-54.ckpt, the one before" in said
    assert_same(outcome(copy), outcome(left_alone))


def test_without_a_usable_checkpoint_a_run_is_not_resumed(copy):
    truncate(copy / "checkpoints" / "step-60.ckpt")
    other_seed(copy / "checkpoints" / "step-54.ckpt")
    words = r"no checkpoint in .*step-60.ckpt is damaged.*step-54.ckpt is of another run.*anew"
    with pytest.raises(CheckpointError, match=words):
        train(copy, resume=True)


def test_another_networks_checkpoint_is_named(copy):
    with pytest.raises(CheckpointError, match=r"weights.core.weight_ih_l0 is"):
        train(copy, net=network(Halves(), hidden_size=4), resume=True)


def test_a_stray_checkpoint_does_not_push_good_ones_out(copy):
    checkpoints = copy / "checkpoints"
    (checkpoints / "step-60.ckpt").unlink()
    (checkpoints / "step-56.ckpt").write_bytes(random.Random(0).randbytes(5000))
    train(copy, resume=True)
    names = {file.name for file in checkpoints.iterdir()}
    assert names == {"step-54.ckpt", "step-56.ckpt", "step-60.ckpt"}


def fill_up(path: Path, size: int, config: Fit) -> None:
    """Train where no file can be larger than `size`."""
    import resource

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        # Wide, so that a tensor is larger than the buffer of a file.
        train(path / "run", config, net=network(Halves(), hidden_size=64))
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        (path / "said").write_text(str(error))
        sys.exit(3)


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits on files")
@pytest.mark.parametrize(
    ("size", "config", "words"),
    [
        (60_000, QUICK, r"step-9\.ckpt could not be written \(.*\), and nothing is left of it; m"),
        (1200, replace(QUICK, log_every=1), r"metrics\.csv could not be written \(.*\); make room"),
    ],
)
def test_a_disk_that_gets_full_is_said_with_the_way_out(size, config, words, tmp_path):
    assert finish(start(fill_up, tmp_path, size, config)) == 3
    assert re.search(words, (tmp_path / "said").read_text())
    assert not list(tmp_path.rglob("*.ckpt*"))
    resume(tmp_path / "run", config)
