"""Checkpoints to resume from: written atomically, checked when read, the last two kept.

A line with the SHA-256 of the rest, then a file of torch's own. The sum is compared before anything
is parsed, and nothing in the file is executed. Each says which run it is of.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from riglstm.lab.train.folder import RunFolder, atomic_write, differences

KEPT = 2
NAME = re.compile(r"step-(\d+)\.ckpt")
HEAD = b"riglstm checkpoint, sha256 %s\n"


class CheckpointError(ValueError):
    """There are checkpoints, and none of them can be resumed from."""


class UnusableError(ValueError):
    """A file that is not a whole checkpoint, or one of another run."""


class Checkpoints:
    """The checkpoints of the run that `identity` describes."""

    def __init__(self, folder: RunFolder, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.identity = identity
        self.kept: list[Path] = []
        """The newest first, without those that could not be resumed from."""

    def path(self, step: int) -> Path:
        """The file of the checkpoint after that many updates."""
        return self.folder.checkpoints / f"step-{step}.ckpt"

    def latest(self, say: Callable[[str], None], *, resume: bool) -> dict[str, Any] | None:
        """The newest that is whole and of this run; None where there is none at all.

        `say` is told of each that had to be passed over. Raises ValueError where there are
        checkpoints and the run is not to be resumed.
        """
        paths = [p for p in self.folder.checkpoints.glob("*") if NAME.fullmatch(p.name)]
        paths.sort(key=_step, reverse=True)
        if paths and not resume:
            raise ValueError(
                f"{self.folder.path} holds checkpoints of a run that was stopped; go on with it by "
                "--resume, or give another folder"
            )
        faults: list[str] = []
        for number, path in enumerate(paths):
            try:
                checkpoint = read(path)
                self._check_identity(path, checkpoint)
            except UnusableError as error:
                faults.append(str(error))
                continue
            if faults:
                say(f"{'; '.join(faults)}; going on from {path.name}, the one before")
            self.kept = paths[number:]
            return checkpoint
        if faults:
            raise CheckpointError(
                f"no checkpoint in {self.folder.checkpoints} can be gone on from: "
                f"{'; '.join(faults)}; delete the folder of the run, and start it anew"
            )
        return None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint after that many updates, then remove those that are too old."""
        path = self.path(step)
        write({**state, "run": self.identity}, path)
        self.kept = [path, *(other for other in self.kept if other != path)]
        for old in self.kept[KEPT:]:
            old.unlink(missing_ok=True)
        del self.kept[KEPT:]

    def _check_identity(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        found = differences(checkpoint["run"], self.identity)
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise UnusableError(f"{path.name} is of another run ({'; '.join(found[:3])}{more})")


def write(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a whole checkpoint, or none."""
    # In memory first: of a full disk torch's own writer says nothing that helps.
    whole = io.BytesIO()
    torch.save(dict(checkpoint), whole)
    with atomic_write(path) as file:
        file.write(HEAD % _sum(whole.getbuffer()))
        file.write(whole.getbuffer())


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, after its sum was compared."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnusableError(f"{path.name} cannot be read ({error.strerror})") from error
    start = len(HEAD % _sum(b""))
    if content[:start] != HEAD % _sum(memoryview(content)[start:]):
        raise UnusableError(f"{path.name} is damaged, or no checkpoint (its sha256 is another)")
    try:
        found = torch.load(io.BytesIO(content[start:]), map_location="cpu", weights_only=True)
    # The sum is right: somebody has made the file so, and it may fail in any way.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UnusableError(f"{path.name} is damaged, or no checkpoint ({reason})") from error
    if not isinstance(found, dict) or not isinstance(found.get("run"), dict):
        raise UnusableError(f"{path.name} is no checkpoint (it does not say of which run)")
    return found


def _sum(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _step(path: Path) -> int:
    """The updates in a checkpoint, by its name."""
    return int(path.stem.removeprefix("step-"))
