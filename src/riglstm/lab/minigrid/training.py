"""Training an agent in a run's folder: log, checkpoints, stopping and going on, as other tasks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from riglstm.lab.minigrid.envs import Environments, WorkerDied
from riglstm.lab.minigrid.network import ActorCritic
from riglstm.lab.minigrid.ppo import PPO, Agent
from riglstm.lab.train.checkpoints import Checkpoints
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.progress import Bar, Log
from riglstm.lab.train.stopping import Diverged, Interrupted, StopNow, StopRequest
from riglstm.lab.train.weights import save_weights

__all__ = ["Diverged", "Interrupted", "Trained", "train"]

SECONDS = 30.0
"""Between two lines, where there is no terminal."""


class Trained(NamedTuple):
    """What a training gave; the network holds its last weights."""

    updates: int
    frames: int
    seconds: float
    """Of all the sessions that the run took."""


def train(
    net: ActorCritic,
    level: str,
    frames: int,
    config: PPO,
    seed: int,
    folder: RunFolder,
    *,
    resume: bool = False,
    progress: bool = True,
    again: str = "",
) -> Trained:
    """Train `net` in place in the level of that id, for `frames` frames, less what is no update.

    As `riglstm.lab.train.loop.fit`; raises the same, and WorkerDied.
    """
    frames = config.whole(frames)
    shapes = {name: list(weight.shape) for name, weight in net.state_dict().items()}
    config_json = folder.read_json(folder.config) if folder.config.exists() else {}
    checkpoints = Checkpoints(folder, {"config": config_json, "weights": shapes})
    start = checkpoints.latest(print, resume=resume)
    folder.sweep()
    with (
        Environments([level] * config.envs, seed, workers=config.workers) as envs,
        StopRequest(speaks=True) as request,
    ):
        agent = Agent(net, envs, config, seed)
        seconds = 0.0
        if start is not None:
            agent.load_state_dict(start["agent"])
            seconds = float(start["seconds"])
        shown = FrameProgress(frames, agent.frames, progress)
        record = Log(folder, agent.frames, config.tensorboard)
        began, saved = time.monotonic(), agent.updates

        def save() -> None:
            record.flush()
            state = {"agent": agent.state_dict(), "seconds": seconds + time.monotonic() - began}
            checkpoints.save(agent.updates, state)

        try:
            try:
                while agent.frames < frames:
                    figures = agent.update()
                    _check(figures, agent, saved)
                    record.add(agent.frames, figures)
                    shown.move(agent.frames, figures)
                    if agent.updates % config.checkpoint_every == 0 or request.made:
                        save()
                        saved = agent.updates
                    if request.made and agent.frames < frames:
                        raise Interrupted(_words("stopped, and saved", agent, saved, again))
                # So that a stop during the test does not cost the training.
                save()
                saved = agent.updates
                save_weights(net, folder.weights_of(agent.frames))
            finally:
                shown.close()
                record.close()
        except StopNow:
            raise Interrupted(
                _words("stopped at once, without saving", agent, saved, again)
            ) from None
        except WorkerDied as error:
            raise WorkerDied(_words(str(error), agent, saved, again)) from None
        if request.made:
            # Too late for this training; whoever asked wants no tests now either.
            how = f"; go on with: {again}" if again else ""
            raise Interrupted(f"trained to the end, and saved; not tested yet{how}")
        return Trained(agent.updates, agent.frames, seconds + time.monotonic() - began)


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


def _check(figures: dict[str, float], agent: Agent, saved: int) -> None:
    if all(math.isfinite(value) for value in figures.values()) and all(
        bool(torch.isfinite(p).all()) for p in agent.net.parameters()
    ):
        return
    there = f"the last checkpoint is of update {saved}" if saved else "there is no checkpoint"
    raise Diverged(
        f"a loss or a weight is not a number after update {agent.updates}; {there}; "
        "try a smaller --lr, or another --seed"
    )


def _words(how: str, agent: Agent, saved: int, again: str) -> str:
    there = f"the last checkpoint is of update {saved}" if saved else "there is no checkpoint yet"
    return f"{how}; {there}" + (f"; go on with: {again}" if again else "")
