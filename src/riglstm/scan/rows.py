"""The rows that a step works on: one row for each pair of a sample and a cell at work.

On a CPU only the cells that wake are computed, which saves a third of the products at the paper's
sizes; their rows are ordered by cell, so that each cell's rows meet its weights in one product.
On other devices reading the counts back would stop the queue: there every pair has a row, and
the rows of sleeping cells are thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from riglstm.selection import Selection


def awake_only(device: torch.device, sel: Selection) -> bool:
    """Whether rows of sleeping cells are left out on this device."""
    return device.type == "cpu" and sel.awake < sel.N


def rows_per_sample(device: torch.device, sel: Selection) -> int:
    """Rows that each sample has in each step."""
    return sel.awake if awake_only(device, sel) else sel.N


def some_idle(device: torch.device, sel: Selection, live: Tensor | None) -> bool:
    """Whether a row may belong to a cell that does not update: asleep, or its sequence is over."""
    return live is not None or (not awake_only(device, sel) and sel.awake < sel.N)


@dataclass(frozen=True)
class Rows:
    """Rows ordered by cell; within a cell, by sample."""

    sample: Tensor
    """(R) int64."""
    cell: Tensor
    """(R) int64."""
    pair: Tensor
    """(R) int64: sample · N + cell."""
    counts: list[int] | None
    """Rows of each cell; None: every cell has the same number."""
    N: int

    def times(
        self, v: Tensor, W: Tensor, b: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Each cell's rows v (R, m) times its own matrix W (N, m, n), plus its b (N, n)."""
        y = v.new_empty(v.shape[0], W.shape[2]) if out is None else out
        if self.counts is None:
            v = v.unflatten(0, (self.N, -1))
            wide = torch.bmm(v, W) if b is None else torch.baddbmm(b.unsqueeze(1), v, W)
            return y.copy_(wide.flatten(0, 1)) if out is not None else wide.flatten(0, 1)
        parts = zip(v.split(self.counts), W.unbind(), y.split(self.counts), strict=True)
        if b is None:
            for v_j, W_j, y_j in parts:
                torch.mm(v_j, W_j, out=y_j)
        else:
            for (v_j, W_j, y_j), b_j in zip(parts, b.unbind(), strict=True):
                torch.addmm(b_j, v_j, W_j, out=y_j)
        return y

    def outer(self, v: Tensor, g: Tensor, total: Tensor) -> None:
        """Add each cell's vᵀ g to its matrix in total (N, m, n)."""
        if self.counts is None:
            v, g = v.unflatten(0, (self.N, -1)), g.unflatten(0, (self.N, -1))
            total += torch.bmm(v.mT, g)
            return
        for v_j, g_j, total_j in zip(
            v.split(self.counts), g.split(self.counts), total.unbind(), strict=True
        ):
            if v.dtype == total.dtype:
                total_j.addmm_(v_j.t(), g_j)
            else:
                total_j += v_j.t() @ g_j

    def sum_by_sample(self, v: Tensor, samples: int) -> Tensor:
        """Add up the rows v (R, n) of each sample, in the order of the cells: (samples, n)."""
        if self.counts is None:
            return v.view(self.N, samples, -1).sum(0)
        return v.index_select(0, self.pair.argsort()).view(samples, -1, v.shape[1]).sum(1)

    def sum_by_cell(self, v: Tensor) -> Tensor:
        """Add up the rows v (R, n) of each cell: (N, n)."""
        if self.counts is None:
            return v.view(self.N, -1, v.shape[1]).sum(1)
        return torch.stack([v_j.sum(0) for v_j in v.split(self.counts)])


def rows_of(pair: Tensor, counts: list[int] | None, N: int) -> Rows:
    """Rows from their pairs."""
    return Rows(pair.div(N, rounding_mode="floor"), pair.remainder(N), pair, counts, N)


def all_rows(samples: int, N: int, device: torch.device) -> Rows:
    """A row for every pair."""
    return rows_of(
        torch.arange(samples * N, device=device).view(samples, N).t().reshape(-1), None, N
    )


def awake_rows(active: Tensor) -> Rows:
    """A row for every cell that is awake, from active (B, N)."""
    N = active.shape[1]
    cell, sample = active.t().nonzero().unbind(1)
    return Rows(sample, cell, torch.add(cell, sample, alpha=N), active.sum(0).tolist(), N)
