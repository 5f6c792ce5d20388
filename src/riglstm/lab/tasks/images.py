"""Pictures as sequences: one pixel a step, row by row; tested at sizes that training never saw.

Shapes: n pictures, C channels, T = size² steps, B sequences.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.lab.tasks.base import Batch, Metric, Split, Totals, check_split, generator
from riglstm.lab.tasks.common import (
    CPU,
    AboveZero,
    BelowOne,
    Count,
    Options,
    TokenNetwork,
    batches,
    check_core,
    check_network,
    check_whole,
    empty_totals,
    shuffled,
    whole,
)
from riglstm.lab.tasks.datasets import Images, Show, obtain
from riglstm.models.base import Core

HELD_OUT = 0.2
"""Share of the training pictures that becomes validation data."""
SPLIT, SUBSET = 0, 1
"""Seeds, so that neither purpose draws what the other does."""
CLASSES = 10
FLIPS = 1
"""The last number of a seed of mirror images, so that they are not drawn as the order is."""


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


def positions(n: int, size: Size, device: torch.device = CPU) -> Tensor:
    """(rows · columns,): the pixel of an n x n picture that each step shows, row by row.

    Row i of the resized picture is row ⌊i·n/rows⌋ of the original, and columns likewise.
    """
    row, column = (torch.arange(many, device=device) * n // many for many in size)
    return (n * row[:, None] + column).flatten()


def resized(pixels: Tensor, condition: str) -> Tensor:
    """Square pictures (n, C, pixels) at the size of a condition: (n, C, T)."""
    side = math.isqrt(pixels.shape[2])
    return pixels.index_select(2, positions(side, read_size(condition), pixels.device))


def split_up(
    images: Images, train_size: int | None, validation_size: int | None, test_size: int | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pictures and labels of "training", "validation" and "test", the same for every run.

    None: all there are. A smaller number are drawn at random, again the same for every run.
    """
    order = torch.randperm(len(images.train_images), generator=generator(CPU, SPLIT))
    held_out = round(HELD_OUT * len(order))
    # Drawn for test pictures as well: the first half of MNIST's is the easier one.
    test = torch.randperm(len(images.test_images), generator=generator(CPU, SUBSET))
    learned, tested = images[:2], images[2:]
    parts = {}
    for name, option, (pixels, labels), rows, wanted in (
        ("training", "train_size", learned, order[held_out:], train_size),
        ("validation", "validation_size", learned, order[:held_out], validation_size),
        ("test", "test_size", tested, test, test_size),
    ):
        if wanted is not None:
            check_whole(option, wanted, high=len(rows))
        chosen = rows[:wanted].sort().values
        parts[name] = pixels[chosen], labels[chosen]
    return parts


@dataclass(frozen=True)
class SequentialImages(Options):
    """What the picture tasks have in common."""

    dataset: ClassVar[str]
    """As in `riglstm.lab.tasks.datasets.DATASETS`."""
    channels: ClassVar[int]

    size: Count
    """Side of the training pictures."""
    conditions: tuple[str, ...]
    """Sizes at which the model is tested besides training's own."""
    batch_size: Count = 64
    """Sequences an update."""
    dropout: BelowOne = 0.0
    """On the embedded pixels and on the core's output."""
    train_size: Count | None = None
    """Training pictures; None: all but the fifth that is held out."""
    validation_size: Count | None = None
    """Pictures by which a checkpoint is chosen; None: all that are held out."""
    test_size: Count | None = None
    """Pictures of the test; None: all 10,000."""
    input_size: Count = 600
    """Width of an embedded pixel, its channels together."""
    start_range: AboveZero | None = None
    """Tables and read-out start in ± this, the read-out's bias at 0; none: as torch starts them."""
    label_smoothing: BelowOne = 0.0
    """Share of each training label that is spread over all classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_network(self.input_size, self.channels, f"the {self.channels} channels")
        for condition in self.conditions:
            read_size(condition)

    @property
    def values(self) -> int:
        """How many values a pixel may have."""
        raise NotImplementedError

    def prepare(self, images: Tensor) -> Tensor:
        """The values of pixels as they are shown, before any resizing."""
        raise NotImplementedError

    def open(
        self, device: torch.device, data_dir: Path | None = None, show: Show | None = None
    ) -> ImageTask:
        """The task; its pictures are read at first use, or downloaded if no folder was named."""
        read = functools.partial(obtain, self.dataset, data_dir, show)
        return ImageTask(self, read, torch.device(device))


@dataclass(frozen=True)
class MNIST(SequentialImages):
    """Handwritten digits, black or white."""

    dataset: ClassVar[str] = "mnist"
    channels: ClassVar[int] = 1

    size: Count = 14
    conditions: tuple[str, ...] = ("16x16", "19x19", "24x24")
    threshold: Annotated[int, whole(1, 255)] = 128
    """A pixel is white from this value on (0 to 255), before the picture is resized."""

    @property
    def values(self) -> int:
        """Black and white."""
        return 2

    def prepare(self, images: Tensor) -> Tensor:
        """0 or 1."""
        return (images >= self.threshold).to(torch.uint8)


@dataclass(frozen=True)
class CIFAR10(SequentialImages):
    """Photographs of ten kinds of things, in three colours of 256 values."""

    dataset: ClassVar[str] = "cifar"
    channels: ClassVar[int] = 3

    size: Count = 16
    conditions: tuple[str, ...] = ("19x19", "24x24", "32x32")
    flip: bool = False
    """Each training picture is mirrored left to right in half of the updates that see it."""
    levels: Annotated[int, whole(2, 256)] = 256
    """Different values of a pixel in each channel, evenly spaced; 256: all."""

    @property
    def values(self) -> int:
        """As many as there are levels."""
        return self.levels

    def prepare(self, images: Tensor) -> Tensor:
        """0 to levels - 1."""
        return (images.int() * self.levels // 256).to(torch.uint8)


class ImageTask:
    """See `SequentialImages`; all pictures lie on the device, a batch is chosen there.

    `read` is called when they are first needed: a network is built without them.
    """

    metric = Metric("accuracy", higher_is_better=True)

    def __init__(
        self, config: SequentialImages, read: Callable[[], Images], device: torch.device
    ) -> None:
        self.config = config
        self.device = device
        self.input_size = config.input_size
        self.trained_on = f"{config.size}x{config.size}"
        self.conditions = tuple(dict.fromkeys((self.trained_on, *config.conditions)))
        self._read = read

    @functools.cached_property
    def pictures(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each part of the data the pixels (n, C, pixels), and labels; read at first use.

        Pictures for training have its size, others their own.
        """
        config, images, found = self.config, self._read(), {}
        parts = split_up(images, config.train_size, config.validation_size, config.test_size)
        for name, (shown, labels) in parts.items():
            pixels = config.prepare(shown).flatten(2)
            if name == "training":
                pixels = resized(pixels, self.trained_on)
            found[name] = pixels.to(self.device), labels.to(self.device)
        return found

    def ready(self) -> None:
        """Read the pictures, if that was not done yet."""
        _ = self.pictures

    def size(self, split: Split) -> int:
        """Pictures, at each size."""
        check_split(split)
        return len(self.pictures[split][1])

    def network(self, core: Core) -> nn.Module:
        """A table for each channel, the core, and ten classes read from its summary."""
        check_core(core, self.input_size)
        config = self.config
        return TokenNetwork(
            core,
            config.channels,
            config.values,
            (CLASSES,),
            dropout=config.dropout,
            summarise=True,
            start_range=config.start_range,
        )

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        """Always `batch_size` pictures: where an epoch ends within a batch, the next one begins.

        The pictures are shuffled anew for each epoch, and each is seen once in it.
        """
        (pictures, labels), B = self.pictures["training"], self.config.batch_size
        chosen = shuffled(len(labels), B, self.device, seed, step)[rows]
        pixels = pictures.index_select(0, chosen)  # (B, C, T)
        if getattr(self.config, "flip", False):
            gen = generator(CPU, seed, step, FLIPS)
            flipped = torch.rand(B, generator=gen)[rows] < 0.5
            flipped = flipped[:, None, None].to(self.device)
            size = self.config.size
            mirrored = pixels.unflatten(2, (size, size)).flip(3).flatten(2)
            pixels = torch.where(flipped, mirrored, pixels)
        return Batch(pixels.permute(2, 0, 1), labels.index_select(0, chosen))

    def loss(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy, and the share of pictures whose class is right."""
        logits = net(batch.inputs)
        right = logits.detach().argmax(-1) == batch.targets
        loss = F.cross_entropy(
            logits.float(), batch.targets, label_smoothing=self.config.label_smoothing
        )
        return loss, right.float().mean()

    def score(
        self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
    ) -> Totals:
        """Sums over pictures, all of them."""
        size = read_size(condition)
        totals = empty_totals(self.device, "loss", "accuracy", "count")
        for rows in batches(self.size(split), size.rows * size.columns, self.device, share):
            batch = self.examples(condition, split, rows)
            logits = net(batch.inputs).float()
            totals["loss"] += F.cross_entropy(logits, batch.targets, reduction="sum").double()
            totals["accuracy"] += (logits.argmax(-1) == batch.targets).sum()
            totals["count"] += rows.stop - rows.start
        return totals

    def examples(self, condition: str, split: Split, rows: slice | Tensor = slice(None)) -> Batch:
        """Pictures of the validation or the test data at a size, as sequences (T, B, C)."""
        check_split(split)
        pixels, labels = self.pictures[split]
        shown = resized(pixels[rows], condition)  # (B, C, T)
        return Batch(shown.permute(2, 0, 1), labels[rows])
