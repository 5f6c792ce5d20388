"""`riglstm list`: every name that another verb or a constructor takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from riglstm import VARIANTS
from riglstm.lab import tasks
from riglstm.lab.cli import flags
from riglstm.lab.cli.train import option_types, summary
from riglstm.lab.minigrid.levels import FAMILIES
from riglstm.lab.tables.recipes import NAMES, TABLES
from riglstm.models import MODELS
from riglstm.scan import BACKENDS


@dataclass(frozen=True)
class List:
    """Print the names of tasks, models, tables, RigLSTM's variants and its backends.

    Example: riglstm list
    """


def main(args: Sequence[str]) -> None:
    """Print the names of tasks, models, tables, variants and backends."""
    flags.read_one("riglstm list", List, args)
    print("tasks: riglstm train NAME")
    for name in tasks.names():
        print(f"  {name:<24}{summary(name)}")
        for conditions in _tested_on(name):
            print(f"  {'':<24}tested on {' '.join(conditions)} (--conditions)")
    print("families: riglstm train minigrid --family NAME")
    for name, family in FAMILIES.items():
        text = " (the goal is in a text that no agent here reads)" if family.text else ""
        print(f"  {name:<24}{' '.join(family.levels)}{text}")
    print("tables: riglstm reproduce NAME")
    for name in NAMES:
        title = TABLES[name].title if name in TABLES else "Inference time, parameters and memory"
        print(f"  {name:<24}{title}")
    print(
        "models: riglstm train TASK --model NAME --set option=value; "
        "from riglstm.models import build"
    )
    for model in MODELS:
        print(f"  {model:<24}{', '.join(option_types(model))}".rstrip())
    print("variants: riglstm train TASK --set variant=NAME; RigLSTM(..., **VARIANTS[NAME])")
    for name, changes in VARIANTS.items():
        print(f"  {name:<24}{', '.join(f'{key}={value!r}' for key, value in changes.items())}")
    print("backends: riglstm train TASK --set backend=NAME; RigLSTM(..., backend=NAME)")
    for name in ("auto", *BACKENDS):
        print(f"  {name}")


def _tested_on(task: str) -> list[tuple[str, ...]]:
    """The default of a task's option `conditions`, if it can be used and has one."""
    try:
        found = fields(tasks.find(task))  # type: ignore[arg-type]
    except ValueError:
        return []
    return [f.default for f in found if f.name == "conditions" and isinstance(f.default, tuple)]
