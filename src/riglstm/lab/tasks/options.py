"""Options of tasks, of training and of commands: a field's type says what its value may be."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
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
    for part in parts:
        if isinstance(part, Rule):
            part.check(name, value, also=", or none" if may_lack else "")


def strip_none(kind: Any) -> tuple[Any, bool]:
    """The type without None, and whether it had it."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    inner = tuple(arg for arg in get_args(kind) if arg is not types.NoneType)
    # Of one type a union is that type.
    return Union[inner], len(inner) < len(get_args(kind))  # noqa: UP007
