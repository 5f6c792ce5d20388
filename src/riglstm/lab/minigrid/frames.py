"""The frames of a rollout, each kept and encoded once: a MiniGrid agent sees few different ones.

A frame's code is its row in `images`. What the encoder makes of a frame is the same wherever it
occurs, so it is computed once; gradients of all occurrences add up.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KNOWN = 512
"""Frames that are remembered from one rollout to the next, and the least room for features."""


class Frames:
    """Different frames in the order in which they came, with their features under fixed weights.

    `known` (U, 7, 7, 3) uint8, on the CPU, are expected to be seen again: they are encoded at once,
    which is quicker than one by one.
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], device: torch.device, known: Tensor | None = None
    ) -> None:
        self.encode, self.device = encode, device
        self.codes: dict[bytes, int] = {}
        self.pieces: list[Tensor] = []
        self.seen: set[int] = set()
        self.features: Tensor | None = None
        if known is not None and len(known):
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
        if self.features is None or len(self.codes) > len(self.features):
            room = features.new_empty(max(KNOWN, 2 * len(self.codes)), features.shape[1])
            if self.features is not None:
                room[:used] = self.features[:used]
            self.features = room
        self.features[used : len(self.codes)] = features
