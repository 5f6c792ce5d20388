"""`riglstm bench --tables minigrid`: frames a second of training, beside mere stepping."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from riglstm.lab.cli import text
from riglstm.lab.minigrid.envs import available
from riglstm.lab.minigrid.levels import family
from riglstm.lab.minigrid.ppo import PPO

if TYPE_CHECKING:
    from riglstm.lab.cli.bench import Bench

FAMILY, MODELS = "doorkey", ("lstm", "riglstm")
STEPS = "random steps"


def show(config: Bench) -> dict[str, list[float]]:
    """Measure and print, where there are environments; frames a second by round."""
    try:
        available()
    except ValueError as error:
        print(f"\n{error}")
        return {}
    sizes = PPO(envs=4, steps=8, window=4, minibatch=16) if config.quick else PPO()
    speeds = measure(config.timed, sizes)
    print(f"\n{table(speeds, sizes)}")
    return speeds


def measure(rounds: int, config: PPO) -> dict[str, list[float]]:
    """Random steps, and updates of each model, taking turns; the first turn is not counted.

    All in the same processes, on the same environments.
    """
    import numpy as np

    from riglstm.lab.minigrid.envs import Environments
    from riglstm.lab.minigrid.ppo import Agent
    from riglstm.lab.minigrid.reproduce import build
    from riglstm.lab.minigrid.spec import MEMORIES, GridSpec

    rng = np.random.default_rng(0)
    levels = [family(FAMILY).levels[0].id] * config.envs
    with Environments(levels, 0, workers=config.workers) as envs:

        def stepping() -> None:
            for actions in rng.integers(0, 7, (config.steps, config.envs)):
                envs.step(actions)

        work: dict[str, Callable[[], Any]] = {STEPS: stepping}
        for name in MODELS:
            memory = MEMORIES[name]
            options = dict(memory.options)
            spec = GridSpec(FAMILY, memory.model, memory.hidden_size, options, config, 0)
            work[name] = Agent(build(spec, torch.device("cpu")), envs, config, 0).update
        speeds: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(rounds + 1):
            for name, do in work.items():
                began = time.perf_counter()
                do()
                if turn:
                    speeds[name].append(config.batch / (time.perf_counter() - began))
    return speeds


def table(speeds: Mapping[str, list[float]], config: PPO) -> str:
    """Side by side; ratios are taken within a round, and their median is printed."""

    def ratio(a: str, b: str) -> str:
        pairs = zip(speeds[a], speeds[b], strict=True)
        return f"{statistics.median(x / y for x, y in pairs):.2f}"

    lines = [
        [
            name if name == STEPS else f"training {name}",
            f"{statistics.median(found):,.0f}",
            ratio(name, STEPS),
            "" if name == STEPS else ratio("lstm", name),
        ]
        for name, found in speeds.items()
    ]
    title = f"MiniGrid DoorKey-5x5, {config.envs} environments, {torch.get_num_threads()} threads"
    return text.table(title, ("", "frames/s", "of random steps", "time of lstm's"), lines)
