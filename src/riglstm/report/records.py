"""Run folders, read: what each run was, how far it came, what it measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from riglstm.experiments.plan import State
from riglstm.experiments.result import CHOSEN, FAILED, read_reason, read_result
from riglstm.experiments.spec import RunSpec
from riglstm.report.curves import Series
from riglstm.train.folder import RunFolder


@dataclass(frozen=True)
class Record:
    """What the folder of one run says."""

    path: Path
    spec: RunSpec
    state: State
    run: Mapping[str, Any]
    """Versions, commit, device, command; empty where run.json is not there."""
    result: Mapping[str, Any] | None
    """None: the run has none yet."""
    reason: str
    """Why it failed; empty where it did not."""
    metrics: Mapping[str, Series]

    @property
    def last(self) -> int:
        """The last update that left a figure."""
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def trained_on(self) -> str | None:
        """The condition of the training data; None: nothing was measured yet."""
        if self.result is not None:
            return str(self.result["rows"][0]["chosen_on"]).removeprefix(CHOSEN)
        return next(iter(self.validated), None)

    @property
    def validated(self) -> dict[str, Series]:
        """The metric on validation data, by condition."""
        found = {}
        for name, series in self.metrics.items():
            kind, _, condition = name.partition("@")
            if condition and kind.startswith("validation/") and kind != "validation/loss":
                found[condition] = series
        return found

    def describe(self) -> str:
        """Which run it is, and how far it came, in a line."""
        begun = f"{self.path}: {self.spec.name} on {self.spec.task}, seed {self.spec.seed}"
        wanted = self.spec.fit.updates
        if self.state == "failed":
            return f"{begun}: failed after update {self.last:,} of {wanted:,}: {self.reason}"
        if self.state == "partial":
            return f"{begun}: not finished, update {self.last:,} of {wanted:,}; go on with --resume"
        return begun


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


def _runs(folder: Path) -> Iterator[Path]:
    if RunFolder(folder).config.exists():
        yield folder
        return
    for below in sorted(folder.iterdir()):
        if below.is_dir():
            yield from _runs(below)


def read(path: Path) -> Record:
    """One run; raises ValueError where the folder's files are not a run's."""
    folder = RunFolder(path)
    spec = RunSpec.from_json(folder.read_json(folder.config))
    result = read_result(folder) if folder.state == "done" else None
    failed = result is None and (path / FAILED).exists()
    return Record(
        path=path,
        spec=spec,
        state="failed" if failed else folder.state,
        run=folder.read_json(folder.run) if folder.run.exists() else {},
        result=result,
        reason=read_reason(folder) if failed else "",
        metrics=read_metrics(folder.metrics) if folder.metrics.exists() else {},
    )


def read_metrics(path: Path) -> dict[str, Series]:
    """metrics.csv, by name; half a line, as a kill may leave one, is no figure."""
    points: dict[str, dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        whole = [line for line in file if line.endswith("\n")]
    for number, line in enumerate(list(csv.reader(whole))[1:], start=2):
        try:
            step, name, value = line
            points.setdefault(name, {})[int(step)] = float(value)
        except ValueError:
            raise ValueError(
                f"{path}, line {number}, must be step,name,value, got {','.join(line)!r}"
            ) from None
    return {
        name: Series(np.array(list(values)), np.array(list(values.values())))
        for name, values in points.items()
    }


def without_copies(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Every run once, and a line on each copy: one run counted twice would narrow the spread.

    Of copies the first that is done stays, or the first of all where none is.
    """
    by_run: dict[str, list[Record]] = {}
    for record in records:
        by_run.setdefault(record.spec.digest(), []).append(record)
    kept, said = [], []
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
