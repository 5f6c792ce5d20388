"""Flags from flat frozen dataclasses: a field is a flag, its docstring the help.

A field without a default, or made by `positional`, is given by its place. The parser is argparse,
so that the command line needs nothing that torch does not need.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from riglstm.lab.cli import UsageError
from riglstm.lab.tasks.common import strip_none

C = TypeVar("C")


def positional() -> Any:
    """A list, empty by default, of what is given by its place."""
    return field(default=(), metadata={"positional": True})


def read_one(prog: str, config: type[C], args: Sequence[str]) -> C:
    """One dataclass from the command line; its docstring is what `--help` begins with."""
    made: C = read(prog, inspect.getdoc(config) or "", {"flags": config}, args)["flags"]
    return made


def read(prog: str, about: str, groups: Mapping[str, type], args: Sequence[str]) -> dict[str, Any]:
    """Several dataclasses from one command line: each is a group of flags in the help.

    Prints the help and leaves by SystemExit(0) where that is asked for; raises UsageError, with
    the nearest flag named, where an argument cannot be read.
    """
    parser = _Parser(
        prog=prog,
        description=about,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter,
            max_help_position=30,
            width=min(shutil.get_terminal_size().columns, 100),
        ),
    )
    owners, places = dict[str, str](), ""
    for title, config in groups.items():
        group = parser.add_argument_group(title)
        kinds, said = get_type_hints(config), docs(config)
        for flag in fields(config):
            if flag.name in owners:
                raise UsageError(
                    f"{flag.name} is a flag of {owners[flag.name]} and of {title}; rename the field"
                )
            owners[flag.name] = title
            places += _add(group, flag, kinds[flag.name], said.get(flag.name, ""))
    parser.usage = f"{prog}{places} [flags]"
    last = parser.add_argument_group("help")
    last.add_argument("-h", "--help", action="help", help="Print this and stop.")
    given, rest = parser.parse_known_args(list(args))
    if rest and not rest[0].startswith("-"):
        parser.error(f"{rest[0]!r} was not expected here")
    if rest:
        known = [name for action in parser._actions for name in action.option_strings]
        near = did_you_mean(rest[0].partition("=")[0], known)
        parser.error(f"there is no flag {rest[0]}{near}")
    made = {}
    for title, config in groups.items():
        own = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(given).items()
            if owners[name] == title
        }
        try:
            made[title] = config(**own)
        except ValueError as error:
            # A message that begins with a field's name gets the flag in its place.
            name, space, words = str(error).partition(" ")
            parser.error(f"{flag_of(name) if name in owners else name}{space}{words}")
    return made


def docs(config: type) -> dict[str, str]:
    """The docstrings under a class's fields, from its source; empty where there is no source."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for pair in itertools.pairwise(body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(text)):
                    found[name] = inspect.cleandoc(str(text))
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1: ", message)
        raise UsageError(f"{message} (`{self.prog} --help` explains the flags)")


def _add(group: Any, flag: Field[Any], kind: Any, doc: str) -> str:
    """Add one flag; returns what usage says of one that is given by its place.

    Defaults stay with the dataclass: what is not given is not passed on.
    """
    single, several = strip_list(kind)
    required = flag.default is MISSING and flag.default_factory is MISSING
    # As it is typed: `none`.
    text = re.sub(r"\bNone\b", "none", " ".join(doc.replace("%", "%%").split()))
    if not required and flag.default != ():
        default = flag.default if flag.default_factory is MISSING else flag.default_factory()
        text = f"{text} (default: {_typed(default)})"
    if kind is bool:
        group.add_argument(
            flag_of(flag.name), dest=flag.name, action=argparse.BooleanOptionalAction, help=text
        )
        return ""
    options: dict[str, Any] = {"type": partial(convert, single), "help": text}
    if several:
        options |= {"action": "extend"}
    if required or flag.metadata.get("positional"):
        name = flag.name.upper()
        options |= {"metavar": name}
        if several:
            options |= {"nargs": "+" if required else "*"}
        # Said once more: argparse asks for a list that may be empty, unless it has a default.
        group.add_argument(flag.name, **options, default=argparse.SUPPRESS)
        name += " ..." if several else ""
        return f" {name}" if required else f" [{name}]"
    if several:
        # Where None stands for what is usual, an empty list would be a slip.
        options |= {"nargs": "+" if strip_none(kind)[1] else "*"}
    group.add_argument(flag_of(flag.name), dest=flag.name, metavar=_metavar(single), **options)
    return ""


def _metavar(kind: Any) -> str:
    """A type as help shows it: INT|none."""
    kind, may_lack = strip_none(kind)
    if get_origin(kind) is not Literal and kind not in WORDS:
        takes = ", ".join(known.__name__ for known in WORDS)
        raise UsageError(
            f"a flag must be {takes}, a Literal, a tuple of one of these, or one of these or None, "
            f"got {kind}; change the type of the field"
        )
    choices = map(str, get_args(kind)) if get_origin(kind) is Literal else [WORDS[kind][0]]
    return "|".join([*choices, "none"] if may_lack else choices)


def _typed(value: Any) -> str:
    """A default as it would be typed."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


WORDS: dict[Any, tuple[str, str]] = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    bool: ("BOOL", "true or false"),
    str: ("TEXT", "a word"),
    Path: ("PATH", "a path"),
}
"""How help and errors speak of a type."""


class Unreadable(ValueError, argparse.ArgumentTypeError):  # noqa: N818
    """Text that is no value of a type."""


def convert(kind: Any, text: str) -> Any:
    """A value of that type; Unreadable says what was expected and got. Lists have commas."""
    kind, may_lack = strip_none(kind)
    if may_lack and text.lower() == "none":
        return None
    kind, several = strip_list(kind)
    if several:
        return tuple(convert(kind, part) for part in text.split(",") if part)
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if text not in choices:
            near = did_you_mean(text, choices)
            expected = one_of([*choices, "none"] if may_lack else choices)
            raise Unreadable(f"expected {expected}, got {text!r}{near}")
        return choices[text]
    if get_origin(kind) is Union:
        return _any_of(get_args(kind), text, may_lack)
    if kind not in WORDS:
        raise Unreadable(f"expected {kind}, which cannot be given as text, got {text!r}")
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
        raise Unreadable(f"expected {WORDS[kind][1]}{none}, got {text!r}") from None


def _any_of(kinds: Sequence[Any], text: str, may_lack: bool) -> Any:
    """A value of the first of the types that the text fits: a number or a word."""
    said = []
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return convert(kind, text)
        said += list(map(str, get_args(kind))) or [WORDS[kind][1]]
    words = ", or ".join([*said, "none"] if may_lack else said)
    raise Unreadable(f"expected {words}, got {text!r}")


def strip_list(kind: Any) -> tuple[Any, bool]:
    """The type of a list's members, or the type itself; and whether it is a list (or None)."""
    inner, _ = strip_none(kind)
    if get_origin(inner) in (tuple, list, Sequence):
        return get_args(inner)[0], True
    return kind, False


def flag_of(name: str) -> str:
    """A field's name as it is typed."""
    return f"--{name.replace('_', '-')}"


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not one of those known, and offer the nearest one."""
    known = list(known)
    if name not in known:
        raise UsageError(f"{what} must be {one_of(known)}, got {name!r}{did_you_mean(name, known)}")


def check_names(what: str, names: Iterable[str] | None, known: Iterable[str]) -> None:
    """The same for each of several names; None, that nothing was named, is right."""
    for name in names or ():
        check_name(what, name, known)


def one_of(names: Iterable[str]) -> str:
    """As in "expected one of a, b"."""
    return f"one of {', '.join(names)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message: the nearest name, or nothing where none is near."""
    lower = {k.lower(): k for k in known}
    near = [k for k in lower if k.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), lower, n=1)
    return f"; did you mean {lower[near[0]]}?" if near else ""


def again(verb: str, args: Sequence[str], *extra: str) -> str:
    """The command that runs a verb with the same arguments, and with `extra` once."""
    program = "riglstm"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        program = "torchrun … -m riglstm"
    elif Path(sys.argv[0]).name == "__main__.py":
        program = f"{shlex.quote(sys.executable)} -m riglstm"
    more = [word for word in extra if word not in args]
    return f"{program} {shlex.join([verb, *args, *more])}"
