"""The state of torch's generators, of every process of a run: dropout draws from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from riglstm.lab.tasks.base import generator


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """What is drawn or seeded within it leaves no trace outside."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def sow(seed: int, device: torch.device) -> None:
    """Seed what `kept` keeps, and nothing else: torch's own seeds every GPU that it sees."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


class RandomState:
    """Seeds a run's generators, or sets them as a checkpoint has them."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.states: list[dict[str, Tensor]] = []
        """One for each process."""

    def start(self, rank: int, step: int) -> None:
        """Set the generators of this process, before the update that follows `step` updates."""
        sow(generator(torch.device("cpu"), self.seed, rank, step).initial_seed(), self.device)
        if rank < len(self.states):
            state = self.states[rank]
            torch.set_rng_state(state["cpu"])
            # A run may go on on another kind of device.
            if self.device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self.device)

    def gather(self, world: int) -> None:
        """Take the states of all processes, for a checkpoint."""
        own = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(self.device)
        self.states = [own]
        if world > 1:
            everyone: list[Any] = [None] * world
            torch.distributed.all_gather_object(everyone, own)
            self.states = everyone

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"states": self.states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.states = state["states"]
