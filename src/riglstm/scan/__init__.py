"""`scan` runs a whole sequence; its backends differ in speed, not in meaning."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.checks import (
    constant_to_compilers,
    differentiating,
    refuse_transforms,
    tracing,
    untraced,
    watched,
)
from riglstm.scan import batched, compiled, reference
from riglstm.scan.base import BackendError, Scan, State
from riglstm.selection import Noise, Selection

__all__ = ["BACKENDS", "Backend", "BackendError", "Scan", "State", "resolve", "scan"]

Backend: TypeAlias = Literal["auto", "reference", "batched", "compiled", "triton"]


def _triton(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, State, Tensor]:
    """The `triton` backend, whose module needs Triton and is read on first use."""
    from riglstm.scan import triton

    return triton.scan(x, *args, **kwargs)


BACKENDS: dict[str, Scan] = {
    "reference": reference.scan,
    "batched": batched.scan,
    "compiled": compiled.scan,
    "triton": _triton,
}


@untraced
def resolve(
    backend: str,
    device: torch.device,
    sel: Selection | None = None,
    d: int | None = None,
    dtype: torch.dtype = torch.float32,
    B: int = 1,
) -> str:
    """The backend that `backend` stands for on a device; only `auto` may choose.

    With a problem's selection, cell size, dtype and sequences, `auto` knows whether `triton` runs
    it; what it does not run on a GPU is `compiled`, where there is a compiler.
    """
    if backend == "auto":
        if device.type != "cuda":
            return "batched"
        if sel is not None and d is not None and _no_triton(device) is None:
            from riglstm.scan import triton

            if not triton.refusal(sel, d, dtype, device, B):
                return "triton"
        return "compiled" if compiled.available(device) else "batched"
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(("auto", *BACKENDS))
        raise BackendError(f"backend must be one of {names}, got {backend!r}")
    if backend == "compiled" and not compiled.available(device):
        raise BackendError(
            "backend='compiled' needs torch.compile, for a CPU with a C++ compiler on the PATH, "
            "for a GPU from sm_70 on with Triton, got neither; install g++ or clang++, or use "
            "backend='batched' or 'auto'"
        )
    if backend == "triton" and (missing := _no_triton(device)) is not None:
        raise BackendError(f"backend='triton' needs {missing}; use backend='batched' or 'auto'")
    return backend


def check_possible(backend: str, device: torch.device | str | int | None) -> None:
    """Raise as `resolve` does if a layer made on a device could run nowhere.

    Many are made on a CPU, or on `meta`, and get to a GPU later: each call asks again.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    moves = device.type == "meta" or (device.type == "cpu" and torch.cuda.is_available())
    if not (moves and isinstance(backend, str) and backend in BACKENDS):
        resolve(backend, device)


@functools.cache
def _no_triton(device: torch.device) -> str | None:
    """What `triton` misses on a device; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton, which is not installed"
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        return None if major >= 8 and not torch.version.hip else "an NVIDIA GPU from sm_80 on"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"a CUDA device, got {device.type!r}"


def choose_backend(backend: str, name: str) -> str:
    """The backend for this call: `name`, or what runs under a transform, trace or export.

    `backend` is the one asked for, `name` what it resolved to.

    Operators of ours have backward() only, and are none of ONNX's: there `auto` takes the
    reference. A loop in Python has as many steps in a trace as its example had.
    """
    if tracing():
        if torch.onnx.is_in_onnx_export():
            raise BackendError(
                "torch.onnx.export(..., dynamo=False) would fix the length of sequences, got a "
                "model with a RigLSTM; use dynamo=True, or riglstm.onnx.export for the layer alone"
            )
        if name in ("reference", "compiled"):
            raise BackendError(
                f"torch.jit.trace would fix the length of sequences with backend={name!r}; use "
                "backend='batched' or 'auto', or torch.export"
            )
    elif differentiating():
        if backend == "auto":
            return "reference"
        if name in ("batched", "triton"):
            refuse_transforms(name)
    elif torch.compiler.is_exporting() and _for_onnx():
        if backend not in ("auto", "reference"):
            raise BackendError(
                f"torch.onnx.export needs backend='auto' or 'reference', got {backend!r}, which is "
                "no operator of ONNX; set layer.backend = 'auto'"
            )
        return "reference"
    return name


@constant_to_compilers
def _for_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def repeatable(input: Any) -> TypeGuard[Tensor]:
    """True for an eager call on a GPU without gradients, whose launches may be cached.

    Every call of a layer asks, so that it takes no time on a CPU.
    """
    return (
        not torch.compiler.is_compiling()
        and type(input) is Tensor
        and input.is_cuda
        and not torch.is_grad_enabled()
        and _no_triton(input.device) is None
    )


def scan(
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Weights,
    sel: Selection,
    *,
    noise: Noise | None = None,
    live: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, State, Tensor]:
    """Run RigLSTM over a sequence: x (T, B, D), h and c (B, N, d), zero where they are None.

    `live` (T, B) bool: where False the step does not happen for that sample. `reset` (T, B) bool:
    where True the sample's state is zero before the step, live or not. `noise` is what `random`
    rules rank. Returns y (T, B, N, d), the final (h, c), and active (T, B, N); no two of them,
    and none of them and an argument, share memory.
    """
    W = weights.W
    dtype = W.dtype if h is None else h.dtype
    name = resolve(backend, x.device, sel, W.shape[2] // 4, dtype, x.shape[1])
    if backend == "auto" and name == "compiled" and watched(x, h, c, *weights):
        name = "batched"  # its operators are what compilers, modes, traces and transforms know
    # Of no sequences there are only shapes, and gradients of zero.
    none = not tracing() and x.shape[1] == 0
    run = BACKENDS["reference" if none else choose_backend(backend, name)]
    return run(x, h, c, weights, sel, noise=noise, live=live, reset=reset)
