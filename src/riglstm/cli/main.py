"""`riglstm`: reads the verb and its flags, and runs it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from riglstm import VARIANTS, __version__
from riglstm.cli import UsageError
from riglstm.models import MODELS
from riglstm.scan import BACKENDS

DESCRIPTION = f"""RigLSTM {__version__}: recurrent layers behind the call of nn.LSTM.

Example: riglstm demo

`riglstm VERB --help` explains a verb; `riglstm --version` prints the version."""

FAILED, INTERRUPTED = 2, 130
"""Exit codes: the request was wrong; Ctrl-C, as shells count it."""


@dataclass(frozen=True)
class List:
    """Print the names of the models, of RigLSTM's variants and of its backends.

    Example: riglstm list
    """


def list_names(_: List) -> None:
    """The names that `build`, `VARIANTS` and `RigLSTM` take, with what each variant changes."""
    print("models: riglstm.models.build(name, input_size, hidden_size)")
    for name in MODELS:
        print(f"  {name}")
    print("variants: RigLSTM(..., **VARIANTS[name])")
    for name, options in VARIANTS.items():
        changes = ", ".join(f"{key}={value!r}" for key, value in options.items())
        print(f"  {name:<24}{changes}")
    print("backends: RigLSTM(..., backend=name)")
    for name in ("auto", *BACKENDS):
        print(f"  {name}")


def main(args: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. Flags that cannot be read leave by SystemExit(2)."""
    args = sys.argv[1:] if args is None else args
    if list(args) == ["--version"]:
        print(f"riglstm {__version__}")
        return 0
    if any(importlib.util.find_spec(name) is None for name in ("tyro", "rich")):
        return _fail("the command line needs tyro and rich: pip install 'riglstm[cli]'")

    # Only now: these need the extra, and the line above must come out without it.
    import tyro

    from riglstm.cli import bench, demo

    verbs: dict[str, Callable[..., Any]] = {
        "demo": demo.Demo,
        "bench": bench.Bench,
        "list": List,
    }
    runs: dict[type, Callable[[Any], None]] = {
        demo.Demo: demo.run,
        bench.Bench: bench.run,
        List: list_names,
    }
    config = tyro.extras.subcommand_cli_from_dict(
        verbs, prog="riglstm", description=DESCRIPTION, args=args, sort_subcommands=False
    )
    try:
        runs[type(config)](config)
    except UsageError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("\nriglstm: stopped by Ctrl-C; nothing was saved", file=sys.stderr)
        return INTERRUPTED
    return 0


def _fail(message: str) -> int:
    print(f"riglstm: {message}", file=sys.stderr)
    return FAILED
