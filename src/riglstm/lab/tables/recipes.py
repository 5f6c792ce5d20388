"""How each table's models are built and trained, as data, by table and budget.

`paper` has the paper's sizes, what it says of training, and RigLSTM's soft update as printed (P18);
`tuned` the same sizes with what was found in `docs/recipes.md`, which changes that update too;
`quick` small models for a look, RigLSTM with the layer's defaults. What the paper leaves open is
decided in `docs/paper_notes.md` (P8, P9, P23 to P25) and in `docs/experiments.md`.
"""

from __future__ import annotations

from collections.abc import Mapping

from riglstm.lab.tables.entries import (
    FULL,
    SMALL,
    Budget,
    Recipe,
    Row,
    Setting,
    ablation_rows,
    ball_rows,
    image_rows,
    only,
    printed,
)
from riglstm.lab.tables.tuned import tuned_copying, tuned_mnist
from riglstm.lab.train.config import Fit
from riglstm.layer import VARIANTS

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


def _copying(rows: Mapping[str, Row]) -> Recipe:
    return Recipe(
        rows,
        settings={f"M={M}": Setting("P=50", {"M": M}) for M in (1, 2, 4, 8)},
        conditions=("P=100", "P=200", "P=400"),
        task={"L": 10, "P": 50, "digits": 10, "input_size": FULL.hidden, "batch_size": 64},
        fit=Fit(updates=40_000, lr=1e-4),
        models=_COPYING_ROWS,
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


MEASURED_ROWS = only(printed(image_rows(FULL, 4, "mnist")), *_SOME)
"""Models of the table of times and sizes, which is measured at the paper's widths only."""

RECIPES: dict[str, dict[Budget, Recipe]] = {
    "mnist": {
        "paper": _mnist(printed(image_rows(FULL, 5, "mnist"))),
        "tuned": tuned_mnist(_mnist(image_rows(FULL, 5, "mnist"))),
        "quick": _quick_mnist(image_rows(SMALL, 5, "mnist"), _SOME, 250),
    },
    "cifar": {
        "paper": Recipe(
            only(printed(image_rows(FULL, 4, "cifar")), *_CIFAR_ROWS),
            settings={"16x16": Setting("16x16", {"size": 16})},
            conditions=("19x19", "24x24", "32x32"),
            task={"input_size": FULL.hidden, "batch_size": 64, "dropout": 0.2},
            # 100 epochs of 40,000 images, each looked at.
            fit=Fit(updates=62_500, lr=1e-4, evaluate_every=625, checkpoint_every=625),
            models=_CIFAR_ROWS,
        ),
        "quick": Recipe(
            only(image_rows(SMALL, 4, "cifar"), *_CIFAR_ROWS),
            settings={"6x6": Setting("6x6", {"size": 6})},
            conditions=("7x7", "9x9", "12x12"),
            task=_FEW_IMAGES,
            fit=_quick_fit(250),
            models=_SOME,
            seeds=1,
        ),
    },
    "ablation": {
        "paper": _mnist(printed(ablation_rows(FULL))),
        "tuned": tuned_mnist(_mnist(ablation_rows(FULL))),
        "quick": _quick_mnist(ablation_rows(SMALL), ("riglstm", *VARIANTS), 100),
    },
    "balls": {
        "paper": Recipe(
            printed(ball_rows(FULL, 5, 50)),
            settings={n: Setting(n, {"balls": n}) for n in ("4", "678")},
            conditions=("4", "678", "curtain"),
            task={"batch_size": 64},
            # Until five epochs of 782 updates have brought nothing; a hundred at the most.
            fit=Fit(updates=78_200, lr=3e-4, evaluate_every=782, checkpoint_every=782, patience=5),
            models=("rim", "entnet", "lstm", "gridlstm", "riglstm"),
            seeds=5,
        ),
        "quick": Recipe(
            ball_rows(SMALL, 5, 10),
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
        "paper": _copying(only(printed(image_rows(FULL, 4, "mnist")), *_COPYING_ROWS)),
        "tuned": tuned_copying(_copying(only(image_rows(FULL, 4, "mnist"), *_COPYING_ROWS))),
        "quick": Recipe(
            only(image_rows(SMALL, 4, "mnist"), *_COPYING_ROWS),
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
"""By table and budget."""
