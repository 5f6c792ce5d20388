"""`riglstm evaluate`: a run's result computed again from what it left, and other conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from riglstm.lab.cli import UsageError, flags, text
from riglstm.lab.tables.run import evaluate, finished
from riglstm.lab.tasks.common import Device, Options


@dataclass(frozen=True)
class Evaluate(Options):
    """Compute a finished run's test figures again, from its folder or its exported file alone.

    Prints them by both rules of choosing the weights, and says whether they are those that the
    run has recorded. Nothing is written. Other conditions than the run's own can be named.

    Example: riglstm evaluate runs/copying/lstm-s0 --conditions P=20 P=1000
    """

    run: Path
    """The run's folder, or a file that `riglstm export` wrote."""
    conditions: tuple[str, ...] | None = None
    """Test conditions, as the task names them (P=100, 19x19, curtain), or levels of an agent's
    family; none: the run's own."""
    device: Device = "auto"
    """Where to compute: auto (a GPU where there is one), cpu, cuda, cuda:1."""
    data_dir: Path | None = None
    """Folder that holds the data; none: RIGLSTM_DATA, or a download to the user's cache."""


def main(args: Sequence[str]) -> None:
    """Compute a run's result again from its folder or file, or on other conditions."""
    config = flags.read_one("riglstm evaluate", Evaluate, args)
    if not config.run.exists():
        raise UsageError(
            f"RUN must be the folder of a run, or an exported file, got {config.run}, which is "
            "not there"
        )
    recorded = finished(config.run).result
    result = evaluate(config.run, config.device, config.data_dir, config.conditions)
    title = f"{config.run}, {result['updates']} updates, {result['device']}"
    print(f"{text.result_table(result, title)}\n\n{verdict(result, recorded)}")


def verdict(result: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    """Whether figures are those that were recorded."""
    before, now = (
        {(row["condition"], row["chosen_on"], row["metric"]): row["value"] for row in of["rows"]}
        for of in (recorded, result)
    )
    both = before.keys() & now.keys()
    if not both:
        return "None of these conditions is in the recorded result."
    worst = max(both, key=lambda key: abs(before[key] - now[key]))
    if before[worst] == now[worst]:
        return "This equals the recorded result."
    return (
        f"This differs from the recorded result, most at {worst[0]}, chosen on {worst[1]}: "
        f"recorded {before[worst]:.6g} on {recorded['device']}, now {now[worst]:.6g} on "
        f"{result['device']}. Another device rounds otherwise."
    )
