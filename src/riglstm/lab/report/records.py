"""Which run folders there are, and what a page says of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from riglstm.lab.minigrid.reproduce import is_grid
from riglstm.lab.minigrid.runs import GridRun
from riglstm.lab.minigrid.runs import read as read_grid
from riglstm.lab.tables.result import CHOSEN, Record, read_record, refused
from riglstm.lab.train.folder import RunFolder

R = TypeVar("R", Record, GridRun)


def find(paths: Sequence[Path | str]) -> list[Path]:
    """All run folders in the folders given, or these themselves; each once."""
    found: dict[Path, None] = {}
    for given in map(Path, paths):
        if not given.is_dir():
            raise ValueError(
                f"{given} must be the folder of a run, or a folder of such folders, got "
                f"{'a file' if given.exists() else 'nothing of that name'}"
            )
        found |= dict.fromkeys(_runs(given))
    if not found:
        raise ValueError(
            "expected runs, which are folders with a config.json, got none in "
            f"{', '.join(map(str, paths)) or 'no folder at all'}; train one with "
            "`riglstm train` or `riglstm reproduce` first"
        )
    return list(found)


def _runs(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    if RunFolder(folder).config.exists():
        yield folder
        return
    here = folder.resolve()
    # A link may lead back to a folder above it.
    for below in sorted(folder.iterdir()) if here not in above else ():
        if below.is_dir():
            yield from _runs(below, above | {here})


def read(path: Path) -> Record | GridRun:
    """One run; raises RunError where the folder's files are not a run's."""
    with refused(path / "config.json"):
        grid = is_grid(path)
    return read_grid(path) if grid else read_record(path)


def without_copies(records: Sequence[R]) -> tuple[list[R], list[str]]:
    """Every run once, and a line on each copy: one run counted twice would narrow the spread.

    Of copies the first that is done stays, or the first of all where none is.
    """
    by_run: dict[str, list[R]] = {}
    for record in records:
        by_run.setdefault(record.spec.digest(), []).append(record)
    kept: list[R] = []
    said: list[str] = []
    for same in by_run.values():
        first = next((record for record in same if record.state == "done"), same[0])
        kept.append(first)
        said += [
            f"{record.path}: left out, the same run as {first.path} (configuration and seed)"
            for record in same
            if record is not first
        ]
    return kept, said


def facts(record: Record) -> dict[str, str]:
    """What a reader needs to walk back from a figure to its run."""
    run, result = record.run, record.result or {}
    versions = run.get("versions", {})
    said = {
        "state": record.state,
        "task": record.spec.task,
        "model": f"{record.spec.name}, width {record.spec.hidden_size}",
        "seed": str(record.spec.seed),
        "parameters": f"{result['parameters']:,}" if "parameters" in result else "",
        "updates": _updates(record),
        "seconds": f"{result['seconds']:,.0f}" if "seconds" in result else "",
        "device": str(result.get("device") or run.get("device") or ""),
        "chosen on": "; ".join(
            f"{CHOSEN}{condition}: update {chosen['step']:,}, {chosen['value']:.4g}"
            for condition, chosen in result.get("chosen", {}).items()
        ),
        "versions": ", ".join(f"{name} {v}" for name, v in versions.items() if v),
        "commit": str(result.get("commit") or run.get("commit") or "unknown"),
        "started": str(run.get("started", "")),
        "gone on with": ", ".join(str(again.get("started")) for again in run.get("resumed", [])),
        "command": str(run.get("command", "")),
    }
    return {name: value for name, value in said.items() if value}


def config_text(record: Record) -> str:
    """The whole configuration, as its file has it."""
    return json.dumps(record.spec.resolved(), indent=1)


def _updates(record: Record) -> str:
    if record.result is None:
        return f"{record.last:,} of {record.spec.fit.updates:,}"
    stopped = {"patience": "stopped without improvement", "updates": "all"}
    return f"{record.result['updates']:,} ({stopped.get(record.result.get('stopped', ''), 'done')})"
