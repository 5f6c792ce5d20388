"""MiniGrid's families and their levels, easiest first: an agent learns on the first one alone.

The ids are Farama's. Single levels that belong to no family (FourRooms, LockedRoom, Unlock, ...)
are not here: there is nothing to generalise to.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import NamedTuple


class Family(NamedTuple):
    """Levels of one kind; an episode is over after the environment's own limit of steps (P34)."""

    title: str
    levels: dict[str, str]
    """The easiest first: gymnasium's id by the name in tables, `5x5`."""
    frames: int = 1_000_000
    """To train for, if nothing else is said (P35)."""
    actions: int = 7
    text: bool = False
    """The goal is told in words alone: without reading them success is near chance (P36)."""


def _levels(prefix: str, *names: str, version: str = "v0") -> dict[str, str]:
    return {name: f"MiniGrid-{prefix}{name}-{version}" for name in names}


_ROOMS = ("5x5", "6x6", "8x8", "16x16")
_CROSSINGS = ("S9N1", "S9N2", "S9N3", "S11N5")

FAMILIES: dict[str, Family] = {
    "empty": Family(
        "Empty", _levels("Empty-", *_ROOMS, "Random-5x5", "Random-6x6"), frames=100_000
    ),
    "doorkey": Family("DoorKey", _levels("DoorKey-", *_ROOMS)),
    "multiroom": Family(
        "MultiRoom",
        # Version 0 of the second is registered with six rooms.
        _levels("MultiRoom-", "N2-S4")
        | _levels("MultiRoom-", "N4-S5", version="v1")
        | _levels("MultiRoom-", "N6"),
    ),
    "simplecrossing": Family("SimpleCrossing", _levels("SimpleCrossing", *_CROSSINGS)),
    "lavacrossing": Family("LavaCrossing", _levels("LavaCrossing", *_CROSSINGS)),
    "lavagap": Family("LavaGap", _levels("LavaGap", "S5", "S6", "S7")),
    "distshift": Family("DistShift", _levels("DistShift", "1", "2")),
    "dynamicobstacles": Family(
        "Dynamic-Obstacles",
        _levels("Dynamic-Obstacles-", *_ROOMS, "Random-5x5", "Random-6x6"),
        actions=3,
    ),
    "redbluedoors": Family("RedBlueDoors", _levels("RedBlueDoors-", "6x6", "8x8")),
    "memory": Family(
        "Memory", _levels("Memory", "S7", "S9", "S11", "S13", "S13Random", "S17Random")
    ),
    "keycorridor": Family(
        "KeyCorridor",
        _levels("KeyCorridor", "S3R1", "S3R2", "S3R3", "S4R3", "S5R3", "S6R3"),
        frames=5_000_000,
    ),
    "obstructedmaze": Family(
        "ObstructedMaze",
        # In version 0 of the last four a blocking ball may cover the key.
        _levels("ObstructedMaze-", "1Dl", "1Dlh", "1Dlhb", "2Dl", "2Dlh")
        | _levels("ObstructedMaze-", "2Dlhb", "1Q", "2Q", "Full", version="v1"),
        frames=5_000_000,
    ),
    "fetch": Family("Fetch", _levels("Fetch-", "5x5-N2", "6x6-N2", "8x8-N3"), text=True),
    "gotodoor": Family("GoToDoor", _levels("GoToDoor-", "5x5", "6x6", "8x8"), text=True),
    "gotoobject": Family("GoToObject", _levels("GoToObject-", "6x6-N2", "8x8-N2"), text=True),
    "putnear": Family("PutNear", _levels("PutNear-", "6x6-N2", "8x8-N3"), text=True),
}

SHOWN = tuple(name for name, family in FAMILIES.items() if not family.text)
"""The families of a comparison, if nothing else is said: those whose goal can be seen."""


def available() -> None:
    """Raise where environments cannot be stepped: gymnasium or minigrid is missing."""
    if os.name == "nt":
        raise ValueError(
            "MiniGrid's workers are started as Linux and macOS do it, got Windows; use WSL there"
        )
    for name in ("gymnasium", "minigrid"):
        if not importlib.util.find_spec(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def chosen_levels(of: Family, names: Sequence[str]) -> dict[str, str]:
    """The levels of that name, in the family's order."""
    if not set(names) <= of.levels.keys():
        raise ValueError(
            f"levels of {of.title} must be some of {', '.join(of.levels)}, got {', '.join(names)}"
        )
    return {name: level for name, level in of.levels.items() if name in names}
