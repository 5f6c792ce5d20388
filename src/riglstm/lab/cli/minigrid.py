"""`riglstm train minigrid` and `riglstm reproduce minigrid`: their flags, and what they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from riglstm.lab.cli import flags
from riglstm.lab.cli.reproduce import Engine, place, tell
from riglstm.lab.cli.train import ABOUT, Model, Place, make, read_options
from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.minigrid.task import MiniGrid
from riglstm.lab.tables import agents
from riglstm.lab.tables.executor import overview
from riglstm.lab.tables.recipes import MEMORIES
from riglstm.lab.tables.reproduce import reproduce
from riglstm.lab.tasks import MINIGRID
from riglstm.lab.tasks.common import Count, Options
from riglstm.lab.train.config import cores
from riglstm.models.rig import changes_of

THIS = """\
a family of MiniGrid: an agent with this memory, on its easiest level, by recurrent PPO.

Environments are stepped in processes of their own. An episode earns 1 if it is solved within the
level's limit, else 0, so that the mean reward is the success rate."""
EXAMPLE = "--family doorkey --model riglstm"


@dataclass(frozen=True)
class Memory(Model):
    """What remembers."""

    model: str = "riglstm"
    """A memory at its MiniGrid sizes: riglstm, rim, rim3 (3 active cells), lstm, ..."""
    hidden_size: int = 64
    """Its whole width."""


def train(args: Sequence[str]) -> None:
    """`riglstm train minigrid`: train one agent."""
    groups: dict[str, type] = {"task": MiniGrid, "memory": Memory, "training": PPO, "run": Place}
    about = ABOUT.format(about=THIS, task=MINIGRID, example=EXAMPLE)
    given = flags.read("riglstm train minigrid", about, groups, args[1:])
    world, asked, where = given["task"], given["memory"], given["run"]
    flags.check_name("--model", asked.model, MEMORIES)
    memory = MEMORIES[asked.model]
    own = read_options(memory.model, asked.set)
    # A variant says itself what it changes.
    changed = changes_of(own)
    options = {n: v for n, v in memory.options.items() if n not in changed} | own
    memory = replace(memory, hidden_size=asked.hidden_size, options=options)
    spec = agents.spec_of(world, memory, given["training"], where.seed)
    make(spec, f"{world.family}-{asked.model}", where, args)


@dataclass(frozen=True)
class Reproduce(Options):
    """Train agents on MiniGrid's families and print how often they solve each level.

    Runs that are done are skipped, one that was stopped is gone on with: the same command does
    the rest. The table is printed at the end and at a stop; `riglstm report` draws RigLSTM's
    success relative to RIM's, the paper's figure.

    Example: riglstm reproduce minigrid --families doorkey empty --models riglstm rim --seeds 3
    """

    families: tuple[str, ...] | None = None
    """Which families; none: all whose goal can be seen without reading a text."""
    models: tuple[str, ...] | None = None
    """Which memories; none: riglstm rim lstm."""
    seeds: Count = 3
    """Runs of each."""
    frames: Count | None = None
    """Frames of every run; none: as many as its family is given."""
    episodes: int = 100
    """Episodes of each level in the test."""
    out: Path = Path("runs")
    """Folder of the runs, and of the table at the end."""
    workers: Count | None = None
    """Processes that step the environments of a run; none: one to each of its cores."""
    results: Path | None = None
    """CSV file that takes one line for each figure of each run; none: none."""


def reproduce_table(args: Sequence[str]) -> None:
    """`riglstm reproduce minigrid`: train agents and print their table."""
    groups: dict[str, type] = {"flags": Reproduce, "engine": Engine}
    about = inspect.getdoc(Reproduce) or ""
    given = flags.read("riglstm reproduce minigrid", about, groups, args)
    config, engine = given["flags"], given["engine"]
    where = place(engine)
    flags.check_names("--families", config.families, FAMILIES)
    flags.check_names("--models", config.models, MEMORIES)
    share = engine.cores_per_run if where.executor else max(1, cores() // where.jobs)
    workers = share if config.workers is None else config.workers
    ppo = PPO(device=where.device, workers=workers, frames=config.frames)
    runs = agents.plan(
        *(config.families, config.models, config.seeds, config.out, ppo, config.episodes)
    )
    print(f"{MINIGRID}, in {config.out}: {overview(runs)[0]}", flush=True)
    again = flags.again("reproduce", [MINIGRID, *args])
    done = reproduce(
        *(MINIGRID, runs, "paper", config.out),
        jobs=where.jobs,
        executor=where.executor,
        deadline=where.deadline,
        results=config.results,
        again=again,
    )
    tell(done, config.out / f"{MINIGRID}.md", again)
