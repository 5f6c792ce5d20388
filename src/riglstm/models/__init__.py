"""The models of the paper's comparison, by name, behind one contract: `riglstm.models.base.Core`.

>>> from riglstm.models import build
>>> core = build("rim", 600, 600, active_cells=4)
>>> output, state = core(torch.randn(196, 64, 600))       # (T, B, D) -> (T, B, core.output_size)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from riglstm.models.brim import BRIM
from riglstm.models.entnet import EntNet
from riglstm.models.gridlstm import GridLSTM
from riglstm.models.lstm import LSTM
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
    return MODELS[name](input_size, hidden_size, **options)


__all__ = ["MODELS", "build"]
