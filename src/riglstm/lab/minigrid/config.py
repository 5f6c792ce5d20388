"""The options of recurrent PPO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from riglstm.lab.train.config import check_device

FROM_ZERO: tuple[str, Callable[[float], bool]] = ("from 0 on", lambda v: 0 <= v < math.inf)
ABOVE_ZERO: tuple[str, Callable[[float], bool]] = ("above 0", lambda v: 0 < v < math.inf)
SHARE: tuple[str, Callable[[float], bool]] = ("from 0 to 1", lambda v: 0 <= v <= 1)

NUMBERS = {
    "lr": ABOVE_ZERO,
    "adam_eps": FROM_ZERO,
    "gamma": SHARE,
    "gae_lambda": SHARE,
    "clip": FROM_ZERO,
    "value_coef": FROM_ZERO,
    "entropy_coef": FROM_ZERO,
    "clip_norm": ABOVE_ZERO,
}
"""Options that are numbers: which, in words, and whether one is."""


def check_count(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise ValueError where a number of things is none."""
    if or_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        ending = ", or none" if or_none else ""
        raise ValueError(f"{name} must be a whole number from 1 on{ending}, got {value!r}")


@dataclass(frozen=True)
class PPO:
    """Recurrent PPO; the defaults are those of the usual MiniGrid agents, but for P35."""

    frames: int | None = None
    """Frames to train for, at most; None: as many as the family is given."""
    envs: int = 16
    """Environments that are stepped together."""
    steps: int = 128
    """Steps in each of them between two updates."""
    window: int = 32
    """Steps that are backpropagated through."""
    epochs: int = 4
    """How often each frame is learned from."""
    minibatch: int = 2048
    """Frames in a minibatch; a multiple of `window`."""
    lr: float = 2e-3
    """Adam's step size."""
    adam_eps: float = 1e-8
    """Adam's ε."""
    gamma: float = 0.99
    """Discount of later rewards."""
    gae_lambda: float = 0.95
    """GAE's λ."""
    clip: float = 0.2
    """How far a ratio of probabilities, and a value, may move in one update."""
    value_coef: float = 0.5
    """Weight of the critic's loss."""
    entropy_coef: float = 0.01
    """Weight of the policy's entropy."""
    clip_norm: float = 0.5
    """Limit of the gradient's norm."""
    normalise: bool = False
    """Scale each minibatch's advantages to mean 0 and deviation 1."""
    workers: int | None = None
    """Processes that step environments; None: one to a core."""
    device: str = "auto"
    """Where to learn: auto (a GPU where there is one), cpu, cuda."""
    checkpoint_every: int = 20
    """Updates between two checkpoints; what a kill costs at most."""
    tensorboard: bool = True
    """Write TensorBoard's files too, where it is installed."""

    def __post_init__(self) -> None:
        check_device(self.device)
        for name in ("envs", "steps", "window", "epochs", "minibatch", "checkpoint_every"):
            check_count(name, getattr(self, name))
        for name in ("frames", "workers"):
            check_count(name, getattr(self, name), or_none=True)
        if self.steps % self.window or self.minibatch % self.window:
            raise ValueError(
                f"steps and minibatch must be multiples of window = {self.window}, "
                f"got {self.steps} and {self.minibatch}"
            )
        for name, (words, allowed) in NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
                raise ValueError(f"{name} must be a number {words}, got {value!r}")
        smallest = min(self.minibatch, self.batch, self.batch % self.minibatch or self.minibatch)
        if self.normalise and smallest == 1:
            raise ValueError(
                "normalise scales the advantages of a minibatch, and one frame has no deviation: "
                f"expected minibatches of 2 frames or more, got {self.batch} frames in minibatches "
                f"of {self.minibatch}; give another minibatch, or a window from 2 on"
            )

    @property
    def batch(self) -> int:
        """Frames of an update."""
        return self.envs * self.steps

    def whole(self, frames: int) -> int:
        """Of so many frames those of whole updates."""
        if frames < self.batch:
            raise ValueError(
                f"frames must be those of one update at least, {self.batch} = envs · steps, "
                f"got {frames}"
            )
        return frames - frames % self.batch
