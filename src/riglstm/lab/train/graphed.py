"""A module's training step as captured CUDA graphs, which read its parameters where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from riglstm.cuda_graphs import CAPTURING, Graphed
from riglstm.lab.train.config import fork_rng


class GraphedModule:
    """The training step of a module, forward and backward, captured for arguments like `given`.

    Called like the module, with its present parameters, and differentiated like it; gradients may
    be accumulated. Arguments and results are tensors, and tuples of them; any other argument must
    be the same in every call. The capture holds for the tensors' shapes, dtypes and devices, whose
    requires_grad says whether their gradients are wanted, and under the autocast that is active
    now. Parameters stay where they are, frozen or not as they are. A model built with
    compile_step=True is compiled before it is captured. What it must not do, `Graphed` says.
    """

    results: TreeSpec
    """What the module returns, without its tensors."""

    def __init__(self, module: nn.Module, *given: Any) -> None:
        leaves, arguments = tree_flatten(given)
        # Without the tensors: what is captured lives longer than the call.
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        results: TreeSpec

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal results
            filled = list(others)
            for i, tensor in zip(places, tensors, strict=True):
                filled[i] = tensor
            made, results = tree_flatten(module(*tree_unflatten(filled, arguments)))
            return tuple(made)

        parameters = [p for p in module.parameters() if p.requires_grad]
        with CAPTURING, torch.enable_grad():
            self.graph = Graphed(run, _tensors(given), parameters)
        self.results = results

    def __call__(self, *given: Any) -> Any:
        """The module's forward pass; the results are the caller's to keep."""
        return tree_unflatten(self.graph(*_tensors(given)), self.results)


@contextlib.contextmanager
def captured(module: nn.Module) -> Iterator[None]:
    """Within it, a call of the module in training is captured, recorded when it is first made.

    Calls of another kind than the first, in eval mode or without gradients are the module's own.
    """
    plain: Callable[..., Any] = module.forward
    graphed: GraphedModule | None = None
    kind: tuple[Any, ...] = ()

    def forward(*given: Any) -> Any:
        nonlocal graphed, kind
        if not module.training or not torch.is_grad_enabled():
            return plain(*given)
        if graphed is None:
            # The capture calls the module itself. `forward` must not name itself: such a cycle
            # would keep the graphs' memory beyond the training.
            this, module.forward = module.forward, plain
            try:
                graphed, kind = _capture(module, given), _kind(given)
            finally:
                module.forward = this
        return (graphed if _kind(given) == kind else plain)(*given)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _capture(module: nn.Module, given: tuple[Any, ...]) -> GraphedModule:
    try:
        # What is drawn in order to capture must not shift what the run draws.
        with fork_rng(_tensors(given)[0].device):
            return GraphedModule(module, *given)
    except RuntimeError as error:
        raise RuntimeError(
            f"the training step of {type(module).__name__} could not be captured as CUDA graphs; "
            "train it without (--no-capture)"
        ) from error


def _tensors(given: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def _kind(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a capture depends on, but the numbers in the tensors."""
    leaves, form = tree_flatten(given)
    told = [
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    device = _tensors(given)[0].device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return form, told, cast
