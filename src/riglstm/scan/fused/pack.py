"""What is made of weights and state before the forward kernel: one launch, the first of a call.

Shapes as in `plan.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan.fused.launch import Argument, Launch, Place, prepare
from riglstm.scan.fused.plan import Sizes
from riglstm.scan.fused.tiles import columns
from riglstm.scan.kernels.common import power_of_two
from riglstm.scan.kernels.input_map import LINES
from riglstm.scan.kernels.products import COLUMNS, pack_kernel


class Into(NamedTuple):
    """Where `pack` writes to."""

    W: Tensor | Place
    """The weights of the gates, in tiles."""
    unit: Tensor | Place
    """What one stands for in their columns; unwritten where it is one."""
    counter: Argument = None
    """The barriers'; it is set to zero."""
    zeros: int = 0
    """How many int32 from the counter on are set to zero: all counters, and the lists' counts."""
    lines: Argument = None
    """(D, K·P): W_in, for `map_kernel`."""
    sizes: Argument = None
    """(D,): what each line was divided by, for `halve_kernel`; None: by nothing."""
    c: Tensor | None = None
    """(B, N, d): the state that the kernel works on; a copy of c_0, or zero."""
    h: Argument = None
    """(B, N, d), to be zero."""
    c_0: Argument = None
    """(B, N, d): the state that is given."""


def packed(z: Sizes, BN: int, by_gate: bool = False) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What `pack` writes in tiles: the weights, and the columns' units."""
    shape = (z.N, columns(z, BN, by_gate), BN)
    return [(z.held, (*shape, z.S * z.P)), (torch.float32, shape)]


def pack(
    weights: Weights,
    z: Sizes,
    BN: int,
    into: Into,
    by_gate: bool = False,
) -> tuple[Tensor | Place, Tensor | Place | None]:
    """All weights of the gates, and what one stands for in their columns where that is not one.

    As (N, tiles, BN, S·P), what a tile of the forward kernel reads. Columns of a tile are
    `by_gate`, as the resident kernel wants them, or in the order of `pack_kernel`. What else there
    is to write is written on the way, which saves launches.
    """
    W, W_q = weights.W, weights.W_q
    W_in = None if into.lines is None else weights.W_in
    unit = into.unit if z.held == torch.float16 else None
    per_cell = W_q is not None and W_q.dim() == 3
    D = 0 if W_in is None else W_in.shape[0]
    run, grid = _pack(z, BN, per_cell, by_gate, D)
    run(
        grid,
        (
            *(W, W if W_q is None else W_q, W_in, into.c_0, into.W, unit, into.lines),
            *(into.sizes, into.counter, into.c, into.h, into.zeros),
            0 if into.c is None else into.c.numel(),
        ),
    )
    return into.W, unit


@functools.lru_cache(64)
def _pack(z: Sizes, BN: int, per_cell: bool, by_gate: bool, D: int) -> tuple[Launch, tuple[int]]:
    run = prepare(
        pack_kernel, N=z.N, K=z.K, d=z.d, P=z.P, G=z.G, D=D, BN=BN, BP=power_of_two(z.P),
        BW=power_of_two(z.K * z.P), TILES=columns(z, BN, by_gate), PER_CELL=per_cell,
        BY_GATE=by_gate,
    )  # fmt: skip
    return run, (z.N * columns(z, BN, by_gate) * (BN // COLUMNS) + -(-D // LINES),)
