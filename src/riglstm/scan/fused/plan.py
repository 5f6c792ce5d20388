"""Sizes and buffers of the `triton` backend, and the layouts that its kernels read.

Shapes: T steps, B sequences, D input features, N cells of size d, K views, S = K + N slots,
G = 4 or 5 gates (W_q Q is the fifth), P: d rounded up to 16 bytes, L: G·d to whole pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from riglstm.scan.kernels.common import interpreted
from riglstm.selection import Selection

ROWS_AT_ONCE = 1 << 14
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
    """(T·B, `rounded`): the input, rounded; empty where the forward kernel keeps none of it."""


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
