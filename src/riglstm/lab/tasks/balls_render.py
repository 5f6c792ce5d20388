"""Bouncing balls as pictures: drawn as rows of bits, and kept on disk.

Shapes: B sequences, n balls, T frames of 64×64 pixels; packed frames are 512 bytes, eight pixels
in each, the leftmost in the lowest bit.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.lab.tasks.balls_physics import BOX, Scene, simulate, start
from riglstm.lab.tasks.base import SPLITS, generator
from riglstm.lab.tasks.files import DataError, alone_in, aside

VERSION = 2
"""Of all that decides what the pictures show; files of another version are not read."""
SIDE = 64
FRAME_BYTES = SIDE * SIDE // 8
WINDOW = 16
"""Rows that the largest ball can touch."""
CURTAIN = 28
"""Side of the curtain in pixels."""
CHUNK = 2000
"""Sequences that are made at a time; each such part has a generator of its own."""


class Sequences(NamedTuple):
    """Which sequences: everything that their pixels depend on."""

    scene: Scene
    split: str
    size: int
    frames: int
    seed: int

    @property
    def file(self) -> str:
        """The name of the file that keeps them."""
        scene = self.scene.name.replace("=", "").replace(",", "-")
        return f"{scene}_{self.split}_{self.size}x{self.frames}_seed{self.seed}_v{VERSION}.bits"

    @property
    def bytes(self) -> int:
        """Size of the packed pixels."""
        return self.size * self.frames * FRAME_BYTES


def draw(position: Tensor, radius: Tensor) -> Tensor:
    """Rows (T, B, 64) of 64 bits, for balls at (T, B, n, 2) of radii (B, n).

    A pixel is on where its centre is not farther from the centre of a ball than the radius: in
    each row of a ball that is one run of pixels.
    """
    scale = SIDE / BOX
    window = torch.arange(WINDOW)
    # The windows of balls at the lower edge reach below the frame.
    rows = torch.zeros(*position.shape[:2], SIDE + WINDOW, dtype=torch.int64)
    for k in range(radius.shape[1]):
        # In pixels, from the centre of the first one.
        x, y = (scale * position[:, :, k] - 0.5).unsqueeze(-1).unbind(-2)  # (T, B, 1)
        r = scale * radius[:, k].unsqueeze(-1)
        row = (y - r).ceil().clamp(0, SIDE).long() + window  # (T, B, 16)
        square = r.square() - (y - row).square()
        half = square.clamp(min=0).sqrt()
        left, right = (x - half).ceil().long().clamp(min=0), (x + half).floor().long()
        run = ((1 << (right - left + 1).clamp(min=0)) - 1) << left
        run = torch.where(square >= 0, run, 0)
        rows.scatter_(2, row, rows.gather(2, row) | run)
    return rows[..., :SIDE]


def hide(rows: Tensor, gen: torch.Generator) -> Tensor:
    """Paint a square of background over rows (T, B, 64), at one place in each sequence (P29)."""
    left, top = torch.randint(SIDE - CURTAIN + 1, (2, rows.shape[1], 1), generator=gen)
    y = torch.arange(SIDE)
    behind = (y >= top) & (y < top + CURTAIN)
    return rows & ~torch.where(behind, ((1 << CURTAIN) - 1) << left, 0)


def pack(rows: Tensor) -> Tensor:
    """Rows (T, B, 64) to packed sequences (B, T, 512)."""
    return rows.transpose(0, 1).contiguous().view(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Packed frames (..., 512) to pixels (..., 64, 64) of 0 and 1, in float32."""
    bit = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(-1).bitwise_right_shift(bit).bitwise_and_(1)
    return bits.to(torch.float32).view(*packed.shape[:-1], SIDE, SIDE)


def film(wanted: Sequences) -> Iterator[Tensor]:
    """Packed sequences, some at a time: (up to 2000, T, 512)."""
    scene, split = wanted.scene, SPLITS.index(wanted.split)
    for first in range(0, wanted.size, CHUNK):
        gen = generator(torch.device("cpu"), wanted.seed, split, *scene, first)
        world = start(scene, min(CHUNK, wanted.size - first), gen)
        rows = draw(simulate(world, wanted.frames)[0], world.radius)
        yield pack(hide(rows, gen) if scene.curtain else rows)


def load(
    wanted: Sequences,
    cache: Path,
    show: Callable[[str], None] | None = None,
    named: Path | None = None,
) -> Tensor:
    """Packed sequences (size, T, 512): from the folder `named`, or else from `cache`.

    What neither has is made, and kept in `cache`; the folder `named` is the user's.
    """
    show = show or _quiet
    for folder in dict.fromkeys((named or cache, cache)):
        if (found := _found(wanted, folder / wanted.file, show)) is not None:
            return found
    path = cache / wanted.file
    try:
        with alone_in(cache, show) as alone:
            if alone:
                for old in cache.glob("*.part"):
                    old.unlink(missing_ok=True)
                # Another process may have made them while this one waited.
                if (found := _found(wanted, path, _quiet)) is not None:
                    return found
            return _make(wanted, path, show)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        room = f"make room for {wanted.bytes / 1e6:,.0f} MB" if full else "check its permissions"
        raise DataError(
            f"{path} cannot be written ({error.strerror}), and no part of it was left; "
            f"{room}, or choose another cache folder with XDG_CACHE_HOME"
        ) from error


def _quiet(line: str) -> None:
    """Say nothing."""


def _found(wanted: Sequences, path: Path, show: Callable[[str], None]) -> Tensor | None:
    try:
        return read(wanted, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check its permissions, or delete it, and "
            "it is made again"
        ) from error
    except DataError as error:
        show(f"{error}; it is made again")
        return None


def read(wanted: Sequences, path: Path) -> Tensor:
    """The packed sequences of a file, its size and checksum tested."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        expected = wanted.bytes + hashlib.sha256().digest_size
        if size != expected:
            raise DataError(f"{path} is damaged: expected {expected:,} bytes, got {size:,}")
        data = bytearray(wanted.bytes)
        file.readinto(data)
        checksum = file.read()
    if _digest(wanted, data) != checksum:
        raise DataError(f"{path} is damaged: its pixels do not have the checksum that it ends with")
    return _tensor(wanted, data)


def _make(wanted: Sequences, path: Path, show: Callable[[str], None]) -> Tensor:
    free = shutil.disk_usage(path.parent).free
    if free < wanted.bytes:
        raise OSError(errno.ENOSPC, f"only {free / 1e6:,.0f} MB are free on the disk")
    show(
        f"making {wanted.size:,} {wanted.split} sequences of {wanted.scene.name}, "
        f"{wanted.bytes / 1e6:,.0f} MB, in {path.parent}"
    )
    data = bytearray(wanted.bytes)
    sequences, done = _tensor(wanted, data), 0
    for some in film(wanted):
        sequences[done : done + len(some)] = some
        done += len(some)
    part = aside(path)
    try:
        with part.open("wb") as file:
            file.write(data)
            file.write(_digest(wanted, data))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return sequences


def _digest(wanted: Sequences, data: bytearray) -> bytes:
    # With the name, so that a file that was renamed is not taken for another.
    digest = hashlib.sha256(wanted.file.encode())
    digest.update(data)
    return digest.digest()


def _tensor(wanted: Sequences, data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).view(wanted.size, wanted.frames, FRAME_BYTES)
