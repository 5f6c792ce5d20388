"""Checkpoints to go on from: written aside, checked when read, the last two kept.

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
from pytorch_lightning.plugins.io import CheckpointIO

from riglstm.lab.train.folder import RunFolder, aside, differences

KEPT = 2
NAME = re.compile(r"step-(\d+)\.ckpt")
HEAD = b"riglstm checkpoint, sha256 %s\n"


class CheckpointError(ValueError):
    """There are checkpoints, and none of them can be gone on from."""


class UnusableError(ValueError):
    """A file that is not a whole checkpoint, or one of another run."""


class Checkpoints(CheckpointIO):
    """The checkpoints of a run, for Lightning to read and write."""

    def __init__(self, folder: RunFolder, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.identity = identity
        self.found: dict[Path, dict[str, Any]] = {}
        """What `latest` has read, for Lightning to take."""
        self.passed_over: set[Path] = set()

    def path(self, step: int) -> Path:
        """The checkpoint after that many updates."""
        return self.folder.checkpoints / f"step-{step}.ckpt"

    def there(self) -> list[Path]:
        """All files with the name of a checkpoint, the newest first."""
        paths = (p for p in self.folder.checkpoints.glob("*") if NAME.fullmatch(p.name))
        return sorted(paths, key=step_of, reverse=True)

    def latest(self, say: Callable[[str], None]) -> Path | None:
        """The newest that is whole and of this run; None: there is none at all.

        `say` hears of each that had to be passed over.
        """
        faults = []
        for path in self.there():
            try:
                checkpoint = read(path)
                self._claim(path, checkpoint)
            except UnusableError as error:
                faults.append(str(error))
                self.passed_over.add(path)
                continue
            if faults:
                say(f"{'; '.join(faults)}; going on from {path.name}, the one before")
            self.found = {path: checkpoint}
            return path
        if faults:
            raise CheckpointError(
                f"no checkpoint in {self.folder.checkpoints} can be gone on from: "
                f"{'; '.join(faults)}; delete the folder of the run, and start it anew"
            )
        return None

    def _claim(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        found = differences(checkpoint["run"], self.identity)
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise UnusableError(f"{path.name} is of another run ({'; '.join(found[:3])}{more})")

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, then remove those that are too old."""
        write({**checkpoint, "run": self.identity}, Path(path))
        mine = [p for p in self.there() if p not in self.passed_over - {Path(path)}]
        for old in [p for p in mine if step_of(p) <= step_of(Path(path))][KEPT:]:
            self.remove_checkpoint(old)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint."""
        checkpoint = self.found.pop(Path(path), None)
        return read(Path(path)) if checkpoint is None else checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


def write(checkpoint: Mapping[str, Any], path: Path) -> None:
    """A whole checkpoint, or none."""
    # In memory first: of a full disk torch's own writer says nothing that helps.
    whole = io.BytesIO()
    torch.save(dict(checkpoint), whole)
    with aside(path) as file:
        file.write(HEAD % _sum(whole.getbuffer()))
        file.write(whole.getbuffer())


def read(path: Path) -> dict[str, Any]:
    """A checkpoint, on the CPU, after its sum was compared."""
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


def step_of(path: Path) -> int:
    """The updates in a checkpoint, by its name."""
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])
