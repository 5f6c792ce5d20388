"""What a run is computed on: device, processes, precision, random generators, versions, commit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import riglstm
from riglstm.lab.tasks import offered
from riglstm.lab.tasks.base import Split, Task, Totals
from riglstm.lab.train.config import Fit, Precision

PACKAGES = ("pytorch-lightning", "numpy", "safetensors", "triton")
"""Recorded with every run, beside torch."""


def rank() -> int:
    """The number of this process among those of a run; 0 for the first, or the only one."""
    # Without torchrun RANK is somebody else's; Fabric tells the processes it starts LOCAL_RANK.
    name = "LOCAL_RANK" if launched() is None else "RANK"
    return int(os.environ.get(name) or 0)


def launched() -> int | None:
    """The number of processes that torchrun has started for this run; None: it has not."""
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
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """A context with matrix products in fp32 or TF32, as asked, however torch is set.

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
    """The context of a forward pass: bf16 by autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def score(
    net: nn.Module,
    task: Task,
    condition: str,
    split: Split,
    *,
    precision: Precision = "fp32",
    share: tuple[int, int] = (0, 1),
) -> Totals:
    """`task.score` in eval mode, without gradients, in the precision of the training.

    Training and the tests after it come here, so that both give the same figures.
    """
    training = net.training
    net.eval()
    try:
        with torch.no_grad(), products(precision, task.device), autocast(precision, task.device):
            return task.score(net, condition, split, share)
    finally:
        net.train(training)


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context that leaves the generators of the CPU and of `device` as it found them."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def seed_rng(seed: int, device: torch.device) -> None:
    """Seed what `fork_rng` restores, and nothing else: torch's own seeds every GPU it sees."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def surroundings() -> dict[str, Any]:
    """The versions of everything that could change a result, and the commit; no host names."""
    versions: dict[str, str | None] = {
        "riglstm": riglstm.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions |= {point.dist.name: point.dist.version for point in offered() if point.dist}
    return {
        "versions": versions,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of this code, "+changes" where files differ from it; None: it is not in git.

    Where the code is a copy without git, the variable RIGLSTM_COMMIT may say what of.
    """
    # The file must be tracked: an environment may lie inside a repository that is not ours.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    head = _git("rev-parse", "HEAD") if tracked else None
    if head is None:
        return os.environ.get("RIGLSTM_COMMIT")
    return head + ("+changes" if _git("status", "--porcelain", "--", "../..") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", *arguments),
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    """The device as tables name it: "NVIDIA H200", "CPU (aarch64, 2 threads)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} ({platform.machine()}, {torch.get_num_threads()} threads)"
