"""`riglstm report`: figures and tables from run folders, or from files of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from riglstm.lab.cli import UsageError, flags
from riglstm.lab.tasks.common import Count, Device, Options, whole

UNREAD = 1
"""Exit code: the page is written, and lacks runs that cannot be read."""


@dataclass(frozen=True)
class Report(Options):
    """Draw what runs have measured, on one HTML page that needs nothing else.

    From run folders alone: tables, the metric against the shift for all models, training curves,
    cell activations and score maps of test digits, roll-outs of balls beside the truth. What is
    not there is said on the page. A run that cannot be read is named there and left out; the
    exit code is then 1.

    `--results` does another thing: from the CSV files of a folder it writes README's table, a
    page of all tables in that folder, and figures, with the cells of exported networks among them.

    Example: riglstm report runs --out report.html --digits 0 1 2 --step 289
    """

    paths: tuple[Path, ...] = flags.positional()
    """Folders of runs, or folders that hold such folders."""
    results: Path | None = None
    """Folder of CSV files, as `riglstm reproduce --results` writes them; none: none."""
    readme: Path = Path("README.md")
    """With --results: the file that takes the table, between its two marks."""
    weights: Path = Path("weights")
    """With --results: folder of networks that `riglstm export` wrote."""
    out: Path = Path("report.html")
    """File of the page, or a folder for it."""
    figures: Path | None = None
    """Folder that takes every picture as a PNG file, too, in place of files that have the names of
    these; none: none."""
    digits: tuple[Annotated[int, whole(0)], ...] | None = None
    """Numbers of test images whose cells and scores are drawn; none: the first three classes."""
    size: Count = 24
    """Side of these images; 24 in the paper."""
    step: int = 289
    """Where scores are drawn, counted from 1; 289 in the paper."""
    sequence: Annotated[int, whole(0)] = 0
    """Number of the test sequence of balls that is rolled out."""
    models: tuple[str, ...] | None = None
    """Models whose weights are drawn; none: all."""
    device: Device = "cpu"
    """Where to compute: cpu, cuda, cuda:1, auto (a GPU where there is one)."""
    data_dir: Path | None = None
    """Folder that holds the data; none: RIGLSTM_DATA, or the user's cache. Nothing is
    downloaded."""


def main(args: Sequence[str]) -> None:
    """Draw tables and figures from run folders, on one HTML page."""
    config = flags.read_one("riglstm report", Report, args)
    if not config.paths and config.results is None:
        raise UsageError("report needs PATHS, folders of runs, or --results, a folder, got neither")
    for path in (config.results, config.readme, config.weights) if config.results else ():
        if not path.exists():
            raise UsageError(
                f"--results, --readme and --weights must be there, got {path}, which is not"
            )
    # Only here: matplotlib takes seconds to load.
    from riglstm.lab.report import publish, report
    from riglstm.lab.train.progress import say

    if config.results is not None:
        changed = publish(
            *(config.results, config.readme, config.weights),
            device=config.device,
            data_dir=config.data_dir,
            show=say,
        )
        print(f"written: {', '.join(map(str, changed)) or 'nothing, all is up to date'}")
    if config.paths:
        own = ("paths", "out", "results", "readme", "weights")
        given = {name: value for name, value in asdict(config).items() if name not in own}
        unread: list[str] = []
        print(f"written: {report(config.paths, config.out, **given, show=say, warn=unread.append)}")
        if unread:
            say(f"{len(unread)} of the runs cannot be read, and the page names them:")
            for line in unread:
                say(f"  {line}")
            raise SystemExit(UNREAD)
