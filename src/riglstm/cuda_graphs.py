"""A function of tensors, forward and backward, as captured CUDA graphs: one for each pass.

A loop over a sequence is many small kernels; started one by one from Python, a GPU waits for most
of them. A captured graph starts them all at once. What it costs: shapes are fixed, arguments are
copied into the graph's own memory, and activations are kept for the last call only.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from riglstm.checks import learns, refuse_batched, refuse_second_backward, watched

Given: TypeAlias = Sequence[Tensor | None]
Function: TypeAlias = Callable[..., tuple[Tensor, ...]]

_REPLAYING = threading.Lock()
"""A copy into a graph's memory, its replay and the copy out are one thing. Nobody who holds it
waits for another thread: autograd's own may be waiting for it."""
CAPTURING = threading.Lock()
"""Held by whoever captures: one graph at a time, and none inside another."""


class Captured:
    """Work on a GPU, done once to record it, then repeated into the same tensors by `replay`."""

    def __init__(
        self, work: Callable[[], tuple[Tensor | None, ...]], stream: Any, pool: Any = None
    ) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, to pin memory say, is no mistake.
        with torch.cuda.graph(self.graph, pool, stream, "thread_local"):
            self.results = work()
        self.pool, self.replay = self.graph.pool(), self.graph.replay


class Loop:
    """A function of tensors, whose passes run as they are, as one node of autograd's graph.

    Called like the function, and differentiated like it, under the autocast that was active when
    it was made. `fixed`: tensors that the function reads where they are, and whose gradients are
    wanted as well. The function must return new tensors.

    Activations are those of the last call, until it is differentiated. A backward pass through
    any other first repeats its forward pass on what it was given, where nothing is `fixed`: code
    of torch.compile refuses to be differentiated twice.
    """

    lock: Any = contextlib.nullcontext()
    own: tuple[Tensor | None, ...]
    """The arguments, apart from the caller's autograd graph."""
    outputs: tuple[Tensor, ...]
    """Those of the last forward pass that have a gradient, with their autograd graph."""
    differentiable: tuple[bool, ...]
    """Which of all outputs these are."""
    output_grads: Sequence[Tensor | None]
    """Where the backward pass starts from; of `outputs`."""

    def __init__(
        self, function: Function, given: Given, fixed: Sequence[Tensor] = (), quiet: bool = False
    ) -> None:
        self.function, self.fixed = function, tuple(fixed)
        # Only where a compiler may be at work: filters of warnings are the whole process's.
        self.quiet = _quiet if quiet else contextlib.nullcontext
        self.learns = learns(*given, *fixed)
        self.device = next(t.device for t in given if t is not None)
        # Casts that autocast remembers from before a capture would not be repeated by it.
        self.autocast = torch.autocast(
            self.device.type,
            dtype=torch.get_autocast_dtype(self.device.type),
            enabled=torch.is_autocast_enabled(self.device.type),
            cache_enabled=False,
        )
        self.holds: Callable[[], Any] = _nobody
        """The node whose activations are there, as long as autograd's graph has it."""

    def __call__(self, *given: Tensor | None) -> tuple[Tensor, ...]:
        """The function of these arguments; the results are the caller's to keep."""
        if not self.learns:
            with self.lock:
                return self.run(given)
        made: tuple[Tensor, ...] = _Node.apply(self, *given, *self.fixed)  # type: ignore[no-untyped-call]
        return made

    def run(self, given: Given) -> tuple[Tensor, ...]:
        """The forward pass."""
        self.own = tuple(
            None if t is None else t.detach().requires_grad_(self.learns and t.requires_grad)
            for t in given
        )
        return self._forward()

    def back(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The backward pass: gradients of arguments and of `fixed`; None where none is wanted."""
        self.output_grads = grads
        return self._backward()

    def _forward(self) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(self.learns), self.autocast, self.quiet():
            made = self.function(*self.own)
        self.outputs = tuple(o for o in made if o.requires_grad)
        self.differentiable = tuple(o.requires_grad for o in made)
        return tuple(o.detach() for o in made)

    def _backward(self) -> tuple[Tensor | None, ...]:
        pairs = zip(self.outputs, self.output_grads, strict=True)
        outputs, grads = zip(*((o, g) for o, g in pairs if g is not None), strict=True)
        read = (*self.own, *self.fixed)
        learned = [t for t in read if t is not None and t.requires_grad]
        del self.outputs
        with self.quiet():
            found = iter(torch.autograd.grad(outputs, learned, grads, allow_unused=True))
        return tuple(next(found) if t is not None and t.requires_grad else None for t in read)


class Graphed(Loop):
    """A function of tensors, captured for arguments like the given ones, on their GPU.

    Its arguments must have their shapes, dtypes, devices and requires_grad. The function must wait
    nowhere for the GPU (`.item()`, shapes that depend on data). Nothing that was computed from
    `fixed`, such as a learned state, may still hold an autograd graph when it is captured.
    """

    lock = _REPLAYING

    def __init__(self, function: Function, given: Given, fixed: Sequence[Tensor] = ()) -> None:
        super().__init__(function, given, fixed, quiet=True)
        self.own = tuple(
            None
            if t is None
            else torch.empty_like(t, memory_format=torch.contiguous_format)
            .copy_(t.detach())
            .requires_grad_(self.learns and t.requires_grad)
            for t in given
        )
        with torch.cuda.device(self.device):
            self._warm_up()
            stream = torch.cuda.Stream()
            self.forward_pass = Captured(self._forward, stream)
            if self.learns:
                self.output_grads = [torch.empty_like(o) for o in self.outputs]
                self.backward_pass = Captured(self._backward, stream, self.forward_pass.pool)

    def run(self, given: Given) -> tuple[Tensor, ...]:
        """Repeat the forward pass: copies of what it gives."""
        own, new = ([t for t in tensors if t is not None] for tensors in (self.own, given))
        torch._foreach_copy_(own, new)
        self.forward_pass.replay()
        return tuple(o.clone() for o in self.forward_pass.results if o is not None)

    def back(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Repeat the backward pass: copies, as autograd may keep one, and add the next to it."""
        for own, grad in zip(self.output_grads, grads, strict=True):
            assert own is not None
            own.zero_() if grad is None else own.copy_(grad)
        self.backward_pass.replay()
        return tuple(None if g is None else g.clone() for g in self.backward_pass.results)

    def _warm_up(self) -> None:
        """Run twice outside the capture, on a stream of its own, as captures demand it.

        An autograd graph that is still there would lend its nodes, and their stream, to the next.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward()
                if self.learns:
                    self.output_grads = [torch.zeros_like(o) for o in self.outputs]
                    self._backward()
        torch.cuda.current_stream().wait_stream(stream)


class _Node(torch.autograd.Function):
    """Both passes as one node of the caller's autograd graph."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, *given: Tensor | None) -> tuple[Tensor, ...]:
        ctx.loop = loop
        arguments = given[: len(given) - len(loop.fixed)]
        with loop.lock:
            made = loop.run(arguments)
            loop.holds = weakref.ref(ctx)
        ctx.versions = [t._version for t in loop.fixed]
        if not loop.fixed:
            ctx.save_for_backward(*arguments)
        ctx.set_materialize_grads(False)
        plain = (o for o, learns in zip(made, loop.differentiable, strict=True) if not learns)
        ctx.mark_non_differentiable(*plain)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched("compiled", *grads)
        loop: Loop = ctx.loop
        given = ctx.saved_tensors
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        with torch.no_grad():
            found = _Node._gradients(ctx, loop, given, grads)
        if torch.is_grad_enabled():
            # A gradient without a graph would count as a constant in a second backward pass.
            like = next(t for t in (*given, *loop.fixed) if t is not None and t.requires_grad)
            found = tuple(None if g is None else _Once.apply(g, like) for g in found)  # type: ignore[no-untyped-call]
        return None, *found

    @staticmethod
    def _gradients(
        ctx: Any, loop: Loop, given: Given, grads: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        with loop.lock:
            if loop.holds() is not ctx:
                if loop.fixed:
                    raise RuntimeError(
                        "captured graphs keep the activations of their last forward pass, for one "
                        "backward pass: expected backward through that one, got another or a "
                        "second; call backward before the next forward pass, add losses up, or "
                        "capture once for each"
                    )
                loop.run(given)
            if ctx.versions != [t._version for t in loop.fixed]:
                raise RuntimeError(
                    "captured graphs read weights where they are: expected those of the forward "
                    "pass, got weights that were changed in place; call backward before the update"
                )
            loop.holds = _nobody
            wanted = [g for g, learns in zip(grads, loop.differentiable, strict=True) if learns]
            return loop.back(wanted)


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again, which it says."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, like: Tensor) -> Tensor:
        return grad.view_as(grad)

    backward = staticmethod(refuse_second_backward("compiled"))


@dataclass
class Kind:
    """A kind of call in a cache."""

    graphs: list[Graphed] = field(default_factory=list)
    wait: float = 1
    """Calls without a graph before one is captured, which takes as long as dozens of them."""
    calls: int = 0
    """Calls without a graph so far."""


class Cache:
    """Graphs of functions by kind of call; a kind is captured when it comes for the second time.

    A kind of which a call waits for its backward pass, as of another layer, gets a graph more
    while there is room. For the first one of a kind the graphs of the least recently used kind
    go, and that kind has to come four times as often before it is captured again.
    """

    def __init__(self, graphs: int = 8, kinds: int = 256) -> None:
        self.most_graphs, self.most_kinds = graphs, kinds
        self.kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        """The least recently used first."""
        self.lock = threading.Lock()

    def call(self, kind: Hashable, function: Function, given: Given) -> tuple[Tensor, ...]:
        """function(*given), by a graph where there is one; `kind` says all else it depends on."""
        if CAPTURING.locked() or not capturable(*given):
            return function(*given)
        with self.lock:
            this = self._find((kind, *kind_of(given)))
            graph = next((g for g in this.graphs if g.holds() is None), None)
            busy = this.graphs[0] if this.graphs else None
            first = this.calls == 0
            full = self._count() >= self.most_graphs
            wanted = not full if this.graphs else this.calls >= this.wait
            this.calls += not this.graphs
        if graph is None and wanted:
            graph = self._capture(this, function, given)
        graph = busy if graph is None else graph
        return (Loop(function, given, quiet=first) if graph is None else graph)(*given)

    def _find(self, key: Hashable) -> Kind:
        """A kind, as the most recently used one."""
        found = self.kinds.setdefault(key, Kind())
        self.kinds.move_to_end(key)
        if len(self.kinds) > self.most_kinds:
            self.kinds.popitem(last=False)
        return found

    def _count(self) -> int:
        return sum(len(kind.graphs) for kind in self.kinds.values())

    def _capture(self, kind: Kind, function: Function, given: Given) -> Graphed | None:
        """A graph more of a kind; None where it cannot be had, or another is being captured."""
        if not CAPTURING.acquire(blocking=False):
            return None
        try:
            with self.lock:
                # Before the capture, so that their memory can be had.
                for other in list(self.kinds.values()):
                    if other.graphs and self._count() >= self.most_graphs:
                        other.graphs, other.calls, other.wait = [], 0, 4 * other.wait
            graph = Graphed(function, given)
        except RuntimeError as error:
            full = isinstance(error, torch.OutOfMemoryError)
            kind.calls, kind.wait = 0, 4 * kind.wait if full else math.inf
            warnings.warn(
                f"the loop could not be captured as a CUDA graph, and is slower without: {error}",
                stacklevel=2,
            )
            return None
        finally:
            CAPTURING.release()
        kind.graphs.append(graph)
        return graph


def capturable(*tensors: Tensor | None) -> bool:
    """True if only the GPU has to see a call, and no graph is being captured there.

    Hooks of saved tensors, as those of torch.utils.checkpoint, are to see each step's.
    """
    return (
        not watched(*tensors)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def kind_of(given: Given) -> tuple[Hashable, ...]:
    """What a graph of a function of these arguments depends on."""
    device = next(t.device for t in given if t is not None)
    grad, cuda = torch.is_grad_enabled(), device.type == "cuda"
    cast = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
    forms = (
        None if t is None else (t.shape, t.dtype, t.device, grad and t.requires_grad) for t in given
    )
    return (
        *forms,
        cast,
        grad,
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        # Calls on other streams would write to a graph's memory at the same time.
        torch.cuda.current_stream(device).cuda_stream if cuda else None,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch's compiler has to say of itself from whoever calls a layer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        yield


def _nobody() -> None:
    """No node."""
