"""MiniGrid environments by the dozen, stepped in worker processes.

A worker is this file started as a script. It imports nothing of the package, so it is up in a
second, needs no torch, and any script may start it. Its standard input is a connection, on which it
takes commands and answers each. Where the connection ends the process ends, so it cannot outlive
the one that started it.

    STEP        step each environment by its action; SKIP leaves one as it is
    RESTORE     go to these episodes and actions, a History
    HISTORY     answer with the History

To the first two it answers as `look` does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

SECONDS = 120
"""How long a worker may take over one answer."""
STEP, RESTORE, HISTORY = "step", "restore", "history"
SKIP = 255
"""The action that leaves an environment as it is."""

History = list[tuple[int, list[int]]]
"""For each environment the number of its episode, and the actions in it so far."""


class WorkerDied(RuntimeError):  # noqa: N818
    """A worker process ended, or does not answer."""


class Environments:
    """Environments that are stepped together, each by its own action.

    Episode e of environment i depends on (seed, i, e) and its actions alone, not on the number of
    workers. After an episode's last step the next one begins in the same step.

    Args:
        levels: gymnasium's id of the level of each environment.
        workers: processes; default: one to a core, at most one to an environment.
        numbers: i of each environment; default: 0, 1, 2 and so on.
    """

    images: NDArray[np.uint8]
    """(B, 7, 7, 3): what each agent sees; at an episode's end the first image of the next."""
    rewards: NDArray[np.uint8]
    """(B): 1 where an episode was solved in the last step."""
    dones: NDArray[np.uint8]
    """(B): 1 where an episode ended in the last step."""
    steps: NDArray[np.int32]
    """(B): where one has ended, how long it was."""

    def __init__(
        self,
        levels: Sequence[str],
        seed: int,
        *,
        workers: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        # Here, as a worker imports nothing of the package.
        from riglstm.lab.minigrid.levels import available
        from riglstm.lab.train.config import cores

        available()
        B = len(levels)
        workers = min(B, workers or cores())
        self.images = np.zeros((B, 7, 7, 3), np.uint8)
        self.rewards, self.dones = np.zeros((2, B), np.uint8)
        self.steps = np.zeros(B, np.int32)
        self.workers: list[_Worker] = []
        numbers = numbers or range(B)
        try:
            for first, end in itertools.pairwise(B * i // workers for i in range(workers + 1)):
                own = slice(first, end)
                self.workers.append(_Worker(own, levels[own], seed, numbers[own]))
            self._look()
        except BaseException:
            self.close()
            raise

    def step(self, actions: NDArray[Any]) -> None:
        """One step of every environment; what comes of it stands in the arrays."""
        for worker in self.workers:
            worker.tell(STEP, actions[worker.rows].tolist())
        self._look()

    def _look(self) -> None:
        """Take what the workers answer."""
        for worker in self.workers:
            own = worker.rows
            self.images[own], self.rewards[own], self.dones[own], self.steps[own] = worker.answer()

    def history(self) -> History:
        """Where the environments stand, for a checkpoint."""
        for worker in self.workers:
            worker.tell(HISTORY)
        return [own for worker in self.workers for own in worker.answer()]

    def restore(self, history: History) -> None:
        """Go where they stood: each plays its episode's actions again."""
        for worker in self.workers:
            worker.tell(RESTORE, history[worker.rows])
        self._look()

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()
        self.workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process, with some of the environments."""

    def __init__(
        self, rows: slice, levels: Sequence[str], seed: int, numbers: Sequence[int]
    ) -> None:
        self.rows, self.levels = rows, levels
        self.connection, theirs = Pipe()
        # -P: the script's folder is no place to import from. One thread: it has none to spare.
        # What a library prints goes to stderr.
        self.process = subprocess.Popen(
            (sys.executable, "-P", __file__),
            stdin=theirs.fileno(),
            stdout=2,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYGAME_HIDE_SUPPORT_PROMPT": "1"},
        )
        theirs.close()
        self.tell(levels, seed, numbers)

    def tell(self, *command: Any) -> None:
        """Send it something."""
        try:
            self.connection.send(command)
        except OSError:
            self._fail()

    def answer(self) -> Any:
        """Wait for its answer."""
        try:
            if self.connection.poll(SECONDS):
                return self.connection.recv()
        except (EOFError, OSError):
            self._fail()
        self.process.kill()
        self._fail(f"did not answer within {SECONDS} s")

    def close(self) -> None:
        """End it: without commands to come it goes by itself, or is made to."""
        self.connection.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _fail(self, what: str | None = None) -> NoReturn:
        code = self.process.wait()
        raise WorkerDied(
            f"the worker with environments {self.rows.start} to {self.rows.stop - 1} "
            f"({', '.join(sorted(set(self.levels)))}) {what or f'ended with exit code {code}'}; "
            "what it wrote stands above; a run goes on from its last checkpoint by --resume"
        ) from None


def solved(reward: float) -> int:
    """1 where a level was solved, else 0: no bonus for speed, and none below zero (P33)."""
    return int(reward > 0)


class Player:
    """One environment, its episodes one after another, each from a seed of its own."""

    reward = done = steps = 0
    """What came of the last step; of the last episode that ended, how long it was."""

    def __init__(self, level: str, seed: int, number: int) -> None:
        import gymnasium
        import minigrid  # noqa: F401  registers the levels

        self.env: Any = gymnasium.make(level, disable_env_checker=True)
        self.seed, self.number = seed, number
        self.start(0)

    def start(self, episode: int) -> None:
        """Begin an episode; it depends on the seed, the environment and its number alone."""
        entropy = np.random.SeedSequence((self.seed, self.number, episode))
        seen, _ = self.env.reset(seed=int(entropy.generate_state(1)[0]))
        self.episode, self.actions = episode, bytearray()
        self.image = seen["image"]

    def step(self, action: int) -> None:
        """One step; after an episode's last the next one begins."""
        self.reward = self.done = 0
        if action == SKIP:
            return
        seen, reward, terminated, truncated, _ = self.env.step(action)
        self.actions.append(action)
        self.image, self.reward = seen["image"], solved(reward)
        if terminated or truncated:
            self.done, self.steps = 1, len(self.actions)
            self.start(self.episode + 1)

    def replay(self, episode: int, actions: list[int]) -> None:
        """Go to an episode and play these actions in it."""
        self.start(episode)
        for action in actions:
            self.step(action)


def look(players: Sequence[Player]) -> tuple[Any, ...]:
    """What the environments show: images, rewards, dones, steps."""
    images, rewards, dones, steps = zip(
        *((p.image, p.reward, p.done, p.steps) for p in players), strict=True
    )
    return np.stack(images), rewards, dones, steps


def main() -> None:
    """Serve until the input ends."""
    # Ctrl-C reaches every process of a terminal; whether to stop is for the one that started us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(0)
    levels, seed, numbers = connection.recv()
    players = [Player(level, seed, number) for level, number in zip(levels, numbers, strict=True)]
    answer: Any = look(players)
    while True:
        connection.send(answer)
        command, *given = connection.recv()
        if command == HISTORY:
            answer = [(player.episode, list(player.actions)) for player in players]
            continue
        for player, own in zip(players, *given, strict=True):
            if command == STEP:
                player.step(own)
            else:
                player.replay(*own)
        answer = look(players)


if __name__ == "__main__":
    # Whoever started us has closed the connection, or is gone.
    with contextlib.suppress(EOFError, ConnectionError):
        main()
