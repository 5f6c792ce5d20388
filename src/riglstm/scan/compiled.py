"""The `compiled` backend: a loop around a compiled step, on a GPU as captured CUDA graphs.

Only the step is compiled: unrolling a whole sequence takes the compiler minutes (its time grows
faster than the length), the step alone seconds, and one compiled step serves every length.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from riglstm.cell import Weights, cell_scores, gated, input_views, scores
from riglstm.checks import learns, product_dtype
from riglstm.cuda_graphs import Cache
from riglstm.scan import reference
from riglstm.scan.base import BackendError, State, begin, five_gates, loop
from riglstm.selection import Noise, Selection, choose_cells, weigh_peers, weigh_views

Step = Callable[..., tuple[Tensor, Tensor, Tensor]]

GRAPHS = Cache()


def available(device: torch.device) -> bool:
    """True if torch.compile can build the step for this device."""
    if device.type == "cpu":
        return any(shutil.which(cxx) for cxx in ("g++", "clang++", "c++"))
    if device.type == "cuda":
        recent = torch.cuda.get_device_capability(device)[0] >= 7
        return recent and importlib.util.find_spec("triton") is not None
    return True


@functools.cache
def _step(sel: Selection, kind: Hashable) -> Step:
    """A compiled step for each selection and kind of call, so that each meets few shapes."""
    return compiled_apart(lambda x, h, c, weights, _, *flags: step(x, h, c, weights, sel, *flags))


def compiled_apart(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function through torch.compile, with a code object of its own.

    The compiler counts recompilations per code object, and gives up after some: with one object
    for all, calls of other kinds would use up this one's.
    """
    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True)


def step(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    sel: Selection,
    noise: Noise,
    live: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`cell.step` for views x (B, K, d) and weights with W_q beside the gates, in fewer kernels.

    The query is a fifth gate, nothing is gathered for it, and the softmax of two is a sigmoid.
    """
    if reset is not None:
        h = h.masked_fill(reset[:, None, None], 0)
        c = c.masked_fill(reset[:, None, None], 0)
    s = scores(h, x)
    active = choose_cells(cell_scores(s), sel, noise.cells)
    if live is not None:
        active = active & live.unsqueeze(-1)
    views = weigh_views(s, sel, noise.views)
    peers = weigh_peers(scores(h, h), sel, noise.peers)

    slots = ((x, views), (h, peers))
    parts = [v.to(h.dtype).unsqueeze(1) * w.to(h.dtype).unsqueeze(-1) for v, w in slots]
    H = torch.cat(parts, dim=2).flatten(2)  # (B, N, (K+N)·d)
    made = torch.einsum("bnj,njg->bng", H, weights.W).to(h.dtype)  # (B, N, 4·d or 5·d)
    d = h.shape[2]
    h_new, c_new = gated(made[..., : 4 * d], c, weights.b)
    if made.shape[2] > 4 * d:
        logit = sel.update_scale * (made[..., 4 * d :] * (h_new - h)).sum(dim=-1)
        if weights.update_bias is not None:
            logit = logit + weights.update_bias
        logit = logit.unsqueeze(-1)
        h_new = logit.sigmoid() * h_new + (-logit).sigmoid() * h
    woke = active.unsqueeze(-1)
    return torch.where(woke, h_new, h), torch.where(woke, c_new, c), active


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
    if _functorch.peek_interpreter_stack() is not None:
        # The compiler takes no tensors of torch.func; transforms see the equations as they are.
        return reference.scan(x, h, c, weights, sel, noise=noise, live=live, reset=reset)
    h, c = begin(x, h, c, weights, sel)
    given = (x, h, c, *weights, *(noise or Noise()), live, reset)
    run = functools.partial(_run, sel)
    y, h, c, active = GRAPHS.call(sel, run, given) if _repeats(x) else run(*given)
    return y, (h, c), active


def _repeats(x: Tensor) -> bool:
    """True where graphs help: on a GPU, unless a step alone would not pay for copies to one."""
    return x.device.type == "cuda" and x.shape[0] > 1


def _run(
    sel: Selection, x: Tensor, h: Tensor, c: Tensor, *given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loop, of tensors alone: y (T, B, N, d), the final h and c, and active (T, B, N)."""
    weights, noise, (live, reset) = Weights(*given[:6]), Noise(*given[6:9]), given[9:]  # type: ignore[arg-type]
    tensors = (x, h, c, *given)
    kind = (
        *(None if t is None else (t.dtype, t.device) for t in tensors),
        *(product_dtype(x.device, h.dtype), x.shape[2], learns(*tensors)),
    )
    # What no step changes: all views (T, B, K, d), and W_q beside the gates, (N, (K+N)·d, 5·d).
    views = input_views(x, weights.W_in, weights.b_in, sel.K)
    W = five_gates(weights.W, weights.W_q, sel.K)
    weights = Weights(None, None, W, weights.b, None, weights.update_bias)
    if learns(*tensors):
        # The first step's state is then like all others', and needs no code of its own.
        h, c = (s if s.requires_grad else s.detach().requires_grad_() for s in (h, c))
    try:
        # torch would go on without compiling, and say so in a log only.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            compiled = _step(sel, kind)
            y, (h, c), active = loop(compiled, views, h, c, weights, sel, noise, live, reset)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise BackendError(
            "backend='compiled' has met too many different shapes, and torch.compile gives up; "
            "use fewer batch sizes, or backend='batched'"
        ) from error
    return y, h, c, torch.stack(active)
