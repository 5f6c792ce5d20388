"""`riglstm explore`: a local page on which networks read a digit, pixel by pixel."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from riglstm.lab.cli import UsageError, flags
from riglstm.lab.tasks.common import Options, whole


@dataclass(frozen=True)
class Explore(Options):
    """Serve a page on this machine: draw a digit, and watch the cells read it pixel by pixel.

    It shows which cells are awake, what each looks at, how much it keeps, and the class
    probabilities over time, at any size of the picture from 14 to 28. A second tab opens a trace of
    a model of yours, written by `riglstm.plot.save_trace`. Nothing is downloaded.

    Example: riglstm explore --weights weights/mnist-riglstm.safetensors --port 8000
    """

    weights: tuple[Path, ...] = (Path("weights"),)
    """Networks that `riglstm export` wrote, folders of them, or runs on mnist."""
    port: Annotated[int, whole(0, 2**16 - 1)] = 8000
    """Where the page is served; 0: any port that is free."""
    host: str = "127.0.0.1"
    """Address to serve at; any other than this one lets other machines in."""


def main(args: Sequence[str]) -> None:
    """Draw a digit on a local page, and watch the cells read it."""
    config = flags.read_one("riglstm explore", Explore, args)
    for path in config.weights:
        if not path.exists():
            raise UsageError(
                f"--weights must be exported networks or folders of them, got {path}, which is not "
                "there; the repository of riglstm has a folder weights"
            )
    # Only here: safetensors may not be installed.
    from riglstm.lab.explore.networks import open_networks
    from riglstm.lab.explore.server import Server

    # Products of one sequence gain nothing from more, and lose much beside a busy process.
    torch.set_num_threads(1)
    networks = open_networks(config.weights)
    try:
        server = Server(config.host, config.port, networks)
    except OSError as error:
        raise UsageError(
            f"--host and --port must be free on this machine, got {config.host}:{config.port}: "
            f"{error.strerror}; --port 0 takes any that is free"
        ) from None
    host, port = server.server_address[:2]
    names = ", ".join(one.name for one in networks) or "no network; the second tab works"
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"exploring {names}: http://{host!s}:{port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
