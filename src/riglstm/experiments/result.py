"""What the end of a run leaves in its folder: its figures, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from riglstm.train.folder import RunFolder

CHOSEN = "validation@"
"""What `chosen_on` begins with in a row of a result; the condition follows."""
FAILED = "failed.json"
"""In the folder of a run that diverged: why."""

ROW: dict[str, type | tuple[type, ...]] = {
    "condition": str,
    "metric": str,
    "value": (int, float),
    "chosen_on": str,
    "step": int,
}
"""Fields of a row that are read, and their types."""


def read_result(folder: RunFolder) -> dict[str, Any]:
    """result.json; raises ValueError where it is not a run's."""
    result = folder.read_json(folder.result)
    check_result(result, folder.result)
    return result


def check_result(
    result: Mapping[str, Any], path: Path, way_out: str = "delete the folder, and train anew"
) -> None:
    """Raise ValueError where the content of a file is no result."""
    rows, chosen = result.get("rows"), result.get("chosen")
    for what, sound in (
        ("rows, a list of figures", isinstance(rows, list) and all(map(_row, rows))),
        (
            "chosen, the step of each condition",
            isinstance(chosen, dict) and all(map(_choice, chosen.values())),
        ),
        ("updates, a whole number", isinstance(result.get("updates"), int)),
    ):
        if not sound:
            raise ValueError(
                f"{path} must be the result of a run, with {what}, got "
                f"{', '.join(result) or 'an empty one'}; {way_out}"
            )


def _row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(n), kind) for n, kind in ROW.items())


def _choice(choice: object) -> bool:
    return isinstance(choice, dict) and all(
        isinstance(choice.get(name), int | float) for name in ("step", "value")
    )


def read_reason(folder: RunFolder) -> str:
    """Why a run failed."""
    return str(folder.read_json(folder.path / FAILED).get("reason") or "for a reason not recorded")


def read_cost(folder: RunFolder) -> dict[str, Any]:
    """Updates and seconds that a failed run took; 0 where they were not recorded."""
    said = folder.read_json(folder.path / FAILED)
    return {"updates": said.get("updates", 0), "seconds": said.get("seconds", 0.0)}
