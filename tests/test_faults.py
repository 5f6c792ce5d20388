"""Kills, flipped bits and wrong command lines: no lost file, no other number, no traceback.

As a script it makes runs and kills them, each in a fork of one process that has everything loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import pytest
import torch

from riglstm.lab.cli import flags
from riglstm.lab.cli.main import VERBS, main
from riglstm.lab.train.checkpoints import Checkpoints, read_checkpoint, read_weights
from riglstm.lab.train.folder import PART, RunFolder
from train_helpers import assert_same
from train_task import SMALL, train

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
SEED = int(os.environ.get("RIGLSTM_FAULT_SEED") or time.time())
KILLS, FLIPS, COMMANDS = 50, 200, 100

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
    """What a run leaves, but for times and the record of its sessions."""
    folder = RunFolder(path)
    result = folder.read_json(folder.result)
    lines = folder.metrics.read_text().splitlines()
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    return {
        "result": {k: v for k, v in result.items() if k not in ("seconds", "commit", "device")},
        "config": folder.read_json(folder.config),
        "weights": {
            f.name: hashlib.sha256(f.read_bytes()).hexdigest()
            for f in folder.weights.glob("step-*")
        },
        "metrics": [line for line in lines if "per_second" not in line],
        "files": [name for name in files if name not in OTHERS],
    }


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
def test_runs_killed_at_any_file_operation_end_as_one_left_alone(tmp_path: Path) -> None:
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


def test_a_checkpoint_with_a_flipped_bit_is_never_resumed_from(tmp_path: Path) -> None:
    draw = draws("flips")
    train(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    last, before = folder.checkpoints / "step-60.ckpt", folder.checkpoints / "step-54.ckpt"
    identity, whole = read_checkpoint(last)["run"], read_checkpoint(before)
    for _ in range(FLIPS):
        with flipped(last, draw) as place:
            said: list[str] = []
            checkpoints = Checkpoints(folder, identity)
            assert_same(checkpoints.latest(said.append, resume=True), whole, str(place))
            assert "step-60.ckpt is damaged" in said[0]


def test_weights_with_a_flipped_bit_are_refused(tmp_path: Path, capsys: Capture) -> None:
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


GRID = [
    *("train", "minigrid", "--frames", "64", "--envs", "4", "--steps", "16", "--window", "8"),
    *("--minibatch", "32", "--epochs", "1", "--workers", "1", "--episodes", "1"),
    *("--family", "lavagap", "--device", "cpu", "--no-tensorboard", "--out", "new"),
]
COMMANDS_OF: list[tuple[int, list[str]]] = [
    (2, [*SMALL, "--updates", "4", "--out", "new"]),
    (2, GRID),
    (1, ["demo", "--updates", "2", "--hidden-size", "4", "--num-cells", "2", "--out", "new"]),
    (1, ["evaluate", "done", "--device", "cpu"]),
    (1, ["export", "done", "new.safetensors"]),
    (1, ["reproduce", "copying", "--minutes", "0.001", "--out", "new", "--models", "lstm"]),
    (2, ["reproduce", "minigrid", "--families", "lavagap", "--workers", "1", "--out", "new"]),
    (1, ["sweep", "space.toml", "--minutes", "0.001", "--out", "new", "--results", "new"]),
    (1, ["report", "done", "--out", "new.html"]),
    (1, ["bench", "--quick", "--tables", "speed"]),
    (1, ["explore", "--weights", "no-such-file"]),
    (1, ["data"]),
    (1, ["list"]),
]
"""How many words name the verb, and the command: quick, should it be taken."""

WRONG = ("", "nan", "-7", "no-such", "9" * 23, "~nobody-at-all/x")


def refused(kind: Any) -> list[str]:
    """Values that no flag of that type takes."""
    inner, may_lack = flags.strip_none(flags.strip_list(kind)[0])
    found = []
    for word in WRONG:
        try:
            flags.convert(inner, word)
        except ValueError:
            found.append(word)
    # What the type takes and no flag of ours does: numbers below zero, or that are none; no names.
    found += {int: ["-7"], float: ["-7", "nan", "-inf"], str: ["", "no-such"]}.get(inner, [])
    found += ["none"] if inner in (int, float) and not may_lack else []
    return sorted(set(found))


def groups_of(verb: list[str]) -> dict[str, type]:
    """The dataclasses whose fields are the flags of a verb."""
    found: dict[str, type] = {}

    def stop(prog: str, about: str, groups: dict[str, type], args: object) -> NoReturn:
        found.update(groups)
        raise SystemExit(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "read", stop)
        with contextlib.suppress(SystemExit):
            main([*verb, "--help"])
    return found


def wrong_commands() -> list[list[str]]:
    """Every flag of every verb with every value that it does not take, and flags there are none."""
    assert {words[0] for _, words in COMMANDS_OF} == VERBS.keys()
    found = []
    for length, words in COMMANDS_OF:
        found.append([*words, "--no-such-flag", "3"])
        for config in groups_of(words[:length]).values():
            kinds = get_type_hints(config)
            for flag in fields(config):
                if flag.default is MISSING or flag.metadata.get("positional"):
                    continue
                bad = refused(kinds[flag.name]) if kinds[flag.name] is not bool else ["maybe"]
                # Before the others, as the last one counts: with = a value may begin with a dash.
                found += [[*words, f"{flags.flag_of(flag.name)}={word}"] for word in bad]
    return found


def test_wrong_commands_end_with_a_message_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("minigrid", reason="needs the extra riglstm[rl]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIGLSTM_DATA", str(tmp_path / "data"))
    assert main([*SMALL, "--updates", "4", "--out", "done"]) == 0
    (tmp_path / "space.toml").write_text('table = "copying"\nsetting = "M=1"\nbudget = "quick"\n')
    before = sorted(tmp_path.rglob("*"))
    every = wrong_commands()
    assert len(every) > 3 * COMMANDS
    for command in draws("commands").sample(every, COMMANDS):
        print(command)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(command)
        last = (err.getvalue().strip().splitlines() or [""])[-1]
        assert code == 2, json.dumps([command, last])
        assert last.startswith("riglstm: "), json.dumps([command, last])
        assert sorted(tmp_path.rglob("*")) == before, command


if __name__ == "__main__":
    kill(Path(sys.argv[1]), sys.argv[2])
