"""The paper's tables: what each one measures, and what has to be said with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from riglstm.lab.tables.entries import Budget, Recipe
from riglstm.lab.tables.recipes import RECIPES
from riglstm.lab.train.config import Precision

MEASURED = "complexity"
"""The table that is measured and not trained: see `riglstm.lab.tables.complexity`."""


@dataclass(frozen=True)
class PaperTable:
    """A table whose cells are trained models' figures on test data."""

    title: str
    task: str
    """A key of `riglstm.lab.tasks.TASKS`."""
    measure: str
    """What a cell is, in words."""
    recipes: Mapping[Budget, Recipe]
    metric: str = "accuracy"
    """Its name in results."""
    scale: float = 100.0
    """Factor from the recorded figure to the printed one."""
    higher_is_better: bool = True
    settings: str = "trained on"
    """Head of the column that tells settings apart, where there are several."""
    best: bool = False
    """Whether to show the best run too, as the paper's figures are those."""
    notes: tuple[str, ...] = ()
    """On the paper's figures; left out where these are."""


_COPIED = (
    "The paper's rows for other models are mostly those of earlier papers, each with a protocol of "
    "its own; GridLSTM and LSTM are the same function with other start values (P26)."
)

TABLES: dict[str, PaperTable] = {
    "mnist": PaperTable(
        "Sequential MNIST",
        *("mnist", "test accuracy in %"),
        recipes=RECIPES["mnist"],
        notes=(_COPIED,),
    ),
    "cifar": PaperTable(
        "Sequential CIFAR-10",
        *("cifar", "test accuracy in %"),
        recipes=RECIPES["cifar"],
        notes=(_COPIED,),
    ),
    "ablation": PaperTable(
        "Ablations on sequential MNIST",
        *("mnist", "test accuracy in %"),
        recipes=RECIPES["ablation"],
        notes=(
            "all_h and RigLSTM are the same model at K_h = N − 1 = 5 (P3). In the recipe `tuned` "
            "cells take in all views and peers: all_inputs, rand_inputs and rand_h are RigLSTM "
            "there, too.",
            "In the recipe `tuned` RigLSTM has a steady start, which no_input_trans, all_cells and "
            "rand_cells cannot have.",
        ),
    ),
    "balls": PaperTable(
        "Bouncing balls",
        *("balls", "100 × BCE in nats per pixel and frame, of frames rolled out after true ones"),
        recipes=RECIPES["balls"],
        metric="bce",
        higher_is_better=False,
        best=True,
        notes=(
            "10 frames are rolled out after 15.",
            "The paper's figures are the best of five runs, and it does not print how its BCE is "
            "normalised: compare the order of models, not the numbers.",
        ),
    ),
    "copying": PaperTable(
        "Multi-digit copying",
        *("copying", "test accuracy in %, by digit"),
        recipes=RECIPES["copying"],
        settings="digits a step",
        notes=("GridLSTM and LSTM are the same function with other start values (P26).",),
    ),
}

NAMES = (*TABLES, MEASURED)
"""All tables that can be asked for."""


def table(name: str) -> PaperTable:
    """A table of trained models."""
    if name not in TABLES:
        raise ValueError(f"the table must be one of {', '.join(NAMES)}, got {name!r}")
    return TABLES[name]


def recipe(name: str, budget: Budget) -> Recipe:
    """How a table is made in a budget."""
    recipes = table(name).recipes
    if budget not in recipes:
        raise ValueError(
            f"the budget of {name} must be one of {', '.join(recipes)}, got {budget!r}"
        )
    return recipes[budget]


def stem(name: str, budget: Budget | None, precision: Precision | None = None) -> str:
    """The name of a table's files: a quick one must never take the place of the other.

    Nor one in another precision than the recipe's.
    """
    said = name if budget in ("paper", None) else f"{name}-{budget}"
    if budget is None or precision is None or precision == recipe(name, budget).fit.precision:
        return said
    return f"{said}-{precision}"


def chosen(recipe: Recipe, models: Sequence[str] | None) -> tuple[str, ...]:
    """The rows that are asked for, in the table's order."""
    if models is None:
        return recipe.models
    for name in models:
        if name not in recipe.rows:
            raise ValueError(f"models must be some of {', '.join(recipe.rows)}, got {name!r}")
    return tuple(name for name in recipe.rows if name in models)


def chosen_settings(recipe: Recipe, settings: Sequence[str] | None) -> tuple[str, ...]:
    """The settings that are asked for, in the table's order; None: all."""
    for name in settings or ():
        if name not in recipe.settings:
            raise ValueError(f"settings must be some of {', '.join(recipe.settings)}, got {name!r}")
    return tuple(name for name in recipe.settings if settings is None or name in settings)
