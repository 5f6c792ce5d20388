"""What the end of a run leaves in its folder: its figures, or why there are none."""

from __future__ import annotations

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
    rows, chosen = result.get("rows"), result.get("chosen")
    for what, sound in (
        ("rows, a list of figures", isinstance(rows, list) and bool(rows) and all(map(_row, rows))),
        (
            "chosen, the step of each condition",
            isinstance(chosen, dict) and all(map(_choice, chosen.values())),
        ),
        ("updates, a whole number", isinstance(result.get("updates"), int)),
    ):
        if not sound:
            raise ValueError(
                f"{folder.result} must be the result of a run, with {what}, got "
                f"{', '.join(result) or 'an empty one'}; delete the folder, and train anew"
            )
    return result


def _row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(n), kind) for n, kind in ROW.items())


def _choice(choice: object) -> bool:
    return isinstance(choice, dict) and all(
        isinstance(choice.get(name), int | float) for name in ("step", "value")
    )


def read_reason(folder: RunFolder) -> str:
    """Why a run failed."""
    return str(folder.read_json(folder.path / FAILED).get("reason") or "for a reason not recorded")
