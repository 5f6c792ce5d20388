"""What a recipe is made of, and the models of the tables, at a size: what each row builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from riglstm.lab.train.config import Fit
from riglstm.layer import VARIANTS
from riglstm.models.brim import PRESETS
from riglstm.models.rig import changes_of

Budget: TypeAlias = Literal["quick", "paper", "tuned"]


@dataclass(frozen=True)
class Row:
    """A model of a table, at a size."""

    label: str
    model: str
    hidden_size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the model."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """What it changes in the recipe's task."""
    task_in: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The same, in some of the table's settings alone."""
    fit: Mapping[str, Any] = field(default_factory=dict)
    """What it changes in the recipe's training."""
    fit_in: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The same, in some of the table's settings alone."""

    def data(self, setting: str) -> dict[str, Any]:
        """All that it changes in the recipe's task in a setting."""
        return {**self.task, **self.task_in.get(setting, {})}

    def training(self, setting: str) -> dict[str, Any]:
        """All that it changes in the recipe's training in a setting."""
        return {**self.fit, **self.fit_in.get(setting, {})}

    def own_in(self, setting: str) -> dict[str, Any]:
        """What it changes in a setting alone, of task and of training."""
        return {**self.task_in.get(setting, {}), **self.fit_in.get(setting, {})}

    @property
    def cells(self) -> str:
        """(N, K_a), of each layer; a dash where there is nothing to choose from."""
        N, K_a = self.options.get("num_cells"), self.options.get("active_cells")
        if N is None or K_a is None:
            return "–"
        layers = [(N, K_a)] if isinstance(N, int) else list(zip(N, K_a, strict=True))
        return ", ".join(f"({n}, {k})" for n, k in layers)


class Setting(NamedTuple):
    """Data that the models of a table are trained on."""

    trained_on: str
    """The task's name of it, among its conditions."""
    task: Mapping[str, Any]
    """What it changes in the recipe's task."""


@dataclass(frozen=True)
class Recipe:
    """All runs of a table in one budget."""

    rows: Mapping[str, Row]
    settings: Mapping[str, Setting]
    conditions: tuple[str, ...]
    """Where models are tested, beside what they are trained on."""
    task: Mapping[str, Any]
    """Options of the task."""
    fit: Fit
    models: tuple[str, ...]
    """Rows that are run where none are named."""
    seeds: int = 3
    """Runs of each row where no other number is asked for."""


class Widths(NamedTuple):
    """The sizes of the models, beside the counts that are the same at all of them."""

    hidden: int
    brim: int
    """Both layers, and its input: its authors' is half as wide as the others."""
    transformer: int
    heads: int
    layers: int
    """Of the Transformer; its other sizes follow from its width."""
    rim: Mapping[str, int]
    """Sizes inside RIM's attentions, where they are not its defaults."""


FULL = Widths(600, 300, 256, heads=8, layers=4, rim={})
SMALL = Widths(72, 36, 32, heads=4, layers=2, rim={"key_size": 16, "comm_size": 8})


def image_rows(w: Widths, K_a: int, brim: str) -> dict[str, Row]:
    """The models of the image tables, RigLSTM with K_a = K_x = K_h."""
    six = {"num_cells": 6}
    return {
        "lstm": Row("LSTM", "lstm", w.hidden),
        "rim": Row("RIM", "rim", w.hidden, {**six, "active_cells": 4, **w.rim}),
        "entnet": Row("EntNet", "entnet", w.hidden, {"num_slots": 6}),
        "rmc": Row("RMC", "rmc", w.hidden, {"num_slots": 6, "num_heads": 4}),
        "transformer": Row(
            *("Transformer", "transformer", w.transformer),
            {"num_layers": w.layers, "num_heads": w.heads},
        ),
        "gridlstm": Row("GridLSTM", "gridlstm", w.hidden, six),
        "brim": Row(
            *("BRIM", "brim", w.brim, {**PRESETS[brim], **w.rim}), task={"input_size": w.brim}
        ),
        "riglstm": Row("RigLSTM", "riglstm", w.hidden, {**six, "active_cells": K_a}),
    }


def ablation_rows(w: Widths) -> dict[str, Row]:
    """RigLSTM as in the MNIST table, and each of its variants."""
    whole = image_rows(w, 5, "mnist")["riglstm"]
    return {
        "riglstm": whole,
        **{
            name: replace(whole, label=name, options={**whole.options, "variant": name})
            for name in VARIANTS
        },
    }


def ball_rows(w: Widths, N: int, d: int) -> dict[str, Row]:
    return {
        "rim": Row("RIM", "rim", N * d, {"num_cells": N, "active_cells": 2, **w.rim}),
        "entnet": Row("EntNet", "entnet", N * d, {"num_slots": N}),
        "lstm": Row("LSTM", "lstm", N * d),
        "gridlstm": Row("GridLSTM", "gridlstm", N * d, {"num_cells": N}),
        "riglstm": Row("RigLSTM", "riglstm", N * d, {"num_cells": N, "active_cells": 2}),
    }


def printed(rows: Mapping[str, Row]) -> dict[str, Row]:
    """RigLSTM with the soft update that the paper prints, where it has one."""
    return {
        name: replace(row, options={**row.options, "soft_update": "printed"}) if soft(row) else row
        for name, row in rows.items()
    }


def soft(row: Row) -> bool:
    """Whether it has a soft update; one that a variant takes away cannot be asked for."""
    return row.model == "riglstm" and "soft_update" not in changes_of(row.options)


def steady(row: Row) -> bool:
    """Whether it is a RigLSTM that can start steadily, as `check_steady_start` has it."""
    return row.model == "riglstm" and not changes_of(row.options).keys() & {"cells", "input_views"}


def only(rows: Mapping[str, Row], *names: str) -> dict[str, Row]:
    """Some of the rows, by name."""
    return {name: rows[name] for name in names}
