"""Tiles of the `triton` backend's kernels, by what a GPU has room for.

Shapes as in `plan.py`. A tile is BM sequences by BN columns, BK numbers of a sum at a time; RB are
the sequences that a program takes at a time in the row-wise half of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from riglstm.scan.fused.plan import PIECE, Sizes
from riglstm.scan.kernels.common import KNOWN, interpreted, power_of_two

FEW = 64
"""Up to so many sequences one tile holds them all; above, tiles are filled with those awake."""


def columns(z: Sizes, BN: int, by_gate: bool = False) -> int:
    """Tiles of BN columns for a cell: of the four gates, and of W_q Q.

    `by_gate`, as the resident kernel has them, what is left of W_q Q by whole tiles goes to the
    last tile of units, where that has room for it.
    """
    of_units, whole, rest = -(-4 * z.d // BN), z.d // BN, z.d % BN
    if rest and not (by_gate and rest <= -z.d % (BN // 4)):
        whole += 1
    return of_units + (z.G - 4) * whole


@functools.cache
def chip(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a GPU, and bytes of shared memory that a program can have."""
    of = torch.cuda.get_device_properties(device)
    return of.multi_processor_count, int(of.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def programs_on(device: torch.device, most: int | None = None) -> int:
    """Programs of a persistent grid: one for each multiprocessor, so many at most."""
    every = chip(device)[0]
    return every if most is None else min(most, every)


def _in_pairs(L: int) -> int:
    """Two pieces at a time, where L has whole pairs of them: loads need no mask."""
    return PIECE if L % (2 * PIECE) else 2 * PIECE


def stages(device: torch.device, most: int, rows: int, BK: int, dtype: torch.dtype) -> int:
    """How many pieces of a product's operands, `rows` lines of BK numbers, fit in shared memory."""
    if interpreted():
        return 1
    room = chip(device)[1] - 4096
    return max(1, min(most, room // (rows * BK * dtype.itemsize)))


def _narrowest(tiles: Callable[[int], int], device: torch.device) -> int:
    """Columns of a tile: as few as give each multiprocessor one tile at most, or 128.

    Where there is a multiprocessor for each, narrow tiles are done at once. On a small GPU, on a
    part of one that processes share, or with very many tiles, they would wait in line, and each
    would load the same sequences again.
    """
    if interpreted():
        return 32
    return next((BN for BN in (32, 64) if tiles(BN) <= chip(device)[0]), 128)


def _shorter(B: int, tiles: Callable[[int], int], device: torch.device) -> int | None:
    """Columns of tiles of half as many rows, where a multiprocessor has one at most; else None.

    What a tile takes is not what its tensor cores do but what goes through shared memory for them:
    of half the rows three fifths, and then of half the columns two thirds. B counts as the next
    power of two, so that kernels are of few kinds. With two sequences a program takes, all are
    taken at once.
    """
    most, rows = 132 if interpreted() else chip(device)[0], power_of_two(B)
    if rows > 2 * most:
        return None
    return next((BN for BN in (64, 128) if tiles(BN) * -(-rows // 64) <= most), None)


def _rows(device: torch.device) -> int:
    """Sequences that a program takes at a time, where there may be a program for each, or not."""
    return 1 if interpreted() or chip(device)[0] >= FEW else 2


def forward_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any]:
    """Tiles of the forward kernel, by the number of sequences and the width of a number."""
    BP, short = power_of_two(z.P), z.held.itemsize == 2
    BM, BN, RB, warps = 128, 128, 4, 8

    def tiles(BN: int) -> int:
        return z.N * columns(z, BN)

    if B <= FEW:
        BM, BN, RB = 64, _narrowest(tiles, device), _rows(device)
    elif short and (half := _shorter(B, tiles, device)):
        BM, BN, RB, warps = 64, half, 2, 4
    BK = BP if short and B <= FEW else min(BP, 64)
    tile = {"BM": BM, "BN": BN, "BK": BK, "RB": RB, "BP": BP, "WARPS": warps, "num_warps": warps}
    tile["STAGES"] = stages(device, 4 if short else 7, BM + BN, BK, z.held)
    tile["TOLD"] = KNOWN and B > FEW and z.d % 4 == 0 and BP >= 32
    return tile | {"COMPACT": B > FEW, "FLAT": B > FEW or not short}


def resident_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any] | None:
    """Tiles of the forward kernel that keeps its weights; None where they are not one a program.

    APART: there are multiprocessors enough for programs that select and do nothing else. How many
    sequences these take at a time depends on the most there can be: B is not compiled for.
    """
    many = columns(z, 32, by_gate=True)
    left = 0 if interpreted() else chip(device)[0] - z.N * many
    if B > FEW or z.held.itemsize > 2 or left < 0:
        return None
    tile = {n: v for n, v in forward_tiles(z, B, device).items() if n in ("BM", "BP", "num_warps")}
    RB = next((RB for RB in (1, 2) if left >= -(-FEW // RB)), None)
    tile |= {"BN": 32, "TILES": many, "APART": RB is not None}
    # A thread of a program that selects has four numbers of a vector then, side by side.
    told = KNOWN and RB is not None and z.d % 4 == 0 and RB * tile["BP"] >= 128
    return tile | {"RB": _rows(device) if RB is None else RB, "TOLD": told}


def backward_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any]:
    """Tiles of the backward kernel, likewise."""
    # Four sequences at a time have all 512 of the largest bench done at once; with units, a thread
    # has not the registers for them.
    BM, BN, BK, RB, warps = 128, 128, PIECE, 4 if z.back == torch.bfloat16 else 2, 8

    def tiles(BN: int) -> int:
        return z.N * -(-z.N * z.d // BN)

    if B <= FEW:
        BM, BN, BK, RB = 64, _narrowest(tiles, device), _in_pairs(z.L), _rows(device)
    elif z.back.itemsize == 2 and (half := _shorter(B, tiles, device)):
        BM, BN, RB, warps = (64, 64, 1, 4) if half == 64 else (64, 128, 2, 8)
    tile = {"BM": BM, "BN": BN, "BK": BK, "RB": RB, "BP": power_of_two(z.d), "num_warps": warps}
    tile["STAGES"] = stages(device, 3, BM + BN, BK, z.back)
    return tile | {"COMPACT": B > FEW}


def views_tiles(z: Sizes, device: torch.device) -> dict[str, Any]:
    """Tiles of the kernel for the gradient of views."""
    BM, BP = 128, power_of_two(z.d)
    tile = {"BM": BM, "BK": PIECE, "BP": BP, "num_warps": 8}
    return tile | {"STAGES": stages(device, 4, BM + BP, PIECE, z.back)}


PERSISTENT: dict[str, Any] = {"launch_cooperative_grid": True}
"""The whole grid at once, since its programs wait for each other."""
