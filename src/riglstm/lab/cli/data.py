"""`riglstm data`: which data sets there are, where they lie; downloads, and checks of every sum."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from riglstm.lab.cli import UsageError, flags
from riglstm.lab.tasks.datasets import DATASETS, DataError, data_folder, fetch, find, load


@dataclass(frozen=True)
class Data:
    """Show which data sets are there, and download those that are named.

    A download is checked against the sum that its authors published, and a file that is only
    half there is never taken for whole. The balls and the copying task need no files.

    Example: riglstm data mnist --data-dir ~/data
    """

    names: tuple[str, ...] = flags.positional()
    """Data sets to get: mnist, cifar, or all; without a name they are only listed."""
    data_dir: Path | None = None
    """Folder of the data; none: RIGLSTM_DATA, or the user's cache."""
    check: bool = False
    """Download nothing: read every file of those named (or of all that are there)."""


def main(args: Sequence[str]) -> None:
    """Show, download and check the data sets."""
    config = flags.read_one("riglstm data", Data, args)
    flags.check_names("NAMES", config.names, [*DATASETS, "all"])
    names = list(DATASETS) if "all" in config.names else list(dict.fromkeys(config.names))
    if config.check:
        _check(names, config.data_dir)
        return
    for name in names:
        print(f"{name}: in {fetch(name, config.data_dir, show=print)}, all sums right")
    if not names:
        print(f"data sets, in {data_folder(config.data_dir)}:")
        for name in DATASETS:
            print(f"  {name:<10}{DATASETS[name].title}; {_place(name, config.data_dir)}")
        print("`riglstm data NAME` downloads one, `riglstm data --check` reads all that are there.")


def _place(name: str, data_dir: Path | None) -> str:
    try:
        return f"in {find(name, data_dir)}"
    except DataError:
        return "not there"


def _check(names: Sequence[str], data_dir: Path | None) -> None:
    """Read what is named, or all that is there; a set that is named must be there."""
    names = names or [n for n in DATASETS if _place(n, data_dir) != "not there"] or list(DATASETS)
    wrong = []
    for name in names:
        try:
            load(name, data_dir)
            print(f"{name}: {_place(name, data_dir)}, all sums right")
        except DataError as error:
            print(error if str(error).startswith(name) else f"{name}: {error}")
            wrong.append(name)
    if wrong:
        where = "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"
        raise UsageError(
            f"{', '.join(wrong)}: missing or damaged; `riglstm data {' '.join(wrong)}{where}` "
            "gets it"
        )
