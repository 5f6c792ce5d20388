"""Time a training step of each model on a GPU: its eager loop, and captured CUDA graphs.

    PYTHONPATH=src python3 benchmarks/rivals.py            # every model, paper's size
    PYTHONPATH=src python3 benchmarks/rivals.py rim rmc    # some of them

A training step is a forward and a backward pass, with gradients of the parameters and the input.
The eager loop runs `model.step` once for each time step; the graphs hold the compiled step, or the
fused kernel where a model has one. Both start from the same weights, and a model is timed only
after outputs and gradients of both agree, for two inputs. Dropout is off, as its draws could not
agree.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from riglstm.lab.train.graphed import GraphedCore
from riglstm.models import MODELS, build, options_of
from riglstm.models.base import prepare, unroll

HIDDEN = {"transformer": 256}
"""Widths that are not the others' own."""
SELECTING = ("rim", "brim", "riglstm")
"""Models that choose cells by hard comparisons."""
NO_LIMIT = ("transformer", "riglstm")
"""Shown beside the others; the first has no loop to beat, the second is no rival."""
AGREED_STEPS = 8
"""Later steps of selecting models are not compared: a last bit that differs between kernels becomes
another cell, and another sequence from there on. Of the others, all steps are."""
TOLERANCE = 1e-5
"""Of the largest difference, relative to the largest value: float32 sums in another order. Where
all steps are compared, twice the eager loop's own distance from float64 is allowed if that is more:
RMC multiplies rounding a thousand times in 196 steps."""
HEADER = "model          eager ms graphed ms   ratio difference   took s"

Run = Callable[[Tensor], tuple[Tensor, Any]]


def eager_loop(model: nn.Module) -> Run:
    """The model's step in a Python loop; a model that has none runs as it is."""
    if not hasattr(model, "step"):
        return model
    return lambda x: unroll(model.step, *prepare(model, x, None))


def train_step(run: Run, model: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the output, the gradient of the input, those of the parameters."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    y, _ = run(x)
    (y * weight).sum().backward()
    grads = (p.grad for p in model.parameters())
    return y.detach(), x.grad, *(g for g in grads if g is not None)


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    """The median time of a call, from start to an idle GPU."""
    times = []
    for i in range(2 + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def largest_difference(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    """Over all tensors, relative to the largest value of each."""
    return max(
        ((p - q).abs().max() / q.abs().max().clamp_min(1e-30)).item()
        for p, q in zip(a, b, strict=True)
    )


def bench(name: str, T: int, B: int, width: int, seed: int) -> tuple[bool, str]:
    """One row of the table, and whether it holds."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    hidden, takes = HIDDEN.get(name, width), options_of(name)
    options: dict[str, Any] = {"dropout": 0.0} if "dropout" in takes else {}
    if name == "riglstm":
        # Captured graphs are for models without a kernel; docs/kernels.md has that of this one.
        options["backend"] = "batched"
    eager = build(name, width, hidden, device="cuda", **options)
    if name in SELECTING:
        # Wider than the start values: scores of cells are then further apart than rounding.
        with torch.no_grad():
            for p in eager.parameters():
                p.add_(0.05 * torch.randn_like(p))
    fast_options = options | ({"compile_step": True} if "compile_step" in takes else {})
    fast = build(name, width, hidden, device="cuda", **fast_options)
    fast.load_state_dict(eager.state_dict())
    x, other_x = (torch.randn(T, B, width, device="cuda").requires_grad_() for _ in range(2))
    weight = torch.randn(T, B, eager.output_size, device="cuda")

    loop, graph = eager_loop(eager), GraphedCore(fast, x)
    has_loop = hasattr(eager, "step")
    agreed = AGREED_STEPS if name in SELECTING else T
    compared = weight.clone()
    compared[agreed:] = 0
    difference, allowed = 0.0, TOLERANCE
    # Twice: a replay must read what it is given, not what was captured.
    for given in (x, other_x):
        slow_y, *slow = train_step(loop, eager, given, compared)
        fast_y, *fast_grads = train_step(graph, fast, given, compared)
        difference = max(
            difference, largest_difference((fast_y[:agreed], *fast_grads), (slow_y[:agreed], *slow))
        )
    if name not in SELECTING:
        exact = copy.deepcopy(eager).double()
        given = other_x.detach().double().requires_grad_()
        known = train_step(eager_loop(exact), exact, given, compared.double())
        allowed = max(allowed, 2 * largest_difference((slow_y, *slow), known))
    if not difference < allowed:
        return False, f"{name:12} DISAGREES: difference {difference:.1e}, allowed {allowed:.1e}"

    slow_ms = milliseconds(lambda: train_step(loop, eager, x, weight))
    fast_ms = milliseconds(lambda: train_step(graph, fast, x, weight))
    ratio = fast_ms / slow_ms
    within = ratio <= 0.25 or name in NO_LIMIT
    return within, (
        f"{name:12} {slow_ms:10.2f} {fast_ms:10.2f} {ratio:7.3f} {difference:10.1e} "
        f"{time.perf_counter() - began:8.0f} {'' if has_loop else ' no loop: one pass over T'}"
        f"{'' if within else ' OVER A QUARTER'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=[], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=196)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, got none", file=sys.stderr)
        return 2
    # The same products on both sides; the fused LSTM would otherwise round to TF32.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32")
    print(f"T={args.steps}, B={args.batch}, {args.width} wide; a training step:")
    print(HEADER)
    holds = True
    for name in args.models or MODELS:
        try:
            within, row = bench(name, args.steps, args.batch, args.width, args.seed)
        except Exception as error:
            within, row = False, f"{name:12} FAILED: {type(error).__name__}: {error}"
        holds = holds and within
        print(row, flush=True)
        torch.cuda.empty_cache()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
