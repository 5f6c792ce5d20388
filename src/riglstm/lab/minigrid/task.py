"""MiniGrid as a task: its options, and the world that an agent learns in and is tested in."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from riglstm.lab.minigrid.levels import FAMILIES, available
from riglstm.lab.minigrid.network import FEATURES, ActorCritic
from riglstm.lab.tasks.base import Metric
from riglstm.lab.tasks.common import Count, Options
from riglstm.models.base import Core

TEST_SEED = 2**31
"""Of test episodes; seeds of runs are below it, so that no run is trained on them."""


@dataclass(frozen=True)
class MiniGrid(Options):
    """What the agent learns in."""

    family: str = "doorkey"
    """One of MiniGrid's families; `riglstm list` has all."""
    episodes: Count = 100
    """Episodes of each level in the test."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.family not in FAMILIES:
            near = difflib.get_close_matches(self.family, FAMILIES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}{hint}"
            )

    def open(
        self,
        device: torch.device,
        data_dir: Path | None = None,
        show: Callable[[str], None] | None = None,
    ) -> Any:
        """The family as a `World`, which is a `Task` but for batches: it has no data."""
        return World(self, device)


class World:
    """A family; its easiest level is the condition of training, all are those of the test.

    `riglstm.lab.minigrid.training` has what an agent does here.
    """

    input_size = FEATURES
    metric = Metric("success", higher_is_better=True)

    def __init__(self, config: MiniGrid, device: torch.device) -> None:
        self.family, self.episodes, self.device = FAMILIES[config.family], config.episodes, device
        self.conditions = tuple(self.family.levels)
        self.trained_on = self.conditions[0]

    def ready(self) -> None:
        """Raise where environments cannot be stepped."""
        available()

    def network(self, core: Core) -> ActorCritic:
        """Encoder, memory and heads."""
        return ActorCritic(core, self.family.actions)
