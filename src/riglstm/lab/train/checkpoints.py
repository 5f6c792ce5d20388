"""Checkpoints to resume from, a network's weights, and which of them are chosen.

Files are written atomically and checked when read.

A checkpoint is a line with the SHA-256 of the rest, then a file of torch's own; the last two are
kept, and each says which run it is of. The state of the random generators is part of it. Weights
are safetensors: what people share, and what a run is tested with. The file's metadata has its
SHA-256, taken with zeros in that place. A sum is compared before anything is parsed, so that no
other number comes of a file that is damaged, and nothing in a file is executed.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from riglstm.lab.train.folder import RunFolder, atomic_write, differences
from riglstm.lab.train.progress import say

KEPT = 2
HEAD = b"riglstm checkpoint, sha256 %s\n"


class CheckpointError(ValueError):
    """A file is not a whole checkpoint, or one of another run; or all that there are."""


class Checkpoints:
    """The checkpoints of the run that the folder holds; each says which run, and what network."""

    def __init__(self, folder: RunFolder, net: nn.Module) -> None:
        self.folder = folder
        self.shapes = {name: list(weight.shape) for name, weight in net.state_dict().items()}
        self.kept: list[Path] = []
        """The newest first, without those that could not be resumed from."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What two runs must share for one to resume from the other's checkpoint."""
        # Of several processes the first writes the file, and the others may be here before.
        return {"config": self.folder.read_json(self.folder.config), "weights": self.shapes}

    def path(self, step: int) -> Path:
        """The file of the checkpoint after that many updates."""
        return self.folder.checkpoints / f"step-{step}.ckpt"

    def latest(self) -> dict[str, Any] | None:
        """The newest that is whole and of this run; None where there is none at all."""
        paths = self.folder.made(self.folder.checkpoints)
        paths.sort(key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)
        faults: list[str] = []
        for number, path in enumerate(paths):
            try:
                checkpoint = read_checkpoint(path)
                self._check_identity(path, checkpoint)
            except CheckpointError as error:
                faults.append(str(error))
                continue
            # Of several processes the first speaks for all.
            if faults and self.folder.writes:
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
        write_checkpoint({**state, "run": self.identity}, path)
        self.kept = [path, *(other for other in self.kept if other != path)]
        for old in self.kept[KEPT:]:
            old.unlink(missing_ok=True)
        del self.kept[KEPT:]

    def _check_identity(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        now = self.identity
        # Those of earlier versions say more.
        found = differences({name: checkpoint["run"].get(name) for name in now}, now)
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise CheckpointError(f"{path.name} is of another run ({'; '.join(found[:3])}{more})")


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a whole checkpoint, or none."""
    # In memory first: of a full disk torch's own writer says nothing that helps.
    whole = io.BytesIO()
    torch.save(dict(checkpoint), whole)
    with atomic_write(path) as file:
        file.write(HEAD % _sum(whole.getbuffer()))
        file.write(whole.getbuffer())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, after its sum was compared."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from error
    start = len(HEAD % _sum(b""))
    if content[:start] != HEAD % _sum(memoryview(content)[start:]):
        raise CheckpointError(f"{path.name} is damaged, or no checkpoint (its sha256 is another)")
    try:
        found = torch.load(io.BytesIO(content[start:]), map_location="cpu", weights_only=True)
    # The sum is right: somebody has made the file so, and it may fail in any way.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path.name} is damaged, or no checkpoint ({reason})") from error
    if not isinstance(found, dict) or not isinstance(found.get("run"), dict):
        raise CheckpointError(f"{path.name} is no checkpoint (it does not say of which run)")
    return found


def _sum(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


NONE_YET = "0" * 64
SUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')


def save_weights(net: nn.Module, path: Path) -> None:
    """Write the weights, under the names of the network's state_dict."""
    write_weights(net.state_dict(), path)


def load_weights(net: nn.Module, path: Path) -> None:
    """Read what `save_weights` wrote into a network of the same form."""
    tensors = read_weights(path)
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"{path} holds the weights of another network: {error}; "
            "build the network with the options of its run"
        ) from error


def write_weights(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a whole file, or none."""
    # Copies, as safetensors refuses tensors that share memory.
    copies = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
    entries, numbers = _parts(save(copies))
    # safetensors writes metadata in random order, and equal weights are to be equal bytes.
    entries["__metadata__"] = {**(metadata or {}), "sha256": NONE_YET}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    content = len(head).to_bytes(8, "little") + head + numbers
    own = hashlib.sha256(content).hexdigest()
    with atomic_write(path) as file:
        file.write(content.replace(_field(NONE_YET), _field(own), 1))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    return load(_verified(path))


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file."""
    said: dict[str, str] = _parts(_verified(path))[0]["__metadata__"]
    return said


def _parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """What the header of safetensors says, and the tensors' numbers behind it."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _verified(path: Path) -> bytes:
    """The bytes of a file that `write_weights` wrote, and that nothing has changed since."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"expected weights in {path}, got no such file; the run that wrote them is not whole"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} must hold weights as safetensors, got: {error}") from error
    said = SUM.search(content)
    blank = content if said is None else content.replace(said[0], _field(NONE_YET), 1)
    if said is None or hashlib.sha256(blank).hexdigest() != said[1].decode():
        raise ValueError(
            f"{path} must hold weights as safetensors, with their sha256 in its metadata, got "
            f"{'none' if said is None else 'another sha256: the file is damaged'}; take another "
            "copy, or train or export anew"
        )
    return content


def _field(digest: str) -> bytes:
    return b'"sha256":"%s"' % digest.encode()


class Chosen(NamedTuple):
    """The weights that were best on a condition's validation data."""

    step: int
    """Updates they have had."""
    value: float
    """The metric."""
    loss: float
    """The loss on the same data."""


@dataclass(frozen=True)
class Fitted:
    """What a training gave; the network holds its last weights, as the last update left them."""

    chosen: dict[str, Chosen]
    """For each condition the weights, or means of them, that were best on its validation data."""
    updates: int
    """Updates that were made."""
    seconds: float
    """Of all the sessions that the run took."""
    stopped: Literal["updates", "patience"]
    """What ended it."""


class Choice:
    """The best weights so far on each condition, and the evaluations since the training one's.

    The honest rule chooses on validation data of the training condition. The rule of earlier papers
    chooses for each test condition on validation data of that condition; both are kept track of.
    """

    def __init__(self, trained_on: str, higher_is_better: bool, patience: int | None) -> None:
        self.trained_on = trained_on
        self.sign = 1.0 if higher_is_better else -1.0
        self.patience = patience
        self.best: dict[str, Chosen] = {}
        self.waited = 0

    def add(self, step: int, values: Mapping[str, float], losses: Mapping[str, float]) -> bool:
        """Add an evaluation, by metric and by loss; True if a choice falls on it.

        A metric that can be perfect may be so from early on, while the network goes on learning: of
        equals the one with the lower loss is taken, and of equals in that, too, the earlier.
        """
        better, improved = {}, False
        for name, value in values.items():
            found, before = Chosen(step, value, losses[name]), self.best.get(name)
            gain = 1 if before is None else self._order(value, before.value)
            if before is None or gain > 0 or (gain == 0 and found.loss < before.loss):
                better[name] = found
            improved |= name == self.trained_on and gain > 0
        self.best |= better
        self.waited = 0 if improved else self.waited + 1
        return bool(better)

    @property
    def exhausted(self) -> bool:
        """True if the run has stopped improving for as long as its patience lasts."""
        return self.patience is not None and self.waited >= self.patience

    def steps(self) -> set[int]:
        """The updates whose weights a choice fell on."""
        return {chosen.step for chosen in self.best.values()}

    def _order(self, value: float, before: float) -> int:
        """1 if better, 0 if as good, -1 if worse; NaN is worse than any number."""
        now, then = (-math.inf if math.isnan(v) else self.sign * v for v in (value, before))
        return (now > then) - (now < then)

    def state_dict(self) -> dict[str, Any]:
        return {"best": {k: tuple(c) for k, c in self.best.items()}, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = {name: Chosen(*chosen) for name, chosen in state["best"].items()}
        self.waited = state["waited"]
