"""`riglstm train minigrid`, and what the other verbs do with its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from riglstm.lab.cli import flags
from riglstm.lab.cli.evaluate import verdict
from riglstm.lab.cli.reproduce import tell
from riglstm.lab.cli.train import ABOUT, Model, Place, check_folder, read_options
from riglstm.lab.minigrid import runs
from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.minigrid.spec import MEMORIES, TASK, GridSpec
from riglstm.lab.minigrid.table import METRICS, read
from riglstm.lab.tables.table import TextTable, markdown
from riglstm.lab.tasks.options import Count, Device, Options
from riglstm.models.rig import changes_of

THIS = """\
a family of MiniGrid: an agent with this memory, on its easiest level, by recurrent PPO.

Environments are stepped in processes of their own. An episode earns 1 if it is solved within the
level's limit, else 0, so that the mean reward is the success rate."""
EXAMPLE = "--family doorkey --model riglstm"


@dataclass(frozen=True)
class Where:
    """What the agent learns in."""

    family: str = "doorkey"
    """One of MiniGrid's families; `riglstm list` has all."""
    episodes: int = 100
    """Episodes of each level in the test."""


@dataclass(frozen=True)
class Memory(Model):
    """What remembers."""

    model: str = "riglstm"
    """A memory at its MiniGrid sizes: riglstm, rim, rim3 (3 active cells), lstm, ..."""
    hidden_size: int = 64
    """Its whole width."""


def train(args: Sequence[str]) -> None:
    """`riglstm train minigrid`: train one agent."""
    groups: dict[str, type] = {"task": Where, "memory": Memory, "training": PPO, "run": Place}
    about = ABOUT.format(about=THIS, task=TASK, example=EXAMPLE)
    given = flags.read("riglstm train minigrid", about, groups, args)
    where, asked, place = given["task"], given["memory"], given["run"]
    flags.check_name("--family", where.family, FAMILIES)
    flags.check_name("--model", asked.model, MEMORIES)
    memory = MEMORIES[asked.model]
    own = read_options(memory.model, asked.set)
    # A variant says itself what it changes.
    changed = changes_of(own)
    spec = GridSpec(
        family=where.family,
        model=memory.model,
        hidden_size=asked.hidden_size,
        model_options={n: v for n, v in memory.options.items() if n not in changed} | own,
        ppo=given["training"],
        seed=place.seed,
        episodes=where.episodes,
    )
    name = f"{where.family}-{asked.model}-s{place.seed}"
    out = place.out or Path("runs") / "minigrid" / name
    if check_folder(out, place.resume, spec.resolved()):
        done = read(out).result
        print(f"{name}, in {out}: done already\n\n{table(done, name)}", end="")
        return
    print(f"minigrid {where.family}: {asked.model}, seed {place.seed}, into {out}", flush=True)
    again = flags.again("train", ["minigrid", *args], "--resume")
    result = runs.run(spec, out, resume=place.resume, again=again)
    print(f"\n{table(result, name)}\nwritten to {out}")


def table(result: Mapping[str, Any], title: str) -> str:
    """The success rates of one run, in Markdown."""
    lines: dict[str, list[str]] = {}
    for row in result["rows"]:
        lines.setdefault(row["condition"], [row["condition"]]).append(f"{row['value']:.0%}")
    title += f", {result['frames']:,} frames in {result['seconds']:,.0f} s"
    heads = ("episodes solved", *(f"actions {how}" for how in METRICS.values()))
    return markdown(TextTable(title, heads, list(lines.values()), lead=1))


def evaluate(path: Path, device: str, levels: Sequence[str] | None) -> None:
    """Test an agent again, from its folder; on some levels of its family if asked for."""
    result, recorded = runs.evaluate(path, device, levels), read(path, curves=False).result
    print(f"{table(result, str(path))}\n{verdict(result, recorded)}")


@dataclass(frozen=True)
class Reproduce(Options):
    """Train agents on MiniGrid's families and print how often they solve each level.

    Runs that are done are skipped, one that was stopped is gone on with: the same command does
    the rest. The table is written anew after every run, as Markdown, and its figures run by run
    as CSV; `riglstm report` draws RigLSTM's success relative to RIM's, the paper's figure.

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
    """Folder of the runs; the table goes to `tables` in it."""
    device: Device = "auto"
    """Where to learn: auto (a GPU where there is one), cpu, cuda."""
    workers: Count | None = None
    """Processes that step environments; none: one to a core."""


def reproduce_table(args: Sequence[str]) -> None:
    """`riglstm reproduce minigrid`: train agents and print their table."""
    config = flags.read_one("riglstm reproduce minigrid", Reproduce, args)
    flags.check_names("--families", config.families, FAMILIES)
    flags.check_names("--models", config.models, MEMORIES)
    again = flags.again("reproduce", ["minigrid", *args])
    ppo = PPO(device=config.device, workers=config.workers, frames=config.frames)
    asked = runs.plan(
        *(config.families, config.models, config.seeds, config.out, ppo, config.episodes)
    )
    tell(runs.reproduce(asked, config.out / "tables", again=again), again)
