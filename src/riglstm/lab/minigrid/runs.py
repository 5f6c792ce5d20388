"""Folders of runs on MiniGrid, as tables and pages read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from riglstm.lab.minigrid.spec import GridSpec
from riglstm.lab.tables.read_run import RunFiles, read_files, refused
from riglstm.lab.tables.result import check_result


@dataclass(frozen=True, kw_only=True)
class GridRun(RunFiles):
    """A run on MiniGrid."""

    spec: GridSpec

    def rates(self, metric: str = "success") -> dict[str, float]:
        """Success rates by level."""
        return {r["condition"]: r["value"] for r in self.rows if r["metric"] == metric}


def read(path: Path, curves: bool = True) -> GridRun:
    """A run; raises RunError where the folder's files are not those of one."""
    files = read_files(path, curves)
    with refused(path / "config.json"):
        spec = GridSpec.from_json(files.config)
        spec.digest()
    if files.result is not None:
        check_result(files.result, path / "result.json", chosen=False)
    return GridRun(**vars(files), spec=spec)
