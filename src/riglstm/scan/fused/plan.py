"""Sizes, tiles and buffers of the `triton` backend, and the layouts that its kernels read.

Shapes: T steps, B sequences, D input features, N cells of size d, K views, S = K + N slots,
G = 4 or 5 gates (W_q Q is the fifth), P and L: d and G·d rounded up to 16 bytes, L of halves to
what rows are read by (`rows.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from riglstm.scan.kernels.common import interpreted, power_of_two
from riglstm.scan.kernels.rows import GROUP
from riglstm.selection import Selection

FEW = 64
"""Up to so many sequences one tile holds them all; above, tiles are filled with those awake."""
AHEAD = 0
"""Pieces of rows that are under way to registers in tiles of many sequences in halves, on sm_90; 0:
rows go through shared memory there, too."""
ROWS_AT_ONCE = 16384
"""Rows (pairs of step and sequence) in a piece of the backward pass: 200 MB at the paper's size."""

HALVE_INPUTS = True
"""Whether the map to views is ours with TF32 in halves, too, and not torch's in TF32."""
HELD = 8192
"""Numbers of the input that a program makes halves of: some rows, or one, and no longer ones."""


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
    return Sizes(sel.N, sel.K, d, _whole(d, held), _line(G * d, back), G, product, held, back)


def sizes_back(z: Sizes, saved: Saved) -> Sizes:
    """The sizes of a backward pass, whose forward pass may have been of another precision."""
    held = saved.XH.dtype
    back = z.back if held == z.held else z.dtype
    return z._replace(P=saved.XH.shape[3], L=_line(z.G * z.d, back), held=held, back=back)


def _coarse() -> bool:
    """Whether cuBLAS may add up products of halves in halves, which would overflow."""
    return torch._C._get_cublas_allow_fp16_accumulation()


def _whole(n: int, dtype: torch.dtype) -> int:
    """n rounded up to 16 bytes."""
    many = 16 // dtype.itemsize
    return -(-n // many) * many


def _line(n: int, dtype: torch.dtype) -> int:
    """n rounded up for D5."""
    return -(-n // GROUP) * GROUP if dtype.itemsize == 2 else _whole(n, dtype)


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


def empty_saved(T: int, B: int, z: Sizes, like: Tensor, save: bool) -> Saved:
    """Unwritten buffers."""
    N, int32, float32, new = z.N, torch.int32, torch.float32, like.new_empty
    kept = T if save else 0
    # Of sizes in a tuple torch takes half as long again.
    return Saved(
        XH=new(T, B, z.S, z.P, dtype=z.held),
        woke=new(T, B, N, dtype=torch.bool),
        act=new(T, B, dtype=int32),
        bits=new(T, B, N, dtype=int32),
        gates=new(kept, B, N, z.G * z.d, dtype=z.dtype),
        c=new(kept, B, N, z.d, dtype=float32),
        a=new(kept if z.G == 5 else 0, B, N, dtype=float32),
        unit=new(T if z.held == torch.float16 else 0, B, dtype=float32),
    )


def columns(z: Sizes, BN: int) -> int:
    """Tiles of BN columns for a cell: of the four gates, and of W_q Q."""
    return -(-4 * z.d // BN) + (z.G - 4) * -(-z.d // BN)


@functools.cache
def chip(device: torch.device) -> tuple[int, int, int]:
    """Multiprocessors of a GPU, bytes of shared memory that a program can have, and what sm."""
    of = torch.cuda.get_device_properties(device)
    room = int(of.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return of.multi_processor_count, room, of.major * 10 + of.minor


def programs_on(device: torch.device, most: int) -> int:
    """Programs of a persistent grid: one for each multiprocessor at most."""
    return min(most, chip(device)[0])


def stages(device: torch.device, most: int, rows: int, BK: int, dtype: torch.dtype) -> int:
    """How many pieces of a product's operands, `rows` lines of BK numbers, fit in shared memory."""
    if interpreted():
        return 1
    room = chip(device)[1] - 4096
    return max(1, min(most, room // (rows * BK * dtype.itemsize)))


def views_tiles(z: Sizes, device: torch.device) -> dict[str, Any]:
    """Tiles of the gradient of views."""
    BM, BP, BK = 128, power_of_two(z.d), 64 if z.back.itemsize == 4 else 128
    tile = {"BM": BM, "BK": BK, "BP": BP, "num_warps": 8}
    return tile | {"STAGES": stages(device, 3, BM + BP, BK, z.back)}


def has_map(z: Sizes, D: int) -> bool:
    """Whether the map of D features to views is ours; else it is torch's."""
    # It counts the numbers of W_in in 32 bits.
    if not 0 < D * z.K * z.P < 2**31:
        return False
    return z.held == torch.bfloat16 or (z.held == torch.float16 and HALVE_INPUTS and D <= HELD)


def map_tiles(held: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Tiles of the map to views: two fit on a multiprocessor, one stores while one multiplies."""
    tile = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4}
    if held == torch.float16:
        return tile | {"STAGES": stages(device, 3, 128 + 128, 64, held)}
    tile["BK"] = 32
    # In float32: 128 rows of x, and 128 columns of W_in, which has halves.
    return tile | {"STAGES": stages(device, 4, 128 + 64, 32, torch.float32)}


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


def _to_registers(kind: torch.dtype, B: int, BN: int, device: torch.device) -> dict[str, Any]:
    """What is different where rows go to registers: sm_90's tensor cores take them from there."""
    few, whole = B <= FEW, kind.itemsize > 2
    if few or whole or not (interpreted() or chip(device)[2] == 90) or not AHEAD:
        return {}
    return {"AHEAD": AHEAD, "BK": 64, "STAGES": stages(device, 8, AHEAD * BN, 64, kind)}


def forward_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any]:
    """Tiles of the forward kernel, by the number of sequences and the width of a number."""
    BP, short = power_of_two(z.P), z.held.itemsize == 2
    BM, BN, RB = 128, 128, 4
    if B <= FEW:
        BM, BN, RB = 64, _narrowest(lambda BN: z.N * columns(z, BN), device), _rows(device)
    BK = BP if short and B <= FEW else min(BP, 64)
    tile = {"BM": BM, "BN": BN, "BK": BK, "RB": RB, "BP": BP}
    tile["STAGES"] = stages(device, 4 if short else 7, BM + BN, BK, z.held)
    tile |= {"COMPACT": B > FEW, "FLAT": B > FEW or not short, "AHEAD": 0, "num_warps": 8}
    return tile | _to_registers(z.held, B, BN, device)


def resident_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any] | None:
    """Tiles of the forward kernel that keeps its weights; None where they are not one a program."""
    tile = forward_tiles(z, B, device)
    if B > FEW or z.held.itemsize > 2 or tile["BN"] != 32:
        return None
    return {name: tile[name] for name in ("BM", "BN", "RB", "BP", "num_warps")}


def backward_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any]:
    """Tiles of the backward kernel, likewise."""
    BM, BN, BK, RB = 128, 128, 64, 2
    if B <= FEW:
        BN = _narrowest(lambda BN: z.N * -(-z.N * z.d // BN), device)
        BM, BK, RB = 64, 128, _rows(device)
    tile = {"BM": BM, "BN": BN, "BK": BK, "RB": RB, "BP": power_of_two(z.d)}
    tile["STAGES"] = stages(device, 3, BM + BN, BK, z.back)
    tile |= {"COMPACT": B > FEW, "AHEAD": 0, "num_warps": 8}
    return tile | _to_registers(z.back, B, BN, device)


PERSISTENT: dict[str, Any] = {"launch_cooperative_grid": True}
"""The whole grid at once, since its programs wait for each other."""
