"""The loop of `reference` around a compiled step.

Only the step is compiled: unrolling a whole sequence takes the compiler minutes (its time grows
faster than the length), the step alone seconds, and one compiled step serves every length.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from riglstm.cell import Weights, step
from riglstm.checks import learns, product_dtype
from riglstm.scan.base import BackendError, State, begin, loop
from riglstm.selection import Noise, Selection

Step = Callable[..., tuple[Tensor, Tensor, Tensor]]


def available(device: torch.device) -> bool:
    """True if torch.compile can build the step for this device."""
    if device.type == "cpu":
        return any(shutil.which(cxx) for cxx in ("g++", "clang++", "c++"))
    return True


@functools.cache
def _step(sel: Selection, kind: Hashable) -> Step:
    """A compiled step for each selection and kind of call, so that each meets few shapes."""

    def run(
        x: Tensor,
        h: Tensor,
        c: Tensor,
        weights: Weights,
        _: Selection,
        noise: Noise | None,
        live: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        h, c, seen = step(x, h, c, weights, sel, noise, live, reset)
        return h, c, seen.active

    # The compiler counts recompilations per code object, and gives up after some: with one object
    # for all, those of other kinds would use up this one's.
    run.__code__ = run.__code__.replace()
    return torch.compile(run)


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
) -> tuple[Tensor, State, Tensor]:
    """See `riglstm.scan.scan`."""
    h, c = begin(x, h, c, weights, sel)
    tensors = (x, h, c, *weights, *(noise or Noise()), live, reset)
    kind = (
        *(None if t is None else (t.dtype, t.device) for t in tensors),
        *(product_dtype(x.device, h.dtype), x.shape[2], learns(*tensors)),
    )
    try:
        # torch would go on without compiling, and say so in a log only.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            y, state, active = loop(_step(sel, kind), x, h, c, weights, sel, noise, live, reset)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise BackendError(
            "backend='compiled' has met too many different shapes, and torch.compile gives up; "
            "use fewer batch sizes, or backend='batched'"
        ) from error
    return y, state, torch.stack(active)
