"""How far a run of an agent is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm  # type: ignore[import-untyped]

from riglstm.lab.train.progress import Bar

SECONDS = 30.0
"""Between two lines, where there is no terminal."""


class FrameProgress(Bar):
    """Frames, frames a second, success rate and time left, on stderr; `shown` False: nothing."""

    def __init__(self, frames: int, done: int, shown: bool) -> None:
        self.frames, self.shown = frames, shown
        self.began, self.first, self.said = time.monotonic(), done, -SECONDS
        if shown and sys.stderr.isatty():
            self.bar = tqdm(
                total=frames, initial=done, unit="frame", unit_scale=True, dynamic_ncols=True
            )

    def move(self, frames: int, figures: Mapping[str, float]) -> None:
        """That many frames are done."""
        words = "no episode has ended yet"
        if "success" in figures:
            words = f"success {figures['success']:.0%}, {figures['steps']:.0f} steps"
        gone = time.monotonic() - self.began
        if self.bar is not None:
            self.bar.set_postfix_str(words, refresh=False)
            self.bar.update(frames - self.bar.n)
        elif self.shown and (gone - self.said > SECONDS or frames >= self.frames):
            self.said = gone
            speed = (frames - self.first) / gone
            left = max(0, self.frames - frames) / speed
            self.say(
                f"frame {frames:,} of {self.frames:,}: {words}; "
                f"{speed:,.0f} frames/s, {left / 60:.1f} min left"
            )


class Testing:
    """Says on stderr what is tested, and now and then how many episodes have ended."""

    def __init__(self, episodes: int, levels: int) -> None:
        print(f"testing {episodes} episodes of {levels} levels", file=sys.stderr, flush=True)
        self.said = time.monotonic()

    def __call__(self, ended: int, episodes: int) -> None:
        """So many of so many."""
        if time.monotonic() - self.said > SECONDS:
            self.said = time.monotonic()
            print(f"tested {ended:,} of {episodes:,} episodes", file=sys.stderr, flush=True)
