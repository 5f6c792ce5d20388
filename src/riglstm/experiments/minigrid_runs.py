"""Folders of runs on MiniGrid, as tables and pages read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from riglstm.experiments.minigrid_spec import GridSpec
from riglstm.experiments.result import FAILED, read_reason
from riglstm.train.folder import RunFolder


class Run(NamedTuple):
    """A run's folder."""

    spec: GridSpec
    folder: Path
    result: dict[str, Any] | None
    """None: it is not done."""
    failed: str | None = None
    """Why it will never be."""

    @property
    def state(self) -> str:
        """As `RunFolder.state`, or failed."""
        if self.failed is not None:
            return "failed"
        return "partial" if self.result is None else "done"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its figures."""
        return [] if self.result is None else list(self.result["rows"])

    def rates(self, metric: str = "success") -> dict[str, float]:
        """Success rates by level."""
        return {r["condition"]: r["value"] for r in self.rows if r["metric"] == metric}


def read(path: Path) -> Run:
    """A run; raises ValueError where the folder's files are not those of one."""
    folder = RunFolder(path)
    spec = GridSpec.from_json(folder.read_json(folder.config))
    if folder.state != "done":
        failed = read_reason(folder) if (path / FAILED).exists() else None
        return Run(spec, path, None, failed)
    result = folder.read_json(folder.result)
    if not isinstance(result.get("rows"), list):
        raise ValueError(
            f"{folder.result} must be the result of a run, with rows, a list of figures, got "
            f"{', '.join(result) or 'an empty one'}; delete the folder, and train anew"
        )
    return Run(spec, path, result)
