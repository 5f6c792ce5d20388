"""Tasks by name, behind one contract (`base.Task`): ours, those of packages, those of scripts.

>>> from riglstm.lab import tasks
>>> task = tasks.find("copying")(M=2).open(torch.device("cpu"))
>>> tokens, targets = task.batch(seed=0, step=0)       # (T, B, M), made on the device

A package offers a task of its own as an entry point of the group `riglstm.tasks`; a script or a
notebook calls `register`. `docs/own-tasks.md` shows both.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from riglstm.lab.tasks.balls import Balls
from riglstm.lab.tasks.base import TaskConfig
from riglstm.lab.tasks.copying import Copying
from riglstm.lab.tasks.images import CIFAR10, MNIST

TASKS: dict[str, type[TaskConfig]] = {
    "copying": Copying,
    "mnist": MNIST,
    "cifar": CIFAR10,
    "balls": Balls,
}
"""Ours alone; `find` knows others too."""

MINIGRID = "minigrid"
"""A world of agents, trained in another way: `riglstm.lab.minigrid`."""
TAKEN = (*TASKS, MINIGRID)
"""Names that no other task can have."""

_registered: dict[str, type[TaskConfig]] = {}


def find(name: str) -> type[TaskConfig]:
    """The options of a task; raises ValueError where there is none, or where it is broken."""
    return TASKS.get(name) or _registered.get(name) or _installed(name)


def names() -> list[str]:
    """What `find` can be asked for: our tasks, registered ones, those of packages; none loaded."""
    theirs = sorted(point.name for point in offered() if point.name not in TAKEN)
    return list(dict.fromkeys((*TASKS, *_registered, *theirs)))


def register(name: str, options: type[TaskConfig]) -> None:
    """Make a task known in this process, for scripts and notebooks that are no packages.

    A cell that is run again registers its class again, and the last one counts.
    """
    if name in TAKEN:
        raise ValueError(
            f"a task's name must be new, got {name!r}, which riglstm has; take another name"
        )
    _registered[name] = options


def offered() -> EntryPoints:
    """The tasks of all packages that are installed; none is loaded."""
    return entry_points(group="riglstm.tasks")


@functools.cache
def _installed(name: str) -> type[TaskConfig]:
    """The options of a package's task, loaded once."""
    points = offered().select(name=name)
    if not points:
        raise ValueError(
            f"the task must be one of {', '.join(names())}, got {name!r}; one of your own is "
            "found once its package is installed, or after riglstm.lab.tasks.register"
        )
    owners = " and ".join(f"{_owner(point)} from {point.value}" for point in points)
    try:
        # Of two packages neither is taken: which one is the first would be chance.
        (point,) = points
        options: type[TaskConfig] = point.load()
        fields(options)  # type: ignore[arg-type]
    # Whatever a package does when it is imported: its task alone is lost.
    except Exception as error:
        raise ValueError(
            f"the task {name!r} of {owners} cannot be loaded: {type(error).__name__}: {error}; "
            "repair or uninstall that package"
        ) from error
    return options


def _owner(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


__all__ = ["MINIGRID", "TASKS", "find", "names", "offered", "register"]
