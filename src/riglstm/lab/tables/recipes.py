"""The paper's tables, and how the models of each are built and trained, as data by budget.

`paper` has the paper's sizes, what it says of training, and RigLSTM's soft update as printed (P18);
`tuned` the same sizes with what was found in `docs/recipes.md`, which changes that update too;
`quick` small models for a look, RigLSTM with the layer's defaults. What the paper leaves open is
decided in `docs/paper_notes.md` (P8, P9, P23 to P25) and in `docs/reproducing.md`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from riglstm.lab.tasks.balls import BallsTask
from riglstm.lab.tasks.base import Metric
from riglstm.lab.tasks.copying import CopyingTask
from riglstm.lab.tasks.images import ImageTask
from riglstm.lab.train.config import Fit
from riglstm.layer import VARIANTS
from riglstm.models.brim import PRESETS
from riglstm.models.rig import changes_of

Budget: TypeAlias = Literal["quick", "paper", "tuned"]
SEARCHED = "searched"
"""In place of a budget, of the final runs of a search: each model has the recipe of its best trial,
see `riglstm.lab.tables.search`."""
AT_HOME, SHIFTED = "training condition", "shifted conditions"
"""The two rules by which a search chooses recipes, and a run its checkpoint."""


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
    """The same in some of the table's settings, before what it changes in all."""
    fit: Mapping[str, Any] = field(default_factory=dict)
    """What it changes in the recipe's training."""
    fit_in: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The same, in some of the table's settings alone."""

    def having(self, options: Mapping[str, Any]) -> Row:
        """The same row with more options, or other values of its own."""
        return replace(self, options={**self.options, **options})

    @property
    def settled(self) -> dict[str, Any]:
        """Its options, with those that its variant sets."""
        return {**self.options, **changes_of(self.options)}

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
        **{name: replace(whole.having({"variant": name}), label=name) for name in VARIANTS},
    }


def block_zoneout(w: Widths) -> Row:
    """An LSTM whose units are in six blocks, of which some keep their state at each step.

    A control: cells that sleep by chance, and nothing else of RigLSTM. It is one whose cells all
    read the whole input and all states, which are an LSTM's stacked rows. As `rand_cells` does, it
    draws in tests, too.
    """
    whole = {"input_views": "split", "views": "all", "peers": "all", "soft_update": False}
    options = {"num_cells": 6, "active_cells": 5, "cells": "random", **whole}
    return Row("LSTM, block zoneout", "riglstm", w.hidden, options)


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
        name: row.having({"soft_update": "printed"}) if soft(row) else row
        for name, row in rows.items()
    }


def soft(row: Row) -> bool:
    """Whether it has a soft update; one that a variant takes away cannot be asked for."""
    return row.model == "riglstm" and row.settled.get("soft_update") is not False


def steady(row: Row) -> bool:
    """Whether it is a RigLSTM that can start steadily, as `check_steady_start` has it."""
    return row.model == "riglstm" and not row.settled.keys() & {"cells", "input_views"}


def only(rows: Mapping[str, Row], *names: str) -> dict[str, Row]:
    """Some of the rows, by name."""
    return {name: rows[name] for name in names}


_CIFAR_ROWS = ("lstm", "rim", "rmc", "transformer", "gridlstm", "brim", "riglstm")
_COPYING_ROWS = ("lstm", "gridlstm", "rim", "riglstm")
_SOME = ("lstm", "rim", "riglstm")
"""What `quick` trains of the longer tables."""

REMEMBERS = {"forget_bias": 3.0}
"""Of every LSTM cell: one that starts by keeping what it holds learns to copy many times sooner."""
SOFT = {"update_scale": 0.01, "update_bias": 4.0}
"""Of the soft update: 1/d, so that its logit stays small while W_q grows; a start near h~. In
numbers, as they are part of the names of runs: the layer's own defaults at d = 100."""
STEADY = {"steady_start": True}
"""Of RigLSTM: the input does not decide who wakes first."""
FEWER = {"active_cells": 4, "views_per_cell": 6, "peers_per_cell": 5}
"""Of RigLSTM on MNIST, where the paper has five awake, each with five of six views: four awake
that take in all there is learn later, and hold more at other sizes."""
MORE_UPDATES = {"M=4": {"updates": 30_000}, "M=8": {"updates": 60_000}}
"""In copying: more digits take longer to learn."""


def _fit(updates: int, lr: float, every: int, **more: Any) -> Fit:
    """Adam, with an evaluation and a checkpoint every so many updates."""
    return Fit(updates=updates, lr=lr, evaluate_every=every, checkpoint_every=every, **more)


def _quick_fit(updates: int) -> Fit:
    """Five looks on the way."""
    return _fit(updates, 2e-3, updates // 5)


def _pictures(
    rows: Mapping[str, Row],
    sizes: Sequence[int],
    task: Mapping[str, Any],
    fit: Fit,
    models: tuple[str, ...] = (),
    seeds: int = 3,
) -> Recipe:
    """Trained on pictures of the first size and tested on the others; no `models`: all rows."""
    trained, *shifted = (f"{size}x{size}" for size in sizes)
    settings = {trained: Setting(trained, {"size": sizes[0]})}
    return Recipe(rows, settings, tuple(shifted), task, fit, models or tuple(rows), seeds)


def _quick_pictures(
    rows: Mapping[str, Row], sizes: Sequence[int], models: tuple[str, ...], updates: int
) -> Recipe:
    task = {
        **{"input_size": SMALL.hidden, "batch_size": 32},
        **{"train_size": 2000, "validation_size": 200, "test_size": 500},
    }
    return _pictures(rows, sizes, task, _quick_fit(updates), models, seeds=1)


def _mnist(rows: Mapping[str, Row]) -> Recipe:
    task = {"input_size": FULL.hidden, "batch_size": 64, "dropout": 0.5}
    # 100 epochs of 48,000 digits, each looked at.
    return _pictures(rows, (14, 16, 19, 24), task, _fit(75_000, 1e-4, 750))


def _copying(rows: Mapping[str, Row]) -> Recipe:
    return Recipe(
        rows,
        settings={f"M={M}": Setting("P=50", {"M": M}) for M in (1, 2, 4, 8)},
        conditions=("P=100", "P=200", "P=400"),
        task={"L": 10, "P": 50, "digits": 10, "input_size": FULL.hidden, "batch_size": 64},
        fit=Fit(updates=40_000, lr=1e-4),
        models=_COPYING_ROWS,
    )


def _tuned_mnist(paper: Recipe) -> Recipe:
    """That of sequential MNIST, and of its ablations."""
    rows = _remembering(paper.rows)
    for name, row in rows.items():
        if row.model == "riglstm":
            rows[name] = row.having({**FEWER, **(STEADY if steady(row) else {})})
    for name in rows.keys() & {"lstm", "gridlstm"}:
        # With as many as RigLSTM the LSTM gains nothing at other sizes, in their mean.
        rows[name] = replace(rows[name], fit={"updates": 18_000})
    if "rim" in rows:
        # In small batches, without a fall of the step size, it does not settle.
        own = {
            **{"updates": 7500, "lr": 5e-4, "flood": 0.0, "decay": "cosine", "average": 0.999},
            **{"evaluate_every": 1500, "checkpoint_every": 1500},
        }
        rim = rows["rim"]
        rows["rim"] = replace(rim, task={**rim.task, "batch_size": 64}, fit={**rim.fit, **own})
    return replace(
        paper,
        rows=rows,
        task={**paper.task, "batch_size": 32, "dropout": 0.2, "validation_size": 4000},
        # Sixteen epochs of small batches, and a long mean in place of a step size that falls: what
        # learns the trained size soonest is worst at 24x24. With the flood less of that is lost.
        fit=_fit(24_000, 3e-4, 3000, warmup=300, average=0.9997, flood=0.3, precision="tf32"),
    )


def _tuned_copying(paper: Recipe) -> Recipe:
    """That of copying."""
    rows = _remembering(paper.rows)
    return replace(
        paper,
        rows={
            **rows,
            **{name: replace(rows[name], fit_in=MORE_UPDATES) for name in ("lstm", "gridlstm")},
            "riglstm": _copying_rig(rows["riglstm"]),
        },
        # The blanks before the answer are known from the clock alone.
        task={**paper.task, "loss_on": "answer"},
        fit=_fit(
            *(20_000, 1e-3, 2000), warmup=300, decay="cosine", average=0.999, precision="tf32"
        ),
    )


def _copying_rig(row: Row) -> Row:
    """RigLSTM with a larger step, which it stands where its maps to views move slowly."""
    often = {"evaluate_every": 2500, "checkpoint_every": 2500}
    return replace(
        # It keeps more at the start.
        row.having({**STEADY, "forget_bias": 7.0}),
        # The limit is that of the runs; Adam makes little of its size, as nearly every gradient is
        # longer.
        fit={"lr": 2e-3, "input_rate": 0.02, "decay": "late", "clip_norm": 0.1, **often},
        # With eight digits a larger step in larger batches was ahead, and neither by itself.
        task_in={"M=8": {"batch_size": 128}},
        fit_in={
            "M=1": {"updates": 10_000},
            "M=4": MORE_UPDATES["M=4"],
            "M=8": {**MORE_UPDATES["M=8"], "lr": 3e-3},
        },
    )


def _remembering(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The same start for every model that has LSTM cells, and the soft update that learns."""
    changed = {}
    for name, row in rows.items():
        has_lstm_cells = row.model in ("lstm", "gridlstm", "rim", "brim", "riglstm")
        start = REMEMBERS if has_lstm_cells else {}
        changed[name] = row.having({**start, **(SOFT if soft(row) else {})})
    return changed


ALL_AWAKE = {"num_cells": 4, "active_cells": 4, "views_per_cell": 4, "peers_per_cell": 3}
MEMORIES: dict[str, Row] = {
    "riglstm": Row("RigLSTM", "riglstm", 64, {**ALL_AWAKE, "soft_update": "printed"}),
    "rim": Row("RIM", "rim", 64, {"num_cells": 4, "active_cells": 2, "dropout": 0.0}),
    "rim3": Row("RIM, 3 active", "rim", 64, {"num_cells": 4, "active_cells": 3, "dropout": 0.0}),
    "lstm": Row("LSTM", "lstm", 64, {}),
    "gridlstm": Row("GridLSTM", "gridlstm", 64, {"num_cells": 4}),
    "brim": Row("BRIM", "brim", 64, {"num_cells": (4, 4), "active_cells": (2, 2), "dropout": 0.0}),
    "rmc": Row("RMC", "rmc", 64, {"num_slots": 4, "num_heads": 4}),
    "entnet": Row("EntNet", "entnet", 64, {"num_slots": 4}),
}
"""Of agents on MiniGrid: the paper's RigLSTM (K_h is capped at N - 1) and RIM; the others at their
width."""

MEASURED_ROWS = only(printed(image_rows(FULL, 4, "mnist")), *_SOME)
"""Models of the table of times and sizes, which is measured at the paper's widths only."""

MEASURED = "complexity"
"""The table that is measured and not trained: see `riglstm.lab.tables.complexity`."""


@dataclass(frozen=True)
class PaperTable:
    """A table whose cells are trained models' figures on test data."""

    title: str
    task: str
    """A key of `riglstm.lab.tasks.TASKS`."""
    metric: Metric
    """That of the task."""
    measure: str
    """What a cell is, in words."""
    recipes: Mapping[Budget, Recipe]
    settings: str = "trained on"
    """Head of the column that tells settings apart, where there are several."""
    best: bool = False
    """Whether to show the best run too, as the paper's figures are those."""
    notes: tuple[str, ...] = ()
    """On the paper's figures; left out where these are."""
    notes_of: Mapping[str, str] = field(default_factory=dict)
    """More, by budget."""
    found: str = "by equal search"
    """How the recipes of final runs were found, for the title."""


_COPIED = (
    "The paper's rows for other models are mostly those of earlier papers, each with a protocol of "
    "its own; GridLSTM and LSTM are the same function with other start values (P26)."
)

TABLES: dict[str, PaperTable] = {
    "mnist": PaperTable(
        "Sequential MNIST",
        *("mnist", ImageTask.metric, "test accuracy in %"),
        recipes={
            "paper": _mnist(printed(image_rows(FULL, 5, "mnist"))),
            "tuned": _tuned_mnist(_mnist(image_rows(FULL, 5, "mnist"))),
            "quick": _quick_pictures(image_rows(SMALL, 5, "mnist"), (7, 8, 10, 12), _SOME, 250),
        },
        notes=(_COPIED,),
    ),
    "cifar": PaperTable(
        "Sequential CIFAR-10",
        *("cifar", ImageTask.metric, "test accuracy in %"),
        recipes={
            "paper": _pictures(
                only(printed(image_rows(FULL, 4, "cifar")), *_CIFAR_ROWS),
                sizes=(16, 19, 24, 32),
                task={"input_size": FULL.hidden, "batch_size": 64, "dropout": 0.2},
                # 100 epochs of 40,000 images, each looked at.
                fit=_fit(62_500, 1e-4, 625),
            ),
            "quick": _quick_pictures(
                only(image_rows(SMALL, 4, "cifar"), *_CIFAR_ROWS), (6, 7, 9, 12), _SOME, 250
            ),
        },
        notes=(_COPIED,),
    ),
    "ablation": PaperTable(
        "Ablations on sequential MNIST",
        *("mnist", ImageTask.metric, "test accuracy in %"),
        recipes={
            "paper": _mnist(printed(ablation_rows(FULL))),
            "tuned": _tuned_mnist(
                _mnist({**ablation_rows(FULL), "block_zoneout": block_zoneout(FULL)})
            ),
            "quick": _quick_pictures(ablation_rows(SMALL), (7, 8, 10, 12), (), 100),
        },
        notes_of={
            "paper": "all_h and RigLSTM are the same model at K_h = N − 1 = 5 (P3).",
            "tuned": "Cells take in all views and peers: all_inputs, rand_inputs, all_h and rand_h "
            "are RigLSTM itself. It has a steady start, which no_input_trans, all_cells and "
            "rand_cells cannot have.",
            SEARCHED: "Five of six cells wake, and read five of six views and four of five "
            "peers. The rest is the recipe that the search found for RigLSTM on MNIST; none was "
            "searched for a row.",
        },
        found="by RigLSTM's searched recipe",
    ),
    "balls": PaperTable(
        "Bouncing balls",
        *("balls", BallsTask.metric, "100 × BCE in nats per pixel of rolled-out frames"),
        recipes={
            "paper": Recipe(
                printed(ball_rows(FULL, 5, 50)),
                settings={n: Setting(n, {"balls": n}) for n in ("4", "678")},
                conditions=("4", "678", "curtain"),
                task={"batch_size": 64},
                # Until five epochs of 782 updates have brought nothing; a hundred at the most.
                fit=_fit(78_200, 3e-4, 782, patience=5),
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
        best=True,
        notes=(
            "10 frames are rolled out after 15 true ones.",
            "The paper's figures are the best of five runs, and it does not print how its BCE is "
            "normalised: compare the order of models, not the numbers.",
        ),
    ),
    "copying": PaperTable(
        "Multi-digit copying",
        *("copying", CopyingTask.metric, "test accuracy in %, by digit"),
        recipes={
            "paper": _copying(only(printed(image_rows(FULL, 4, "mnist")), *_COPYING_ROWS)),
            "tuned": _tuned_copying(_copying(only(image_rows(FULL, 4, "mnist"), *_COPYING_ROWS))),
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
        settings="digits a step",
        notes=("GridLSTM and LSTM are the same function with other start values (P26).",),
    ),
}

NAMES = (*TABLES, MEASURED)
"""All tables that can be asked for."""


def recipe(name: str, budget: Budget) -> Recipe:
    """How a table is made in a budget."""
    if name not in TABLES:
        raise ValueError(f"the table must be one of {', '.join(NAMES)}, got {name!r}")
    recipes = TABLES[name].recipes
    if budget not in recipes:
        raise ValueError(
            f"the budget of {name} must be one of {', '.join(recipes)}, got {budget!r}"
        )
    return recipes[budget]


def chosen(what: str, known: Iterable[str], asked: Collection[str]) -> tuple[str, ...]:
    """The names that are asked for, in the order of `known`; `what`: what a message calls them."""
    known = tuple(known)
    for name in asked:
        if name not in known:
            raise ValueError(f"{what} must be some of {', '.join(known)}, got {name!r}")
    return tuple(name for name in known if name in asked)
