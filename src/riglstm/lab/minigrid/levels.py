"""MiniGrid's families and their levels, easiest first: an agent learns on the first one alone.

The ids are Farama's. Single levels that belong to no family (FourRooms, LockedRoom, Unlock, ...)
are not here: there is nothing to generalise to.
"""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple


class Level(NamedTuple):
    """One level of a family."""

    name: str
    """As tables name it: `5x5`."""
    id: str
    """As gymnasium names it."""
    limit: int
    """Steps after which an episode counts as not solved (P34): the environment's own."""


class Family(NamedTuple):
    """Levels of one kind."""

    title: str
    levels: tuple[Level, ...]
    frames: int = 1_000_000
    """To train for, if nothing else is said (P35)."""
    actions: int = 7
    text: bool = False
    """The goal is told in words alone: without reading them success is near chance (P36)."""


def _levels(prefix: str, *levels: tuple[str, int], version: str = "v0") -> tuple[Level, ...]:
    return tuple(Level(name, f"MiniGrid-{prefix}{name}-{version}", limit) for name, limit in levels)


def _square(prefix: str, sizes: tuple[int, ...], factor: int) -> tuple[Level, ...]:
    """Levels of s × s tiles, with factor · s² steps."""
    return _levels(prefix, *((f"{s}x{s}", factor * s * s) for s in sizes))


_CROSSINGS = (("S9N1", 324), ("S9N2", 324), ("S9N3", 324), ("S11N5", 484))

FAMILIES: dict[str, Family] = {
    "empty": Family(
        "Empty",
        (
            *_square("Empty-", (5, 6, 8, 16), 4),
            *_levels("Empty-", ("Random-5x5", 100), ("Random-6x6", 144)),
        ),
        frames=100_000,
    ),
    "doorkey": Family("DoorKey", _square("DoorKey-", (5, 6, 8, 16), 10)),
    "multiroom": Family(
        "MultiRoom",
        (
            *_levels("MultiRoom-", ("N2-S4", 40)),
            # Version 0 of this level is registered with six rooms.
            *_levels("MultiRoom-", ("N4-S5", 80), version="v1"),
            *_levels("MultiRoom-", ("N6", 120)),
        ),
    ),
    "simplecrossing": Family("SimpleCrossing", _levels("SimpleCrossing", *_CROSSINGS)),
    "lavacrossing": Family("LavaCrossing", _levels("LavaCrossing", *_CROSSINGS)),
    "lavagap": Family("LavaGap", _levels("LavaGap", ("S5", 100), ("S6", 144), ("S7", 196))),
    "distshift": Family("DistShift", _levels("DistShift", ("1", 252), ("2", 252))),
    "dynamicobstacles": Family(
        "Dynamic-Obstacles",
        (
            *_square("Dynamic-Obstacles-", (5, 6, 8, 16), 4),
            *_levels("Dynamic-Obstacles-", ("Random-5x5", 100), ("Random-6x6", 144)),
        ),
        actions=3,
    ),
    "redbluedoors": Family("RedBlueDoors", _square("RedBlueDoors-", (6, 8), 20)),
    "memory": Family(
        "Memory",
        _levels(
            "Memory",
            *(("S7", 245), ("S9", 405), ("S11", 605), ("S13", 845)),
            *(("S13Random", 845), ("S17Random", 1445)),
        ),
    ),
    "keycorridor": Family(
        "KeyCorridor",
        _levels(
            "KeyCorridor",
            *(("S3R1", 270), ("S3R2", 270), ("S3R3", 270)),
            *(("S4R3", 480), ("S5R3", 750), ("S6R3", 1080)),
        ),
        frames=5_000_000,
    ),
    "obstructedmaze": Family(
        "ObstructedMaze",
        (
            *_levels("ObstructedMaze-", ("1Dl", 288), ("1Dlh", 288), ("1Dlhb", 288)),
            *_levels("ObstructedMaze-", ("2Dl", 576), ("2Dlh", 576)),
            # In version 0 of these a blocking ball may cover the key.
            *_levels("ObstructedMaze-", ("2Dlhb", 576), ("1Q", 720), version="v1"),
            *_levels("ObstructedMaze-", ("2Q", 1584), ("Full", 3600), version="v1"),
        ),
        frames=5_000_000,
    ),
    "fetch": Family(
        "Fetch",
        _levels("Fetch-", ("5x5-N2", 125), ("6x6-N2", 180), ("8x8-N3", 320)),
        text=True,
    ),
    "gotodoor": Family("GoToDoor", _square("GoToDoor-", (5, 6, 8), 4), text=True),
    "gotoobject": Family(
        "GoToObject",
        _levels("GoToObject-", ("6x6-N2", 180), ("8x8-N2", 320)),
        text=True,
    ),
    "putnear": Family(
        "PutNear",
        _levels("PutNear-", ("6x6-N2", 30), ("8x8-N3", 40)),
        text=True,
    ),
}

SHOWN = tuple(name for name, family in FAMILIES.items() if not family.text)
"""The families of a comparison, if nothing else is said: those whose goal can be seen."""


def available() -> None:
    """Raise where environments cannot be stepped: gymnasium or minigrid is missing."""
    if os.name == "nt":
        raise ValueError(
            "MiniGrid's workers share memory as Linux and macOS do, got Windows; use WSL there"
        )
    for name in ("gymnasium", "minigrid"):
        if not importlib.util.find_spec(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def family(name: str) -> Family:
    """A family by its name."""
    if name not in FAMILIES:
        raise ValueError(f"the family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def chosen_levels(of: Family, names: tuple[str, ...] | None) -> tuple[Level, ...]:
    """The levels of that name, in the family's order; None: all."""
    if names is None:
        return of.levels
    known = tuple(level.name for level in of.levels)
    if not names or not set(names) <= set(known):
        raise ValueError(
            f"levels of {of.title} must be some of {', '.join(known)}, got "
            f"{', '.join(names) or 'none'}"
        )
    return tuple(level for level in of.levels if level.name in names)
