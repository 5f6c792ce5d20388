"""Flags from dataclasses: types, defaults, help from docstrings, and what cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from riglstm.lab.cli import UsageError, flags

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Sizes:
    """Measure something.

    Example: riglstm measure here
    """

    run: Path
    """The folder."""
    names: tuple[str, ...] = flags.positional()
    """Names, if any."""
    steps: int = 1
    """Steps; 50 % of them count.

    The rest does not."""
    limit: float | None = None
    """A limit; None: no limit."""
    P_from: int | None = 3
    """The first."""
    loud: bool = True
    """Whether to say it."""
    kind: Literal["top", "all"] = "top"
    """Which kind."""
    kinds: tuple[Literal["top", "all"], ...] = ("top",)
    """Which kinds."""
    out: Path | None = None
    """A file."""
    places: tuple[int, ...] = field(default_factory=lambda: (1, 2))
    """Where."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True)
class Other:
    """Other flags."""

    speed: float = 1e-3
    """How fast."""


@dataclass(frozen=True)
class Child(Other):
    """A class that takes a flag over and adds one."""

    more: int = 0
    """One more."""


def read(*args: str) -> Sizes:
    return flags.read_one("riglstm measure", Sizes, args)


EVERY = {
    **{"names": ("a", "b"), "steps": 4, "limit": 1e-3, "P_from": 7, "loud": False, "kind": "all"},
    **{"kinds": ("all", "top"), "out": Path("~/x").expanduser(), "places": (3,)},
}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        (
            "a b --steps 4 --limit 1e-3 --P-from 7 --no-loud --kind all --kinds all top "
            "--out ~/x --places 3",
            EVERY,
        ),
        ("--limit none --P-from None --out none", {"limit": None, "P_from": None, "out": None}),
        ("--kinds all --kinds top", {"kinds": ("all", "top")}),
        ("--kinds", {"kinds": ()}),
    ],
)
def test_what_is_given_is_read_by_its_type_and_the_rest_is_the_default(words, given):
    assert read("here", *words.split()) == Sizes(Path("here"), **given)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("here", "--stepz", "3"), "there is no flag --stepz; did you mean --steps?"),
        (("here", "--kin=3"), "there is no flag --kin=3; did you mean --kind?"),
        (("here", "--P_from", "3"), "there is no flag --P_from; did you mean --P-from?"),
        (("here", "--zzz"), "there is no flag --zzz (`riglstm measure --help` explains"),
        (("here", "--steps", "many"), "--steps: expected a whole number, got 'many'"),
        (("here", "--limit", "x"), "--limit: expected a number or none, got 'x'"),
        (("here", "--kind", "some"), "--kind: expected one of top, all, got 'some'"),
        (("here", "--kinds", "some"), "--kinds: expected one of top, all, got 'some'"),
        (("here", "--steps"), "--steps: expected one argument"),
        (("here", "--steps", "0"), "--steps must be at least 1, got 0"),
        (("here", "--steps", "1", "2"), "'2' was not expected here"),
        ((), "the following arguments are required: RUN (`riglstm measure --help`"),
    ],
)
def test_what_cannot_be_read_is_explained(args, message):
    with pytest.raises(UsageError) as error:
        read(*args)
    assert message in str(error.value)


def test_help_has_docstrings_types_and_defaults(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "usage: riglstm measure RUN [NAMES ...] [flags]"
    for line in (
        "Measure something.",
        "Example: riglstm measure here",
        "RUN The folder.",
        "NAMES Names, if any.",
        "--steps INT Steps; 50 % of them count. The rest does not. (default: 1)",
        "--limit FLOAT|none A limit; none: no limit. (default: none)",
        "--loud, --no-loud Whether to say it. (default: yes)",
        "--kind top|all Which kind. (default: top)",
        "--kinds [top|all ...] Which kinds. (default: top)",
        "--out PATH|none A file. (default: none)",
        "--places [INT ...] Where. (default: 1 2)",
    ):
        assert line in lines


def test_several_dataclasses_are_groups_of_one_command_line_without_a_flag_in_common(capsys):
    groups: dict[str, type] = {"sizes": Sizes, "other": Other}
    given = flags.read("riglstm both", "About.", groups, ["x", "--speed", "2", "--steps", "5"])
    assert given == {"sizes": Sizes(Path("x"), steps=5), "other": Other(2.0)}
    with pytest.raises(SystemExit):
        flags.read("riglstm both", "About.", groups, ["--help"])
    out = capsys.readouterr().out
    assert out.index("sizes:") < out.index("--steps") < out.index("other:") < out.index("--speed")

    with pytest.raises(UsageError, match="speed is a flag of a and of b; rename the field"):
        flags.read("riglstm both", "", {"a": Other, "b": Child}, [])


def test_docstrings_are_inherited_and_not_needed():
    assert flags.docs(Child) == {"speed": "How fast.", "more": "One more."}
    space: dict[str, Any] = {}
    exec("class Made:\n    x: int = 1\n", space)
    # A class without source.
    made = dataclass(frozen=True)(space["Made"])
    assert flags.read_one("riglstm made", made, ["--x", "2"]) == made(2)


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        (int, "10_000", 10_000),
        (bool, "true", True),
        (bool, "False", False),
        (Sequence[int], "6,3", (6, 3)),
        (Sequence[int] | None, "4", (4,)),
        (Sequence[int] | None, "none", None),
        (Literal[1, 2], "2", 2),
        (bool | Literal["printed"], "printed", "printed"),
        (bool | Literal["printed"], "false", False),
        (float | Literal["auto"] | None, "0.5", 0.5),
        (float | Literal["auto"] | None, "auto", "auto"),
        (float | Literal["auto"] | None, "none", None),
    ],
)
def test_text_becomes_a_value_of_the_type(kind, word, value):
    assert flags.convert(kind, word) == value


@pytest.mark.parametrize(
    ("kind", "word", "message"),
    [
        (bool, "maybe", "expected true or false, got 'maybe'"),
        (Sequence[int], "6,x", "expected a whole number, got 'x'"),
        (Literal["a"] | None, "b", "expected one of a, none, got 'b'"),
        (bool | Literal["printed"], "no", "expected true or false, or printed, got 'no'"),
        (float | Literal["auto"], "x", "expected a number, or auto, got 'x'"),
        (float | Literal["auto"] | None, "x", "expected a number, or auto, or none, got 'x'"),
        (dict, "x", "which cannot be given as text, got 'x'"),
    ],
)
def test_text_of_another_type_is_explained(kind, word, message):
    with pytest.raises(ValueError, match=message):
        flags.convert(kind, word)
