"""Films of bouncing balls: discs that meet walls and each other without loss, drawn as bits.

Shapes: B sequences, n places for balls, P = n·(n − 1)/2 pairs of them, T frames of 64×64 pixels;
packed frames are 512 bytes, eight pixels in each, the leftmost in the lowest bit. Lengths are in
units of a tenth of the box, times in frames.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.lab.tasks.base import SPLITS, generator
from riglstm.lab.tasks.datasets import DataError, Show, alone_in

BOX = 10.0
"""Side of the box."""
SMALL, LARGE = (0.8, 1.0), (1.0, 6.0)
"""Radius and mass of the two kinds of balls, equally frequent."""
CURTAIN_RADIUS = 1.2
"""Of the balls behind a curtain, which are all alike."""
SPEED, CURTAIN_SPEED = 1 / 3, 1 / 2
"""Root of the summed squares of all speeds at the start."""
MOST, MOST_CURTAIN = 9, 6
"""Balls for which non-overlapping starts are still found by drawing."""
REST = 1e-12
"""Pairs that close in more slowly (times their distance) are at rest: rounding could hold them."""
CANDIDATES = 20_000
"""Starts that are drawn at a time."""
NAMED = {"4": "balls=4", "678": "balls=6-8", "curtain": "balls=3,curtain"}
"""The paper's three sets."""

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


class Scene(NamedTuple):
    """How many balls, and whether a curtain hides some of the picture."""

    low: int
    high: int
    curtain: bool

    @property
    def name(self) -> str:
        """The same for all ways to write it."""
        count = str(self.low) if self.low == self.high else f"{self.low}-{self.high}"
        return f"balls={count}" + ",curtain" * self.curtain


def scene(condition: str) -> Scene:
    """Read a condition: a name of the paper, or `balls=5`, `balls=6-8`, `balls=3,curtain`."""
    form = r"balls=(\d{1,3})(?:-(\d{1,3}))?(,curtain)?"
    found = re.fullmatch(form, NAMED.get(condition, condition))
    if found is None:
        raise ValueError(
            f"a condition of the balls must be one of {', '.join(NAMED)}, or like balls=5, "
            f"balls=6-8 or balls=3,curtain, got {condition!r}"
        )
    low, curtain = int(found[1]), found[3] is not None
    high = low if found[2] is None else int(found[2])
    most = MOST_CURTAIN if curtain else MOST
    if not 1 <= low <= high <= most:
        kind = "with a curtain, whose balls are larger, " if curtain else ""
        raise ValueError(
            f"the number of balls must be {kind}from 1 to {most}, the lower one first, "
            f"got {condition!r}; more do not find room by chance"
        )
    return Scene(low, high, curtain)


def written(condition: str) -> str:
    """The one way to write a condition: the paper's name, where it has one."""
    name = scene(condition).name
    return next((short for short, long in NAMED.items() if long == name), name)


class World(NamedTuple):
    """Balls at one time; those that a sequence lacks have no radius and rest far from the box."""

    position: Tensor
    """(B, n, 2): x to the right, y down."""
    velocity: Tensor
    """(B, n, 2)."""
    radius: Tensor
    """(B, n)."""
    mass: Tensor
    """(B, n)."""


def start(scene: Scene, size: int, gen: torch.Generator) -> World:
    """Worlds in which no two balls overlap, with random velocities of a fixed total."""
    n = scene.high
    count = torch.randint(scene.low, scene.high + 1, (size, 1), generator=gen)
    present = torch.arange(n) < count  # (B, n)
    large = torch.rand(size, n, generator=gen) < 0.5
    kinds = torch.tensor((SMALL, LARGE), dtype=torch.float64)[large.long()]  # (B, n, 2)
    radius, mass = kinds.unbind(-1)
    if scene.curtain:
        radius, mass = torch.full_like(radius, CURTAIN_RADIUS), torch.ones_like(mass)
    radius = radius * present
    far = -100 * BOX * torch.arange(1, n + 1, dtype=torch.float64).view(n, 1)
    position = torch.where(present.unsqueeze(-1), place(radius, gen), far)
    velocity = torch.randn(size, n, 2, generator=gen, dtype=torch.float64)
    velocity *= present.unsqueeze(-1)
    speed = CURTAIN_SPEED if scene.curtain else SPEED
    velocity *= speed / velocity.norm(dim=(1, 2), keepdim=True)
    return World(position, velocity, radius, mass)


def place(radius: Tensor, gen: torch.Generator) -> Tensor:
    """Positions (B, n, 2), drawn anew for all balls of a sequence until none overlap."""
    size, n = radius.shape
    position = torch.empty(size, n, 2, dtype=torch.float64)
    i, j = torch.triu_indices(n, n, 1)
    reach = (radius[:, i] + radius[:, j]).square()  # (B, P)
    reach *= (radius[:, i] > 0) & (radius[:, j] > 0)
    todo = torch.arange(size)
    while len(todo):
        tries = max(1, CANDIDATES // len(todo))
        drawn = torch.rand(tries, len(todo), n, 2, generator=gen, dtype=torch.float64)
        r = radius[todo].unsqueeze(-1)
        drawn = r + (BOX - 2 * r) * drawn
        gap = (drawn[..., i, :] - drawn[..., j, :]).square().sum(-1)
        fits = (gap >= reach[todo]).all(-1)  # (tries, B)
        found, first = fits.any(0), fits.byte().argmax(0)
        position[todo[found]] = drawn[first[found], found.nonzero().squeeze(1)]
        todo = todo[~found]
    return position


def simulate(world: World, frames: int) -> tuple[Tensor, World]:
    """Positions (T, B, n, 2) in that many frames, the start first, and the world in the last one.

    Each collision happens at its own time (P28). Between two of them balls run straight, so every
    sequence goes from one to the next by its own clock, and leaves the frames that lie between.
    """
    size, n = world.radius.shape
    positions = world.position.new_empty(frames, size, n, 2)
    x, v = world.position.clone(), world.velocity.clone()
    clock = x.new_zeros(size)
    times = torch.arange(frames, dtype=x.dtype).unsqueeze(1)  # (T, 1)
    rows = torch.arange(size)
    while len(rows):
        now = World(x[rows], v[rows], world.radius[rows], world.mass[rows])
        wait, event = next_event(now)
        since = times - clock[rows]  # (T, B)
        frame, row = ((since >= 0) & (since < wait)).nonzero().unbind(1)
        run = now.velocity[row] * since[frame, row].view(-1, 1, 1)
        positions[frame, rows[row]] = now.position[row] + run
        hit = since[-1] >= wait
        rows, wait, event = rows[hit], wait[hit], event[hit]
        x[rows] += v[rows] * wait.view(-1, 1, 1)
        clock[rows] += wait
        now = World(x[rows], v[rows], world.radius[rows], world.mass[rows])
        v[rows] = collide(now, event)
    return positions, world._replace(position=positions[-1], velocity=v)


def next_event(world: World) -> tuple[Tensor, Tensor]:
    """When the next collision of each sequence happens, and which: (B,) each.

    Events are numbered: ball k at a wall of axis a is 2·k + a, pairs follow in the order of
    `torch.triu_indices`. What moves apart does not collide, even if rounding lets it overlap.
    """
    x, v, r = world.position, world.velocity, world.radius.unsqueeze(-1)
    edge = torch.where(v > 0, BOX - r, r)
    wall = torch.where(v == 0, torch.inf, (edge - x) / v)  # (B, n, 2)
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)
    p, w = (s.index_select(1, j) - s.index_select(1, i) for s in (x, v))  # (B, P, 2)
    closing = -(p * w).sum(-1)  # (B, P)
    reach = world.radius.index_select(1, i) + world.radius.index_select(1, j)
    gap = p.square().sum(-1) - reach.square()
    inside = closing.square() - w.square().sum(-1) * gap
    # The smaller root of the quadratic, in the form that does not cancel.
    pair = gap / (closing + inside.clamp(min=0).sqrt())
    pair = torch.where((closing > REST) & (inside > 0), pair, torch.inf)
    return torch.cat((wall.flatten(1), pair), dim=1).clamp(min=0).min(dim=1)


def collide(world: World, event: Tensor) -> Tensor:
    """Velocities (B, n, 2) after one event in each sequence."""
    x, v, m = world.position, world.velocity.clone(), world.mass
    n = x.shape[1]
    wall = event < 2 * n
    rows = wall.nonzero().squeeze(1)
    ball, axis = event[wall] // 2, event[wall] % 2
    v[rows, ball, axis] *= -1
    rows = (~wall).nonzero().squeeze(1)
    i, j = torch.triu_indices(n, n, 1)[:, event[~wall] - 2 * n]
    normal = torch.nn.functional.normalize(x[rows, j] - x[rows, i], dim=-1)
    v_i, v_j = ((v[rows, k] * normal).sum(-1) for k in (i, j))
    m_i, m_j = m[rows, i], m[rows, j]
    # v_i' = ((m_i - m_j) v_i + 2 m_j v_j) / (m_i + m_j) along the line of the centres, as a change.
    push = (2 * (v_j - v_i) / (m_i + m_j)).unsqueeze(-1) * normal
    v[rows, i] += m_j.unsqueeze(-1) * push
    v[rows, j] -= m_i.unsqueeze(-1) * push
    return v


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


def load(wanted: Sequences, cache: Path, show: Show | None = None) -> Tensor:
    """Packed sequences (size, T, 512); what `cache` does not have is made, and kept there."""
    show = show or (lambda line: None)
    path = cache / wanted.file
    try:
        if (found := _read(wanted, path)) is not None:
            return found
        with alone_in(cache, show):
            # Another process may have made them while this one waited.
            found = _read(wanted, path)
            return _make(wanted, path, show) if found is None else found
    except OSError as error:
        raise DataError(
            f"{path} cannot be read or made ({error.strerror}), and no part of it was left; make "
            f"room for {wanted.bytes / 1e6:,.0f} MB, check permissions, or choose another cache "
            "folder with XDG_CACHE_HOME"
        ) from error


def _read(wanted: Sequences, path: Path) -> Tensor | None:
    """The packed sequences of a file; None where it is missing or damaged."""
    try:
        with path.open("rb") as file:
            data = bytearray(wanted.bytes)
            file.readinto(data)
            checksum = file.read()
    except FileNotFoundError:
        return None
    return _tensor(wanted, data) if checksum == _digest(wanted, data) else None


def _make(wanted: Sequences, path: Path, show: Show) -> Tensor:
    if path.exists():
        show(f"{path} is damaged: expected films and their checksum, got another; it is made again")
    if shutil.disk_usage(path.parent).free < wanted.bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    show(
        f"making {wanted.size:,} {wanted.split} sequences of {wanted.scene.name}, "
        f"{wanted.bytes / 1e6:,.0f} MB, in {path.parent}"
    )
    data = bytearray(wanted.bytes)
    sequences, done = _tensor(wanted, data), 0
    for some in film(wanted):
        sequences[done : done + len(some)] = some
        done += len(some)
    # One that a kill leaves is written over: only the holder of the folder's lock makes films.
    part = path.with_name(f"{path.name}.part")
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
