"""What a call of the `triton` backend is planned with: sizes, tiles, buffers and launches.

None of it depends on a call's numbers, and most is computed once for a kind of call.

Shapes: T steps, B sequences, D input features, N cells of size d, K views, S = K + N slots,
G = 4 or 5 gates (W_q Q is the fifth), P: d rounded up to 16 bytes, L: G·d to whole pieces. A tile
is BM sequences by BN columns, BK numbers of a sum at a time; RB are the sequences that a program
takes at a time in the row-wise half of a step.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from riglstm import checks
from riglstm.scan.triton.kernels.common import KNOWN, SLOTS, interpreted, lines_of, power_of_two
from riglstm.scan.triton.kernels.pack import halve_kernel, map_kernel
from riglstm.selection import Selection

PIECE = 64
"""Numbers of D5 and its weights that products take at a time, at the least: 128 bytes in halves."""
FEW = 64
"""Sequences that one tile holds; of more, tiles are filled with those whose cell is awake."""
MOST_FEATURES = 8192
"""Features up to which TF32 in halves has its own map to views: one program holds a row of them."""
PERSISTENT: dict[str, Any] = {"launch_cooperative_grid": True}
"""The whole grid at once, since its programs wait for each other."""


class Saved(NamedTuple):
    """What the backward pass needs; without one, much of it is empty."""

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
    """(T, B): the scale factor of each row of XH; empty where it is one."""
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
    # cuBLAS may add up products of halves in halves, which would overflow.
    coarse = torch._C._get_cublas_allow_fp16_accumulation()
    back = product if coarse else held
    return Sizes(sel.N, sel.K, d, aligned(d, held), in_pieces(G * d), G, product, held, back)


def sizes_back(z: Sizes, saved: Saved) -> Sizes:
    """The sizes of a backward pass, whose forward pass may have been of another precision."""
    held = saved.XH.dtype
    back = z.back if held == z.held else z.dtype
    return z._replace(P=saved.XH.shape[3], held=held, back=back)


def aligned(n: int, dtype: torch.dtype) -> int:
    """n rounded up to 16 bytes."""
    many = 16 // dtype.itemsize
    return -(-n // many) * many


def padded(n: int) -> int:
    """The power of two that holds n, 16 at the least: no product is shorter."""
    return max(16, power_of_two(n))


def in_pieces(n: int) -> int:
    """n rounded up to whole pieces of a product over it."""
    return -(-n // PIECE) * PIECE


def rounds(product: torch.dtype) -> bool:
    """True if products may round what they multiply; float32's by torch.backends.cuda.matmul."""
    # What torch.backends.cuda.matmul.fp32_precision says, which takes its time.
    return product != torch.float32 or (
        torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    )


def precision(product: torch.dtype) -> str:
    """The `input_precision` of a kernel's products."""
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


@functools.cache
def chip(device: torch.device) -> tuple[int, int]:
    """Multiprocessors to plan for, and bytes of shared memory that a program can have.

    Persistent kernels have no more programs than that. Where several processes share a GPU, the
    variable RIGLSTM_MULTIPROCESSORS makes these fit on it together. It is read once.
    """
    of = torch.cuda.get_device_properties(device)
    there, limit = of.multi_processor_count, os.environ.get("RIGLSTM_MULTIPROCESSORS")
    if limit is not None and not (limit.isdecimal() and 1 <= int(limit) <= there):
        raise ValueError(
            f"RIGLSTM_MULTIPROCESSORS must be a number from 1 to {there}, got {limit!r}; unset it "
            "for the whole GPU"
        )
    room = int(of.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return there if limit is None else int(limit), room


def programs_on(device: torch.device, most: int | None = None) -> int:
    """Programs of a persistent grid: one for each multiprocessor, so many at most."""
    every = chip(device)[0]
    return every if most is None else min(most, every)


def stages(device: torch.device, most: int, rows: int, BK: int, dtype: torch.dtype) -> int:
    """How many pieces of a product's operands, `rows` lines of BK numbers, fit in shared memory."""
    if interpreted():
        return 1
    room = chip(device)[1] - 4096
    return max(1, min(most, room // (rows * BK * dtype.itemsize)))


def columns(z: Sizes, BN: int, by_gate: bool = False) -> int:
    """Tiles of BN columns for a cell: of the four gates, and of W_q Q.

    `by_gate`, as the resident kernel has them, what is left of W_q Q by whole tiles goes to the
    last tile of units, where that has room for it.
    """
    of_units, whole, rest = -(-4 * z.d // BN), z.d // BN, z.d % BN
    if rest and not (by_gate and rest <= -z.d % (BN // 4)):
        whole += 1
    return of_units + (z.G - 4) * whole


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

    A tile's time goes not into its tensor cores but into shared memory: half the rows take three
    fifths of it, and then half the columns two thirds. B counts as the next power of two, so that
    kernels are of few kinds. With two sequences a program, all are taken at once.
    """
    most, rows = 132 if interpreted() else chip(device)[0], power_of_two(B)
    if rows > 2 * most:
        return None
    return next((BN for BN in (64, 128) if tiles(BN) * -(-rows // 64) <= most), None)


def _rows(device: torch.device) -> int:
    """Sequences that a program takes at a time, where there may be a program for each, or not."""
    return 1 if interpreted() or chip(device)[0] >= FEW else 2


def small(z: Sizes) -> bool:
    """True if a warp can have a cell, or a view, and hold a vector of it."""
    return max(z.N, z.K) <= SLOTS and z.P <= 128


def _few_rows(B: int, BN: int, dtype: torch.dtype) -> int:
    """Rows of a tile that holds all of up to 64 sequences.

    With products of float32, three in TF32 each, a wide tile takes as long as it has rows.
    """
    return 32 if B <= 32 and BN > 32 and dtype.itemsize == 4 else 64


def _fewer(RB: int, N: int, BP: int) -> int:
    """RB, or as many sequences as have no more numbers than RB of 8 cells of 128 have."""
    return max(1, RB * 1024 // max(1024, int(lines_of(N)) * BP))


def forward_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any]:
    """Tiles of the tiled kernel, by the number of sequences and the width of a number.

    COMPACT: tiles are filled from lists of the sequences whose cell is awake.
    """
    BP, short, compact = padded(z.P), z.held.itemsize == 2, B > FEW or not small(z)
    BM, BN, RB, warps = 128, 128, 4, 8

    def tiles(BN: int) -> int:
        return z.N * columns(z, BN)

    if B <= FEW:
        BN, RB = _narrowest(tiles, device), _rows(device)
        BM = _few_rows(B, BN, z.held)
    elif short and (half := _shorter(B, tiles, device)):
        BM, BN, RB, warps = 64, half, 2, 4
    lines = lines_of(z.N)
    RB = min(_fewer(RB, z.N, BP), 32 // lines)  # who woke is a bit of one whole number
    BK = min(BP, 64) if compact or not short else BP
    tile = {"BM": BM, "BN": BN, "BK": BK, "RB": RB, "BP": BP, "WARPS": warps, "num_warps": warps}
    tile["STAGES"] = stages(device, 4 if short else 7, BM + BN, BK, z.held)
    # A thread has four numbers of a piece then, side by side.
    fours = RB * lines == 4 * warps and BP >= 32
    tile["POLLING"] = KNOWN and compact and fours and z.d % 4 == 0 and z.d <= 128
    return tile | {"COMPACT": compact, "FLAT": compact or not short}


def resident_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any] | None:
    """Tiles of the resident kernel; None where they are not one a program.

    APART: there are multiprocessors enough for programs that select and do nothing else. How many
    sequences these take at a time depends on the most there can be: B is not compiled for.
    """
    many = columns(z, 32, by_gate=True)
    left = 0 if interpreted() else chip(device)[0] - z.N * many
    if B > FEW or not small(z) or z.held.itemsize > 2 or left < 0:
        return None
    tile = {n: v for n, v in forward_tiles(z, B, device).items() if n in ("BM", "BP", "num_warps")}
    RB = next((RB for RB in (1, 2) if left >= -(-FEW // RB)), None)
    tile |= {"BN": 32, "TILES": many, "APART": RB is not None}
    # A thread of a program that selects has four numbers of a vector then, side by side.
    polling = KNOWN and RB is not None and z.d % 4 == 0 and RB * tile["BP"] >= 128
    return tile | {"RB": _rows(device) if RB is None else RB, "POLLING": polling}


def backward_tiles(z: Sizes, B: int, device: torch.device) -> dict[str, Any]:
    """Tiles of the backward kernel, likewise."""
    # Four sequences at a time have all 512 of the largest bench done at once; with units, a thread
    # has not the registers for them.
    BM, BN, BK, RB, warps = 128, 128, PIECE, 4 if z.back == torch.bfloat16 else 2, 8

    def tiles(BN: int) -> int:
        return z.N * -(-z.N * z.d // BN)

    if B <= FEW:
        # Two pieces at a time where L has whole pairs of them: loads need no mask.
        BK = PIECE if z.L % (2 * PIECE) else 2 * PIECE
        BN, RB = _narrowest(tiles, device), _rows(device)
        BM = _few_rows(B, BN, z.back)
    elif z.back.itemsize == 2 and (half := _shorter(B, tiles, device)):
        BM, BN, RB, warps = (64, 64, 1, 4) if half == 64 else (64, 128, 2, 8)
    BP = padded(z.d)
    RB = _fewer(RB, z.N, BP)
    tile = {"BM": BM, "BN": BN, "BK": BK, "RB": RB, "BP": BP, "num_warps": warps}
    tile["STAGES"] = stages(device, 3, BM + BN, BK, z.back)
    return tile | {"COMPACT": B > FEW}


def views_tiles(z: Sizes, device: torch.device) -> dict[str, Any]:
    """Tiles of the kernel for the gradient of views, BP numbers of one each."""
    BM, BP = 128, min(128, padded(z.d))
    tile = {"BM": BM, "BK": PIECE, "BP": BP, "num_warps": 8}
    return tile | {"STAGES": stages(device, 4, BM + BP, PIECE, z.back)}


class Map(NamedTuple):
    """The map of D features to views, which writes them to XH."""

    run: Launch
    D: int
    width: int
    """Numbers of a row in memory of what is mapped: the input, or its halves."""
    rows: int
    """Of a tile."""
    columns: int
    """Tiles beside each other."""
    halve: Launch | None
    """With TF32 in halves, the kernel that makes halves of the input, before the map."""
    halve_rows: int
    """That a program of it takes."""


def has_map(z: Sizes, D: int) -> bool:
    """True if the map of D features to views is a kernel of ours; otherwise it is torch's."""
    # It counts the numbers of W_in in 32 bits.
    if not 0 < D * z.K * z.P < 2**31:
        return False
    return z.held == torch.bfloat16 or (z.held == torch.float16 and D <= MOST_FEATURES)


def inside(z: Sizes, B: int, D: int) -> bool:
    """True if the tiled kernel maps D features itself, two steps ahead.

    Of many sequences some of its programs have nothing to multiply meanwhile; but a sum must not
    take them longer than that of the gates takes the others, and what they round takes time, too.
    """
    return B > FEW and has_map(z, D) and 3 * D <= 2 * z.S * z.P


def rounded(z: Sizes, B: int, D: int, kind: torch.dtype, save: bool) -> int:
    """Numbers of a row of the rounded input that is kept for the backward pass; 0: it is not.

    That is in training in bfloat16, where the tiled kernel rounds the input, of another kind,
    anyway: the gradient of W_in would else have to do that.
    """
    kept = save and z.held == torch.bfloat16 != kind and inside(z, B, D)
    return aligned(D, z.held) if kept else 0


def map_tiles(held: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Tiles of the map to views: two fit on a multiprocessor, one stores while one multiplies."""
    if held == torch.float16:
        BK, many = 64, stages(device, 3, 128 + 128, 64, held)
    else:
        # In float32: 128 rows of x, and 128 columns of W_in, which has halves.
        BK, many = 32, stages(device, 4, 128 + 64, 32, torch.float32)
    return {"BM": 128, "BN": 128, "num_warps": 4, "BK": BK, "STAGES": many}


def map_of(z: Sizes, D: int, device: torch.device) -> Map:
    """The map of D features to views."""
    tile, width, halve, rows = map_tiles(z.held, device), D, None, 0
    if z.held == torch.float16:
        width = aligned(D, z.held)
        BD, BH, BW = (power_of_two(n) for n in (width, z.N * z.d, z.K * z.d))
        rows = MOST_FEATURES // max(BD, BH)  # of short rows a program holds several
        halve = prepare(
            halve_kernel, D=D, X_ROW=width, BIASES=z.K * z.d, STATES=z.N * z.d, BR=rows, BD=BD,
            BW=BW, BH=BH,
        )  # fmt: skip
    run = prepare(
        map_kernel, D=D, X_ROW=width, K=z.K, S=z.S, d=z.d, P=z.P, WIDE=interpreted(), **tile
    )
    return Map(run, D, width, tile["BM"], -(-z.K * z.P // tile["BN"]), halve, rows)


def inner_map(
    of: Map | None, z: Sizes, tile: dict[str, Any], device: torch.device
) -> dict[str, int]:
    """What the tiled kernel is compiled with for the map; without one, nothing that counts."""
    if of is None:
        return dict.fromkeys(("D", "IN_ROW", "LOW_ROW", "IN_BK", "IN_STAGES"), 0)
    many, low = stages(device, 3, tile["BM"] + tile["BN"], 64, z.held), aligned(of.D, z.held)
    return {"D": of.D, "IN_ROW": of.width, "LOW_ROW": low, "IN_BK": 64, "IN_STAGES": many}


class Buffer:
    """Memory that only kernels see: Triton takes whatever has a dtype and a `data_ptr`."""

    __slots__ = ("address", "dtype", "memory")

    def __init__(self, dtype: torch.dtype, address: int, memory: Tensor) -> None:
        self.dtype, self.address = dtype, address
        self.memory = memory
        """What it is a part of, which must not be freed before."""

    def data_ptr(self) -> int:
        return self.address


Argument: TypeAlias = Tensor | Buffer | int | None


def nth(of: Tensor | Buffer, i: int, size: int) -> Tensor | Buffer:
    """The i-th of equal parts of a buffer, `size` numbers each; as a tensor, its i-th element."""
    if isinstance(of, Tensor):
        return of[i]
    return Buffer(of.dtype, of.address + i * size * of.dtype.itemsize, of.memory)


class Layout:
    """Buffers of these dtypes and shapes, to be had in one allocation.

    An allocation takes the host microseconds, and so does each view of one as a tensor: a call of
    one step would spend more on its buffers than on its arithmetic.
    """

    def __init__(self, *wanted: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self.wanted, self.starts, self.size = wanted, list[tuple[torch.dtype, int]](), 0
        for dtype, shape in wanted:
            self.starts.append((dtype, self.size))
            self.size += -(-math.prod(shape) * dtype.itemsize // 128) * 128

    def make(self, like: Tensor) -> list[Tensor] | list[Buffer]:
        """All of them, unwritten, where `like` is."""
        # Of its dtype, whatever that is: torch takes twice as long where it is told another.
        return self.cut(like.new_empty(self.size // like.itemsize))

    def cut(self, memory: Tensor) -> list[Tensor] | list[Buffer]:
        """All of them, in memory of `size` bytes."""
        if interpreted():
            memory = memory.view(torch.uint8)
            return [
                memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for (dtype, start), (_, shape) in zip(self.starts, self.wanted, strict=True)
            ]
        first = memory.data_ptr()
        return [Buffer(dtype, first + start, memory) for dtype, start in self.starts]


class Launch:
    """A kernel with its constants; what Triton compiled is cached by kinds of arguments.

    The kernel's whole numbers must not be specialized, and all constants come after its arguments.
    Of a call that took half a millisecond, Triton spent a fifth on finding the kernel that it had
    compiled for just such arguments: by a text of fifty of them. Here a tuple of what matters does.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.rest = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self.ready: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], arguments: Sequence[Argument]) -> None:
        """`kernel[grid](*arguments, **constants)`, on the current device."""
        if interpreted():
            self.kernel[grid](*arguments, **self.constants)
            return
        device = torch.cuda.current_device()
        kinds: list[Any] = [device]
        values: list[int | None] = []
        here = True
        argument: Any  # of a type that is looked up, and not asked for by isinstance
        for argument in arguments:
            what = type(argument)
            if what is Buffer:
                kinds.append(argument.dtype)
                values.append(argument.address)
            elif argument is None:
                kinds.append(None)
                values.append(None)
            elif what is int:
                kinds.append(argument < 2**31)
                values.append(argument)
            else:
                # Triton compiles for a type, and whether an address is a multiple of 16.
                address = argument.data_ptr()
                kinds.append(argument.dtype if address % 16 == 0 else (argument.dtype,))
                values.append(address)
                if argument.get_device() != device:
                    here = False
        key = tuple(kinds)
        compiled = self.ready.get(key)
        if compiled is None:
            compiled = self.kernel[grid](*arguments, **self.constants)
            if compiled is not None:  # a hook of Triton's may keep it
                self.ready[key] = compiled
        elif here and KNOWN and not hooked():  # of a tensor elsewhere, Triton says so
            stream = driver.active.get_current_stream(device)
            compiled.run(
                *(*(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata),
                *(None, None, None, *values, *self.rest),  # nothing for hooks, and no hooks
            )
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *self.rest)
        if (records := getattr(_RECORDS, "launches", None)) is not None:
            records.append(Launched(grid, tuple(arguments), compiled, self.rest))


class Launched(NamedTuple):
    """A launch that was made."""

    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    compiled: Any
    rest: tuple[Any, ...]
    """The constants."""


_RECORDS = threading.local()


@contextlib.contextmanager
def recorded() -> Iterator[list[Launched]]:
    """The launches that this thread makes meanwhile.

    Those of another layer's call in the midst, a finalizer's say, are its own if it records, too.
    """
    before, launches = getattr(_RECORDS, "launches", None), list[Launched]()
    _RECORDS.launches = launches
    try:
        yield launches
    finally:
        _RECORDS.launches = before


def hooked() -> bool:
    """True if a profiler is to hear of launches through Triton."""
    runtime = knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
    )


def watched(*tensors: Tensor | None) -> bool:
    """True if anybody of `checks.watched`, or a launch hook, is to see what is done.

    Then a call goes through torch's operators, and a launch through Triton.
    """
    return checks.watched(*tensors) or hooked()


_LAUNCHES: dict[tuple[Any, ...], Launch] = {}
"""By kernel and constants; as many as there are kernels to compile."""


def prepare(kernel: Any, **constants: Any) -> Launch:
    """The one `Launch` of a kernel with these constants."""
    key = (id(kernel), *constants.items())
    if key not in _LAUNCHES:
        _LAUNCHES[key] = Launch(kernel, constants)
    return _LAUNCHES[key]
