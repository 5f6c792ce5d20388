"""Options of models from the command line: `name=value`, typed by the model's own signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from riglstm import VARIANTS, RigLSTM
from riglstm.lab.cli import UsageError, flags, values
from riglstm.lab.tables.spec import PLACE
from riglstm.models import MODELS, options_of


def types_of(model: str) -> dict[str, Any]:
    """The options of a model that a run can set, with their types."""
    known = flags.hints(MODELS[model].__init__)
    if model == "riglstm":
        known |= flags.hints(RigLSTM.__init__)
    return {name: known[name] for name in options_of(model) if name not in PLACE}


def read(model: str, pairs: Sequence[str]) -> dict[str, Any]:
    """`num_cells=4` and the like; a list has commas: `num_cells=6,3`."""
    known, given = types_of(model), {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise UsageError(f"--set must be like num_cells=4, got {pair!r}")
        if name not in known:
            takes = ", ".join(known)
            near = values.did_you_mean(name, known)
            raise UsageError(f"--set: {model} has no option {name!r}; it takes {takes}{near}")
        try:
            given[name] = values.convert(known[name], value)
        except ValueError as error:
            raise UsageError(f"--set {name}: {error}") from error
        if name == "variant" and given[name] is not None:
            values.check_name("--set variant", given[name], VARIANTS)
    return given
