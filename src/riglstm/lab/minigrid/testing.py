"""Testing an agent: a number of episodes of each level, by drawn and by most probable actions.

The episodes are the same for every agent: their seeds depend on an episode's number alone. So does
the noise of the drawn actions, among tests of the same number of episodes: it is drawn for all of
them together, step by step, and with other numbers of episodes it is other noise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.lab.minigrid.envs import Environments
from riglstm.lab.minigrid.levels import Level
from riglstm.lab.minigrid.network import ActorCritic, Frames
from riglstm.lab.minigrid.ppo import check_count, small_products
from riglstm.lab.minigrid.spec import SEEDS
from riglstm.lab.minigrid.worker import SKIP
from riglstm.lab.tasks.base import generator
from riglstm.models.episodes import stepper

SEED = SEEDS
"""Of test episodes: no run is trained on it, as seeds of runs are below."""
SECONDS = 30.0
"""Between two lines on how far a test is."""


class Score(NamedTuple):
    """How an agent did on a level: shares of episodes solved, and their mean length."""

    success: float
    """With actions drawn from the policy, as in training."""
    success_greedy: float
    """With the most probable action each time."""
    steps: float
    """Of an episode with drawn actions."""


@torch.inference_mode()
def trials(
    net: ActorCritic,
    levels: Sequence[Level],
    episodes: int = 100,
    workers: int | None = None,
    show: Callable[[int, int], None] | None = None,
) -> dict[str, Score]:
    """The scores by level. All episodes of all levels are played at once.

    `show` hears how many of how many have ended, with every step.
    """
    check_count("episodes", episodes)
    count = len(levels)
    # By episodes first: long levels are shared out among the workers.
    ids = [level.id for level in levels] * 2 * episodes
    numbers = [episode for episode in range(episodes) for _ in range(2 * count)]
    with (
        Environments(ids, SEED, workers=workers, once=True, numbers=numbers) as envs,
        small_products(1),
    ):
        solved, lengths = _play(net, envs, count, episodes, show)
    drawn, greedy = solved.view(episodes, 2, count).mean(0).tolist()
    steps = lengths.view(episodes, 2, count)[:, 0].mean(0).tolist()
    scores = map(Score, drawn, greedy, steps)
    return {level.name: score for level, score in zip(levels, scores, strict=True)}


def _play(
    net: ActorCritic,
    envs: Environments,
    count: int,
    episodes: int,
    show: Callable[[int, int], None] | None,
) -> tuple[Tensor, Tensor]:
    """Whether each episode was solved, and its length: (episodes · 2 · count) each."""
    device = next(net.parameters()).device
    book, step, act = Frames(net.encode, device), stepper(net.core), net.prepared_logits()
    gen = generator(torch.device("cpu"), SEED)
    B = len(envs)
    solved, lengths = torch.zeros(B, dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
    live, state = torch.arange(B), net.core.initial_state(B)
    actions = torch.full((B,), SKIP)
    while len(live):
        x = book.look(envs.images[live.numpy()])
        assert book.features is not None
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
            solved[over] = torch.from_numpy(envs.rewards).double()[over]
            lengths[over] = torch.from_numpy(envs.steps).double()[over]
            live = live[~ended]
            state = tuple(s[:, ~ended.to(device)] for s in state)
        if show is not None:
            show(B - len(live), B)
    return solved, lengths


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
