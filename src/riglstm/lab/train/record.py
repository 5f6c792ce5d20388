"""What a run ran on: versions, the commit of this code, the device's name. No names of hosts."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import riglstm

PACKAGES = ("pytorch-lightning", "numpy", "safetensors", "triton")


def surroundings() -> dict[str, Any]:
    """The versions of everything that could change a result, and the commit of this code."""
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
    """As a table names it: "NVIDIA H200", "CPU (aarch64, 2 threads)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} ({platform.machine()}, {torch.get_num_threads()} threads)"


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
