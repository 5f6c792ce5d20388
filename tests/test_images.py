"""Pictures as sequences: resizing, splits, batches, and the score."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import seeded
from riglstm.lab.tasks.common import CPU, TokenNetwork
from riglstm.lab.tasks.datasets import Images
from riglstm.lab.tasks.images import (
    CIFAR10,
    MNIST,
    ImageTask,
    SequentialImages,
    positions,
    read_size,
    split_up,
)
from riglstm.models import build


def noise(train: int = 50, test: int = 20, channels: int = 1, side: int = 28) -> Images:
    """Pictures of random pixels, the same at every call."""
    gen = seeded(0)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        shape = (n, channels, side, side)
        pixels = torch.randint(256, shape, generator=gen, dtype=torch.uint8)
        return pixels, torch.randint(10, (n,), generator=gen)

    return Images(*draw(train), *draw(test))


def small(
    images: Images | None = None,
    kind: type[SequentialImages] = MNIST,
    device: torch.device = CPU,
    **options: Any,
) -> ImageTask:
    """A task of 4x4 pictures and a width of 6, so that it takes no time."""
    config = kind(**{"size": 4, "conditions": ("5x5",), "input_size": 6, **options})
    return ImageTask(config, lambda: images or noise(), device)


SIZES = [(28, f"{s}x{s}") for s in (14, 16, 19, 24)] + [(32, "16x16"), (32, "32x32")]


@pytest.mark.parametrize(("n", "size"), [*SIZES, (28, "14x24"), (28, "19x14")])
def test_a_picture_is_resized_from_the_original_by_the_floor_rule(n, size):
    pixels = torch.randint(256, (n, n))
    rows, columns = map(int, size.split("x"))
    shown = pixels.flatten()[positions(n, read_size(size))].tolist()
    assert shown == [
        int(pixels[row * n // rows, column * n // columns])
        for row in range(rows)
        for column in range(columns)
    ]
    legacy = F.interpolate(pixels[None, None].float(), size=(rows, columns), mode="nearest")
    assert shown == legacy.flatten().tolist()


def test_a_pixel_is_white_from_the_threshold_on_before_the_picture_is_resized():
    images = noise(train=10, test=4)
    rows, columns = (torch.arange(n) * 28 // n for n in (14, 19))
    pixels = images.test_images[:, 0, rows][:, :, columns].flatten(1).mT
    for threshold in (128, 1, 255):
        task = ImageTask(MNIST(threshold=threshold, input_size=6), lambda: images, CPU)
        shown = task.examples("14x19", "test").inputs
        assert torch.equal(shown[..., 0].bool(), pixels >= threshold)


def test_a_step_of_cifar_shows_red_green_and_blue_of_one_pixel():
    images = noise(train=10, test=4, channels=3, side=32)
    task = ImageTask(CIFAR10(input_size=6), lambda: images, CPU)
    shown, labels = task.examples("24x24", "test")
    assert shown.shape == (576, 4, 3)
    assert torch.equal(labels, images.test_labels)
    rows = torch.arange(24) * 32 // 24
    pixels = images.test_images[:, :, rows][..., rows]  # (4, 3, 24, 24)
    assert torch.equal(shown, pixels.flatten(2).permute(2, 0, 1))
    assert task.batch(0, 0).inputs.shape == (256, 64, 3)


def test_training_pictures_are_shown_like_test_pictures():
    pixels, numbers = noise(train=10).train_images, torch.arange(10)
    task = small(Images(pixels, numbers, pixels, numbers), size=5)
    drawn, shown = task.batch(0, 0), task.examples("5x5", "test")
    assert torch.equal(shown.targets, numbers)
    assert torch.equal(drawn.inputs, shown.inputs[:, drawn.targets])


def test_splits_are_disjoint_fixed_and_leave_nothing_out():
    pixels, numbers = torch.zeros(60_000, 1, 1, 1, dtype=torch.uint8), torch.arange(60_000)
    images = Images(pixels, numbers, pixels, numbers)
    parts = split_up(images, None, None, None)
    (_, train), (_, validation) = parts["training"], parts["validation"]
    assert (len(train), len(validation)) == (48_000, 12_000)
    assert torch.equal(torch.cat((train, validation)).sort().values, numbers)
    assert torch.equal(parts["test"][1], numbers)
    # Pinned, so that results of other days stay comparable.
    assert validation[:8].tolist() == [0, 2, 11, 12, 24, 26, 35, 39]
    again = split_up(images, 1000, 100, 10)
    assert [len(labels) for _, labels in again.values()] == [1000, 100, 10]
    for name, (_, labels) in again.items():
        assert set(labels.tolist()) < set(parts[name][1].tolist())
    assert again["test"][1].tolist() != list(range(10))


def test_a_split_larger_than_its_data_is_refused():
    with pytest.raises(ValueError, match="train_size must be a whole number from 1 to 40, got 41"):
        small(train_size=41).ready()
    with pytest.raises(ValueError, match="validation_size must be a whole number from 1 to 10"):
        small(validation_size=11).ready()


@pytest.mark.parametrize("batch_size", [8, 7, 40, 100])
def test_each_picture_is_seen_once_an_epoch(batch_size):
    images = noise(train=50)._replace(train_labels=torch.arange(50))
    task = small(images, batch_size=batch_size)
    steps = -(-160 // batch_size)
    labels = [task.batch(3, step).targets for step in range(steps)]
    assert all(len(drawn) == batch_size for drawn in labels)
    seen = torch.cat(labels)[:160].view(4, 40)
    own = seen[0].sort().values
    assert len(own.unique()) == 40
    for epoch in seen[1:]:
        assert torch.equal(epoch.sort().values, own)
        assert not torch.equal(epoch, seen[0])


def test_the_score_is_that_of_all_pictures_at_once(monkeypatch):
    monkeypatch.setattr("riglstm.lab.tasks.common.CPU_TOKENS", 4 * 25)
    task = small(noise(test=23))
    net = task.network(build("lstm", 6, 6))
    inputs, labels = task.examples("5x5", "test")
    with torch.no_grad():
        logits = net(inputs)
    scored = task.score(net, "5x5", "test")
    assert scored["count"] == task.size("test") == 23
    assert scored["accuracy"] == (logits.argmax(-1) == labels).sum()
    assert scored["loss"].item() == pytest.approx(23 * F.cross_entropy(logits, labels).item())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_cross_entropy_smoothed_in_training_with_a_gradient_for_every_parameter(
    smoothing,
):
    task = small(batch_size=30, label_smoothing=smoothing)
    net = task.network(build("lstm", 6, 6))
    batch = task.batch(0, 0)
    loss, accuracy = task.loss(net, batch)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())
    logits = net(batch.inputs)
    assert torch.equal(loss, F.cross_entropy(logits, batch.targets, label_smoothing=smoothing))
    assert accuracy.item() == pytest.approx((logits.argmax(-1) == batch.targets).float().mean())
    assert not accuracy.requires_grad
    scores = [t.score(net, "5x5", "validation")["loss"] for t in (task, small(batch_size=30))]
    assert scores[0] == scores[1]


def test_there_are_as_many_tables_as_colours():
    grey = ImageTask(MNIST(), noise, CPU).network(build("lstm", 600, 600))
    assert grey.get_parameter("tables.weight").shape == (2, 600)
    assert sum(p.numel() for p in grey.parameters()) == 2_892_010
    task = ImageTask(CIFAR10(size=2), lambda: noise(channels=3, side=32), CPU)
    net = task.network(build("lstm", 600, 6))
    assert net.get_parameter("tables.weight").shape == (3 * 256, 200)
    assert net(task.batch(0, 0).inputs).shape == (64, 10)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_class_is_read_from_the_last_step_or_from_the_mean(streaming):
    class Echo(nn.Module):
        input_size = output_size = 6
        batch_first = False

        def forward(self, x: Tensor) -> tuple[Tensor, tuple[()]]:
            return x, ()

    core = Echo()
    core.streaming = streaming  # type: ignore[assignment]
    task = small()
    net = task.network(core)  # type: ignore[arg-type]
    tokens = task.batch(0, 0).inputs
    x = net.get_submodule("tables")(tokens[..., 0].long())
    read = x[-1] if streaming else x.mean(0)
    torch.testing.assert_close(net(tokens), net.get_submodule("readout")(read))


@pytest.mark.parametrize(
    ("config", "conditions"),
    [
        (MNIST(), ("14x14", "16x16", "19x19", "24x24")),
        (MNIST(size=16), ("16x16", "19x19", "24x24")),
        (CIFAR10(), ("16x16", "19x19", "24x24", "32x32")),
    ],
)
def test_conditions_begin_with_the_size_of_training(config, conditions):
    task = ImageTask(config, noise, CPU)
    assert task.conditions == conditions
    assert task.trained_on == conditions[0]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (MNIST, {"size": 0}, "size must be a whole number from 1 on, got 0"),
        (MNIST, {"test_size": 0}, "test_size must be a whole number from 1 on, or none, got 0"),
        (MNIST, {"threshold": 256}, "threshold must be a whole number from 1 to 255, got 256"),
        (MNIST, {"dropout": -0.1}, "dropout must be a number at least 0 and below 1, got -0.1"),
        (CIFAR10, {"input_size": 100}, "the 3 channels, got 100; take input_size=99"),
        (CIFAR10, {"input_size": 2}, "the 3 channels, got 2; take input_size=3"),
        (CIFAR10, {"levels": 1}, "levels must be a whole number from 2 to 256, got 1"),
        *(
            (MNIST, {"conditions": (size,)}, "like 19x19, or rows and columns like 14x24, got")
            for size in ("", "19", "19x0", "19X19", "019x019", "-1x-1", "19x19x19")
        ),
    ],
)
def test_options_that_cannot_work_are_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_levels_are_evenly_spaced_and_pictures_keep_their_order_of_brightness():
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(CIFAR10().prepare(pixels), pixels)
    few = CIFAR10(levels=16).prepare(pixels)
    assert few.unique(return_counts=True)[1].tolist() == [16] * 16
    assert torch.equal(few, few.sort().values)
    assert CIFAR10(levels=16).values == 16


@pytest.mark.parametrize("start_range", [None, 0.1])
def test_tables_and_readout_start_in_the_range_that_is_asked_for(start_range):
    torch.manual_seed(0)
    core = build("lstm", 64, 64)
    net = TokenNetwork(core, 1, 256, (10,), dropout=0.0, summarise=True, start_range=start_range)
    largest = net.tables.weight.abs().max().item()
    assert net.readout.bias.any() == (start_range is None)
    if start_range is None:
        assert largest > 3
    else:
        assert 0.099 < largest <= 0.1
        assert 0.09 < net.readout.weight.abs().max().item() <= 0.1


def test_half_of_the_pictures_are_mirrored():
    images = noise(channels=3, side=32)
    plain, flipped = (small(images, CIFAR10, batch_size=40, flip=f) for f in (False, True))
    before, after = plain.batch(0, 3).inputs, flipped.batch(0, 3).inputs  # (T, B, C)
    mirror = before.unflatten(0, (4, 4)).flip(1).flatten(0, 1)
    kept = [torch.equal(after[:, b], before[:, b]) for b in range(40)]
    turned = [torch.equal(after[:, b], mirror[:, b]) for b in range(40)]
    assert all(k != t for k, t in zip(kept, turned, strict=True))
    assert 10 < sum(turned) < 30
    assert not torch.equal(flipped.batch(0, 4).inputs, plain.batch(0, 4).inputs)
