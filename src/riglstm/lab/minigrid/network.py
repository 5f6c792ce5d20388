"""The agent for MiniGrid: what it sees, a memory, and two heads.

Shapes: B frames of 7 × 7 tiles with object, colour and state; H the memory's width, A actions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from riglstm.models.base import Core

FEATURES = 64
"""Width of what the memory takes in."""


class ActorCritic(nn.Module):
    """A convolutional encoder, a memory, an actor and a critic.

    The encoder takes the 3 integers of each tile as they are, unscaled. The heads' weights start as
    N(0, 1) with each row scaled to length 1, their biases as 0.
    """

    def __init__(self, core: Core, actions: int) -> None:
        super().__init__()
        if core.input_size != FEATURES:
            raise ValueError(
                f"the memory must have input_size = {FEATURES}, got {core.input_size}; "
                f"build it for {FEATURES} features"
            )
        assert isinstance(core, nn.Module)
        dropout = max(getattr(part, "dropout", 0.0) for part in core.modules())
        if dropout > 0:
            raise ValueError(
                "PPO compares how probable an action was with how probable it is, which dropout "
                f"would make two random numbers: expected a memory with dropout=0, got {dropout}"
            )
        rules = {name: _rule(core, name) for name in ("cells", "views", "peers")}
        drawn = [f"{name}='random'" for name, rule in rules.items() if rule == "random"]
        if drawn:
            raise ValueError(
                "PPO compares how probable an action was with how probable it is, which a random "
                "selection would make two random numbers: expected a memory that draws nothing, "
                f"got {', '.join(drawn)}"
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
        self.core = core
        self.actor = _head(core.output_size, actions)
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

    def logits(self, y: Tensor) -> Tensor:
        """The memory's output (..., H) to the actions' logits (..., A)."""
        logits: Tensor = self.actor(y)
        return logits

    def prepared_logits(self) -> Callable[[Tensor], Tensor]:
        """`logits` for the weights as they are now, laid out once for many small calls."""
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


def _rule(core: nn.Module, name: str) -> str | None:
    """By which a memory selects `name`; None: it has no such thing."""
    found = (getattr(getattr(part, "selection", None), name, None) for part in core.modules())
    return next((rule for rule in found if isinstance(rule, str)), None)


def _conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """A convolution of 2 × 2 tiles, (B, h, w, C) to (B, h - 1, w - 1, outputs)."""
    tiles = torch.cat((x[:, :-1, :-1], x[:, :-1, 1:], x[:, 1:, :-1], x[:, 1:, 1:]), dim=-1)
    W = layer.weight.permute(2, 3, 1, 0).reshape(-1, layer.out_channels)  # (2·2·C, outputs)
    assert layer.bias is not None
    y = torch.addmm(layer.bias, tiles.flatten(0, 2), W)
    return y.view(*tiles.shape[:3], -1)


def _head(H: int, outputs: int) -> nn.Sequential:
    head = nn.Sequential(nn.Linear(H, 64), nn.Tanh(), nn.Linear(64, outputs))
    with torch.no_grad():
        for layer in (head[0], head[2]):
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight)
            layer.weight /= layer.weight.norm(dim=1, keepdim=True)
            nn.init.zeros_(layer.bias)
    return head
