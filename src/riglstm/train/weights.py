"""A network's weights as safetensors: what people share, and what a run is tested with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from riglstm.train.folder import aside


def save_weights(net: nn.Module, path: Path) -> None:
    """Write the weights, under the names of the network's state_dict."""
    write_weights(net.state_dict(), path)


def load_weights(net: nn.Module, path: Path) -> None:
    """Read what `save_weights` wrote into a network of the same form."""
    tensors = read_weights(path)
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"{path} holds the weights of another network: {error}; "
            "build the network with the options of its run"
        ) from error


def write_weights(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """A whole file, or none."""
    # Copies, as safetensors refuses tensors that share memory.
    copies = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
    with aside(path) as file:
        file.write(save(copies, None if metadata is None else dict(metadata)))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(
            f"expected weights in {path}, got no such file; the run that wrote them is not whole"
        ) from None
    except Exception as error:
        raise ValueError(f"{path} must hold weights as safetensors, got: {error}") from error


def read_metadata(path: Path) -> dict[str, str]:
    """What a file says of itself; empty where it says nothing."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except Exception as error:
        raise ValueError(f"{path} must hold weights as safetensors, got: {error}") from error
