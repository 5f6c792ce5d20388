"""Calls of a layer without gradients that come again on a GPU, straight to their launches.

Until a call's kernel is launched the GPU has nothing to do, and that is a matter of Python: checks,
the choice of a backend, plans and buffers took 0.3 to 0.45 ms where a step takes 0.01. What they
come to depends on the kind of a call, on the weights' places and the layer's rules. So the launches
of one call are written down (`scan/fused/tape.py`), and the next ones of that kind make just these.

A kind is the input's shape and dtype, its device, whether a state is given, the backend, and what
torch is told about precision. The first call of a kind is checked; the second one is written down,
if weights and rules are still those that were checked; those that follow are played.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd import forward_ad

from riglstm.checks import product_on
from riglstm.inputs import Input, State
from riglstm.parameters import NAMES
from riglstm.scan import Backend, resolve
from riglstm.selection import Selection

if TYPE_CHECKING:
    from riglstm.scan.fused.tape import Standing, Tape

MOST = 16
"""Kinds that are kept of a layer: as many lengths or sizes of batch as come again and again."""
_OWN = tuple(f"{name}_l0" for name in NAMES)
_UNSEEN: Any = object()


class Seen(dict[tuple[Any, ...], "Tape | Standing | None"]):
    """What a layer keeps, by kind: a tape, or how things stood when it was checked.

    None: it cannot be written down. A copy of a layer has seen nothing: its weights are elsewhere.
    """

    def __reduce__(self) -> tuple[type[Seen], tuple[()]]:
        return Seen, ()


class Layer(Protocol):
    """What is asked of a layer."""

    input_size: int
    num_layers: int
    bidirectional: bool
    batch_first: bool
    hidden_size: int
    cell_size: int
    backend: Backend
    selection: Selection
    _parameters: dict[str, nn.Parameter | None]

    def _in_full(
        self, input: Input, hx: State | None, reset: Tensor | None, mask: Tensor | None
    ) -> tuple[Any, State]: ...


def may_be(input: Any) -> TypeGuard[Tensor]:
    """Whether a call may go straight: soon said, as each call on a CPU asks, too."""
    return (
        not torch.compiler.is_compiling()
        and type(input) is Tensor
        and input.is_cuda
        and not torch.is_grad_enabled()
        # A transform's tensors are no memory.
        and _functorch.peek_interpreter_stack() is None
    )


def call(layer: Layer, input: Tensor, hx: State | None) -> tuple[Any, State]:
    """`_in_full`, or what comes to the same."""
    kind, own = _kind(layer, input, hx), _own(layer)
    if kind is None or own is None:
        return layer._in_full(input, hx, None, None)
    # Layers that were pickled before there was such a thing have none.
    seen: Seen = layer.__dict__.setdefault("_seen", Seen())
    # One look: another thread may take a kind out at any time.
    kept, made = seen.get(kind, _UNSEEN), None
    if kept is _UNSEEN:
        out = layer._in_full(input, hx, None, None)
        if any(k is not None and not k.holds(own, layer.selection) for k in list(seen.values())):
            seen.clear()
        if len(seen) >= MOST:
            for first in list(seen)[:1]:
                seen.pop(first, None)
        seen[kind] = _checked(layer, input, own)
        return out
    if kept is not None and not kept.holds(own, layer.selection):
        # Tapes would keep weights that are the layer's no more.
        seen.clear()
    elif kept is not None:
        made, now = kept.next(input, hx)
        if made is None:
            seen.pop(kind, None)
        elif now is not kept:
            seen[kind] = now
    return layer._in_full(input, hx, None, None) if made is None else made


def _own(layer: Layer) -> list[nn.Parameter | None] | None:
    """The layer's weights, where they are parameters of its own: none is computed for the call."""
    own = layer._parameters
    return [own[name] for name in _OWN] if all(name in own for name in _OWN) else None


def _kind(layer: Layer, x: Tensor, hx: State | None) -> tuple[Any, ...] | None:
    """What launches depend on but for weights and rules; None: a call goes another way."""
    if (
        x.dim() != 3
        or x.shape[2] != layer.input_size
        or layer.num_layers != 1
        or layer.bidirectional
        or layer.batch_first
        or getattr(forward_ad, "_current_level", -1) >= 0
        or not _plain(x)
    ):
        return None
    if hx is not None:
        if type(hx) is not tuple or len(hx) != 2:
            return None
        shape = (1, x.shape[1], layer.hidden_size)
        for state in hx:
            if type(state) is not Tensor or state.shape != shape or not _plain(state):
                return None
            if state.dtype != torch.float32 or state.get_device() != x.get_device():
                return None
    return (
        *(x.shape, x.dtype, x.get_device(), hx is None, layer.backend),
        *(product_on("cuda", torch.float32), torch._C._get_fp32_precision_getter("cuda", "matmul")),
    )


def _plain(t: Tensor) -> bool:
    """Whether a tensor lies in memory as kernels want it: they are compiled for such addresses."""
    return t.is_contiguous() and not t.is_neg() and t.data_ptr() % 16 == 0 and t.numel() > 0


def _checked(layer: Layer, x: Tensor, own: list[nn.Parameter | None]) -> Standing | None:
    """How things stand after a call that `_in_full` made; None where kernels are not ours."""
    W = own[_OWN.index("weight_gates_l0")]
    if W is None:
        return None
    problem = (layer.selection, layer.cell_size, W.dtype, x.shape[1])
    if resolve(layer.backend, x.device, *problem) != "triton":
        return None
    from riglstm.scan.fused.tape import stands

    return stands(own, layer.selection, x.get_device())
