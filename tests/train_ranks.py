"""`riglstm`, with time to be killed in, and each rank's last weights left in the working folder."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

from riglstm.lab.cli.main import main
from riglstm.lab.train import loop
from riglstm.lab.train.config import rank

fit, update = loop.fit, loop.Training._update


def slow(self: loop.Training) -> None:
    time.sleep(0.05)
    update(self)


def kept(net: nn.Module, *arguments: Any, **options: Any) -> loop.Fitted:
    fitted = fit(net, *arguments, **options)
    torch.save(net.state_dict(), f"rank-{rank()}.pt")
    return fitted


if __name__ == "__main__":
    loop.fit, loop.Training._update = kept, slow  # type: ignore[method-assign]
    sys.exit(main())
