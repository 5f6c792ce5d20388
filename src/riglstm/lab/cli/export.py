"""`riglstm export`: the weights of a finished run as one file, to share and to test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from riglstm.lab.cli import UsageError, flags
from riglstm.lab.tables.run import export


@dataclass(frozen=True)
class Export:
    """Write the chosen weights of a finished run to one safetensors file.

    They are those that were best on validation data of the training condition. The run's
    configuration and result stand in the file's metadata, so that `riglstm evaluate FILE` gives
    the recorded figures without the run's folder.

    Example: riglstm export runs/mnist/riglstm-s0 weights/mnist-riglstm.safetensors
    """

    run: Path
    """The run's folder, or a file that was exported from it."""
    file: Path
    """Where to; it must end in .safetensors."""
    force: bool = False
    """Write over a file that is there."""


def main(args: Sequence[str]) -> None:
    """Write the weights of a finished run to one file that is enough to test it."""
    config = flags.read_one("riglstm export", Export, args)
    if not config.run.exists():
        raise UsageError(f"RUN must be the folder of a run, got {config.run}, which is not there")
    if config.file.suffix != ".safetensors":
        raise UsageError(f"FILE must end in .safetensors, got {config.file}")
    if config.file.exists() and not config.force:
        raise UsageError(
            f"FILE must be a new one, got {config.file}, which is there; --force writes over it, "
            "or give another name"
        )
    export(config.run, config.file)
    print(f"written: {config.file}, {config.file.stat().st_size / 1e6:.1f} MB")
