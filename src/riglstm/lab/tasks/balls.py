"""Bouncing balls: predict the next frame of a film of balls, then ten frames from one's own.

Shapes: T frames of 64×64 pixels, B sequences; time first. D = 512 features, H the core's output;
encoder and decoder see T·B frames.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.lab.tasks.balls_films import SIDE, Scene, Sequences, load, scene, unpack, written
from riglstm.lab.tasks.base import SPLITS, Batch, Metric, Split, Totals, check_split, means
from riglstm.lab.tasks.common import (
    Count,
    Options,
    batches,
    check_core,
    check_whole,
    empty_totals,
    shuffled,
    whole,
)
from riglstm.lab.tasks.datasets import Show, cache_folder
from riglstm.models.base import Core, State

FEATURES = 512
EDGE = 1e-6
"""Predicted probabilities stay this far from 0 and 1."""
LAST_FRAME = (0.01, 0.05)
"""How far from 0 and 1 the yardstick that repeats a frame stays."""
FRAME_TOKENS = 16
"""What a frame needs of a device's memory while it is decoded, against a token of other tasks."""


@dataclass(frozen=True)
class Balls(Options):
    """Films of bouncing balls, from a simulator; trained on one number of balls, tested on others.

    A condition is "4", "678" (six to eight balls), "curtain" (three larger balls, and a square
    that hides a part of the picture), or one's own: "balls=5", "balls=2-4", "balls=3,curtain".
    """

    balls: str = "4"
    """The condition of the training data."""
    conditions: tuple[str, ...] = ("4", "678", "curtain")
    """Where the trained model is tested, besides its own condition."""
    sequences: Count = 50_000
    """Training sequences."""
    validation_size: Count = 10_000
    """Validation sequences of each condition."""
    test_size: Count = 10_000
    """Test sequences of each condition."""
    frames: Count = 51
    """Frames of a sequence; all but the last are inputs, all but the first are targets."""
    context: Count = 15
    """True frames that a roll-out starts with."""
    rollout_frames: Count = 10
    """Frames that are predicted from the model's own predictions, and scored."""
    batch_size: int = 64
    """Sequences of an update."""
    data_seed: Annotated[int, whole(0, 2**62)] = 0
    """Seed of the simulator; the same for all runs that are compared."""
    train_rollout: int = 0
    """Last inputs of a training film that are the model's own predictions, as in the test's
    roll-outs; 0: all are true frames."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("batch_size", self.batch_size, high=self.sequences)
        check_whole("train_rollout", self.train_rollout, low=0, high=max(0, self.frames - 2))
        least = self.context + self.rollout_frames
        if self.frames < least:
            raise ValueError(
                f"frames must be at least context + rollout_frames = {least}, got {self.frames}; "
                "take more frames, or fewer of the others"
            )
        for condition in (self.balls, *self.conditions):
            scene(condition)

    def open(
        self, device: torch.device, data_dir: Path | None = None, show: Show | None = None
    ) -> BallsTask:
        """The task; each set of sequences is read, or made in the cache, when it is first used."""
        return BallsTask(self, torch.device(device), show)


class Rollout(NamedTuple):
    """One roll-out: frames (T, 64, 64) on the CPU."""

    seen: Tensor
    """The true frames that the model was given."""
    truth: Tensor
    """The frames that follow."""
    prediction: Tensor
    """Their probabilities, as the model has them."""


class BallsTask:
    """See `riglstm.lab.tasks.base.Task`."""

    metric = Metric("bce", higher_is_better=False, scale=100, unit="")
    input_size = FEATURES

    def __init__(self, config: Balls, device: torch.device, show: Show | None = None) -> None:
        self.config, self.device, self.show = config, device, show
        self.trained_on = written(config.balls)
        others = map(written, config.conditions)
        self.conditions = tuple(dict.fromkeys((self.trained_on, *others)))
        self._loaded: dict[tuple[Scene, str], Tensor] = {}
        # The frames that a roll-out is given, and those that it is scored on.
        self._seen = slice(config.context)
        self._scored = slice(config.context, config.context + config.rollout_frames)

    def network(self, core: Core) -> BallsNetwork:
        """Encoder, core and decoder."""
        return BallsNetwork(core)

    def ready(self) -> None:
        """Read or make all sequences."""
        self.packed(self.trained_on, "training")
        for condition in self.conditions:
            self.packed(condition, "validation")
            self.packed(condition, "test")

    def size(self, split: Split) -> int:
        """Sequences of each condition."""
        check_split(split)
        return self.config.validation_size if split == "validation" else self.config.test_size

    def packed(self, condition: str, split: str) -> Tensor:
        """The sequences of a condition, (size, T, 512) on the device: training, validation, test.

        They stay there: 1.3 GB for 50,000.
        """
        check_split(split, SPLITS)
        c = self.config
        sizes = {"training": c.sequences, "validation": c.validation_size, "test": c.test_size}
        key = scene(condition), split
        if key not in self._loaded:
            wanted = Sequences(*key, sizes[split], c.frames, c.data_seed)
            packed = load(wanted, cache_folder() / "balls", self.show)
            self._loaded[key] = packed.to(self.device)
        return self._loaded[key]

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        """Frames as inputs, and the frames that follow each, (T - 1, B, 64, 64) both.

        Always `batch_size` of them, and each sequence once an epoch: see `shuffled`.
        """
        config = self.config
        chosen = shuffled(config.sequences, config.batch_size, self.device, seed, step)[rows]
        frames = _frames(self.packed(self.trained_on, "training")[chosen])
        return Batch(frames[:-1], frames[1:])

    def loss(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean binary cross-entropy per pixel and frame, of all frames and of the roll-out's.

        Without a roll-out, which the test's metric is of, it is the same number twice.
        """
        own = self.config.train_rollout
        true = len(batch.inputs) - own
        logits = net(batch.inputs[:true], own)
        loss = _from_logits(logits, batch.targets).mean()
        if not own:
            return loss, loss.detach()
        rolled = slice(true - 1, None)
        return loss, _from_logits(logits[rolled].detach(), batch.targets[rolled]).mean()

    def score(
        self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
    ) -> Totals:
        """Sums over sequences: "loss" with true frames, "bce" of the roll-outs (P30).

        "iou" and "iou_last" are the overlap of predicted balls with true ones in a roll-out, on
        average and in its last frame: what predicts the mean image finds no ball, and has 0.
        """
        totals = empty_totals(self.device, "loss", "bce", "iou", "iou_last", "count")
        for frames in self._batches(condition, split, share):
            totals["loss"] += _from_logits(net(frames[:-1]), frames[1:]).double().sum()
            predicted, truth = self._roll_out(net, frames), frames[self._scored]
            totals["bce"] += _from_probabilities(predicted, truth).double().sum()
            overlap = _overlap(predicted, truth).double()  # (T, B)
            totals["iou"] += overlap.mean(dim=0).sum()
            totals["iou_last"] += overlap[-1].sum()
            totals["count"] += frames.shape[1]
        return totals

    def rollout(self, net: nn.Module, condition: str, split: Split, index: int = 0) -> Rollout:
        """The roll-out of one sequence by a network in eval mode, for a picture."""
        packed = self.packed(condition, split)
        check_whole("the index of a sequence", index, low=0, high=len(packed) - 1)
        frames = _frames(packed[index : index + 1])
        with torch.no_grad():
            predicted = self._roll_out(net, frames)
        shown = (frames[self._seen], frames[self._scored], predicted)
        return Rollout(*(f[:, 0].cpu() for f in shown))

    def yardsticks(self, condition: str, split: Split) -> dict[str, float]:
        """The metric of what needs no model, as a mean.

        "constant" and "mean image" know the training set, "last frame" the last true frame, moved
        away from 0 and 1 by the number that follows.
        """
        mean = self._mean_image.clamp(EDGE, 1 - EDGE)
        names = ("constant", "mean image", *(f"last frame {edge}" for edge in LAST_FRAME))
        totals = empty_totals(self.device, *names, "count")
        for frames in self._batches(condition, split, (0, 1)):
            last, truth = frames[self._seen][-1], frames[self._scored]
            repeated = (last.clamp(edge, 1 - edge) for edge in LAST_FRAME)
            for name, guess in zip(names, (mean.mean(), mean, *repeated), strict=True):
                bce = _from_probabilities(guess.expand_as(truth), truth)
                totals[name] += bce.double().sum()
            totals["count"] += truth.shape[1]
        return means(totals)

    def _roll_out(self, net: nn.Module, frames: Tensor) -> Tensor:
        return cast(BallsNetwork, net).roll_out(frames[self._seen], self.config.rollout_frames)

    @functools.cached_property
    def _mean_image(self) -> Tensor:
        """How often each pixel is on in the training set: (64, 64)."""
        packed = self.packed(self.trained_on, "training")
        parts = packed.split(self.config.batch_size)
        total = torch.stack([unpack(p).sum(dim=(0, 1)) for p in parts]).sum(dim=0)
        return total / (packed.shape[0] * packed.shape[1])

    def _batches(self, condition: str, split: Split, share: tuple[int, int]) -> Iterator[Tensor]:
        packed = self.packed(condition, split)
        for rows in batches(len(packed), FRAME_TOKENS * self.config.frames, self.device, share):
            yield _frames(packed[rows])


def _frames(packed: Tensor) -> Tensor:
    """Packed sequences (B, T, 512) to frames (T, B, 64, 64)."""
    return unpack(packed.transpose(0, 1))


def _from_logits(logits: Tensor, truth: Tensor) -> Tensor:
    """Mean cross-entropy of each sequence: (B,)."""
    bce = F.binary_cross_entropy_with_logits(logits.float(), truth, reduction="none")
    return bce.mean(dim=(0, 2, 3))


def _overlap(predicted: Tensor, truth: Tensor) -> Tensor:
    """Pixels that are on in both frames, as a share of those that are in either: (T, B)."""
    guess, balls = predicted > 0.5, truth > 0.5
    both, either = ((guess & balls).sum(dim=(2, 3)), (guess | balls).sum(dim=(2, 3)))
    return torch.where(either > 0, both / either, 1)


def _from_probabilities(predicted: Tensor, truth: Tensor) -> Tensor:
    """Mean cross-entropy of each sequence: (B,)."""
    # Not torch's function of that name, which refuses to run under autocast.
    return -torch.where(truth > 0, predicted, 1 - predicted).log().mean(dim=(0, 2, 3))


class Doubling(nn.Conv2d):
    """Twice the height and width, each pixel repeated, then a 4×4 convolution that keeps the size.

    The latter is padded by 1 before and 2 after. As repeated pixels meet several taps of the
    kernel, sums of taps are applied to the small picture: 3×3 for each of four places in a pair of
    rows and columns. That is the same map, with fewer products, 5 times as fast on a CPU.
    """

    fold: Tensor
    """(36, 16): which taps each pixel of a square of two by two sums up for its 9 neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 4)
        even = ((1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1))
        odd = ((0, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 1))
        line = torch.tensor((even, odd), dtype=self.weight.dtype)  # 2 pixels, 3 neighbours, 4 taps
        fold = torch.einsum("apk,bql->abpqkl", line, line).reshape(36, 16)
        self.register_buffer("fold", fold, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) to (B, outputs, 2·h, 2·w)."""
        taps = F.linear(self.weight.flatten(2), self.fold)  # (outputs, inputs, 36)
        taps = taps.unflatten(2, (4, 9)).transpose(1, 2).reshape(-1, x.shape[1], 3, 3)
        assert self.bias is not None
        y = F.conv2d(x, taps, self.bias.repeat_interleave(4), padding=1)
        return F.pixel_shuffle(y, 2)


def encoder() -> nn.Sequential:
    """Frames (B, 64, 64) to features (B, 512): every map has a bias, a norm and an ELU (P31)."""
    convs: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        conv = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)
        convs += [conv, nn.GroupNorm(1, outputs), nn.ELU()]
    dense = (nn.Linear(64 * 8 * 8, FEATURES), nn.LayerNorm(FEATURES), nn.ELU())
    return nn.Sequential(nn.Unflatten(1, (1, SIDE)), *convs, nn.Flatten(), *dense)


def decoder(width: int) -> nn.Sequential:
    """A core's output (B, H) to logits (B, 64, 64); the last map has neither norm nor ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((width, 512), (512, 64 * 8 * 8)):
        layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU()]
    layers.append(nn.Unflatten(1, (64, 8, 8)))
    for inputs, outputs in ((64, 32), (32, 16), (16, 1)):
        layers.append(Doubling(inputs, outputs))
        if outputs > 1:
            layers += [nn.GroupNorm(1, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(1, 2))


class BallsNetwork(nn.Module):
    """Encoder, core and decoder: frames (T, B, 64, 64) to logits of the next ones."""

    capture_whole = True
    """A roll-out runs all of it step by step."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        if not core.streaming:
            raise ValueError(
                "the roll-out carries a core's state from frame to frame: expected a core with "
                f"streaming=True, got {type(core).__name__} with streaming=False; "
                "use a recurrent model that reads forwards only, such as riglstm or lstm"
            )
        check_core(core, FEATURES)
        self.encoder = encoder()
        self.core = core
        self.decoder = decoder(core.output_size)
        for part in (self.encoder, self.decoder):
            part.apply(_reset)

    def forward(self, frames: Tensor, steps: int = 0) -> Tensor:
        """Logits of the frames that follow each of (T, B, 64, 64), and of `steps` after those.

        For the latter, each prediction is fed back (P31); gradients go through all of them.
        """
        logits, state = self.run(frames)
        predicted = [logits]
        for _ in range(steps):
            logits, state = self.run(probabilities(logits[-1:]), state)
            predicted.append(logits)
        return torch.cat(predicted) if steps else logits

    def run(self, frames: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits of the frames that follow each of (T, B, 64, 64), and the core's state."""
        time, batch = frames.shape[:2]
        x = self.encoder(frames.flatten(0, 1)).unflatten(0, (time, batch))
        y, state = self.core(x, state)
        return self.decoder(y.flatten(0, 1)).unflatten(0, (time, batch)), state

    def roll_out(self, frames: Tensor, steps: int) -> Tensor:
        """Probabilities of the `steps` frames after frames (T, B, 64, 64)."""
        return probabilities(self(frames, steps - 1)[-steps:])


def probabilities(logits: Tensor) -> Tensor:
    """What is predicted and fed back."""
    return logits.float().sigmoid().clamp(EDGE, 1 - EDGE)


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        assert module.bias is not None
        nn.init.zeros_(module.bias)
