"""Which cells wake, and what each of them looks at: the rules behind Eqs. (14)-(16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

CellRule: TypeAlias = Literal["top", "all", "random"]
SlotRule: TypeAlias = Literal["top", "all", "random", "soft"]
SoftUpdate: TypeAlias = bool | Literal["printed"]

CELL_RULES = ("top", "all", "random")
SLOT_RULES = ("top", "all", "random", "soft")

LOWEST = torch.finfo(torch.float32).min
"""To which scores of -inf are lifted, so that a cell's own can be set below every other's."""


@dataclass(frozen=True)
class Selection:
    """The three counts of the paper, the rule each of them is applied by, and the soft update."""

    N: int
    """Cells."""
    K: int
    """Views of the input."""
    K_a: int
    """Cells awake in a step."""
    K_x: int
    """Views that a cell takes in."""
    K_h: int
    """Other cells that a cell listens to; its own state is always there, Eq. (16)."""
    cells: CellRule = "top"
    views: SlotRule = "top"
    peers: SlotRule = "top"
    update_scale: float = 1.0
    """Factor on the two logits of Eq. (21); 1 in the paper."""

    @property
    def awake(self) -> int:
        """Cells that really work in a step."""
        return self.N if self.cells == "all" else self.K_a

    @property
    def draws(self) -> bool:
        """Whether any rule needs random numbers."""
        return "random" in (self.cells, self.views, self.peers)


def two_thirds(N: int) -> int:
    """The number of active cells by default."""
    return max(1, round(2 * N / 3))


class Update(NamedTuple):
    """The soft update in plain numbers."""

    soft_update: bool
    """Whether there is one."""
    update_scale: float
    """Factor on the two logits of Eq. (21)."""
    update_bias: float | None
    """Start value of the bias towards the new state; None: there is no such parameter."""


PRINTED = Update(True, 1.0, None)
"""Eq. (21) to the letter."""


def settle_update(
    soft_update: SoftUpdate,
    scale: float | Literal["auto"],
    bias: float | Literal["auto"] | None,
    d: int,
    biases: bool = True,
) -> Update:
    """The options of the soft update as plain numbers (P18); `biases`: whether a layer has any.

    `auto` is what learns: 1/d, as a logit is a sum of d products, and a bias of 4, by which the new
    state counts 98 % at the start. As printed it is 1 and no bias; without a soft update, too,
    whatever is given, as there is nothing to act on.
    """
    if not soft_update:
        return PRINTED._replace(soft_update=False)
    if soft_update == "printed":
        return PRINTED
    if scale == "auto":
        scale = 1 / d
    if bias == "auto":
        bias = 4.0 if biases else None
    return Update(True, float(scale), None if bias is None else float(bias))


def said_update(update: Update, d: int, biases: bool) -> tuple[tuple[str, object, object], ...]:
    """The inverse of `settle_update`: each option with its value and its default."""
    soft: SoftUpdate = "printed" if update == PRINTED else update.soft_update
    usual = settle_update(soft, "auto", "auto", d, biases)
    return (
        ("soft_update", soft, True),
        ("update_scale", update.update_scale, usual.update_scale),
        ("update_bias", update.update_bias, usual.update_bias),
    )


class Noise(NamedTuple):
    """What the `random` rules rank instead of scores; None where a rule needs none."""

    cells: Tensor | None = None
    """(T, B, N), or (B, N) for one step."""
    views: Tensor | None = None
    """(T, B, N, K), or (B, N, K)."""
    peers: Tensor | None = None
    """(T, B, N, N), or (B, N, N)."""

    def at(self, t: int) -> Noise:
        """The draws of step t."""
        return Noise(*(None if n is None else n[t] for n in self))


def draw_noise(sel: Selection, T: int, B: int, device: torch.device) -> Noise | None:
    """Draw what the `random` rules of one sequence need, from torch's generator (P14)."""
    if not sel.draws:
        return None

    def rand(rule: str, *shape: int) -> Tensor | None:
        return torch.rand(T, B, *shape, device=device) if rule == "random" else None

    return Noise(
        rand(sel.cells, sel.N), rand(sel.views, sel.N, sel.K), rand(sel.peers, sel.N, sel.N)
    )


def top_mask(s: Tensor, k: int) -> Tensor:
    """The k largest along the last dimension, as a bool mask; of equals, the lower index (P4).

    Ranks are counted, not sorted: `torch.topk` promises no order among equals, and with a zero
    state every score is equal. NaN ranks first, so that no selection can hide it (P13).
    """
    n = s.shape[-1]
    if k >= n:
        return torch.ones_like(s, dtype=torch.bool)
    nan = s.isnan()
    s_i, s_j = s.unsqueeze(-1), s.unsqueeze(-2)  # (..., n, 1), (..., 1, n)
    nan_i, nan_j = nan.unsqueeze(-1), nan.unsqueeze(-2)
    i_first = torch.ones(n, n, dtype=torch.bool, device=s.device).triu(1)  # i < j
    equal = (s_i == s_j) | (nan_i & nan_j)
    ahead = (s_i > s_j) | (nan_i & ~nan_j) | (equal & i_first)  # (..., n, n): i is ahead of j
    return ahead.sum(-2) < k


def write_top_mask(s: Tensor, k: int, first: Tensor, out: Tensor) -> None:
    """`top_mask` into a buffer, in fewer operations on a CPU; first = arange(n) < k.

    A sort that keeps the order of equals, and ranks NaN first, makes the same choice.
    """
    if s.device.type == "cpu":
        out.scatter_(-1, s.argsort(dim=-1, descending=True, stable=True), first.expand_as(s))
    else:
        out.copy_(top_mask(s, k))


def choose_cells(s: Tensor, sel: Selection, noise: Tensor | None) -> Tensor:
    """Eq. (14), the set C_t: which cells are active, (B, N) bool, from their scores (B, N)."""
    if sel.cells == "all":
        return torch.ones_like(s, dtype=torch.bool)
    return top_mask(s if noise is None else noise, sel.K_a)


def weigh_views(s: Tensor, sel: Selection, noise: Tensor | None) -> Tensor:
    """Eq. (15), the sets S_t^j: what each view counts for each cell, (B, N, K).

    Bool for the hard rules; for `soft` the softmax of the scores, in their dtype.
    """
    if sel.views == "soft":
        return s.softmax(dim=-1)
    return top_mask(s if noise is None else noise, sel.K if sel.views == "all" else sel.K_x)


def weigh_peers(s: Tensor, sel: Selection, noise: Tensor | None) -> Tensor:
    """Eq. (16), the sets R_t^j: what each cell's state counts for cell j, (B, N, N) as [j, i].

    A cell's own state always counts 1: the K_h are chosen, or weighted, among the others (P11).
    """
    if sel.peers == "soft" and sel.N == 1:
        return torch.ones_like(s)
    if sel.peers != "soft" and (sel.peers == "all" or sel.K_h == sel.N - 1):
        return torch.ones_like(s, dtype=torch.bool)
    own = torch.eye(sel.N, dtype=torch.bool, device=s.device)
    if sel.peers == "soft":
        return s.masked_fill(own, float("-inf")).softmax(dim=-1) + own
    rank = s if noise is None else noise
    rank = rank.clamp(min=LOWEST).masked_fill(own, float("-inf"))
    return top_mask(rank, sel.K_h) | own
