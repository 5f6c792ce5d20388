"""What tasks share: types of options, the network on tokens, orders of data, scoring.

Shapes: T steps, B sequences, C tokens a step, D input features.
"""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Iterator
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from riglstm.lab.tasks.base import Totals, generator, part
from riglstm.models.base import Core, summary

CPU = torch.device("cpu")
CPU_TOKENS = 2**15
"""Steps times sequences of a batch that is scored on a CPU."""
BYTES_PER_TOKEN = 2**19
"""Of a GPU's memory, per token of such a batch, so that a dozen runs can share it: models of the
paper's size held up to 21 % of an H200 at a quarter of this.

Most of a recurrent model's time goes into the number of steps, so large batches pay.
"""


class Rule(NamedTuple):
    """What a value must be: in words for a message, and as a function."""

    words: str
    fits: Callable[[Any], object]

    def check(self, name: str, value: object, also: str = "") -> None:
        """Raise ValueError for a value that does not fit; `also`: the end of the words."""
        if not self.fits(value):
            raise ValueError(f"{name} must be {self.words}{also}, got {value!r}")


def whole(low: int = 1, high: float = math.inf) -> Rule:
    """The rule of a whole number in a range."""
    bounds = f"from {low} on" if high == math.inf else f"from {low} to {high:,}"
    return Rule(f"a whole number {bounds}", lambda n: type(n) is int and low <= n <= high)


def number(words: str, fits: Callable[[float], bool]) -> Rule:
    """The rule of a number, such as `number("from 0 to 1", lambda x: 0 <= x <= 1)`."""
    return Rule(
        f"a number {words}",
        lambda x: isinstance(x, int | float) and not isinstance(x, bool) and fits(x),
    )


Count: TypeAlias = Annotated[int, whole()]
AboveZero: TypeAlias = Annotated[float, number("above 0", lambda x: 0 < x < math.inf)]
FromZero: TypeAlias = Annotated[float, number("from 0 on", lambda x: 0 <= x < math.inf)]
Share: TypeAlias = Annotated[float, number("from 0 to 1", lambda x: 0 <= x <= 1)]
BelowOne: TypeAlias = Annotated[float, number("at least 0 and below 1", lambda x: 0 <= x < 1)]
Device: TypeAlias = Annotated[
    str,
    Rule("auto, cpu, cuda or cuda:N", lambda d: re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", str(d))),
]
"""Whether a device is there, `riglstm.lab.train.config.pick` says."""


class Options:
    """Base of a dataclass of options, which checks each value by the type of its field.

    Checked are a Literal and types with a `Rule`, such as `Count`, also in a tuple or beside None.
    What hangs on several fields is checked by a `__post_init__` of the dataclass, after this one.
    """

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self), include_extras=True)
        for name, value in vars(self).items():
            _check(name, value, kinds[name])


def _check(name: str, value: Any, kind: Any) -> None:
    kind, may_lack = strip_none(kind)
    if value is None and may_lack:
        return
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        for member in value:
            _check(name, member, parts[0])
    if get_origin(kind) is Literal:
        parts = (Rule(f"one of {', '.join(map(str, parts))}", parts.__contains__),)
    for rule in parts:
        if isinstance(rule, Rule):
            rule.check(name, value, also=", or none" if may_lack else "")


def strip_none(kind: Any) -> tuple[Any, bool]:
    """The type without None, and whether it had it."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    inner = tuple(arg for arg in get_args(kind) if arg is not types.NoneType)
    # Of one type a union is that type.
    return Union[inner], len(inner) < len(get_args(kind))  # noqa: UP007


class TokenNetwork(nn.Module):
    """A table of vectors for each of C channels, side by side; a core; a linear read-out.

    `outputs`: shape of the logits of one reading. `summarise`: one reading per sequence, of
    `summary`, or else one per step. `start_range`: tables and read-out start uniformly in ± this
    value, the read-out's bias at zero, as in the scripts of RIM's authors; None: as nn.Embedding
    and nn.Linear start.
    """

    def __init__(
        self,
        core: Core,
        channels: int,
        vocabulary: int,
        outputs: tuple[int, ...],
        *,
        dropout: float,
        summarise: bool,
        start_range: float | None = None,
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.summarise = summarise
        # One table of them all, so that one look-up finds the vectors already side by side.
        self.tables = nn.Embedding(channels * vocabulary, core.input_size // channels)
        self.register_buffer("start", vocabulary * torch.arange(channels), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.core = core
        self.readout = nn.Linear(core.output_size, math.prod(outputs))
        if start_range is not None:
            for weight in (self.tables.weight, self.readout.weight):
                nn.init.uniform_(weight, -start_range, start_range)
            nn.init.zeros_(self.readout.bias)

    start: Tensor
    """(C,): where each channel's table begins."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (T, B, C), of any integer type, to the core's input (T, B, D)."""
        vectors = lookup(tokens + self.start, self.tables.weight)
        x: Tensor = self.dropout(vectors.flatten(2))
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (T, B, C), of any integer type, to logits (B, *outputs) or (T, B, *outputs)."""
        y, _ = self.core(self.embed(tokens))
        y = summary(self.core, y) if self.summarise else y
        logits: Tensor = self.readout(self.dropout(y))
        return logits.view(*y.shape[:-1], *self.outputs)


_gradient = torch.ops.aten.embedding_dense_backward


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """`F.embedding(ids, table)`, whose gradient is summed deterministically on a GPU too.

    There newer versions of torch add up the gradient of a table of few rows by atomics (pytorch's
    pull request 172454), in any order, unless algorithms have to be deterministic. That is asked
    for here, for this one sum: in all of a training it would slow down or refuse what has nothing
    to do with a table. Compiled, the gradient is torch's own.
    """
    learns = table.requires_grad and torch.is_grad_enabled()
    if table.is_cuda and learns and not torch.compiler.is_compiling():
        return InOrder.apply(ids, table)  # type: ignore[no-any-return, no-untyped-call]
    return F.embedding(ids, table)


class InOrder(torch.autograd.Function):
    """`F.embedding`, whose gradient is summed by torch's deterministic way."""

    @staticmethod
    def forward(ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ids, table = inputs
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        # torch's public switch also loads its compiler's options, which takes a second.
        was = torch._C._get_deterministic_algorithms()
        warned = torch._C._get_deterministic_algorithms_warn_only()
        # Strict where the caller is.
        torch._C._set_deterministic_algorithms(True, warn_only=warned or not was)
        try:
            return None, _gradient(grad, ids, ctx.rows, -1, False)
        finally:
            torch._C._set_deterministic_algorithms(was, warn_only=warned)


def shuffled(length: int, batch_size: int, device: torch.device, seed: int, step: int) -> Tensor:
    """(B,): which of `length` sequences an update learns from, on the device.

    Each epoch is an order of all of them. Where one ends within a batch, the next one begins, so
    all batches have one size. Nothing waits for the device within an epoch.
    """
    first, last = step * batch_size, (step + 1) * batch_size
    pieces = []
    while first < last:
        epoch, start = divmod(first, length)
        pieces.append(_order(length, device, seed, epoch)[start : start + last - first])
        first += len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


# Two, as a batch may have sequences of two epochs.
@functools.lru_cache(maxsize=2)
def _order(length: int, device: torch.device, seed: int, epoch: int) -> Tensor:
    """All the numbers, drawn on the CPU, so that every device has the same order."""
    return torch.randperm(length, generator=generator(CPU, seed, epoch)).to(device)


def check_core(core: Core, input_size: int) -> None:
    """The core takes what a task gives it."""
    if core.input_size != input_size or core.batch_first:
        raise ValueError(
            f"the core must have input_size={input_size} and batch_first=False, got "
            f"{core.input_size} and {core.batch_first}; build it so, or give the task another "
            "input_size"
        )


def check_whole(name: str, value: object, low: int = 1, high: float = math.inf) -> None:
    """An option whose range hangs on another is a whole number in it."""
    whole(low, high).check(name, value)


def check_network(input_size: int, channels: int, named: str) -> None:
    """The input of the network on tokens fits; `named`: what the channels are called."""
    if input_size % channels:
        raise ValueError(
            f"input_size must be a multiple of {named}, got {input_size}; "
            f"take input_size={input_size // channels * channels or channels}"
        )


def batches(length: int, T: int, device: torch.device, share: tuple[int, int]) -> Iterator[slice]:
    """The i-th of n parts of that many sequences of T steps, in batches that suit the device."""
    mine = part(length, share)
    size = mine.stop - mine.start
    tokens = CPU_TOKENS
    if device.type == "cuda":
        tokens = torch.cuda.get_device_properties(device).total_memory // BYTES_PER_TOKEN
    # Of sizes that differ by one at the most, so that a compiled core meets two.
    count = math.ceil(size / max(1, tokens // T))
    for j in range(count):
        piece = part(size, (j, count))
        yield slice(mine.start + piece.start, mine.start + piece.stop)


def empty_totals(device: torch.device, *names: str) -> Totals:
    """Sums of nothing."""
    return {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
