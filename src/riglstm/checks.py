"""Checks of options and calls: errors that say expected, got and the way out, before any work.

Options of a layer, its input and state, and what torch is doing around the call: autocast, traces,
gradients and transforms.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

P = ParamSpec("P")
R = TypeVar("R")
_DERIVATIVES = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_resume: Callable[[Any], None] = torch._C._set_tracing_state  # type: ignore[attr-defined]


def tracing() -> bool:
    """True while torch.jit.trace records what is done."""
    return torch._C._get_tracing_state() is not None


def untraced(look: Callable[P, R]) -> Callable[P, R]:
    """Hide a function from torch.jit.trace; sizes are plain numbers in it."""

    @functools.wraps(look)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        state = torch._C._get_tracing_state()
        if state is None:
            return look(*args, **kwargs)
        _resume(None)
        try:
            return look(*map(_numbers, args), **kwargs)
        finally:
            _resume(state)

    return run


def _numbers(given: Any) -> Any:
    """A size, or several, as numbers; in a trace they are tensors."""
    if type(given) is tuple:
        return tuple(map(_numbers, given))
    return int(given) if isinstance(given, Tensor) and given.dim() == 0 else given


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products of `dtype` under autocast, which leaves float64 alone."""
    return product_on(device.type, dtype)


def product_on(kind: str, dtype: torch.dtype) -> torch.dtype:
    """`product_dtype` for a device type by its name."""
    known = kind in ("cuda", "cpu") or torch.amp.is_autocast_available(kind)
    if dtype == torch.float64 or not known:
        return dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype


def learns(*tensors: Tensor | None) -> bool:
    """True if a call is differentiated, and so has something to save.

    A trace saves nothing: torch.jit.trace repeats it without gradients, and compares. Operators
    whose call saved nothing run it again for their backward pass.
    """
    if not torch.is_grad_enabled() or tracing():
        return False
    return any(t is not None and t.requires_grad for t in tensors)


def constant_to_compilers(look: Callable[P, R]) -> Callable[P, R]:
    """Do what torch.compiler.assume_constant_result does, without loading the compiler."""
    look._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return look


@constant_to_compilers
def differentiating() -> bool:
    """True inside torch.func's grad, jvp and jac*, or a level of forward mode."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return True
    if _functorch.peek_interpreter_stack() is None:
        return False
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() in _DERIVATIVES for level in stack)


def watched(*tensors: Tensor | None) -> bool:
    """True if a compiler, dispatch mode, trace, transform or tensor subclass has to see a call.

    Then it goes through torch's operators.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or tracing()
        or _functorch.peek_interpreter_stack() is not None
        or getattr(forward_ad, "_current_level", -1) >= 0
        or not _PLAIN.issuperset(map(type, tensors))
    )


def refuse_transforms(backend: str) -> None:
    """Raise where a derivative is taken that a backend of operators does not have."""
    if differentiating():
        raise NotImplementedError(
            f"backend={backend!r} has backward() only: no forward-mode derivative, and none of "
            "torch.func's grad, jvp and jac*; use backend='reference' or 'auto'"
        )


def refuse_batched(backend: str, *grads: Tensor | None) -> None:
    """Raise where several gradients come in one backward pass."""
    if torch.compiler.is_compiling():
        return
    batched = (_functorch.is_legacy_batchedtensor, _functorch.is_batchedtensor)
    if any(g is not None and any(is_one(g) for is_one in batched) for g in grads):
        raise NotImplementedError(
            f"backend={backend!r} has one gradient at a time, got a batch of them "
            "(is_grads_batched=True, vectorize=True, vmap); ask for one after another, or use "
            "backend='reference'"
        )


def refuse_second_backward(backend: str) -> Callable[..., Any]:
    """Return a derivative of a backward operator that raises: there is none."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"backend={backend!r} can be differentiated once; for double backward use "
            "backend='reference'"
        )

    return refuse


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that a named option is one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def plain(value: Any) -> Any:
    """Return a NumPy number as Python's own, and anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def check_count(name: str, value: int, low: int, high: int, bounds: str) -> int:
    """A whole number lies in its range."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(
            f"{name} must be a whole number in {bounds} = [{low}, {high}], got {value!r}"
        )
    return value


def check_positive(name: str, value: int) -> int:
    """A size is a whole number above zero."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def check_divides(hidden_size: int, parts: int, name: str = "num_cells") -> None:
    """The parts of a model, its cells for one, share the hidden state evenly."""
    if hidden_size % parts:
        below = hidden_size // parts * parts
        near = f"{below} or {below + parts}" if below else f"{parts}"
        start = min(parts, hidden_size)
        # Not all numbers: there may be any number of them.
        near_by = (n for k in range(min(start, 1000)) for n in (start - k, start + k))
        fit = next((n for n in near_by if hidden_size % n == 0), 1)
        raise ValueError(
            f"hidden_size must be a multiple of {name} = {parts}, got {hidden_size}; "
            f"take hidden_size={near}, or another {name}, {fit} say"
        )


def fitting_cells(hidden_size: int) -> int:
    """The paper's 6 cells where they share hidden_size evenly, else the nearest number that does.

    From 2 to 16, with cells of size 2 at least, and of two numbers as near the larger; 6, which
    `check_divides` refuses, where none fits.
    """
    fit = (n for n in range(2, 17) if hidden_size % n == 0 and (n == 6 or 2 * n <= hidden_size))
    return min(fit, key=lambda n: (abs(n - 6), -n), default=6)


def check_split(layer: int, features: int, num_views: int, cell_size: int) -> None:
    """A layer's input can be cut into views as large as a cell."""
    if features != num_views * cell_size:
        raise ValueError(
            f"input_views='split' cuts the input of layer {layer} into num_views pieces of the "
            f"cell size: expected {num_views} x {cell_size} = {num_views * cell_size} features, "
            f"got {features}; choose other sizes, or use input_views='linear'"
        )


def check_switch(name: str, value: object) -> bool:
    """An option that is on or off; 1 and 0 are as good."""
    value = plain(value)
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_projection(value: object) -> None:
    """nn.LSTM's projection of the output, which this layer has none of."""
    if plain(value) != 0:
        raise ValueError(
            f"proj_size must be 0, got {value!r}: the layer has no projection; put "
            "nn.Linear(hidden_size, proj_size) behind it"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_update(soft_update: Any, scale: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The soft update's options: numbers or `auto`, and an update that they may change."""
    soft_update, scale, bias = plain(soft_update), plain(scale), plain(bias)
    if not isinstance(soft_update, bool) and soft_update != "printed":
        raise ValueError(f"soft_update must be True, False or 'printed', got {soft_update!r}")
    for name, value, none in (("update_scale", scale, ""), ("update_bias", bias, ", None")):
        if value == "auto" or (none and value is None):
            continue
        if not _is_number(value):
            raise ValueError(f"{name} must be a finite number{none} or 'auto', got {value!r}")
        if soft_update == "printed":
            raise ValueError(
                f"{name} must be 'auto' with soft_update='printed', which has the paper's, "
                f"got {value}; use soft_update=True"
            )
    if bias not in (None, "auto") and not soft_update:
        raise ValueError(
            f"update_bias must be None without the soft update, got {bias}; use soft_update=True"
        )
    return soft_update, scale, bias


def check_forget_bias(value: Any, needs: str | None = None) -> float:
    """The forget gate's start is a number; `needs`: the option that gives it a bias."""
    value = plain(value)
    if not _is_number(value):
        raise ValueError(f"forget_bias must be a finite number, got {value!r}")
    if value and needs is not None:
        raise ValueError(
            f"forget_bias must be 0 where the gates have no bias, got {value}; use {needs}"
        )
    return float(value)


def check_gate_scale(value: object) -> None:
    """The factor on the start values of the gates' weight matrices."""
    if not _is_number(value) or value <= 0:  # type: ignore[operator]
        raise ValueError(
            f"gate_scale must be a positive finite number, got {value!r}; 1 changes nothing"
        )


def check_steady_start(value: bool, affine: bool, num_views: int, cells: str) -> None:
    """A steady start needs maps to views that can cancel, biases that do not, and a choice."""
    if value and not (affine and num_views > 1 and cells == "top"):
        raise ValueError(
            "steady_start must be False without input_views='linear', bias=True, cells='top' and "
            "two views or more, got True; leave it out"
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Weights are floating-point numbers that torch can compute with."""
    if dtype not in FLOATS:
        names = ", ".join(str(f) for f in FLOATS)
        raise ValueError(f"dtype must be a floating dtype, got {dtype}; use one of {names}")


def check_dropout(dropout: float, num_layers: int) -> float:
    """Dropout is a probability, and has layers to sit between."""
    dropout = plain(dropout)
    if not _is_number(dropout) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be a probability in [0, 1], got {dropout!r}")
    if dropout > 0 and num_layers == 1:
        warnings.warn(
            "dropout acts between layers: expected num_layers of at least 2, got 1, so "
            f"dropout={dropout} does nothing; use nn.Dropout on the output instead",
            stacklevel=3,
        )
    return float(dropout)


def check_tensor(name: str, value: object, kinds: str = "a Tensor") -> None:
    """Something is a tensor, and a dense one."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be {kinds}, got {type(value).__name__}; use torch.as_tensor")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be dense, got {value.layout}; use .to_dense()")


@untraced
def check_input(
    x: Tensor, features: int, like: Tensor, given: tuple[int, ...] | None = None
) -> None:
    """x (T, B, D) fits a layer whose weights are like `like`; `given` is its shape as it came."""
    shape = tuple(x.shape) if given is None else given
    if x.shape[-1] != features:
        raise ValueError(
            f"the input's last dimension must be input_size = {features}, got an input of shape "
            f"{shape}; features come last, as many as the layer is built for"
        )
    if x.device != like.device:
        raise ValueError(
            f"the input must be on the layer's device {like.device}, got {x.device}; "
            "move one of them with .to(device)"
        )
    if not _fits(x, like):
        raise ValueError(
            f"the input must have the layer's dtype {like.dtype}, got {x.dtype}; "
            "convert one of them with .to(dtype), or run under torch.autocast"
        )
    if x.shape[0] == 0:
        raise ValueError(
            f"the input must have at least one step, got an input of shape {shape}; "
            "leave sequences without steps out"
        )


def _fits(given: Tensor, like: Tensor) -> bool:
    """Under autocast a layer meets other precisions; float64 stays among itself."""
    if given.dtype == like.dtype:
        return True
    return given.dtype in FLOATS[:3] and product_dtype(like.device, like.dtype) != like.dtype


def check_rank(x: Tensor, batch_first: bool) -> None:
    """An unpacked input is one sequence or a batch of them."""
    if x.dim() not in (2, 3):
        shape = "(B, T, D)" if batch_first else "(T, B, D)"
        raise ValueError(
            f"the input must be a sequence (T, D) or a batch {shape}, "
            f"got {x.dim()} dimensions: {tuple(x.shape)}; add or merge some with reshape"
        )


def check_pair(hx: Any, shape: tuple[int, ...], meaning: str, like: Tensor) -> None:
    """A given initial state is h and c, and each of them fits."""
    if not (isinstance(hx, tuple | list) and len(hx) == 2):
        raise ValueError(
            f"hx must be a pair (h_0, c_0), got {type(hx).__name__}; "
            "leave it out to start from zero"
        )
    for name, state in zip(("h_0", "c_0"), hx, strict=True):
        if state is None:
            raise ValueError(
                f"{name} must be a Tensor, got None; leave hx out to start from zero, or give both"
            )
        check_tensor(name, state)
    for name, state in zip(("h_0", "c_0"), hx, strict=True):
        check_state(name, state, shape, meaning, like)


@untraced
def check_state(
    name: str, state: Tensor, shape: tuple[int, ...], meaning: str, like: Tensor
) -> None:
    """A tensor of a given initial state fits."""
    if tuple(state.shape) != shape:
        raise ValueError(
            f"{name} must have shape {shape} = ({meaning}), got {tuple(state.shape)}; "
            "leave hx out to start from zero"
        )
    if state.device != like.device or not _fits(state, like):
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} like the layer, "
            f"got {state.dtype} on {state.device}; use {name}.to('{like.device}', {like.dtype})"
        )


@untraced
def check_flags(name: str, flags: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """`reset` or `mask` says something about every step of every sequence."""
    check_tensor(name, flags, "a bool Tensor")
    if flags.dtype != torch.bool:
        raise ValueError(f"{name} must be torch.bool, got {flags.dtype}; use {name}.bool()")
    if tuple(flags.shape) != shape:
        raise ValueError(
            f"{name} must have the input's shape without features, {shape}, "
            f"got {tuple(flags.shape)}; give one flag for every step of every sequence"
        )
    if flags.device != device:
        raise ValueError(
            f"{name} must be on the input's device {device}, got {flags.device}; "
            f"use {name}.to('{device}')"
        )
