"""A module's training step as captured CUDA graphs, which read its parameters where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from riglstm.cuda_graphs import CAPTURING, Graphed, kind_of
from riglstm.lab.train.config import fork_rng


class GraphedModule:
    """The training step of a module, forward and backward, captured for arguments like the given.

    Called like the module, with its present parameters, and differentiated like it; gradients may
    be accumulated. The module must return tensors, or tuples of them. The capture holds for calls
    that it `takes`: those with tensors of the same shapes, dtypes, devices and requires_grad, which
    says whether their gradients are wanted, with the same other arguments, and under the same
    autocast and the same settings of torch. Parameters stay where they are, frozen or not as they
    are. A model built with compile_step=True is compiled before it is captured. What it must not
    do, `Graphed` says.
    """

    results: TreeSpec
    """What the module returns, without its tensors."""

    def __init__(self, module: nn.Module, *given: Any, **named: Any) -> None:
        self.kind = _kind(given, named)
        form, plain, _ = self.kind
        results: TreeSpec

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal results
            rest = iter(tensors)
            leaves = [next(rest) if leaf is Tensor else leaf for leaf in plain]
            given, named = tree_unflatten(leaves, form)
            made, results = tree_flatten(module(*given, **named))
            return tuple(made)

        parameters = [p for p in module.parameters() if p.requires_grad]
        with CAPTURING, torch.enable_grad():
            self.graph = Graphed(run, _tensors(given, named), parameters)
        self.results = results

    def takes(self, *given: Any, **named: Any) -> bool:
        """True for a call of the kind that was captured."""
        return _kind(given, named) == self.kind

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The module's forward pass; the results are the caller's to keep."""
        return tree_unflatten(self.graph(*_tensors(given, named)), self.results)


@contextlib.contextmanager
def captured(net: nn.Module) -> Iterator[None]:
    """Within it, calls of the network's core in training are captured: those like the first.

    Other calls, in eval mode or without gradients too, are the core's own. If the network's
    attribute `capture_whole` is true, its own calls are captured in place of the core's.
    """
    module = net if getattr(net, "capture_whole", False) else net.get_submodule("core")
    plain: Callable[..., Any] = module.forward
    graphed: GraphedModule | None = None

    def forward(*given: Any, **named: Any) -> Any:
        nonlocal graphed
        if not module.training or not torch.is_grad_enabled():
            return plain(*given, **named)
        if graphed is None:
            # The capture calls the module itself. `forward` must not name itself: such a cycle
            # would keep the graphs' memory beyond the training.
            this, module.forward = module.forward, plain
            try:
                graphed = _capture(module, *given, **named)
            finally:
                module.forward = this
        return (graphed if graphed.takes(*given, **named) else plain)(*given, **named)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _capture(module: nn.Module, *given: Any, **named: Any) -> GraphedModule:
    try:
        # What is drawn in order to capture must not shift what the run draws.
        with fork_rng(_tensors(given, named)[0].device):
            return GraphedModule(module, *given, **named)
    except RuntimeError as error:
        raise RuntimeError(
            f"the training step of {type(module).__name__} could not be captured as CUDA graphs; "
            "train it without (--no-capture)"
        ) from error


def _tensors(*arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _kind(given: Any, named: Any) -> tuple[TreeSpec, list[Any], tuple[Hashable, ...]]:
    """What a capture holds for: the arguments, `Tensor` for each tensor, and a graph's own kind."""
    leaves, form = tree_flatten((given, named))
    plain = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return form, plain, kind_of(_tensors(given, named))
