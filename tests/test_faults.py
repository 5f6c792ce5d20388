"""Kills and flipped bits: no lost file, no other number.

As a script it makes runs and kills them, each in a fork of one process that has everything loaded.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from riglstm.lab.cli.main import main
from riglstm.lab.train.checkpoints import Checkpoints, read_checkpoint, read_weights
from riglstm.lab.train.folder import PART, RunFolder
from train_helpers import assert_same, outcome
from train_task import SMALL, train

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("RIGLSTM_FAULT_SEED") or time.time())
KILLS, FLIPS = 50, 200

RUN = [
    *(*SMALL, "--updates", "20", "--evaluate-every", "4", "--checkpoint-every", "3"),
    *("--log-every", "5", "--lr", "0.01", "--resume"),
]


def draws(what: str) -> random.Random:
    print(f"RIGLSTM_FAULT_SEED={SEED} draws these {what} again")
    return random.Random(f"{SEED} {what}")


class Doom:
    """Kills the process at its n-th operation on files below a folder; counts them."""

    EVENTS = ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir")

    def __init__(self, root: Path, number: int, cut: random.Random) -> None:
        self.root, self.left, self.cut = str(root), number, cut
        self.count = 0
        sys.addaudithook(self.hear)
        self.fsync, os.fsync = os.fsync, self.write

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.EVENTS and str(arguments[0]).startswith(self.root):
            self.operation()

    def write(self, handle: int) -> None:
        """A kill in the middle of a write leaves a part of a file that is written aside."""
        link = f"/proc/self/fd/{handle}"
        if self.left == self.count and os.path.exists(link) and os.readlink(link).endswith(PART):
            os.truncate(handle, self.cut.randrange(os.fstat(handle).st_size + 1))
        self.operation()
        self.fsync(handle)

    def operation(self) -> None:
        if self.left == self.count:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def forked(root: Path, out: Path, number: int, cut: random.Random) -> tuple[int, int]:
    """Run the command in a child that is killed at an operation; its exit code, and operations."""
    counted, said = root / "count", root / "said"
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"exit code {code}: {said.read_text()}")
        return code, int(counted.read_text()) if code == 0 else 0
    code = 99
    try:
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        doom = Doom(out, number, cut)
        code = main([*RUN, "--out", str(out)])
        counted.write_text(str(doom.count))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


OTHERS = ("notes.txt", "weights/mine.safetensors", "checkpoints/mine.part", "draft.part")
"""Files that somebody puts into the folder of a run."""


def left(path: Path) -> dict[str, Any]:
    """What a run leaves, without files of others and the folders that these keep."""
    found = outcome(path)
    names = [name for name in found["files"] if (path / name).is_file()]
    return {**found, "files": [name for name in names if name not in OTHERS]}


def kill(root: Path, seed: str) -> None:
    """Kill runs until there were enough kills; each ends as the one that was left alone."""
    torch.set_num_threads(1)
    # Loaded here, and not by every child.
    import riglstm.lab.train.loop  # noqa: F401

    moments = random.Random(seed)
    code, operations = forked(root, root / "alone", -1, moments)
    assert code == 0
    alone = left(root / "alone")
    kills, runs = 0, 0
    while kills < KILLS:
        runs += 1
        out, others = root / f"run-{runs}", set()
        while True:
            number = moments.randrange(operations)
            code, _ = forked(root, out, number, moments)
            # There is a run by now, and somebody puts files of their own beside it.
            if RunFolder(out).config.exists():
                name = moments.choice(OTHERS)
                (out / name).parent.mkdir(exist_ok=True)
                (out / name).touch()
                others.add(name)
            if code == 0:
                break
            kills += 1
        for part, value in left(out).items():
            assert value == alone[part], f"{part} of run {runs}: {value} is not {alone[part]}"
        for name in others:
            assert (out / name).exists(), f"{name} is gone"
        shutil.rmtree(out)
    print(f"{kills} kills in {runs} runs of {operations} operations")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_runs_killed_at_any_file_operation_end_as_one_left_alone(tmp_path):
    draws("kills")
    made = subprocess.run(
        [sys.executable, __file__, str(tmp_path), f"{SEED} kills"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(made.stdout)
    assert made.returncode == 0, made.stderr[-3000:]


@contextlib.contextmanager
def flipped(file: Path, draw: random.Random) -> Iterator[int]:
    """A bit of the file is another within it, half of the time one of the last or first bytes."""
    whole = file.read_bytes()
    places = (range(len(whole)), range(500), range(len(whole) - 4000, len(whole)))
    place = draw.choice(places[draw.choice((0, 0, 1, 2))])
    damaged = bytearray(whole)
    damaged[place] ^= 1 << draw.randrange(8)
    file.write_bytes(damaged)
    yield place
    file.write_bytes(whole)


def test_a_checkpoint_with_a_flipped_bit_is_never_resumed_from(tmp_path):
    draw = draws("flips")
    net = train(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    last, before = folder.checkpoints / "step-60.ckpt", folder.checkpoints / "step-54.ckpt"
    whole = read_checkpoint(before)
    for _ in range(FLIPS):
        with flipped(last, draw) as place, contextlib.redirect_stderr(io.StringIO()) as said:
            assert_same(Checkpoints(folder, net).latest(), whole, str(place))
            assert said.getvalue().startswith("step-60.ckpt is damaged")


def test_weights_with_a_flipped_bit_are_refused(tmp_path, capsys):
    draw = draws("flips of weights")
    out, file = tmp_path / "run", tmp_path / "file.safetensors"
    assert main([*SMALL, "--updates", "4", "--out", str(out)]) == 0
    assert main(["export", str(out), str(file)]) == 0
    for _ in range(FLIPS):
        with flipped(file, draw) as place, pytest.raises(ValueError, match="sha256"):
            print(place, read_weights(file))
    (own,) = (out / "weights").iterdir()
    for path, asked in ((file, file), (own, out)):
        for _ in range(5):
            with flipped(path, draw):
                capsys.readouterr()
                assert main(["evaluate", str(asked), "--device", "cpu"]) == 2
                said = capsys.readouterr()
                assert said.out == ""
                assert f"{path} must hold weights" in said.err


if __name__ == "__main__":
    kill(Path(sys.argv[1]), sys.argv[2])
