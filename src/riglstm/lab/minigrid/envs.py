"""MiniGrid environments by the dozen, stepped in worker processes over shared memory.

A worker is this file started as a script. It imports nothing of the package, so it is up in a
second, needs no torch, and any script may start it. Its standard input is a connection, on which it
takes commands and answers each; what is large lies in a file that both have mapped. Where the
connection ends the process ends, so it cannot outlive the one that started it.

    STEP        step every environment by its `action`; SKIP leaves one as it is
    HISTORY     answer with each environment's episode and the actions in it
    a History   go to these episodes and actions
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

SECONDS = 120
"""How long a worker may take over one answer."""
STEP, HISTORY = "step", "history"
SKIP = 255
"""The action that leaves an environment as it is."""

_FIELDS = (("action", "u1"), ("reward", "u1"), ("done", "u1"), ("steps", "i4"))
RECORD = np.dtype([("image", "u1", (7, 7, 3)), *_FIELDS], align=True)
"""What is shared about an environment: what it sees, is told, earned, and how long it took.

Where an episode is done, `steps` is its length, and `image` the first of the next one, if any.
"""

History = list[tuple[int, list[int]]]
"""For each environment the number of its episode, and the actions in it so far."""


class WorkerDied(RuntimeError):  # noqa: N818
    """A worker process ended, or does not answer."""


class Environments:
    """Environments that are stepped together, each by its own action.

    Episode e of environment i depends on (seed, i, e) and its actions alone, not on the number of
    workers. After an episode's last step the next one begins in the same step; with `once` an
    environment plays one episode and then stands still.

    Args:
        levels: gymnasium's id of the level of each environment.
        seed: of the episodes.
        workers: processes; default: one to a core, at most one to an environment.
        once: one episode each.
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
        once: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> None:
        # Here, as a worker imports nothing of the package.
        from riglstm.lab.minigrid.levels import available

        available()
        workers = min(len(levels), workers or cores())
        self.levels = tuple(levels)
        self.workers: list[_Worker] = []
        # It never has a name, so that a kill at any time leaves nothing behind.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.file = tempfile.TemporaryFile(dir=memory)  # noqa: SIM115
        try:
            self.file.truncate(RECORD.itemsize * len(levels))
            # As a plain array: a memmap keeps books on every access.
            shared = np.asarray(np.memmap(self.file, RECORD, mode="r+", shape=(len(levels),)))
            self.images, self.rewards, self.dones = (shared[n] for n in ("image", "reward", "done"))
            self.steps, self._actions = shared["steps"], shared["action"]
            ask = {"file": self.file.fileno(), "of": len(levels), "seed": seed, "once": once}
            numbers = numbers or range(len(levels))
            bounds = [len(levels) * i // workers for i in range(workers + 1)]
            for first, end in itertools.pairwise(bounds):
                own = {**ask, "numbers": list(numbers[first:end])}
                self.workers.append(_Worker(own, first, self.levels[first:end]))
            self._answers()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.levels)

    def step(self, actions: NDArray[Any]) -> None:
        """One step of every environment; what comes of it stands in the arrays."""
        self._actions[:] = actions
        for worker in self.workers:
            worker.tell(STEP)
        self._answers()

    def history(self) -> History:
        """Where the environments stand, for a checkpoint."""
        for worker in self.workers:
            worker.tell(HISTORY)
        return list(itertools.chain.from_iterable(self._answers()))

    def restore(self, history: History) -> None:
        """Go where they stood: each plays its episode's actions again."""
        for worker in self.workers:
            worker.tell(history[worker.first : worker.first + len(worker.levels)])
        self._answers()

    def _answers(self) -> list[Any]:
        return [worker.answer() for worker in self.workers]

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()
        self.workers = []
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process, with the environments from `first` on."""

    def __init__(self, ask: dict[str, Any], first: int, levels: tuple[str, ...]) -> None:
        self.first, self.levels = first, levels
        self.connection, theirs = Pipe()
        # -P: the script's folder is no place to import from. One thread: it has none to spare.
        # What a library prints goes to stderr.
        self.process = subprocess.Popen(
            (sys.executable, "-P", __file__),
            stdin=theirs.fileno(),
            stdout=2,
            pass_fds=(ask["file"],),
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYGAME_HIDE_SUPPORT_PROMPT": "1"},
        )
        theirs.close()
        self.tell({**ask, "first": first, "levels": levels})

    def tell(self, command: Any) -> None:
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
        last = self.first + len(self.levels) - 1
        raise WorkerDied(
            f"the worker with environments {self.first} to {last} "
            f"({', '.join(sorted(set(self.levels)))}) {what or f'ended with exit code {code}'}; "
            "what it wrote stands above; a run goes on from its last checkpoint by --resume"
        ) from None


def cores() -> int:
    """Those that this process may use: a container or a job often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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

    def replay(self, episode: int, actions: list[int]) -> None:
        """Go to an episode and play these actions in it."""
        self.start(episode)
        for action in actions:
            self.record["action"] = action
            self.step()


def main() -> None:
    """Serve until the input ends."""
    # Ctrl-C reaches every process of a terminal; whether to stop is for the one that started us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(0)
    ask = connection.recv()
    # By its number, which was handed down: it has no name.
    with open(ask["file"], "r+b") as file:
        shared: Any = np.asarray(np.memmap(file, RECORD, mode="r+", shape=(ask["of"],)))
    players = [
        Player(level, ask["seed"], number, ask["once"], shared[ask["first"] + i])
        for i, (level, number) in enumerate(zip(ask["levels"], ask["numbers"], strict=True))
    ]
    connection.send(None)
    while True:
        command, answer = connection.recv(), None
        if command == STEP:
            for player in players:
                player.step()
        elif command == HISTORY:
            answer = [(player.episode, list(player.actions)) for player in players]
        else:
            for player, (episode, actions) in zip(players, command, strict=True):
                player.replay(episode, actions)
        connection.send(answer)


if __name__ == "__main__":
    # Whoever started us has closed the connection, or is gone.
    with contextlib.suppress(EOFError, ConnectionError):
        main()
