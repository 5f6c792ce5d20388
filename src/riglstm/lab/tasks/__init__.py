"""The tasks of the paper's comparison, by name, behind one contract: `riglstm.lab.tasks.base.Task`.

>>> from riglstm.lab.tasks import TASKS
>>> task = TASKS["copying"](M=2).open(torch.device("cpu"))
>>> tokens, targets = task.batch(seed=0, step=0)       # (T, B, M), made on the device
"""

from __future__ import annotations

from riglstm.lab.tasks.balls import Balls
from riglstm.lab.tasks.base import TaskConfig
from riglstm.lab.tasks.copying import Copying
from riglstm.lab.tasks.images import CIFAR10, MNIST, Fashion

TASKS: dict[str, type[TaskConfig]] = {
    "copying": Copying,
    "mnist": MNIST,
    "fashion": Fashion,
    "cifar": CIFAR10,
    "balls": Balls,
}

__all__ = ["TASKS"]
