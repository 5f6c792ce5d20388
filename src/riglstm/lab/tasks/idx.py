"""MNIST and Fashion-MNIST: pictures and labels in IDX files.

An IDX file of bytes: 0, 0, 8, the number of dimensions; each dimension in 4 bytes, highest first;
then the values, the last dimension running fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from riglstm.lab.tasks.files import Content, DataError, Dataset, Download, Images, Layout

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
SIZES = (47_040_016, 60_008, 7_840_016, 10_008)


def parse_idx(data: bytes, name: str) -> Tensor:
    """An IDX file of bytes as a uint8 tensor."""
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(
            f"{name} must be an IDX file of bytes, which begins with 00 00 08, "
            f"got {data[:3].hex(' ') or 'an empty file'}; take the published file"
        )
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    if len(data) != start + math.prod(shape):
        raise DataError(
            f"{name} says it holds {' x '.join(map(str, shape))} values: expected "
            f"{start + math.prod(shape):,} bytes, got {len(data):,}; take the published file"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[start:].view(shape)


def parse(blobs: Sequence[bytes]) -> Images:
    """The four files, in the order of `NAMES`."""
    parts = [parse_idx(data, name) for data, name in zip(blobs, NAMES, strict=True)]
    for images, labels, name in ((parts[0], parts[1], NAMES[1]), (parts[2], parts[3], NAMES[3])):
        most = int(labels.max()) if labels.numel() else None
        if images.dim() != 3 or labels.shape != images.shape[:1] or most is None or most > 9:
            raise DataError(
                f"{name} must hold a label from 0 to 9 for each of {len(images)} pictures, got "
                f"shape {tuple(labels.shape)}, labels up to {most}; take the published file"
            )
    return Images(parts[0].unsqueeze(1), parts[1].long(), parts[2].unsqueeze(1), parts[3].long())


def _dataset(
    title: str,
    folders: tuple[str, ...],
    mirrors: tuple[str, ...],
    contents: tuple[str, str, str, str],
    packed: tuple[tuple[str, int], ...],
) -> Dataset:
    return Dataset(
        title,
        folders,
        layouts=(
            Layout(
                tuple(
                    Content(name, f"sha256:{checksum}", size)
                    for name, checksum, size in zip(NAMES, contents, SIZES, strict=True)
                ),
                parse,
                spellings=(("-idx", ".idx"),),
            ),
        ),
        downloads=tuple(
            Download(
                f"{name}.gz", f"sha256:{checksum}", size, tuple(m + f"{name}.gz" for m in mirrors)
            )
            for name, (checksum, size) in zip(NAMES, packed, strict=True)
        ),
    )


# Sums of the four files whose md5 sums were published with them, and of what is in them.
MNIST = _dataset(
    "MNIST: 60,000 + 10,000 handwritten digits, 28x28",
    ("mnist", "MNIST", "MNIST/raw"),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    (
        ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
        ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
        ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
        ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
    ),
)

# The authors publish md5 sums of the gzip files (github.com/zalandoresearch/fashion-mnist). The
# sha256 sums here are those that several projects (Flux.jl for one) pin for files with that md5,
# and those of what is in them.
FASHION = _dataset(
    "Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 28x28",
    ("fashion", "fashion-mnist", "fashion_mnist", "FashionMNIST", "FashionMNIST/raw"),
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    ),
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    (
        ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
        ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
        ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
        ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
    ),
)
