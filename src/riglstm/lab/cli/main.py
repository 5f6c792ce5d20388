"""`riglstm`: reads the verb, runs it, and turns what goes wrong into one line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from riglstm import __version__
from riglstm.lab.cli import (
    UsageError,
    bench,
    data,
    demo,
    evaluate,
    explore,
    export,
    flags,
    list,
    report,
    reproduce,
    sweep,
    train,
)
from riglstm.lab.tables.executor import FAILED, STOPPED, in_words
from riglstm.lab.train.config import rank

VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "demo": demo.main,
    "train": train.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "reproduce": reproduce.main,
    "sweep": sweep.main,
    "report": report.main,
    "bench": bench.main,
    "explore": explore.main,
    "data": data.main,
    "list": list.main,
}

HELP = f"""\
usage: riglstm VERB [flags]

RigLSTM {__version__}: a recurrent layer with the call of nn.LSTM, its rivals, and the paper's
experiments.

verbs:
{{verbs}}

Example: riglstm demo

`riglstm VERB --help` explains a verb; `riglstm --version` prints the version."""

LAB = (
    *("lightning_fabric", "lightning_utilities", "torchmetrics", "numpy", "tqdm", "safetensors"),
    *("matplotlib", "tensorboard", "pooch"),
)
EXTRAS: dict[str, str] = {
    **dict.fromkeys(LAB, "lab"),
    **{"gymnasium": "rl", "minigrid": "rl", "ray": "ray"},
}
"""What is not installed with torch, and the extra of ours that has it."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    # Everything is loaded: what `riglstm.command` has set gives way to KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = sys.argv[1:] if args is None else args
    # The profiler that counts memory would write its own log between the lines.
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    with unbreakable_output():
        return _main(args)


def _main(args: Sequence[str]) -> int:
    try:
        # Of several processes of one run, one speaks.
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere if rank() else sys.stdout),
        ):
            _run(args)
    except SystemExit as end:
        # After `--help`, or with a verb's own exit code.
        return int(end.code or 0)
    except UsageError as error:
        return FAILED if rank() else _fail(str(error))
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in EXTRAS:
            raise
        way_out = f"pip install 'riglstm[{EXTRAS[name]}]'"
        return _fail(f"this needs {name}, which is not installed: {way_out}")
    except KeyboardInterrupt as stop:
        if rank() == 0:
            said = str(stop) or "stopped by Ctrl-C; nothing was saved"
            print(f"\nriglstm: {said}", file=sys.stderr)
        return STOPPED
    except Exception as error:
        line = in_words(error)
        if line is None:
            raise
        return _fail(line)
    return 0


def _run(args: Sequence[str]) -> None:
    verb, *rest = args or [""]
    if verb in ("-h", "--help"):
        verbs = (f"  {name:<11}{main.__doc__}" for name, main in VERBS.items())
        print(HELP.format(verbs="\n".join(verbs)))
    elif verb == "--version":
        print(f"riglstm {__version__}")
    elif not verb:
        raise UsageError(f"say what to do: {', '.join(VERBS)} (`riglstm --help` explains them)")
    else:
        flags.check_name("the verb", verb, VERBS)
        VERBS[verb](rest)


def _fail(message: str) -> int:
    print(f"riglstm: {message}", file=sys.stderr)
    return FAILED


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Within it, stdout and stderr may be closed, full or unread: no write raises.

    What is printed is lost then, and the work is not.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        # Python has none where it was closed when the process began.
        out, err = _Output(before[0] or nowhere), _Output(before[1] or nowhere)
        sys.stdout, sys.stderr = out, err
        try:
            yield
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = before


class _Output:
    """A stream of text that raises no error; after one, it is silent."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        with contextlib.suppress(AttributeError, ValueError):
            # A terminal without the signs of tables gets others.
            self.stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._do(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._do(self.stream.flush)

    def _do(self, what: Callable[..., object], *arguments: str) -> None:
        try:
            what(*arguments)
        except OSError:
            # What is still in its buffer goes nowhere, too: Python writes it once more at its end.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
