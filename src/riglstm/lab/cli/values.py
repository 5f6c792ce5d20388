"""Values from text: types as they are written, named and asked for on the command line."""

from __future__ import annotations

import contextlib
import difflib
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from riglstm.lab.cli import UsageError

WORDS: dict[Any, tuple[str, str]] = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    bool: ("BOOL", "true or false"),
    str: ("TEXT", "a word"),
    Path: ("PATH", "a path"),
}
"""How help and errors speak of a type."""


def convert(kind: Any, text: str) -> Any:
    """A value of that type; a ValueError says what was expected and got. Lists have commas."""
    kind, may_lack = optional(kind)
    if may_lack and text.lower() == "none":
        return None
    many, kind = several(kind)
    if many:
        return tuple(convert(kind, part) for part in text.split(",") if part)
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if text not in choices:
            near = did_you_mean(text, choices)
            raise ValueError(f"expected {one_of(choices, may_lack)}, got {text!r}{near}")
        return choices[text]
    if get_origin(kind) is Union:
        return _any_of(get_args(kind), text, may_lack)
    if kind not in WORDS:
        raise ValueError(f"expected {kind}, which cannot be given as text, got {text!r}")
    switches = {"true": True, "false": False}
    try:
        # An empty one, what a shell makes of a variable unset, would be the current folder.
        if kind is Path and (not text or "\0" in text):
            raise ValueError
        if kind is Path:
            return Path(text).expanduser()
        value = switches[text.lower()] if kind is bool else kind(text)
        # No size, seed or number of anything is larger, and torch has no larger ones.
        if kind is int and abs(value) >= 2**63:
            raise ValueError
        return value
    # RuntimeError: of ~nobody, who has no home.
    except (ValueError, KeyError, RuntimeError):
        none = " or none" if may_lack else ""
        raise ValueError(f"expected {WORDS[kind][1]}{none}, got {text!r}") from None


def _any_of(kinds: Sequence[Any], text: str, may_lack: bool) -> Any:
    """A value of the first of the types that the text fits: a number or a word."""
    said = []
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return convert(kind, text)
        said += list(map(str, get_args(kind))) or [WORDS[kind][1]]
    words = ", or ".join([*said, "none"] if may_lack else said)
    raise ValueError(f"expected {words}, got {text!r}")


def several(kind: Any) -> tuple[bool, Any]:
    """Whether the type is a list, with the type of its members; a list or None is a list."""
    inner, _ = optional(kind)
    if get_origin(inner) in (tuple, list, Sequence):
        return True, get_args(inner)[0]
    return False, kind


def optional(kind: Any) -> tuple[Any, bool]:
    """The type without None, and whether it had it."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    inner = tuple(arg for arg in get_args(kind) if arg is not types.NoneType)
    # Of one type a union is that type.
    return Union[inner], len(inner) < len(get_args(kind))  # noqa: UP007


def metavar(kind: Any) -> str:
    """A type as help shows it: INT|none."""
    kind, may_lack = optional(kind)
    if get_origin(kind) is Literal:
        words = [str(choice) for choice in get_args(kind)]
    else:
        words = [WORDS[kind][0]]
    return "|".join([*words, "none"] if may_lack else words)


def shown(value: Any) -> str:
    """A default as it would be typed."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """The name is one of those known; the nearest one is offered otherwise."""
    known = list(known)
    if name not in known:
        raise UsageError(f"{what} must be {one_of(known)}, got {name!r}{did_you_mean(name, known)}")


def one_of(names: Iterable[str], or_none: bool = False) -> str:
    """As in "expected one of a, b"."""
    return f"one of {', '.join([*names, 'none'] if or_none else names)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message: the nearest name, or nothing where none is near."""
    lower = {k.lower(): k for k in known}
    near = [k for k in lower if k.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), lower, n=1)
    return f"; did you mean {lower[near[0]]}?" if near else ""
