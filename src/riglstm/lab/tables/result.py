"""What the end of a run leaves in its folder: its figures, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from riglstm.lab.train.folder import RunFolder

CHOSEN = "validation@"
"""What `chosen_on` begins with in a row of a result; the condition follows."""
FAILED = "failed.json"
"""In the folder of a run that diverged: why."""

MOST = 10**12
"""What a number of a result is below: all that are measured are."""
LONGEST = 200
"""Characters of a name."""
LARGEST = 1000
"""Characters of a message, which may quote a file."""


class RunError(ValueError):
    """A file of a run that is not as runs have it; the message names it, and is not endless."""

    def __init__(self, said: str) -> None:
        super().__init__(said if len(said) <= LARGEST else f"{said[:LARGEST]}…")


def check_result(
    result: Mapping[str, Any],
    path: Path,
    way_out: str = "delete the folder, and train anew",
    *,
    chosen: bool = True,
) -> None:
    """Raise RunError where the content of a file is no result; `chosen`: by validation data."""
    rows, best, bars = (result.get(name) for name in ("rows", "chosen", "yardsticks"))
    for what, sound in (
        ("rows, a list of figures", isinstance(rows, list) and all(map(_row, rows))),
        (
            "chosen, the step of each condition",
            not chosen or (isinstance(best, dict) and all(map(_choice, best.values()))),
        ),
        ("updates, a whole number", is_count(result.get("updates"))),
        ("seconds, a number", is_number(result.get("seconds")) and result["seconds"] >= 0),
        ("parameters, a whole number", is_count(result.get("parameters", 0))),
        ("jobs, a whole number", is_count(result.get("jobs", 1))),
        ("device, commit and stopped, names or null", all(map(_named, map(result.get, PLACES)))),
        ("yardsticks, figures by condition and name", bars is None or _yardsticks(bars)),
    ):
        if not sound:
            raise RunError(
                f"{path} must be the result of a run, with {what}, got "
                f"{', '.join(result)[:LONGEST] or 'an empty one'}; {way_out}"
            )


PLACES = ("device", "commit", "stopped")


def is_number(value: object) -> bool:
    """Finite, and not absurd."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def is_count(value: object) -> bool:
    """A whole number from 0 on."""
    return type(value) is int and 0 <= value < MOST


def is_name(value: object) -> bool:
    """Text that fits beside an axis."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST and value.isprintable()


def is_possible(metric: str, value: object) -> bool:
    """A figure that the metric can have: shares are from 0 to 1, and no loss is below 0."""
    most = 1.0 if metric in SHARES else MOST
    return isinstance(value, int | float) and is_number(value) and 0 <= value <= most


SHARES = ("accuracy", "success", "success_greedy")


def _row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and all(is_name(row.get(name)) for name in ("condition", "metric", "chosen_on"))
        and is_count(row.get("step"))
        and is_possible(row["metric"], row.get("value"))
    )


def _choice(choice: object) -> bool:
    return (
        isinstance(choice, dict) and is_count(choice.get("step")) and is_number(choice.get("value"))
    )


def _named(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.isprintable())


def _yardsticks(found: object) -> bool:
    """The same names in every condition."""
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        return False
    figures = [value for values in found.values() for value in values.values()]
    return len({tuple(v) for v in found.values()}) <= 1 and all(map(is_number, figures))


def read_reason(folder: RunFolder) -> str:
    """Why a run failed."""
    return str(folder.read_json(folder.path / FAILED).get("reason") or "for a reason not recorded")


def read_cost(folder: RunFolder) -> dict[str, Any]:
    """Updates and seconds that a failed run took; 0 where they were not recorded."""
    said = folder.read_json(folder.path / FAILED)
    found = {name: said.get(name) or 0 for name in ("updates", "seconds")}
    if not is_count(found["updates"]) or not is_number(found["seconds"]):
        raise RunError(f"{folder.path / FAILED} must say updates and seconds, got {found}")
    return found
