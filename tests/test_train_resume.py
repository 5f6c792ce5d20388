"""A run that is killed, stopped or damaged ends as one that was left alone."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from riglstm.lab.tasks.base import Batch, Split, Totals
from riglstm.lab.train.checkpoints import CheckpointError, read, write
from riglstm.lab.train.config import Fit
from riglstm.lab.train.deadline import Deadline, OutOfTime
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.lock import BusyError
from riglstm.lab.train.signals import SIGNALS
from riglstm.lab.train.supervised import Interrupted, fit
from train_helpers import assert_same, finish, last_step, outcome, start
from train_task import QUICK, Halves, Slow, network, train


def go_on(path: Path, config: Fit = QUICK) -> None:
    torch.set_num_threads(1)
    train(path, config, resume=True)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone")
    process = start(go_on, path)
    assert finish(process) == 0
    return path


def go_on_slowly(path: Path) -> None:
    torch.set_num_threads(1)
    fit(network(Slow()), Slow(), QUICK, 0, RunFolder(path), resume=True, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_three_times_ends_as_one_left_alone(
    seed: int, tmp_path: Path, left_alone: Path
) -> None:
    moments = random.Random(seed)
    for third in range(3):
        process = start(go_on_slowly, tmp_path)
        wanted = moments.randrange(14 * third, 14 * (third + 1))
        while process.is_alive() and last_step(tmp_path) < wanted:
            time.sleep(0.001)
        time.sleep(moments.random() * 0.1)
        process.kill()
        assert finish(process) == -signal.SIGKILL, "it was to be killed before its end"
    assert finish(start(go_on, tmp_path)) == 0
    assert_same(outcome(tmp_path), outcome(left_alone))


def die_at(path: Path, call: str, number: int, after: bool) -> None:
    """Go on, and be killed at a certain call that changes the folder."""
    left = iter(range(number, -1, -1))
    real = getattr(os, call)

    def deadly(*arguments: Any) -> object:
        last = next(left) == 0
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, call, deadly)
    go_on(path)


# Calls 0 to 6 of os.replace name config.json, metrics.csv, checkpoint 9, weights 12, checkpoint 18,
# weights 24, checkpoint 27; those of os.unlink begin with checkpoint 9, after checkpoint 27.
@pytest.mark.parametrize(
    ("call", "number", "after"),
    [
        ("replace", 0, False),
        ("replace", 2, True),
        ("replace", 5, True),
        ("replace", 6, False),
        ("replace", 6, True),
        ("unlink", 0, True),
    ],
)
def test_a_kill_while_a_file_is_written_changes_nothing(
    call: str, number: int, after: bool, tmp_path: Path, left_alone: Path
) -> None:
    assert finish(start(die_at, tmp_path, call, number, after)) == -signal.SIGKILL
    assert finish(start(go_on, tmp_path)) == 0
    assert_same(outcome(tmp_path), outcome(left_alone))


class Soon(Deadline):
    """Near when something has happened, whatever the time is."""

    has_happened: Callable[[], bool]

    def near(self, pause: float) -> bool:
        return self.has_happened()


def soon(has_happened: Callable[[], bool]) -> Deadline:
    deadline = Soon()
    deadline.has_happened = has_happened
    return deadline


def test_a_run_that_stops_in_time_again_and_again_ends_as_one_left_alone(
    tmp_path: Path, left_alone: Path
) -> None:
    folder, seconds = RunFolder(tmp_path), 0.0
    task = Halves()
    for questions in (1, 11, 8, 16):
        left = iter(range(questions))
        with pytest.raises(OutOfTime, match=r"stopped, and saved; .* go on with: more"):
            fit(
                *(network(task), task, QUICK, 0, folder),
                resume=True,
                progress=False,
                again="more",
                deadline=soon(lambda left=left: next(left, None) is None),  # type: ignore[misc]
            )
        newest = max(folder.checkpoints.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        state = read(newest)["callbacks"]["Steward"]
        assert state["seconds"] > seconds
        seconds = state["seconds"]
    assert 0 < state["pause"] < seconds
    with pytest.raises(OutOfTime, match="trained to the end, and saved; not tested yet"):
        fit(
            *(network(task), task, QUICK, 0, folder),
            resume=True,
            progress=False,
            deadline=soon(lambda: last_step(tmp_path) == QUICK.updates),
        )
    # What is left is testing, and is done in any case: else no call would ever do it.
    over = fit(
        *(network(task), task, QUICK, 0, folder),
        resume=True,
        progress=False,
        deadline=Deadline.after(1e-6),
    )
    assert over.seconds > seconds
    found, expected = outcome(tmp_path), outcome(left_alone)
    for one in (found, expected):
        del one["checkpoints"], one["files"]
    assert_same(found, expected)


def test_without_any_time_one_update_is_made(tmp_path: Path) -> None:
    for updates in (1, 2):
        with pytest.raises(OutOfTime):
            fit(
                *(network(Halves()), Halves(), QUICK, 0, RunFolder(tmp_path)),
                resume=True,
                progress=False,
                deadline=Deadline.after(1e-6),
            )
        assert (tmp_path / "checkpoints" / f"step-{updates}.ckpt").exists()


class Asked(Deadline):
    """Never near, and remembers what was asked for."""

    pauses: list[float]

    def near(self, pause: float) -> bool:
        self.pauses.append(pause)
        return False


class MuchTested(Halves):
    """With ten times as much test as validation data."""

    def size(self, split: Split) -> int:
        return 640 if split == "test" else 64


@pytest.mark.parametrize(("conditions", "rules"), [(("T=6", "T=10"), 2), (("T=6",), 1)])
def test_time_for_the_tests_is_kept_free_and_a_checkpoint_knows_it(
    conditions: tuple[str, ...], rules: int, tmp_path: Path
) -> None:
    task, deadline = MuchTested(), Asked()
    task.conditions, deadline.pauses = conditions, []
    once = replace(QUICK, updates=2, warmup=0, evaluate_every=2, checkpoint_every=2)
    fit(network(task), task, once, 0, RunFolder(tmp_path), progress=False, deadline=deadline)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    pause = read(checkpoint)["callbacks"]["Steward"]["pause"]
    assert pause > 0
    assert deadline.pauses[-1] == pytest.approx(rules * 10 * pause)


class Ended(Halves):
    """SIGTERM, once and again, as by whoever ends all processes of a job."""

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        if step == 3:
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
        return super().batch(seed, step, rows)


def test_a_repeated_sigterm_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="stopped, and saved"):
        fit(network(Halves()), Ended(), QUICK, 0, RunFolder(tmp_path), progress=False)
    assert (tmp_path / "checkpoints" / "step-4.ckpt").exists()


def test_another_evaluation_has_to_fit_in_the_time_that_is_left() -> None:
    minute = Deadline.after(1)
    assert not minute.near(20)
    assert minute.near(30)
    assert not Deadline().near(1e9)
    with pytest.raises(ValueError, match=r"minutes must be a number above 0, got -1"):
        Deadline.after(-1)


def test_a_run_that_is_over_is_not_trained_again(left_alone: Path, tmp_path: Path) -> None:
    copy = copy_of(left_alone, tmp_path)
    before = outcome(copy)
    task = Halves()
    net = network(task, seed=5)
    result = fit(net, task, QUICK, 0, RunFolder(copy), resume=True, progress=False)
    assert_same(outcome(copy), before)
    weights = {f"net.{name}": weight for name, weight in net.state_dict().items()}
    assert_same(weights, before["checkpoints"]["step-60.ckpt"]["state_dict"])
    assert result.updates == 60
    assert result.stopped == "updates"
    assert result.seconds > 0
    assert set(result.chosen) == {"T=6", "T=10"}


def copy_of(path: Path, into: Path, *, until: int | None = None) -> Path:
    """The folder of a run; `until`: without the checkpoints after that many updates."""
    subprocess.run(["cp", "-r", str(path), str(into / "copy")], check=True)
    for file in (into / "copy" / "checkpoints").iterdir():
        if until is not None and int(file.stem.removeprefix("step-")) > until:
            file.unlink()
    return into / "copy"


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garbage(file: Path) -> None:
    file.write_bytes(bytes(random.Random(0).randbytes(5000)))


def flip_a_bit(file: Path) -> None:
    """In the middle of a tensor: torch itself reads such a file without a word."""
    content = bytearray(file.read_bytes())
    moment = read(file)["optimizer_states"][0]["state"][0]["exp_avg"].numpy().tobytes()
    content[content.index(moment) + len(moment) // 2] ^= 1
    file.write_bytes(content)


def without_a_sum(file: Path) -> None:
    """Of torch alone."""
    torch.save(read(file), file)


def pickle_code(file: Path) -> None:
    write({"run": read(file)["run"], "state_dict": os.path.join}, file)


def other_seed(file: Path) -> None:
    content = read(file)
    content["run"]["seed"] = 3
    write(content, file)


def of_no_run(file: Path) -> None:
    write({"run": 3}, file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "step-60.ckpt is damaged, or no checkpoint"),
        (empty, "step-60.ckpt is damaged, or no checkpoint"),
        (garbage, "step-60.ckpt is damaged, or no checkpoint"),
        (flip_a_bit, r"step-60.ckpt is damaged, or no checkpoint \(its sha256 is another"),
        (without_a_sum, r"step-60.ckpt is damaged, or no checkpoint \(its sha256 is another"),
        (pickle_code, r"step-60.ckpt is damaged, or no checkpoint \(Weights only load failed"),
        (of_no_run, "step-60.ckpt is no checkpoint"),
        (other_seed, r"step-60.ckpt is of another run \(seed is 3 there, 0 here\)"),
    ],
)
def test_an_unusable_checkpoint_is_named_and_the_one_before_it_used(
    damage: Callable[[Path], None],
    words: str,
    tmp_path: Path,
    left_alone: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = copy_of(left_alone, tmp_path)
    damage(copy / "checkpoints" / "step-60.ckpt")
    train(copy, resume=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(words, said)
    assert "going on from step-54.ckpt, the one before" in said
    assert_same(outcome(copy), outcome(left_alone))


def test_without_a_usable_checkpoint_a_run_does_not_go_on(left_alone: Path, tmp_path: Path) -> None:
    copy = copy_of(left_alone, tmp_path)
    truncate(copy / "checkpoints" / "step-60.ckpt")
    other_seed(copy / "checkpoints" / "step-54.ckpt")
    with pytest.raises(CheckpointError) as error:
        train(copy, resume=True)
    for words in (
        "no checkpoint in",
        "step-60.ckpt is damaged",
        "step-54.ckpt is of another run",
        "start it anew",
    ):
        assert words in str(error.value)


def test_another_run_s_options_are_named(left_alone: Path, tmp_path: Path) -> None:
    copy = copy_of(left_alone, tmp_path)
    with pytest.raises(CheckpointError, match=r"fit.lr is 0.01 there, 0.5 here"):
        train(copy, replace(QUICK, lr=0.5), resume=True)
    with pytest.raises(CheckpointError, match=r"weights.core.weight_ih_l0 is"):
        fit(
            network(Halves(), hidden_size=4),
            Halves(),
            QUICK,
            0,
            RunFolder(copy),
            resume=True,
            progress=False,
        )
    folder = RunFolder(copy)
    folder.write_json(folder.config, {**folder.read_json(folder.config), "task": "Thirds"})
    with pytest.raises(CheckpointError, match=r"config.task is 'its own' there, 'Thirds' here"):
        train(copy, resume=True)


def test_a_run_is_never_overwritten(left_alone: Path) -> None:
    with pytest.raises(ValueError, match="go on with it by --resume, or give another folder"):
        train(left_alone)


def test_a_stray_checkpoint_does_not_push_good_ones_out(left_alone: Path, tmp_path: Path) -> None:
    copy = copy_of(left_alone, tmp_path, until=54)
    garbage(copy / "checkpoints" / "step-56.ckpt")
    train(copy, resume=True)
    names = {file.name for file in (copy / "checkpoints").iterdir()}
    assert names == {"step-54.ckpt", "step-56.ckpt", "step-60.ckpt"}


def interrupted(path: Path, say: Path) -> None:
    torch.set_num_threads(1)
    task = Slow()
    config = replace(QUICK, checkpoint_every=1000)
    try:
        fit(
            network(task),
            task,
            config,
            0,
            RunFolder(path),
            resume=True,
            progress=False,
            again="riglstm train --resume",
        )
    except Interrupted as error:
        say.write_text(str(error))
        sys.exit(130)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_is_stopped_saves_and_says_how_to_go_on(
    number: signal.Signals, tmp_path: Path, left_alone: Path
) -> None:
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
    assert 14 <= read(saved)["callbacks"]["Steward"]["step"] < 60
    assert finish(start(interrupted, path, say)) == 0
    got, want = outcome(path), outcome(left_alone)
    assert_same(got["metrics"], want["metrics"])
    assert want["weights"].items() <= got["weights"].items()
    last = "step-60.ckpt"
    for part in ("state_dict", "optimizer_states"):
        assert_same(got["checkpoints"][last][part], want["checkpoints"][last][part])


class Pressed(Halves):
    """Ctrl-C twice, in the middle of an update."""

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        if step == 20:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return super().batch(seed, step, rows)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"stopped at once, without saving; .*step-18.ckpt"):
        fit(network(Halves()), Pressed(), QUICK, 0, RunFolder(tmp_path), progress=False)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this update" in capfd.readouterr().err


class Nested(Halves):
    """In the middle of a run, another is started in its folder."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.refused = path, False

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        if step == 30:
            with pytest.raises(BusyError):
                train(self.path, resume=True)
            self.refused = True
        return super().batch(seed, step, rows)


def test_two_never_train_in_one_folder(tmp_path: Path, left_alone: Path) -> None:
    task = Nested(tmp_path)
    fit(network(task), task, QUICK, 0, RunFolder(tmp_path), progress=False)
    assert task.refused
    assert_same(outcome(tmp_path), outcome(left_alone))


class Late(Halves):
    """Ctrl-C during the last evaluation."""

    evaluations = 0

    def score(
        self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
    ) -> Totals:
        self.evaluations += 1
        if self.evaluations == 10:
            signal.raise_signal(signal.SIGINT)
        return super().score(net, condition, split, share)


def test_ctrl_c_in_the_last_evaluation_is_heard(tmp_path: Path, left_alone: Path) -> None:
    words = r"^trained to the end, and saved; not tested yet; go on with: riglstm --resume$"
    with pytest.raises(Interrupted, match=words):
        fit(
            *(network(Halves()), Late(), QUICK, 0, RunFolder(tmp_path)),
            progress=False,
            again="riglstm --resume",
        )
    assert_same(outcome(tmp_path), outcome(left_alone))
    again = fit(
        network(Halves()), Halves(), QUICK, 0, RunFolder(tmp_path), resume=True, progress=False
    )
    assert again.updates == 60


def test_a_checkpoint_that_was_not_written_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def fill_up(path: Path, size: int, config: Fit) -> None:
    """Train where no file can be larger than `size`."""
    import resource

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        # Wide, so that a tensor is larger than the buffer of a file.
        net = network(Halves(), hidden_size=64)
        fit(net, Halves(), config, 0, RunFolder(path / "run"), progress=False)
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        (path / "said").write_text(str(error))
        sys.exit(3)


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits on files")
@pytest.mark.parametrize(
    ("size", "config", "words"),
    [
        (
            60_000,
            QUICK,
            r"step-9\.ckpt could not be written \(.*\), and nothing is left of it; make",
        ),
        (200, replace(QUICK, log_every=1), r"metrics\.csv could not be written \(.*\); make room"),
    ],
)
def test_a_disk_that_gets_full_is_said_with_the_way_out(
    size: int, config: Fit, words: str, tmp_path: Path
) -> None:
    assert finish(start(fill_up, tmp_path, size, config)) == 3
    assert re.search(words, (tmp_path / "said").read_text())
    assert not list(tmp_path.rglob("*.ckpt*"))
    go_on(tmp_path / "run", config)


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    train(tmp_path, replace(QUICK, updates=9, warmup=0))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"could not be written \(No space left on device\)"):
        RunFolder(tmp_path).finish({"rows": []})
    assert sorted(tmp_path.rglob("*")) == before
