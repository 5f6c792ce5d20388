"""`riglstm train minigrid`, and what the other verbs do with its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from riglstm.lab.cli import flags, text
from riglstm.lab.cli.reproduce import reproduced
from riglstm.lab.cli.train import check_folder, read_options
from riglstm.lab.minigrid.levels import FAMILIES, available
from riglstm.lab.minigrid.ppo import PPO
from riglstm.lab.minigrid.runs import evaluate as evaluate_run
from riglstm.lab.minigrid.runs import plan, run
from riglstm.lab.minigrid.runs import reproduce as make_table
from riglstm.lab.minigrid.spec import MEMORIES, GridSpec
from riglstm.lab.minigrid.table import read
from riglstm.lab.train.folder import RunFolder
from riglstm.models.rig import changes_of

ABOUT = """\
Train an agent with a memory on the easiest level of a MiniGrid family, by recurrent PPO, and
test it on every level of the family.

Everything goes to one folder: configuration, logs, weights, the result. Ctrl-C saves, and says
how to go on; the same command with --resume does so after any kind of stop. Environments are
stepped in processes of their own. An episode earns 1 if it is solved within the level's limit,
else 0, so that the mean reward is the success rate.

Example: riglstm train minigrid --family doorkey --model riglstm"""


@dataclass(frozen=True)
class Where:
    """What the agent learns in."""

    family: str = "doorkey"
    """One of MiniGrid's families; `riglstm list` has all."""
    episodes: int = 100
    """Episodes of each level in the test."""


@dataclass(frozen=True)
class Memory:
    """What remembers."""

    model: str = "riglstm"
    """A memory at its MiniGrid sizes: riglstm, rim, rim3 (3 active cells), lstm, ..."""
    hidden_size: int = 64
    """Its whole width."""
    set: tuple[str, ...] = ()
    """Other options of the model, as name=value; `riglstm list` has all. A list has commas."""


@dataclass(frozen=True)
class Run:
    """Where it is written."""

    seed: int = 0
    """Of the weights, of the episodes, and of the actions."""
    out: Path | None = None
    """The run's folder; none: runs/minigrid/FAMILY-MODEL-sSEED."""
    resume: bool = False
    """Go on with the run that is in the folder; begin where there is none."""


def train(args: Sequence[str]) -> None:
    """`riglstm train minigrid`: train one agent."""
    groups: dict[str, type] = {"task": Where, "memory": Memory, "training": PPO, "run": Run}
    given = flags.read("riglstm train minigrid", ABOUT, groups, args)
    where, asked, place = given["task"], given["memory"], given["run"]
    flags.check_name("--family", where.family, FAMILIES)
    flags.check_name("--model", asked.model, MEMORIES)
    available()
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
        print(f"{name}, in {out}: done already\n\n{table(done, name)}")
        return
    print(f"minigrid {where.family}: {asked.model}, seed {place.seed}, into {out}", flush=True)
    again = flags.again("train", ["minigrid", *args], "--resume")
    result = run(spec, out, resume=place.resume, again=again)
    print(f"\n{table(result, name)}\n\nwritten to {out}")


def table(result: Mapping[str, Any], title: str) -> str:
    """The success rates of one run, as text."""
    rates: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        rates.setdefault(row["condition"], {})[row["metric"]] = row["value"]
    title += f", {result['frames']:,} frames in {result['seconds']:,.0f} s"
    lines = [
        [level, f"{found['success']:.0%}", f"{found['success_greedy']:.0%}"]
        for level, found in rates.items()
    ]
    return text.table(title, ("episodes solved", "actions drawn", "most probable"), lines)


def evaluate(path: Path, device: str, levels: Sequence[str] | None) -> None:
    """Test an agent again, from its folder; on some levels of its family if asked for."""
    available()
    result = evaluate_run(path, device, levels)
    folder = RunFolder(path)
    recorded = folder.read_json(folder.result)["rows"]
    differs = [row["condition"] for row in result["rows"] if row not in recorded]
    verdict = "This equals the recorded result."
    if differs:
        verdict = f"This differs from the recorded result at {', '.join(dict.fromkeys(differs))}."
    print(f"{table(result, str(path))}\n\n{verdict}")


@dataclass(frozen=True)
class Reproduce:
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
    seeds: int = 3
    """Runs of each."""
    budget: Literal["quick", "paper"] = "paper"
    """Frames: each family's own, or a twentieth of them, which shows how it works."""
    frames: int | None = None
    """Frames of every run; none: as the budget says."""
    episodes: int = 100
    """Episodes of each level in the test."""
    out: Path = Path("runs")
    """Folder of the runs; the table goes to `tables` in it."""
    device: str = "auto"
    """Where to learn: auto (a GPU where there is one), cpu, cuda."""
    workers: int | None = None
    """Processes that step environments; none: one to a core."""


def reproduce_table(args: Sequence[str]) -> None:
    """`riglstm reproduce minigrid`: train agents and print their table."""
    config = flags.read_one("riglstm reproduce minigrid", Reproduce, args)
    for name in config.families or ():
        flags.check_name("--families", name, FAMILIES)
    for name in config.models or ():
        flags.check_name("--models", name, MEMORIES)
    available()
    again = flags.again("reproduce", ["minigrid", *args])
    ppo = PPO(device=config.device, workers=config.workers, frames=config.frames)
    runs = plan(
        *(config.families, config.models, config.seeds, config.out, ppo, config.episodes),
        quick=config.budget == "quick",
    )
    done = make_table(runs, config.out / "tables", again=again)
    print(reproduced(done.rendered.markdown, done.paths, done.failed))
    if config.budget == "quick":
        print("These are few frames, to show how it works; --budget paper has each family's.")
    if done.left:
        print(f"{done.left} runs are not done; go on with: {again}")
