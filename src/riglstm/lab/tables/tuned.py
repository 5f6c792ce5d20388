"""The recipe called `tuned`: what `docs/recipes.md` found, as data.

Each of these takes a recipe of the paper's sizes, and changes how models start and learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from riglstm.lab.tables.entries import Recipe, Row, soft, steady
from riglstm.lab.train.config import Fit

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


def tuned_mnist(paper: Recipe) -> Recipe:
    """That of sequential MNIST, and of its ablations."""
    rows = _remembering(paper.rows)
    for name, row in rows.items():
        start = STEADY if steady(row) else {}
        if row.model == "riglstm":
            rows[name] = replace(row, options={**row.options, **FEWER, **start})
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
        fit=replace(
            _fit(24_000, lr=3e-4, evaluate_every=3000), decay="none", average=0.9997, flood=0.3
        ),
    )


def tuned_copying(paper: Recipe) -> Recipe:
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
        fit=_fit(20_000, lr=1e-3, evaluate_every=2000),
    )


def _copying_rig(row: Row) -> Row:
    """RigLSTM with a larger step, which it stands where its maps to views move slowly."""
    often = {"evaluate_every": 2500, "checkpoint_every": 2500}
    return replace(
        row,
        # It keeps more at the start.
        options={**row.options, **STEADY, "forget_bias": 7.0},
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
        options = {**row.options}
        if row.model in ("lstm", "gridlstm", "rim", "brim", "riglstm"):
            options |= REMEMBERS
        if soft(row):
            options |= SOFT
        changed[name] = replace(row, options=options)
    return changed


def _fit(updates: int, lr: float, evaluate_every: int) -> Fit:
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
