"""Training an agent in a run's folder, and testing it on levels of its family.

A test plays a number of episodes of each level, by drawn and by most probable actions. The episodes
are the same for every agent: their seeds depend on an episode's number alone. So does the noise of
the drawn actions, among tests of the same number of episodes: it is drawn for all of them together,
step by step, and with other numbers of episodes it is other noise.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from riglstm.lab.minigrid.envs import SKIP, Environments
from riglstm.lab.minigrid.network import ActorCritic, Frames
from riglstm.lab.minigrid.ppo import PPO, Agent, small_products
from riglstm.lab.minigrid.task import TEST_SEED, World
from riglstm.lab.tasks.base import generator
from riglstm.lab.tasks.common import CPU
from riglstm.lab.train.checkpoints import Checkpoints, Chosen, Fitted, save_weights
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.progress import SECONDS, Log, Progress, say
from riglstm.lab.train.stopping import (
    NEVER,
    Deadline,
    Diverged,
    Interrupted,
    OutOfTime,
    StopNow,
    StopRequest,
    go_on,
    untested,
)
from riglstm.models.episodes import stepper


def train(
    net: ActorCritic,
    world: World,
    config: PPO,
    seed: int,
    folder: RunFolder,
    *,
    again: str = "",
    deadline: Deadline = NEVER,
) -> Fitted:
    """Train `net` in place on its family's easiest level; the last weights are chosen (P35).

    As `riglstm.lab.train.loop.fit`, in a folder that is begun; raises the same, and WorkerDied.
    """
    assert config.frames is not None
    frames, level = config.whole(config.frames), world.family.levels[world.trained_on]
    checkpoints = Checkpoints(folder, net)
    start = checkpoints.latest()
    with (
        Environments([level] * config.envs, seed, workers=config.workers) as envs,
        StopRequest(speaks=True, deadline=deadline) as request,
    ):
        agent = Agent(net, envs, config, seed)
        if start is not None:
            agent.load_state_dict(start["agent"])
        # As if all sessions were one.
        began = time.monotonic() - (start["seconds"] if start is not None else 0.0)
        saved, late = agent.updates, False

        def kept() -> str:
            if not saved:
                return "there is no checkpoint yet"
            return f"the last checkpoint is of update {saved}"

        try:
            with (
                contextlib.closing(Log(folder, agent.frames, config.tensorboard)) as log,
                contextlib.closing(Progress(frames, "frame", agent.frames)) as progress,
            ):
                while agent.frames < frames:
                    acting = time.monotonic()
                    figures = agent.update()
                    if not _finite(figures, net):
                        raise Diverged(
                            f"a loss or a weight is not a number after update {agent.updates}; "
                            f"{kept()}; try a smaller --lr, or another --seed"
                        )
                    log.add(agent.frames, figures)
                    progress.move(agent.frames, _said(figures))
                    # A signal may come between two looks at it.
                    late = request.deadline.near(time.monotonic() - acting)
                    last, stop = agent.frames == frames, request.made
                    # The last one, so that a stop during the test does not cost the training.
                    if last or stop or late or agent.updates % config.checkpoint_every == 0:
                        log.flush()
                        seconds = time.monotonic() - began
                        state = {"agent": agent.state_dict(), "seconds": seconds}
                        checkpoints.save(agent.updates, state)
                        saved = agent.updates
                    if (stop or late) and not last:
                        kind = Interrupted if stop else OutOfTime
                        raise kind(go_on(f"stopped, and saved; {kept()}", again))
            save_weights(net, folder.weights_of(agent.updates))
        except StopNow:
            how = f"stopped at once, without saving; {kept()}"
            raise Interrupted(go_on(how, again)) from None
        if request.made or late:
            # Too late for this training; whoever asked wants no tests now either.
            raise (Interrupted if request.made else OutOfTime)(untested(again))
        seconds = time.monotonic() - began
        solved = [one for one, _ in agent.recent] or [0]
        last_weights = Chosen(agent.updates, sum(solved) / len(solved), math.nan)
        return Fitted({world.trained_on: last_weights}, agent.updates, seconds, "updates")


def _said(figures: Mapping[str, float]) -> str:
    if "success" not in figures:
        return "no episode has ended yet"
    return f"success {figures['success']:.0%}, {figures['steps']:.0f} steps"


def _finite(figures: Mapping[str, float], net: ActorCritic) -> bool:
    return all(map(math.isfinite, figures.values())) and all(
        bool(torch.isfinite(p).all()) for p in net.parameters()
    )


@torch.inference_mode()
def trials(
    net: ActorCritic, levels: Mapping[str, str], episodes: int, workers: int | None = None
) -> dict[str, dict[str, float]]:
    """The scores by level, whose ids are given. All episodes of all levels are played at once.

    success: the share of episodes solved, by actions drawn from the policy, as in training;
    success_greedy: by the most probable action each time; steps: the mean length of the former.
    """
    count = len(levels)
    # By episodes first: long levels are shared out among the workers.
    ids = [*levels.values()] * 2 * episodes
    numbers = [episode for episode in range(episodes) for _ in range(2 * count)]
    with (
        Environments(ids, TEST_SEED, workers=workers, numbers=numbers) as envs,
        small_products(1),
    ):
        played = _play(net, envs, count, episodes).view(2, episodes, 2, count)
    (drawn, greedy), (steps, _) = played.mean(1).tolist()
    return {
        level: {"success": by_draws, "success_greedy": by_best, "steps": length}
        for level, by_draws, by_best, length in zip(levels, drawn, greedy, steps, strict=True)
    }


def _play(net: ActorCritic, envs: Environments, count: int, episodes: int) -> Tensor:
    """Whether each episode was solved, and its length: (2, episodes · 2 · count)."""
    device = next(net.parameters()).device
    book, step, act = Frames(net.encode, device), stepper(net.core), net.prepared_logits()
    gen = generator(CPU, TEST_SEED)
    B = len(envs.images)
    played = torch.zeros(2, B, dtype=torch.float64)
    live, state = torch.arange(B), net.core.initial_state(B)
    actions, said = torch.full((B,), SKIP), time.monotonic()
    while len(live):
        x = book.look(envs.images[live.numpy()])
        y, state = step(book.features.index_select(0, x), state)
        logits = act(y)
        noise = -torch.empty(episodes, logits.shape[1]).exponential_(generator=gen).log()
        # The same noise for an episode on every level, none for its greedy twin.
        both = torch.stack((noise, torch.zeros_like(noise)), dim=1).flatten(0, 1)
        both = both.repeat_interleave(count, dim=0)
        actions.fill_(SKIP)
        actions[live] = (logits + both[live].to(device)).argmax(-1).cpu()
        envs.step(actions.numpy())
        ended = torch.from_numpy(envs.dones).bool()[live]
        if ended.any():
            over = live[ended]
            played[0, over] = torch.from_numpy(envs.rewards).double()[over]
            played[1, over] = torch.from_numpy(envs.steps).double()[over]
            live = live[~ended]
            state = tuple(s[:, ~ended.to(device)] for s in state)
        if time.monotonic() - said > SECONDS:
            said = time.monotonic()
            say(f"tested {B - len(live):,} of {B:,} episodes")
    return played
