"""Sizes, tiles and buffers of the `triton` backend, and the layouts that its kernels read.

Shapes: T steps, B sequences, D input features, N cells of size d, K views, S = K + N slots,
G = 4 or 5 gates (W_q Q is the fifth), P: d rounded up to 16 bytes, L: G·d to whole pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.weights import ROWS
from riglstm.selection import Selection

FEW = 64
"""Up to so many sequences one tile holds them all; above, tiles are filled with those awake."""
ROWS_AT_ONCE = ROWS
"""Rows (pairs of step and sequence) in a piece of the backward pass: 200 MB at the paper's size."""

PIECE = 64
"""Numbers of D5 and its weights that products take at a time, at the least: 128 bytes in halves."""


class Saved(NamedTuple):
    """What the backward pass needs; without it, empty."""

    XH: Tensor
    """(T, B, S, P): views, and the state before each step, as the products take them."""
    woke: Tensor
    """(T, B, N) bool: the cell woke."""
    act: Tensor
    """(T, B) int32: a bit for each cell that woke, and one for a reset."""
    bits: Tensor
    """(T, B, N) int32: a bit for each slot that a cell took in; 0 where it slept."""
    gates: Tensor
    """(T, B, N, G·d): f, i, o, g after their non-linearity, W_q Q; unwritten where a cell slept."""
    c: Tensor
    """(T, B, N, d): c before the step; likewise."""
    a: Tensor
    """(T, B, N): the weight of the new state; likewise."""
    unit: Tensor
    """(T, B): what one stands for in XH; empty where it is one."""
    x: Tensor
    """(T·B, `rounded`): the input as cuBLAS mapped it; empty where it did not, or without SAVE."""


class Sizes(NamedTuple):
    """The numbers that a kernel is compiled for, less its tiles."""

    N: int
    K: int
    d: int
    P: int
    L: int
    G: int
    dtype: torch.dtype
    """Of the products."""
    held: torch.dtype
    """Of their operands in the forward kernel."""
    back: torch.dtype
    """Of their operands in the backward pass."""

    @property
    def S(self) -> int:
        return self.K + self.N


def sizes(d: int, sel: Selection, soft_update: bool, product: torch.dtype) -> Sizes:
    """The sizes of a problem."""
    G, halves = 5 if soft_update else 4, product == torch.float32 and rounds(product)
    held = torch.float16 if halves else product
    back = product if _coarse() else held
    return Sizes(sel.N, sel.K, d, aligned(d, held), in_pieces(G * d), G, product, held, back)


def sizes_back(z: Sizes, saved: Saved) -> Sizes:
    """The sizes of a backward pass, whose forward pass may have been of another precision."""
    held = saved.XH.dtype
    back = z.back if held == z.held else z.dtype
    return z._replace(P=saved.XH.shape[3], held=held, back=back)


def _coarse() -> bool:
    """Whether cuBLAS may add up products of halves in halves, which would overflow."""
    return torch._C._get_cublas_allow_fp16_accumulation()


def aligned(n: int, dtype: torch.dtype) -> int:
    """n rounded up to 16 bytes."""
    many = 16 // dtype.itemsize
    return -(-n // many) * many


def in_pieces(n: int) -> int:
    """n rounded up to whole pieces of a product over it."""
    return -(-n // PIECE) * PIECE


def _in_pairs(L: int) -> int:
    """Two pieces at a time, where L has whole pairs of them: loads need no mask."""
    return PIECE if L % (2 * PIECE) else 2 * PIECE


def rounds(product: torch.dtype) -> bool:
    """Whether products may round what they multiply; float32's by torch.backends.cuda.matmul."""
    # What torch.backends.cuda.matmul.fp32_precision says, which takes its time.
    return product != torch.float32 or (
        torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    )


def precision(product: torch.dtype) -> str:
    """How a kernel takes float32 products."""
    if interpreted() or product != torch.float32:
        return "ieee"
    return "tf32" if rounds(product) else "tf32x3"


def empty_saved(
    T: int,
    B: int,
    z: Sizes,
    like: Tensor,
    save: bool,
    XH: Tensor | None = None,
    unit: Tensor | None = None,
    x: Tensor | None = None,
) -> Saved:
    """Unwritten buffers, but for those that there are already."""
    N, int32, float32, new = z.N, torch.int32, torch.float32, like.new_empty
    kept = T if save else 0
    # Of sizes in a tuple torch takes half as long again.
    return Saved(
        XH=new(T, B, z.S, z.P, dtype=z.held) if XH is None else XH,
        woke=new(T, B, N, dtype=torch.bool),
        act=new(T, B, dtype=int32),
        bits=new(T, B, N, dtype=int32),
        gates=new(kept, B, N, z.G * z.d, dtype=z.dtype),
        c=new(kept, B, N, z.d, dtype=float32),
        a=new(kept if z.G == 5 else 0, B, N, dtype=float32),
        unit=empty_unit(T, B, z, like) if unit is None else unit,
        x=new(0) if x is None else x,
    )


def empty_unit(T: int, B: int, z: Sizes, like: Tensor) -> Tensor:
    """That of `Saved`, unwritten."""
    return like.new_empty(T if z.held == torch.float16 else 0, B, dtype=torch.float32)


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


def programs_on(device: torch.device, most: int) -> int:
    """Programs of a persistent grid: one for each multiprocessor at most."""
    return min(most, chip(device)[0])


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


def _rows(device: torch.device) -> int:
    """Sequences that a program takes at a time, where there may be a program for each, or not."""
    return 1 if interpreted() or chip(device)[0] >= FEW else 2


def forward_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any]:
    """Tiles of the forward kernel, by the number of sequences and the width of a number."""
    BP, short = power_of_two(z.P), z.held.itemsize == 2
    BM, BN, RB = 128, 128, 4
    if B <= FEW:
        BM, BN, RB = 64, _narrowest(lambda BN: z.N * columns(z, BN), device), _rows(device)
    BK = BP if short and B <= FEW else min(BP, 64)
    tile = {"BM": BM, "BN": BN, "BK": BK, "RB": RB, "BP": BP}
    tile["STAGES"] = stages(device, 4 if short else 7, BM + BN, BK, z.held)
    return tile | {"COMPACT": B > FEW, "FLAT": B > FEW or not short, "num_warps": 8}


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
    return tile | {"RB": _rows(device) if RB is None else RB}


def backward_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any]:
    """Tiles of the backward kernel, likewise."""
    # Four sequences at a time have all 512 of the largest bench done at once; with units, a thread
    # has not the registers for them.
    BM, BN, BK, RB = 128, 128, PIECE, 4 if z.back == torch.bfloat16 else 2
    if B <= FEW:
        BN = _narrowest(lambda BN: z.N * -(-z.N * z.d // BN), device)
        BM, BK, RB = 64, _in_pairs(z.L), _rows(device)
    tile = {"BM": BM, "BN": BN, "BK": BK, "RB": RB, "BP": power_of_two(z.d)}
    tile["STAGES"] = stages(device, 3, BM + BN, BK, z.back)
    return tile | {"COMPACT": B > FEW, "num_warps": 8}


PERSISTENT: dict[str, Any] = {"launch_cooperative_grid": True}
"""The whole grid at once, since its programs wait for each other."""
