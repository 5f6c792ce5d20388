"""A process that steps environments: started as a script, it imports nothing of this package.

So it is up in a second, needs no torch, and whoever starts it may be any script. It reads commands
from its standard input, one byte each, and answers there is one byte on its standard output; what
is large lies in a file that both have mapped. Where the input ends, the process ends: it cannot
outlive the one that started it.

    S  step every environment by its `action`; SKIP leaves one as it is
    H  give each environment's episode and the actions in it, as one line of JSON
    L  go to the episodes and actions of the line of JSON that follows
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

import numpy as np

SKIP = 255

_FIELDS = (("action", "u1"), ("reward", "u1"), ("done", "u1"), ("steps", "i4"))
RECORD = np.dtype([("image", "u1", (7, 7, 3)), *_FIELDS], align=True)
"""What is shared about an environment: what it sees, is told, earned, and how long it took.

Where an episode is done, `steps` is its length, and `image` the first of the next one, if any.
"""


def solved(reward: float) -> int:
    """1 where a level was solved, else 0: no bonus for speed, and none below zero (P33)."""
    return int(reward > 0)


class Player:
    """One environment, its episodes one after another, each from a seed of its own."""

    def __init__(self, level: str, seed: int, number: int, once: bool, record: Any) -> None:
        import gymnasium
        import minigrid  # noqa: F401  registers the levels

        self.env: Any = gymnasium.make(level, disable_env_checker=True)
        self.seed, self.number, self.once, self.record = seed, number, once, record
        self.start(0)

    def start(self, episode: int) -> None:
        """Begin an episode; it depends on the seed, the environment and its number alone."""
        entropy = np.random.SeedSequence((self.seed, self.number, episode))
        seen, _ = self.env.reset(seed=int(entropy.generate_state(1)[0]))
        self.episode, self.actions, self.over = episode, bytearray(), False
        self.record["image"] = seen["image"]

    def step(self) -> None:
        """One step, by the shared action; after an episode's last the next one begins."""
        action, record = int(self.record["action"]), self.record
        if action == SKIP or self.over:
            record["done"] = record["reward"] = 0
            return
        seen, reward, terminated, truncated, _ = self.env.step(action)
        self.actions.append(action)
        done = terminated or truncated
        record["reward"], record["done"] = solved(reward), done
        if done:
            record["steps"] = len(self.actions)
            self.over = self.once
        if done and not self.once:
            self.start(self.episode + 1)
        else:
            record["image"] = seen["image"]

    def history(self) -> tuple[int, list[int]]:
        """Where it stands."""
        return self.episode, list(self.actions)

    def replay(self, episode: int, actions: list[int]) -> None:
        """Go there again."""
        self.start(episode)
        for action in actions:
            self.record["action"] = action
            self.step()


def main() -> None:
    """Serve until the input ends."""
    # Ctrl-C reaches every process of a terminal; whether to stop is for the one that started us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not get among the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    commands = sys.stdin.buffer
    ask = json.loads(commands.readline())
    # By its number, which was handed down: it has no name.
    with open(ask["file"], "r+b") as file:
        shared: Any = np.asarray(np.memmap(file, RECORD, mode="r+", shape=(ask["of"],)))
    players = [
        Player(level, ask["seed"], number, ask["once"], shared[ask["first"] + i])
        for i, (level, number) in enumerate(zip(ask["levels"], ask["numbers"], strict=True))
    ]
    os.write(answers, b".")
    while command := commands.read(1):
        if command == b"S":
            for player in players:
                player.step()
        elif command == b"H":
            text = json.dumps([player.history() for player in players])
            os.write(answers, text.encode() + b"\n")
            continue
        elif command == b"L":
            for player, (episode, actions) in zip(
                players, json.loads(commands.readline()), strict=True
            ):
                player.replay(episode, actions)
        os.write(answers, b".")


if __name__ == "__main__":
    # Whoever started us may be gone before an answer.
    with contextlib.suppress(BrokenPipeError):
        main()
