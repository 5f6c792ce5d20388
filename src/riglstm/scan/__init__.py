"""One function runs a whole sequence; the backends behind it differ in speed, not in meaning."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from riglstm.cell import Weights
from riglstm.scan import batched, compiled, reference
from riglstm.scan.base import BackendError, Scan, State
from riglstm.selection import Noise, Selection

__all__ = ["BACKENDS", "Backend", "BackendError", "Scan", "State", "resolve", "scan"]

Backend: TypeAlias = Literal["auto", "reference", "batched", "compiled"]

BACKENDS: dict[str, Scan] = {
    "reference": reference.scan,
    "batched": batched.scan,
    "compiled": compiled.scan,
}


def resolve(backend: str, device: torch.device) -> str:
    """The backend that runs on a device when `backend` is asked for; only `auto` may choose."""
    if backend == "auto":
        return "batched"
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(("auto", *BACKENDS))
        raise BackendError(f"backend must be one of {names}, got {backend!r}")
    if backend == "compiled" and not compiled.available(device):
        raise BackendError(
            "backend='compiled' needs torch.compile, and for a CPU a C++ compiler on the PATH, "
            "got none; install g++ or clang++, or use backend='batched' or 'auto'"
        )
    return backend


def scan(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    *,
    noise: Noise | None = None,
    live: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, State, Tensor]:
    """Run RigLSTM over a sequence: x (T, B, D), h and c (B, N, d).

    `live` (T, B) bool: where False the step does not happen for that sample. `reset` (T, B) bool:
    where True the sample's state is zero before the step, live or not. `noise` is what `random`
    rules rank. Returns y (T, B, N, d), the final (h, c), and active (T, B, N).
    """
    run = BACKENDS[resolve(backend, x.device)]
    return run(x, h, c, weights, sel, noise=noise, live=live, reset=reset)
