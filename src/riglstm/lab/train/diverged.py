"""A training that has left the numbers: what is said, and what to try."""

from __future__ import annotations

from pathlib import Path

from riglstm.lab.train.config import Fit


class Diverged(RuntimeError):  # noqa: N818
    """The loss, or a weight, is no longer a number; knows after how many updates and seconds."""

    def __init__(self, words: str, updates: int = 0, seconds: float = 0.0) -> None:
        super().__init__(words)
        self.updates, self.seconds = updates, seconds


def in_words(what: str, checkpoint: Path | None, config: Fit) -> str:
    """`what` is no number; `checkpoint`: the last one from before."""
    there = "there is no checkpoint from before it"
    if checkpoint is not None:
        there = f"the last good checkpoint is {checkpoint}"
    ways = [
        f"a smaller --lr (now {config.lr})",
        f"a longer --warmup (now {config.warmup})",
        "--clip-norm 1 (now none)"
        if config.clip_norm is None
        else f"a smaller --clip-norm (now {config.clip_norm})",
    ]
    if config.precision != "fp32":
        ways.append(f"--precision fp32 (now {config.precision})")
    return (
        f"{what} is not a finite number; {there}. Train anew, into another folder, with "
        f"{', '.join(ways[:-1])} or {ways[-1]}"
    )
