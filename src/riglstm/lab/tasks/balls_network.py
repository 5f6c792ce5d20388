"""Bouncing balls: frames to features and back around a core, and the roll-out.

Shapes: T frames, B sequences, D = 512 features, H the core's output; the layers see T·B frames.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.lab.tasks.balls_render import SIDE
from riglstm.lab.tasks.tokens import check_core
from riglstm.models.base import Core, State

FEATURES = 512
EDGE = 1e-6
"""Predicted probabilities stay this far from 0 and 1."""


class Doubling(nn.Conv2d):
    """Twice the height and width, each pixel repeated, then a 4×4 convolution that keeps the size.

    The latter is padded by 1 before and 2 after. As repeated pixels meet several taps of the
    kernel, sums of taps are applied to the small picture: 3×3 for each of four places in a pair of
    rows and columns. That is the same map, with fewer products, 5 times as fast on a CPU.
    """

    fold: Tensor
    """(2, 3, 4): which of the 4 taps an even and an odd pixel sum up for each of 3 neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 4)
        even = ((1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1))
        odd = ((0, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 1))
        fold = torch.tensor((even, odd), dtype=self.weight.dtype)
        self.register_buffer("fold", fold, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) to (B, outputs, 2·h, 2·w)."""
        taps = torch.einsum("apk,bql,oikl->oabipq", self.fold, self.fold, self.weight)
        assert self.bias is not None
        y = F.conv2d(x, taps.flatten(0, 2), self.bias.repeat_interleave(4), padding=1)
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

    def forward(self, frames: Tensor) -> Tensor:
        """Teacher forcing: every frame is a true one."""
        return self.run(frames)[0]

    def run(self, frames: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits of the frames that follow each of (T, B, 64, 64), and the core's state."""
        time, batch = frames.shape[:2]
        x = self.encoder(frames.flatten(0, 1)).unflatten(0, (time, batch))
        y, state = self.core(x, state)
        return self.decoder(y.flatten(0, 1)).unflatten(0, (time, batch)), state

    def roll_out(self, frames: Tensor, steps: int) -> Tensor:
        """Probabilities of the `steps` frames after frames (T, B, 64, 64), each fed back (P31)."""
        logits, state = self.run(frames)
        predicted = [probabilities(logits[-1:])]
        for _ in range(steps - 1):
            logits, state = self.run(predicted[-1], state)
            predicted.append(probabilities(logits))
        return torch.cat(predicted)


def probabilities(logits: Tensor) -> Tensor:
    """What is predicted and fed back."""
    return logits.float().sigmoid().clamp(EDGE, 1 - EDGE)


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        assert module.bias is not None
        nn.init.zeros_(module.bias)
