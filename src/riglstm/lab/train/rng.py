"""torch's random generators, which dropout draws from: forked, seeded, saved and restored."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context that leaves the generators of the CPU and of `device` as it found them."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def seed_rng(seed: int, device: torch.device) -> None:
    """Seed what `fork_rng` restores, and nothing else: torch's own seeds every GPU it sees."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the generators of the CPU and of `device`, for a checkpoint."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators as a checkpoint has them."""
    torch.set_rng_state(state["cpu"])
    # A run may be resumed on another kind of device.
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
