"""How and on what a network is trained: the options of `fit`, and all that follows from them.

The optimizer and its step size; the device, this process among several, the precision of products,
and the random generators of a device.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from riglstm import no_decay_parameters
from riglstm.lab.tasks.base import Split, Task, Totals
from riglstm.lab.tasks.common import AboveZero, Count, Device, FromZero, Options, number, whole

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
Decay: TypeAlias = Literal["none", "linear", "cosine", "late"]

FREE = ("device", "devices", "capture", "tensorboard", "workers")
"""Options that say how a run is computed, not what: a run may go on under others."""


@dataclass(frozen=True)
class Fit(Options):
    """Adam on a task, for a number of updates."""

    updates: Count = 10_000
    """Updates of the weights, at most."""
    lr: AboveZero = 1e-4
    """Adam's step size; the paper's value."""
    warmup: Annotated[int, whole(0)] = 0
    """Updates over which the step size rises from zero."""
    decay: Decay = "none"
    """How the step size falls to zero after the warm-up, over the rest of the updates; late: on a
    line, over the last fifth."""
    clip_norm: AboveZero | None = 1.0
    """Limit of the gradient's global norm; None: no limit. Not stated in the paper."""
    input_rate: AboveZero = 1.0
    """Factor on the step size of what cells are chosen by: the tables of tokens, and RigLSTM's maps
    to views. Not in the paper."""
    weight_decay: FromZero = 0.0
    """Part of a weight that is taken off it in an update, for a step size of one (AdamW); biases
    keep theirs. Not in the paper."""
    flood: FromZero = 0.0
    """Where the loss of a batch is below this, the update goes up its gradient, not down (flooding,
    Ishida et al. 2020). Not in the paper."""
    average: Annotated[float, number("above 0 and below 1", lambda x: 0 < x < 1)] | None = None
    """Decay of a running mean of the weights, such as 0.999, that is evaluated, chosen and saved in
    their place; None: no mean. Not in the paper."""
    evaluate_every: Count = 500
    """Updates between two evaluations on validation data."""
    checkpoint_every: Count = 500
    """Updates between two checkpoints; what a kill costs at most."""
    patience: Count | None = None
    """Evaluations without improvement on the training condition that end the run; None: never."""
    precision: Precision = "fp32"
    """Of matrix products: fp32; tf32, on NVIDIA GPUs; bf16, by autocast, weights in fp32."""
    device: Device = "auto"
    """Where to train: auto (a GPU where there is one), cpu, cuda, cuda:1."""
    devices: Count = 1
    """Processes that share each batch, one to a GPU; torchrun's number goes before this one."""
    capture: bool = True
    """On a GPU: the core's forward and backward pass as captured CUDA graphs; for bouncing balls,
    that of the whole network."""
    test: bool = True
    """Score the chosen weights on test data at the end. A trial of a search does not: test data is
    for the recipe that was found."""
    log_every: Count = 50
    """Updates between two lines of the log, each with means over the updates since the last."""
    tensorboard: bool = True
    """Write TensorBoard's files too, where it is installed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup >= self.updates:
            raise ValueError(
                f"warmup must be below updates = {self.updates}, got {self.warmup}; "
                "the step size would never be reached"
            )


def rate(config: Fit, step: int) -> float:
    """Adam's step size in the update that follows `step` updates."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    gone = (step - config.warmup) / (config.updates - config.warmup)
    if config.decay == "linear":
        return config.lr * (1 - gone)
    if config.decay == "cosine":
        return config.lr * (1 + math.cos(math.pi * gone)) / 2
    if config.decay == "late":
        return config.lr * min(1.0, 5 * (1 - gone))
    return config.lr


def make_optimizer(net: nn.Module, config: Fit) -> Optimizer:
    """AdamW; each group has its decay, and as "factor" that of its step size."""
    named = list(net.named_parameters())
    if config.input_rate != 1 and not any(_of_input(name) for name, _ in named):
        raise ValueError(
            "input_rate must be 1 for a network without tables of tokens and without maps to "
            f"views, got {config.input_rate}; leave it out"
        )
    free = set(no_decay_parameters(net))
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in named:
        factor = config.input_rate if _of_input(name) else 1.0
        decay = 0.0 if parameter in free else config.weight_decay
        new = {"params": [], "factor": factor, "weight_decay": decay}
        groups.setdefault((factor, decay), new)["params"].append(parameter)
    # Without decay it is Adam.
    return AdamW(list(groups.values()), config.lr, fused=True)


def _of_input(name: str) -> bool:
    """True for the parameters that cells are chosen by: tables of tokens, maps to views."""
    own = name.rpartition(".")[2]
    return name.startswith("tables.") or own.startswith(("weight_in_", "bias_in_"))


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


def check_precision(config: Fit, device: torch.device) -> None:
    """Raise ValueError for a precision that the device cannot train in."""
    if config.precision == "tf32" and device.type != "cuda":
        raise ValueError(
            f"precision tf32 is a mode of NVIDIA GPUs, got device {device}; use fp32 or bf16"
        )


def check_products(device: torch.device) -> None:
    """Raise ValueError where a batched product of float16 matrices comes out wrong.

    On 16 % and 33 % of an H200 cuBLAS left blocks of this one unwritten (docs/log/recipes.md).
    """
    rng = torch.Generator(device).manual_seed(0)
    # The shapes and strides of a weight's gradient in RigLSTM's kernels.
    a, b = (
        torch.randn(shape, generator=rng, device=device, dtype=torch.float16)
        for shape in ((6, 384, 1256), (384, 6, 512))
    )
    a, b = a.mT, b.transpose(0, 1)
    made = torch.bmm(a, b)
    wanted = torch.stack([x.float() @ y.float() for x, y in zip(a, b, strict=True)])
    if not (made - wanted).norm() < 0.1 * wanted.norm():
        raise ValueError(
            f"matrix products on {device} come out wrong, as they do where MPS gives a process a "
            "part of a GPU; unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE (to train several RigLSTMs at "
            "once set RIGLSTM_MULTIPROCESSORS)"
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

    Training and the tests after it come here, so that both give the same figures. Every module's
    mode is as before afterwards.
    """
    training = [module for module in net.modules() if module.training]
    net.eval()
    try:
        with torch.no_grad(), products(precision, task.device), autocast(precision, task.device):
            return task.score(net, condition, split, share)
    finally:
        for module in training:
            module.training = True


def rngs(device: torch.device) -> dict[str, torch.Generator]:
    """The random generators that a run draws from: that of the CPU, and that of `device`."""
    found = {"cpu": torch.default_generator}
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        found["cuda"] = torch.cuda.default_generators[index]
    return found


@contextlib.contextmanager
def fork_rng(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """A context that leaves the generators of the CPU and of `device` as it found them.

    `seed`: what they draw from within it; None: they go on.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if seed is not None:
            seed_rng(seed, device)
        yield


def seed_rng(seed: int, device: torch.device) -> None:
    """Seed what `fork_rng` restores, and nothing else: torch's own seeds every GPU it sees."""
    for rng in rngs(device).values():
        rng.manual_seed(seed)


def cores() -> int:
    """Those that this process may use: a container or a job often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """The device as tables name it: "NVIDIA H200", "CPU (aarch64, 2 threads)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} ({platform.machine()}, {torch.get_num_threads()} threads)"
