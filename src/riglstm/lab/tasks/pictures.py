"""Pictures before they are sequences: which of them serve for what, and at which size.

Shapes: n pictures, C channels.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.lab.tasks.base import generator
from riglstm.lab.tasks.files import Images
from riglstm.lab.tasks.tokens import check_whole

HELD_OUT = 0.2
"""Share of the training pictures that becomes validation data."""
SPLIT, SUBSET = 0, 1
"""Seeds, so that neither purpose draws what the other does."""


class Part(NamedTuple):
    """Some pictures of a dataset."""

    images: Tensor
    """(n, C, rows, columns) uint8."""
    labels: Tensor
    """(n,) int64."""


class Size(NamedTuple):
    """Of a picture as it is shown."""

    rows: int
    columns: int


def read_size(condition: str) -> Size:
    """`19x19`, or 14 rows of 24 columns as `14x24`."""
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", condition)
    if found is None:
        raise ValueError(
            f"a condition of pictures must be a size like 19x19, or rows and columns like 14x24, "
            f"got {condition!r}"
        )
    return Size(int(found[1]), int(found[2]))


def positions(n: int, size: Size) -> Tensor:
    """(rows · columns,): the pixel of an n x n picture that each step shows, row by row.

    Row i of the resized picture is row ⌊i·n/rows⌋ of the original, and columns likewise.
    """
    row, column = (torch.arange(many) * n // many for many in size)
    return (n * row[:, None] + column).flatten()


def split_up(
    images: Images, train_size: int | None, validation_size: int | None, test_size: int | None
) -> dict[str, Part]:
    """ "training", "validation" and "test" data, the same for every run.

    None: all there are. A smaller number are drawn at random, again the same for every run.
    """
    cpu = torch.device("cpu")
    order = torch.randperm(len(images.train_images), generator=generator(cpu, SPLIT))
    held_out = round(HELD_OUT * len(order))
    # Drawn for test pictures as well: the first half of MNIST's is the easier one.
    test = torch.randperm(len(images.test_images), generator=generator(cpu, SUBSET))
    learned = Part(images.train_images, images.train_labels)
    parts = {}
    for name, option, source, rows, wanted in (
        ("training", "train_size", learned, order[held_out:], train_size),
        ("validation", "validation_size", learned, order[:held_out], validation_size),
        ("test", "test_size", Part(images.test_images, images.test_labels), test, test_size),
    ):
        if wanted is not None:
            check_whole(option, wanted, high=len(rows))
        chosen = rows[:wanted].sort().values
        parts[name] = Part(source.images[chosen], source.labels[chosen])
    return parts
