"""How each table's models are built and trained, as data, by table and budget.

`paper` has the paper's sizes and what it says of training, `tuned` the same models with what was
found in `docs/recipes.md`, `quick` small models for a look. What the paper leaves open is decided
in `docs/paper_notes.md` (P8, P9, P23 to P25) and in `docs/experiments.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from riglstm.models.brim import PRESETS
from riglstm.train.config import Fit
from riglstm.variants import VARIANTS

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
    fit: Mapping[str, Any] = field(default_factory=dict)
    """What it changes in the recipe's training."""

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


def _image_rows(w: Widths, K_a: int, brim: str) -> dict[str, Row]:
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


def _ablation_rows(w: Widths) -> dict[str, Row]:
    """RigLSTM as in the MNIST table, and each of its variants."""
    whole = _image_rows(w, 5, "mnist")["riglstm"]
    return {
        "riglstm": whole,
        **{
            name: replace(whole, label=name, options={**whole.options, "variant": name})
            for name in VARIANTS
        },
    }


def _ball_rows(w: Widths, N: int, d: int) -> dict[str, Row]:
    return {
        "rim": Row("RIM", "rim", N * d, {"num_cells": N, "active_cells": 2, **w.rim}),
        "entnet": Row("EntNet", "entnet", N * d, {"num_slots": N}),
        "lstm": Row("LSTM", "lstm", N * d),
        "gridlstm": Row("GridLSTM", "gridlstm", N * d, {"num_cells": N}),
        "riglstm": Row("RigLSTM", "riglstm", N * d, {"num_cells": N, "active_cells": 2}),
    }


REMEMBERS = {"forget_bias": 3.0}
"""Of every LSTM cell: one that starts by keeping what it holds learns to copy many times sooner."""
SOFT = {"update_scale": 0.01, "update_bias": 4.0}
"""Of the soft update: 1/d, so that its logit stays small while W_q grows; a start near h~."""


def _tuned(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The same start for every model that has LSTM cells, and the soft update that learns."""
    changed = {}
    for name, row in rows.items():
        options = {**row.options}
        if row.model in ("lstm", "gridlstm", "rim", "brim", "riglstm"):
            options |= REMEMBERS
        changes = VARIANTS.get(options.get("variant", ""), {})
        if row.model == "riglstm" and changes.get("soft_update", True):
            options |= SOFT
        changed[name] = replace(row, options=options)
    return changed


def _only(rows: Mapping[str, Row], *names: str) -> dict[str, Row]:
    return {name: rows[name] for name in names}


_CIFAR_ROWS = ("lstm", "rim", "rmc", "transformer", "gridlstm", "brim", "riglstm")
_COPYING_ROWS = ("lstm", "gridlstm", "rim", "riglstm")
_SOME = ("lstm", "rim", "riglstm")
"""What `quick` trains of the longer tables."""


def _mnist(rows: Mapping[str, Row]) -> Recipe:
    return Recipe(
        rows,
        settings={"14x14": Setting("14x14", {"size": 14})},
        conditions=("16x16", "19x19", "24x24"),
        task={"input_size": FULL.hidden, "batch_size": 64, "dropout": 0.5},
        # 100 epochs of 48,000 digits, each looked at.
        fit=Fit(updates=75_000, lr=1e-4, evaluate_every=750, checkpoint_every=750),
        models=tuple(rows),
    )


def _tuned_mnist(rows: Mapping[str, Row]) -> Recipe:
    return replace(
        _mnist(_tuned(rows)),
        task={
            **{"input_size": FULL.hidden, "batch_size": 64, "dropout": 0.2},
            "validation_size": 4000,
        },
        # Ten epochs.
        fit=_tuned_fit(7500, lr=5e-4, evaluate_every=1500),
    )


def _tuned_fit(updates: int, lr: float, evaluate_every: int) -> Fit:
    return Fit(
        updates=updates,
        lr=lr,
        warmup=300,
        decay="cosine",
        average=0.999,
        precision="tf32",
        evaluate_every=evaluate_every,
        checkpoint_every=evaluate_every,
    )


_FEW_IMAGES = {
    **{"input_size": SMALL.hidden, "batch_size": 32},
    **{"train_size": 2000, "validation_size": 200, "test_size": 500},
}


def _quick_mnist(rows: Mapping[str, Row], models: tuple[str, ...], updates: int) -> Recipe:
    return Recipe(
        rows,
        settings={"7x7": Setting("7x7", {"size": 7})},
        conditions=("8x8", "10x10", "12x12"),
        task=_FEW_IMAGES,
        fit=_quick_fit(updates),
        models=models,
        seeds=1,
    )


def _quick_fit(updates: int) -> Fit:
    """Five looks on the way."""
    every = updates // 5
    return Fit(updates=updates, lr=2e-3, evaluate_every=every, checkpoint_every=every)


_COPYING = Recipe(
    _only(_image_rows(FULL, 4, "mnist"), *_COPYING_ROWS),
    settings={f"M={M}": Setting("P=50", {"M": M}) for M in (1, 2, 4, 8)},
    conditions=("P=100", "P=200", "P=400"),
    task={"L": 10, "P": 50, "digits": 10, "input_size": FULL.hidden, "batch_size": 64},
    fit=Fit(updates=40_000, lr=1e-4),
    models=_COPYING_ROWS,
)

MEASURED_ROWS = _only(_image_rows(FULL, 4, "mnist"), *_SOME)
"""Models of the table of times and sizes, which is measured at the paper's widths only."""

RECIPES: dict[str, dict[Budget, Recipe]] = {
    "mnist": {
        "paper": _mnist(_image_rows(FULL, 5, "mnist")),
        "tuned": _tuned_mnist(_image_rows(FULL, 5, "mnist")),
        "quick": _quick_mnist(_image_rows(SMALL, 5, "mnist"), _SOME, 250),
    },
    "cifar": {
        "paper": Recipe(
            _only(_image_rows(FULL, 4, "cifar"), *_CIFAR_ROWS),
            settings={"16x16": Setting("16x16", {"size": 16})},
            conditions=("19x19", "24x24", "32x32"),
            task={"input_size": FULL.hidden, "batch_size": 64, "dropout": 0.2},
            # 100 epochs of 40,000 images, each looked at.
            fit=Fit(updates=62_500, lr=1e-4, evaluate_every=625, checkpoint_every=625),
            models=_CIFAR_ROWS,
        ),
        "quick": Recipe(
            _only(_image_rows(SMALL, 4, "cifar"), *_CIFAR_ROWS),
            settings={"6x6": Setting("6x6", {"size": 6})},
            conditions=("7x7", "9x9", "12x12"),
            task=_FEW_IMAGES,
            fit=_quick_fit(250),
            models=_SOME,
            seeds=1,
        ),
    },
    "ablation": {
        "paper": _mnist(_ablation_rows(FULL)),
        "tuned": _tuned_mnist(_ablation_rows(FULL)),
        "quick": _quick_mnist(_ablation_rows(SMALL), ("riglstm", *VARIANTS), 100),
    },
    "balls": {
        "paper": Recipe(
            _ball_rows(FULL, 5, 50),
            settings={n: Setting(n, {"balls": n}) for n in ("4", "678")},
            conditions=("4", "678", "curtain"),
            task={"batch_size": 64},
            # Until five epochs of 782 updates have brought nothing; a hundred at the most.
            fit=Fit(updates=78_200, lr=3e-4, evaluate_every=782, checkpoint_every=782, patience=5),
            models=("rim", "entnet", "lstm", "gridlstm", "riglstm"),
            seeds=5,
        ),
        "quick": Recipe(
            _ball_rows(SMALL, 5, 10),
            settings={"4": Setting("4", {"balls": "4"})},
            conditions=("678", "curtain"),
            task={
                **{"sequences": 160, "validation_size": 16, "test_size": 32, "batch_size": 8},
                **{"frames": 12, "context": 6, "rollout_frames": 5},
            },
            fit=_quick_fit(40),
            models=_SOME,
            seeds=1,
        ),
    },
    "copying": {
        "paper": _COPYING,
        "tuned": replace(
            _COPYING,
            rows=_tuned(_COPYING.rows),
            # The blanks before the answer are known from the clock alone.
            task={**_COPYING.task, "loss_on": "answer"},
            fit=_tuned_fit(20_000, lr=1e-3, evaluate_every=2000),
        ),
        "quick": Recipe(
            _only(_image_rows(SMALL, 4, "mnist"), *_COPYING_ROWS),
            settings={f"M={M}": Setting("P=6", {"M": M}) for M in (1, 2)},
            conditions=("P=12", "P=24", "P=48"),
            task={
                **{"L": 3, "P": 6, "digits": 4, "input_size": SMALL.hidden, "batch_size": 64},
                **{"validation_size": 200, "test_size": 500},
            },
            fit=_quick_fit(500),
            models=_SOME,
            seeds=1,
        ),
    },
}
"""By table and budget. The soft update is the printed one (P18) in all but `tuned`."""
