"""What a run on MiniGrid is: a memory, a family, and how the one learns in the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.tables.plan import check_options, digest, identity, plain_options
from riglstm.lab.tables.recipes import Row
from riglstm.lab.tasks.common import check_whole

TASK = "minigrid"
LAST = "last"
"""What chose the weights that a run is tested with: nothing, they are the last (P35)."""

TEST_SEED = 2**31
"""Of test episodes; seeds of runs are below it, so that no run is trained on them."""


ALL_AWAKE = {"num_cells": 4, "active_cells": 4, "views_per_cell": 4, "peers_per_cell": 3}
MEMORIES: dict[str, Row] = {
    "riglstm": Row("RigLSTM", "riglstm", 64, {**ALL_AWAKE, "soft_update": "printed"}),
    "rim": Row("RIM", "rim", 64, {"num_cells": 4, "active_cells": 2, "dropout": 0.0}),
    "rim3": Row("RIM, 3 active", "rim", 64, {"num_cells": 4, "active_cells": 3, "dropout": 0.0}),
    "lstm": Row("LSTM", "lstm", 64, {}),
    "gridlstm": Row("GridLSTM", "gridlstm", 64, {"num_cells": 4}),
    "brim": Row("BRIM", "brim", 64, {"num_cells": (4, 4), "active_cells": (2, 2), "dropout": 0.0}),
    "rmc": Row("RMC", "rmc", 64, {"num_slots": 4, "num_heads": 4}),
    "entnet": Row("EntNet", "entnet", 64, {"num_slots": 4}),
}
"""The paper's RigLSTM (K_h is capped at N - 1) and RIM; the others at their width."""


@dataclass(frozen=True)
class GridSpec:
    """A model, a family, and how the one learns in the other."""

    family: str
    """A key of `FAMILIES`."""
    model: str
    """A key of `riglstm.models.MODELS`."""
    hidden_size: int
    model_options: dict[str, Any]
    ppo: PPO
    seed: int
    episodes: int = 100
    """Of each level, in the test."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(
                f"the family must be one of {', '.join(FAMILIES)}, got {self.family!r}"
            )
        check_options(self.model, self.model_options)
        check_whole("seed", self.seed, low=0, high=TEST_SEED - 1)
        check_whole("episodes", self.episodes)
        self.ppo.whole(self.frames)

    precision: ClassVar[str] = "fp32"

    @property
    def name(self) -> str:
        """The memory's name among `MEMORIES`, or the model's with a mark: other sizes."""
        own = _sizes(self.model, self.hidden_size, self.model_options)
        for name, memory in MEMORIES.items():
            if own == _sizes(memory.model, memory.hidden_size, memory.options):
                return name
        return f"{self.model}-other"

    @property
    def frames(self) -> int:
        """To train for."""
        return FAMILIES[self.family].frames if self.ppo.frames is None else self.ppo.frames

    def resolved(self) -> dict[str, Any]:
        """As JSON has it; the keys are those of other runs."""
        return {
            "task": TASK,
            "task_options": {"family": self.family, "episodes": self.episodes},
            "model": self.model,
            "hidden_size": self.hidden_size,
            "model_options": plain_options(self.model, self.hidden_size, self.model_options),
            "fit": {**asdict(self.ppo), "frames": self.frames},
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GridSpec:
        """The inverse of `resolved`."""
        return cls(
            family=data["task_options"]["family"],
            model=data["model"],
            hidden_size=data["hidden_size"],
            model_options=dict(data["model_options"]),
            ppo=PPO(**data["fit"]),
            seed=data["seed"],
            episodes=data["task_options"]["episodes"],
        )

    def training(self) -> dict[str, Any]:
        """What the runs of one mean have in common: all but the seed, and how it is computed."""
        data = self.resolved()
        del data["seed"], data["fit"]["checkpoint_every"]
        # A run is trained for whole updates.
        data["fit"]["frames"] = self.ppo.whole(self.frames)
        data["model_options"].pop("backend", None)
        return identity(data)

    def recipe(self) -> str:
        """A digest of `training`: runs that have it are repetitions of each other."""
        return digest(self.training())

    def digest(self) -> str:
        """Eight hexadecimal digits of what makes it this run, for the name of a folder."""
        return digest(identity(self.resolved()))


def _sizes(model: str, hidden_size: int, options: Mapping[str, Any]) -> Any:
    """A memory, less the backend, which computes the same in another way."""
    found = plain_options(model, hidden_size, options)
    found.pop("backend", None)
    return model, hidden_size, found
