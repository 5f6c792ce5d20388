"""The models of the paper's comparison, by name, behind one contract: `riglstm.models.base.Core`.

>>> from riglstm.models import build
>>> core = build("rim", 600, 600, active_cells=4)
>>> output, state = core(torch.randn(196, 64, 600))       # (T, B, D) -> (T, B, core.output_size)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from riglstm.layer import RigLSTM
from riglstm.models.brim import BRIM
from riglstm.models.entnet import EntNet
from riglstm.models.lstm import LSTM, GridLSTM
from riglstm.models.rig import Rig
from riglstm.models.rim import RIM
from riglstm.models.rmc import RMC
from riglstm.models.transformer import Transformer

MODELS: dict[str, Callable[..., nn.Module]] = {
    "lstm": LSTM,
    "gridlstm": GridLSTM,
    "rim": RIM,
    "brim": BRIM,
    "rmc": RMC,
    "entnet": EntNet,
    "transformer": Transformer,
    "riglstm": Rig,
}


def build(name: str, input_size: int, hidden_size: int, **options: Any) -> nn.Module:
    """The model of that name; options are the keyword arguments of its class."""
    if name not in MODELS:
        raise ValueError(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(
                f"{option!r} is no option of the model {name!r}; it takes {', '.join(known)}"
            )
    return MODELS[name](input_size, hidden_size, **options)


@functools.cache
def options_of(name: str) -> tuple[str, ...]:
    """The options that `build` takes for a model."""
    names = dict.fromkeys(inspect.signature(MODELS[name]).parameters)
    if MODELS[name] is Rig:
        del names["options"]
        names |= dict.fromkeys(inspect.signature(RigLSTM).parameters)
    return tuple(n for n in names if n not in ("input_size", "hidden_size", "proj_size"))


__all__ = ["MODELS", "build", "options_of"]
