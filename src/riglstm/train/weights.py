"""A network's weights as safetensors: what people share, and what a run is tested with."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save
from torch import nn

from riglstm.train.folder import aside


def save_weights(net: nn.Module, path: Path) -> None:
    """Write the weights, under the names of the network's state_dict."""
    # Copies, as safetensors refuses tensors that share memory.
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in net.state_dict().items()}
    with aside(path) as file:
        file.write(save(tensors))


def load_weights(net: nn.Module, path: Path) -> None:
    """Read what `save_weights` wrote into a network of the same form."""
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ValueError(
            f"expected weights in {path}, got no such file; the run that wrote them is not whole"
        ) from None
    except Exception as error:
        raise ValueError(f"{path} must hold weights as safetensors, got: {error}") from error
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"{path} holds the weights of another network: {error}; "
            "build the network with the options of its run"
        ) from error
