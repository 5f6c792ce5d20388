"""`riglstm report`: the paper's figures and tables from run folders, on one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from riglstm.cli import flags


@dataclass(frozen=True)
class Report:
    """Draw what runs have measured, on one HTML page that needs nothing else.

    From run folders alone: tables, the metric against the shift for all models, training curves,
    cell activations and score maps of test digits, roll-outs of balls beside the truth. What is
    not there is said on the page.

    Example: riglstm report runs --out report.html --digits 0 1 2 --step 289
    """

    paths: tuple[Path, ...]
    """Folders of runs, or folders that hold such folders."""
    out: Path = Path("report.html")
    """File of the page, or a folder for it."""
    figures: Path | None = None
    """Folder that takes every picture as a PNG file, too; none: none."""
    digits: tuple[int, ...] | None = None
    """Numbers of test images whose cells and scores are drawn; none: the first three classes."""
    size: int = 24
    """Side of these images; 24 in the paper."""
    step: int = 289
    """Where scores are drawn, counted from 1; 289 in the paper."""
    sample: int = 64
    """Test images over which each cell's activity is averaged."""
    sequence: int = 0
    """Number of the test sequence of balls that is rolled out."""
    models: tuple[str, ...] | None = None
    """Models whose weights are drawn; none: all."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, auto (a GPU where there is one)."""
    data_dir: Path | None = None
    """Folder that holds the data; none: RIGLSTM_DATA, or the user's cache. Nothing is
    downloaded."""


def main(args: Sequence[str]) -> None:
    """Draw tables and figures from run folders, on one HTML page."""
    config = flags.read_one("riglstm report", Report, args)
    # Only here: matplotlib takes seconds to load.
    from riglstm.experiments.run import say
    from riglstm.report import report

    given = {name: value for name, value in asdict(config).items() if name not in ("paths", "out")}
    page = report(config.paths, config.out, **given, show=say)
    print(f"written: {page}")
