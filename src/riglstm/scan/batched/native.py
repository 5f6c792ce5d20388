"""The loops over steps in C++, `native.cpp`, built by the first call that asks.

The compiler of the machine builds them once, in about ten seconds, into the user's cache. Without
a compiler the loops in Python run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.selection import Noise, Selection

if TYPE_CHECKING:
    from riglstm.scan.batched.forward import Saved

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-funroll-loops", "-march=native", "-std=c++17", "-Wno-psabi", "-shared", "-fPIC")
LARGEST = 2**22
"""Numbers in the matrices of all cells, which each call copies: 700 units in six cells. A copy of
wider ones would take longer than a step."""
FEW_THREADS = 2
"""Threads up to which the forward loop, which has one, is faster than torch's products on all."""
SMALL, SMALL_CELL = 2**19, 2**16
"""Numbers in the matrices of all cells, times threads, and of one cell, up to which each loop is
faster, the backward one as well: 256 units in eight cells with one thread."""
MOST_SLOTS = 64
"""Views, or cells: each is compared with each."""


def takes(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    product: torch.dtype,
    *flags: Tensor | None,
    backward: bool = False,
) -> bool:
    """True if a loop runs: on a CPU where it is faster, hard rules, all in float32 or in float64.

    They are given addresses, so that every dtype and shape is looked at here; what does not fit is
    left to the loops in Python, which work or raise.
    """
    W, W_in, W_q, dtype = weights.W, weights.W_in, weights.W_q, h.dtype
    (T, B, D), N, K, d = x.shape, sel.N, sel.K, h.shape[-1]
    of_query = ((K + N - 1) * d, d) if W_q is None or W_q.dim() == 2 else (N, (K + N - 1) * d, d)
    threads = torch.get_num_threads()
    most = LARGEST
    if backward or threads > FEW_THREADS:
        most = min(LARGEST, SMALL // threads, SMALL_CELL * N)
    shapes = ((D, K * d), (K * d,), (N, (K + N) * d, 4 * d), (N, 4 * d), of_query, (N,))
    return (
        product == dtype
        and dtype in (torch.float32, torch.float64)
        and {sel.cells, sel.views, sel.peers} <= {"top", "all", "random"}
        and W.numel() <= most
        and (W_in is None or W_in.numel() <= LARGEST)
        and max(N, K) <= MOST_SLOTS
        and all(_is_on_cpu(t, dtype) for t in (x, h, c, *weights))
        and all(_is_on_cpu(flag, torch.bool) for flag in flags)
        and all(t is None or t.shape == shape for t, shape in zip(weights, shapes, strict=True))
        and (W_in is not None or K * d == D)
        and h.shape == c.shape == (B, N, d)
        and d > 0
        and all(flag is None or flag.shape == (T, B) for flag in flags)
        and library() is not None
    )


def _is_on_cpu(tensor: Tensor | None, dtype: torch.dtype) -> bool:
    return tensor is None or (tensor.dtype == dtype and tensor.device.type == "cpu")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled loops; None if this machine cannot build them."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        return None
    try:
        file = _cache() / f"native-{_key(compiler)}.so"
        if not file.exists():
            _build(compiler, file)
        return ctypes.CDLL(str(file))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error).encode()
        warnings.warn(
            "layers run a loop in Python, which is slower than the one in C++ that "
            f"{shlex.join(compiler)} could not build: {told.decode(errors='replace').strip()}; set "
            "CXX to another compiler, or to one that does not exist to be told no more",
            stacklevel=2,
        )
        return None


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "riglstm"


def _key(compiler: list[str]) -> str:
    """What the built file depends on; nodes with other processors may share the folder."""
    parts = [*compiler, *FLAGS, platform.system(), platform.machine(), platform.processor()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = ("flags", "Features", "CPU part")  # x86, and ARM
        parts += sorted({s for s in info.read_text().splitlines() if s.startswith(names)})
    return hashlib.sha256(SOURCE.read_bytes() + "\n".join(parts).encode()).hexdigest()[:16]


def _build(compiler: list[str], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [*compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        made.replace(file)  # whole or not at all, whoever else builds it


def forward(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise | None,
    live: Tensor | None,
    reset: Tensor | None,
    y: Tensor,
    active: Tensor,
    saved: Saved,
    save: bool,
) -> None:
    """Write y (T, B, N, d), active (T, B, N), what is saved, and the last c over the first."""
    drawn = (None if v is None else v.to(h.dtype) for v in noise or Noise())
    given = (x, *weights, *drawn, live, reset, h)
    _run("forward", x.shape, weights, sel, save, (*map(_contiguous, given), c, y, active, *saved))


def backward(
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    active: Tensor,
    saved: Saved,
    weights: Weights,
    sel: Selection,
    reset: Tensor | None,
    dV_x: Tensor,
    for_input: bool,
    for_gates: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write dh, dc, dV_x in place; gradients of `five_gates`, their biases, and update_bias."""
    W = weights.W
    N, lines, d = W.shape[0], W.shape[1], W.shape[2] // 4
    width = (4 if weights.W_q is None else 5) * d
    lanes = 64 // W.element_size()
    # The biases are a last line.
    dW5 = W.new_zeros(N, lines + 1, -(-width // lanes) * lanes)
    bias = weights.update_bias
    d_bias = None if bias is None else torch.zeros_like(bias)
    V, weight, pair, _, c, gates, tanh_c, q, a = saved
    given = (dy, W, weights.W_q, active, reset, weight, V, pair, c, gates, tanh_c, q, a)
    out = (dh, dc, dV_x if for_input else None, *((dW5, d_bias) if for_gates else (None, None)))
    _run("backward", (*V.shape[:2], 0), weights, sel, True, (*map(_contiguous, given), *out))
    return dW5[:, :lines, :width], dW5[:, lines, :width], d_bias


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous().resolve_neg()


def _run(
    name: str,
    shape: Sequence[int],
    weights: Weights,
    sel: Selection,
    save: bool,
    tensors: tuple[Tensor | None, ...],
) -> None:
    shared = weights.W_q is not None and weights.W_q.dim() == 2
    views = sel.K if sel.views == "all" else sel.K_x
    peers = sel.N if sel.peers == "all" else sel.K_h
    d = weights.W.shape[2] // 4
    sizes = (ctypes.c_int64 * 11)(*(*shape, sel.N, sel.K, d, sel.awake, views, peers, shared, save))
    pointers = (ctypes.c_void_p * len(tensors))(
        *(None if t is None else t.data_ptr() for t in tensors)
    )
    kind = "double" if weights.W.dtype == torch.float64 else "float"
    run: Any = getattr(library(), f"{name}_{kind}")
    if run(sizes, pointers, ctypes.c_double(sel.update_scale)):
        raise MemoryError(f"no memory left for the buffers of a step of {shape[1]} sequences")
