"""`riglstm`: reads the verb, runs it, and turns what goes wrong into one line."""

from __future__ import annotations

import contextlib
import errno
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

TRAINS = "pip install 'riglstm[lab]'"
EXTRAS: dict[str, tuple[str, str]] = {
    "lightning_fabric": ("training", TRAINS),
    "lightning_utilities": ("training", TRAINS),
    "torchmetrics": ("training", TRAINS),
    "numpy": ("this", TRAINS),
    "tqdm": ("this", TRAINS),
    "safetensors": ("reading and writing weights", TRAINS),
    "matplotlib": ("drawing", TRAINS),
    "tensorboard": ("TensorBoard's log (or --no-tensorboard)", TRAINS),
    "pooch": ("downloading", TRAINS),
    "gymnasium": ("MiniGrid", "pip install 'riglstm[rl]'"),
    "minigrid": ("MiniGrid", "pip install 'riglstm[rl]'"),
    "ray": ("--on ray", "pip install 'riglstm[ray]'"),
    "optuna": ("`stop` in a search space", "pip install 'riglstm[search]'"),
}
"""What is not installed with torch: who needs it, and how to get it."""

WRITES = ("demo", "train", "export", "reproduce", "sweep", "report")
"""Verbs whose result is in files, whatever becomes of what they print."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    # Everything is loaded: what `riglstm.command` has set gives way to KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = sys.argv[1:] if args is None else args
    # The profiler that counts memory would write its own log between the lines.
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    writes = next(iter(args), "") in WRITES and not {"-h", "--help"} & set(args)
    with unbreakable_output() as out:
        code = _main(args)
        out.flush()
        if code == 0 and out.error is not None and not writes:
            return _fail(f"what it printed could not be written: {out.error}")
    return code


def _main(args: Sequence[str]) -> int:
    try:
        # Of several processes of one run, one speaks.
        with open(os.devnull, "w") as nowhere:
            quiet = contextlib.redirect_stdout(nowhere) if rank() else contextlib.nullcontext()
            with quiet:
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
        what, way_out = EXTRAS[name]
        return _fail(f"{what} needs {name}, which is not installed: {way_out}")
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
def unbreakable_output() -> Iterator[_Output]:
    """Within it, stdout and stderr may be closed, full or unread: no write raises.

    What is printed is lost then, and the work is not. Gives the standard output.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        # Python has none where it was closed when the process began.
        out, err = _Output(before[0] or nowhere), _Output(before[1] or nowhere)
        sys.stdout, sys.stderr = out, err
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = before


class _Output:
    """A stream of text that remembers an error and raises none; after one, it is silent."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.error: OSError | None = None
        """What the text was lost to; a reader that has gone has seen enough, and loses nothing."""
        with contextlib.suppress(AttributeError, ValueError):
            # A terminal without the signs of tables gets others.
            self.stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._errors_kept():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._errors_kept():
            self.stream.flush()

    @contextlib.contextmanager
    def _errors_kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EBADF, errno.EIO):
                self.error = error
            # What is still in its buffer goes nowhere, too: Python writes it once more at its end.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
