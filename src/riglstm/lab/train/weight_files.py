"""A network's weights as safetensors: what people share, and what a run is tested with.

The file's metadata has its SHA-256, taken with zeros in that place, and compared before anything is
parsed: no other number comes of a file that is damaged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor, nn

from riglstm.lab.train.folder import atomic_write

NONE_YET = "0" * 64
SUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')


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
    """Write a whole file, or none."""
    # Copies, as safetensors refuses tensors that share memory.
    copies = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
    content = save(copies, {**(metadata or {}), "sha256": NONE_YET})
    own = hashlib.sha256(content).hexdigest()
    with atomic_write(path) as file:
        file.write(content.replace(_field(NONE_YET), _field(own), 1))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    return load(_verified(path))


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file."""
    content = _verified(path)
    size = int.from_bytes(content[:8], "little")
    said: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return said


def _verified(path: Path) -> bytes:
    """The bytes of a file that `write_weights` wrote, and that nothing has changed since."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"expected weights in {path}, got no such file; the run that wrote them is not whole"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} must hold weights as safetensors, got: {error}") from error
    said = SUM.search(content)
    blank = content if said is None else content.replace(said[0], _field(NONE_YET), 1)
    if said is None or hashlib.sha256(blank).hexdigest() != said[1].decode():
        raise ValueError(
            f"{path} must hold weights as safetensors, with their sha256 in its metadata, got "
            f"{'none' if said is None else 'another sha256: the file is damaged'}; take another "
            "copy, or train or export anew"
        )
    return content


def _field(digest: str) -> bytes:
    return b'"sha256":"%s"' % digest.encode()
