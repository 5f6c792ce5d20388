"""The agent for MiniGrid: what it sees, a memory, and two heads.

Shapes: B frames of 7 × 7 tiles with object, colour and state; H the memory's width, A actions, U
different frames.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from riglstm.models.base import Core

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FEATURES = 64
"""Width of what the memory takes in."""
KNOWN = 512
"""Frames that are remembered from one rollout to the next, and the least room for features."""


class ActorCritic(nn.Module):
    """A convolutional encoder, a memory, an actor and a critic.

    The encoder takes the 3 integers of each tile as they are, unscaled. The heads' weights start as
    N(0, 1) with each row scaled to length 1, their biases as 0.
    """

    def __init__(self, core: Core, actions: int) -> None:
        super().__init__()
        assert isinstance(core, nn.Module)
        if draws := _draws(core):
            raise ValueError(
                "PPO compares how probable an action was with how probable it is, which a memory "
                "that draws would make two random numbers: expected one that draws nothing, got "
                f"{', '.join(draws)}"
            )
        if not core.streaming:
            raise ValueError(
                "an agent acts before it knows the steps to come: expected a memory that streams, "
                f"got {type(core).__name__}, which does not; leave out bidirectional=True"
            )
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 2),  # 6 × 6
            nn.ReLU(),
            nn.MaxPool2d(2),  # 3 × 3
            nn.Conv2d(16, 32, 2),  # 2 × 2
            nn.ReLU(),
            nn.Conv2d(32, FEATURES, 2),  # 1 × 1
            nn.ReLU(),
            nn.Flatten(),
        )
        self.core, self.actions = core, actions
        self.actor = _head(core.output_size, actions)  # (..., H) to logits (..., A)
        self.critic = _head(core.output_size, 1)

    def encode(self, images: Tensor) -> Tensor:
        """`encoder` as three products: images (B, 7, 7, 3) uint8 to features (B, 64).

        On images this small a library's convolution is mostly its preparation, which is done anew
        for every other number of images.
        """
        first, second, third = (m for m in self.encoder if isinstance(m, nn.Conv2d))
        x = _conv(images.to(first.weight.dtype), first)  # (B, 6, 6, 16)
        x = F.max_pool2d(x.permute(0, 3, 1, 2), 2).relu().permute(0, 2, 3, 1)  # (B, 3, 3, 16)
        x = _conv(x, second).relu()  # (B, 2, 2, 32)
        return _conv(x, third).relu().flatten(1)

    def prepared_logits(self) -> Callable[[Tensor], Tensor]:
        """`actor` for the weights as they are now, laid out once for many small calls."""
        first, _, last = self.actor
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        W, V = first.weight.t().contiguous(), last.weight.t().contiguous()

        def logits(y: Tensor) -> Tensor:
            return torch.addmm(last.bias, torch.addmm(first.bias, y, W).tanh_(), V)

        return logits

    def values(self, y: Tensor) -> Tensor:
        """The memory's output (..., H) to the return that is expected from here, (...)."""
        values: Tensor = self.critic(y)
        return values.squeeze(-1)


def _draws(core: nn.Module) -> list[str]:
    """Options by which a memory draws: dropout, and rules of selection."""
    found = []
    for part in core.modules():
        if dropout := getattr(part, "dropout", 0.0):
            found.append(f"dropout={dropout}")
        rules = getattr(part, "selection", None)
        for name in ("cells", "views", "peers"):
            if getattr(rules, name, None) == "random":
                found.append(f"{name}='random'")
    return list(dict.fromkeys(found))


def _conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """A convolution of 2 × 2 tiles, (B, h, w, C) to (B, h - 1, w - 1, outputs)."""
    tiles = torch.cat((x[:, :-1, :-1], x[:, :-1, 1:], x[:, 1:, :-1], x[:, 1:, 1:]), dim=-1)
    W = layer.weight.permute(2, 3, 1, 0).reshape(-1, layer.out_channels)  # (2·2·C, outputs)
    assert layer.bias is not None
    y = torch.addmm(layer.bias, tiles.flatten(0, 2), W)
    return y.view(*tiles.shape[:3], -1)


def _head(H: int, outputs: int) -> nn.Sequential:
    first, last = nn.Linear(H, 64), nn.Linear(64, outputs)
    with torch.no_grad():
        for layer in (first, last):
            nn.init.normal_(layer.weight)
            layer.weight /= layer.weight.norm(dim=1, keepdim=True)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), last)


class Frames:
    """The different frames of a rollout, each kept and encoded once: an agent sees few of them.

    A frame's code is its row in `images`. What the encoder makes of a frame, `features`, is the
    same wherever it occurs. `known` (U, 7, 7, 3) uint8, on the CPU, are expected to be seen again:
    they are encoded at once, which is quicker than one by one.
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], device: torch.device, known: Tensor | None = None
    ) -> None:
        self.encode, self.device = encode, device
        self.codes: dict[bytes, int] = {}
        self.pieces: list[Tensor] = []
        self.seen: set[int] = set()
        self.features = torch.empty(0, device=device)
        if known is not None:
            self.look(known.numpy())
            self.seen.clear()

    def look(self, images: NDArray[np.uint8]) -> Tensor:
        """The codes (B) of images (B, 7, 7, 3)."""
        rows = images.reshape(len(images), -1).copy()
        codes, new = [], []
        for i, key in enumerate(rows.view(f"V{rows.shape[1]}").reshape(-1).tolist()):
            code = self.codes.get(key)
            if code is None:
                code = self.codes[key] = len(self.codes)
                new.append(i)
            codes.append(code)
        if new:
            fresh = torch.from_numpy(rows[new]).view(-1, *images.shape[1:])
            self.pieces.append(fresh)
            self._extend(self.encode(fresh.to(self.device)))
        self.seen.update(codes)
        # Four times as quick as torch.tensor of a list.
        return torch.frombuffer(array("q", codes), dtype=torch.int64).to(self.device)

    @property
    def images(self) -> Tensor:
        """All frames, (U, 7, 7, 3) uint8, on the CPU."""
        self.pieces = [torch.cat(self.pieces)]
        return self.pieces[0]

    def again(self) -> Tensor:
        """Those to be `known` next time: what was seen, then what was seen before that."""
        kept = [*sorted(self.seen), *(c for c in range(len(self.codes)) if c not in self.seen)]
        return self.images[kept[:KNOWN]]

    def _extend(self, features: Tensor) -> None:
        used = len(self.codes) - len(features)
        if len(self.codes) > len(self.features):
            room = features.new_empty(max(KNOWN, 2 * len(self.codes)), features.shape[1])
            if used:
                room[:used] = self.features[:used]
            self.features = room
        self.features[used : len(self.codes)] = features
