"""Run folders, read: what each run was, how far it came, what it measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from riglstm.experiments.plan import FAILED, State
from riglstm.experiments.spec import RunSpec
from riglstm.report.curves import Series
from riglstm.train.folder import RunFolder

CHOSEN = "validation@"
"""What `chosen_on` begins with in a result."""


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
    result = folder.read_json(folder.result) if folder.state == "done" else None
    failed = path / FAILED
    reason = folder.read_json(failed)["reason"] if result is None and failed.exists() else ""
    return Record(
        path=path,
        spec=spec,
        state="failed" if reason else folder.state,
        run=folder.read_json(folder.run) if folder.run.exists() else {},
        result=result,
        reason=str(reason),
        metrics=read_metrics(folder.metrics) if folder.metrics.exists() else {},
    )


def read_metrics(path: Path) -> dict[str, Series]:
    """metrics.csv, by name; half a line, as a kill may leave one, is no figure."""
    points: dict[str, dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        whole = [line for line in file if line.endswith("\n")]
    for line in list(csv.reader(whole))[1:]:
        step, name, value = line
        points.setdefault(name, {})[int(step)] = float(value)
    return {
        name: Series(np.array(list(values)), np.array(list(values.values())))
        for name, values in points.items()
    }


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
