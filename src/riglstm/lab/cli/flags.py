"""Flags from flat frozen dataclasses: a field is a flag, its docstring the help.

A field without a default, or made by `positional`, is given by its place. The parser is argparse,
so that the command line needs nothing that torch does not need.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, NoReturn, TypeVar

from riglstm.lab.cli import UsageError, values
from riglstm.lab.train.config import check_device

C = TypeVar("C")


def positional(default: Any) -> Any:
    """A field of a dataclass that is given by its place, and may be left out."""
    return field(default=default, metadata={"positional": True})


def read_one(prog: str, config: type[C], args: Sequence[str]) -> C:
    """One dataclass from the command line; its docstring is what `--help` begins with."""
    made: C = read(prog, inspect.getdoc(config) or "", {"flags": config}, args)["flags"]
    return made


def read(prog: str, about: str, groups: Mapping[str, type], args: Sequence[str]) -> dict[str, Any]:
    """Several dataclasses from one command line: each is a group of flags in the help.

    Prints the help and leaves by SystemExit(0) where that is asked for; raises UsageError, with
    the nearest flag named, where an argument cannot be read.
    """
    parser = _Parser(prog=prog, description=about, usage=_usage(prog, groups), add_help=False)
    owners: dict[str, str] = {}
    for title, config in groups.items():
        group = parser.add_argument_group(title)
        types, said = hints(config), docs(config)
        for flag in fields(config):
            if flag.name in owners:
                raise TypeError(f"{flag.name} is a flag of {owners[flag.name]} and of {title}")
            owners[flag.name] = title
            _add(group, flag, types[flag.name], said.get(flag.name, ""))
    last = parser.add_argument_group("help")
    last.add_argument("-h", "--help", action="help", help="Print this and stop.")
    given, rest = parser.parse_known_args(list(args))
    if rest:
        parser.error(_unknown(rest[0], parser))
    made = {}
    for title, config in groups.items():
        own = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(given).items()
            if owners[name] == title
        }
        try:
            # Of every verb: some would look at it after hours, or never.
            if "device" in own:
                check_device(str(own["device"]))
            made[title] = config(**own)
        except ValueError as error:
            parser.error(_as_flag(str(error), owners))
    return made


def hints(config: Any) -> dict[str, Any]:
    """The types of a class's fields, or of a function's arguments."""
    return typing.get_type_hints(config)


def docs(config: type) -> dict[str, str]:
    """The docstrings under a class's fields, from its source; empty where there is no source."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for name, text in itertools.pairwise(body):
            if (
                isinstance(name, ast.AnnAssign)
                and isinstance(name.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[name.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def check_at_least(name: str, value: int, least: int) -> None:
    """A number is not too small; `name` is its field's."""
    if value < least:
        raise UsageError(f"{flag_of(name)} must be at least {least}, got {value}")


def check_at_most(name: str, value: int, most: int) -> None:
    """A number is not too large."""
    if value > most:
        raise UsageError(f"{flag_of(name)} must be at most {most}, got {value}")


def flag_of(name: str) -> str:
    """A field's name as it is typed."""
    return f"--{name.replace('_', '-')}"


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(
            **options,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Help,
        )

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1: ", message)
        raise UsageError(f"{message} (`{self.prog} --help` explains the flags)")


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        width = min(shutil.get_terminal_size().columns, 100)
        super().__init__(prog, max_help_position=30, width=width)


def _add(group: Any, flag: Field[Any], kind: Any, doc: str) -> None:
    """One flag. Defaults stay with the dataclass: what is not given is not passed on."""
    several, single = values.several(kind)
    required = flag.default is MISSING and flag.default_factory is MISSING
    # As it is typed: `none`.
    text = re.sub(r"\bNone\b", "none", " ".join(doc.replace("%", "%%").split()))
    if not required and flag.default != ():
        default = flag.default if flag.default_factory is MISSING else flag.default_factory()
        text = f"{text} (default: {values.shown(default)})"
    if kind is bool:
        group.add_argument(
            flag_of(flag.name), dest=flag.name, action=argparse.BooleanOptionalAction, help=text
        )
        return
    options: dict[str, Any] = {"type": _argument(single), "help": text}
    if several:
        options |= {"action": "extend"}
    if required or flag.metadata.get("positional"):
        count = {(False, True): None, (False, False): "?", (True, True): "+", (True, False): "*"}
        options |= {"nargs": count[several, required], "metavar": flag.name.upper()}
        # Said once more: argparse asks for a list that may be empty, unless it has a default.
        options |= {"default": argparse.SUPPRESS}
        group.add_argument(flag.name, **options)
        return
    if several:
        # Where None stands for what is usual, an empty list would be a slip.
        options |= {"nargs": "+" if values.optional(kind)[1] else "*"}
    group.add_argument(
        flag_of(flag.name), dest=flag.name, metavar=values.metavar(single), **options
    )


def _argument(kind: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return values.convert(kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _usage(prog: str, groups: Mapping[str, type]) -> str:
    places = ""
    for config in groups.values():
        for flag in fields(config):
            required = flag.default is MISSING and flag.default_factory is MISSING
            dots = " ..." if values.several(hints(config)[flag.name])[0] else ""
            if required:
                places += f" {flag.name.upper()}{dots}"
            elif flag.metadata.get("positional"):
                places += f" [{flag.name.upper()}{dots}]"
    return f"{prog}{places} [flags]"


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{word!r} was not expected here"
    flags = [name for action in parser._actions for name in action.option_strings]
    return f"there is no flag {word}{values.did_you_mean(word.partition('=')[0], flags)}"


def _as_flag(message: str, names: Iterable[str]) -> str:
    """A message that begins with a field's name, with the flag in its place."""
    name, space, rest = message.partition(" ")
    return f"{flag_of(name)}{space}{rest}" if name in names else message
