"""Where a run is computed: which device, which of several processes, in which precision."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from riglstm.lab.train.config import Fit, Precision


def rank() -> int:
    """Which of the processes of a run this one is; the first, or the only one, is 0."""
    # Without torchrun RANK is somebody else's; Lightning tells the processes it starts LOCAL_RANK.
    name = "LOCAL_RANK" if launched() is None else "RANK"
    return int(os.environ.get(name) or 0)


def launched() -> int | None:
    """Processes that torchrun has started for this run; None: it has not."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def pick(config: Fit) -> torch.device:
    """The device of this process."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        return _gpu(device, config.devices)
    most = max(8, os.cpu_count() or 1)
    if config.devices > most:
        raise ValueError(
            f"devices must be at most {most} on this CPU, a process to a core, got "
            f"{config.devices}; use fewer"
        )
    return device


def _gpu(device: torch.device, devices: int) -> torch.device:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    several = (launched() or devices) > 1
    if several and device.index is not None:
        raise ValueError(
            f"several processes take one GPU each, from the first on: expected device cuda, "
            f"got {device}; set CUDA_VISIBLE_DEVICES to choose among GPUs"
        )
    local = int(os.environ.get("LOCAL_RANK") or 0) if several else 0
    index = device.index if device.index is not None else local
    wanted = max(index + 1, devices if launched() is None else 0)
    if wanted > there:
        raise ValueError(
            f"this needs {wanted} GPUs, and torch sees {there}; "
            "use fewer devices, another device, or --device cpu"
        )
    return torch.device("cuda", index)


def check(config: Fit, device: torch.device) -> None:
    """Raise ValueError for a precision that the device cannot train in."""
    if config.precision == "tf32" and device.type != "cuda":
        raise ValueError(
            f"precision tf32 is a mode of NVIDIA GPUs, got device {device}; use fp32 or bf16"
        )


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Environment variables that are set within it are put back at its end."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Matrix products in fp32 or TF32, as asked, and not as torch happens to be set.

    On a CPU TF32 is fp32: a run of a GPU can be tested there. bf16 is autocast's, see `autocast`;
    what stays in fp32 then is fp32.
    """
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """What a forward pass runs under: bf16 by autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
