"""`riglstm demo`: RigLSTM against an LSTM on a small copying problem, all the way to a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from riglstm.lab.cli import UsageError, flags, text
from riglstm.lab.tables.plan import RunSpec, folder_name
from riglstm.lab.tables.run import run
from riglstm.lab.tables.table import TextTable, markdown
from riglstm.lab.tasks.common import Count, Device, Options
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder


@dataclass(frozen=True)
class Demo(Options):
    """Train RigLSTM and an LSTM of the same width to repeat digits after a dormant phase.

    Both get the same sequences and the same number of updates; then both are tested on phases
    longer than any in training. Takes about two minutes on a CPU, and ends with a table, a curve
    and an HTML page. What is trained already is shown, not trained again.

    Example: riglstm demo --seed 1 --out runs/my-demo
    """

    updates: Count = 1200
    """Updates of each model."""
    seed: int = 0
    """Seed of the weights and of the training sequences; the test sequences are always the same."""
    hidden_size: Count = 64
    """Width of both models."""
    num_cells: Count = 4
    """Cells that share RigLSTM's width."""
    out: Path = Path("runs/demo")
    """Folder of both runs and of the page."""
    device: Device = "cpu"
    """Where to train: cpu, cuda, cuda:1."""


TASK: dict[str, Any] = {
    **{"L": 4, "P": 10, "P_from": 5, "digits": 4, "loss_on": "answer", "input_size": 16},
    **{"conditions": ("P=20", "P=40", "P=80"), "validation_size": 200, "test_size": 500},
}
"""What differs from the defaults of `riglstm.lab.tasks.copying.Copying`."""

PROBLEM = "copying: 4 digits of 4 kinds, a dormant phase, the digits again"
NOTES = """\
P: steps of the dormant phase; in training 5 to 10. Guessing gets 25%.
Soft update: update_scale = 1/√d, update_bias = 4. The layer's default is 1/d
and 4, the paper's 1 and none.
This is one seed of a toy problem, with a step size picked for RigLSTM: it shows
that the layer trains, and is no evidence for either model."""


def main(args: Sequence[str]) -> None:
    """Train RigLSTM and an LSTM on a small problem: two minutes, a table, a page."""
    config = flags.read_one("riglstm demo", Demo, args)
    page = config.out / "report.html"
    if page.exists() and not any(RunFolder(path).config.exists() for path in config.out.iterdir()):
        raise UsageError(
            f"--out must be a new folder, or that of a demo, got {config.out}, with a {page.name} "
            "and no runs; give another folder"
        )
    print(f"{PROBLEM}; {config.updates} updates for each model", flush=True)
    runs = specs(config)
    folders = {name: config.out / folder_name(spec) for name, spec in runs.items()}
    # Products this small gain nothing from more.
    torch.set_num_threads(1)
    again = flags.again("demo", args)
    found = {name: _result(name, spec, folders[name], again) for name, spec in runs.items()}
    title = f"digits right, seed {config.seed}"
    print(f"\n{side_by_side(found, title)}\n{NOTES}\n")
    # Only here: matplotlib takes seconds to load.
    from riglstm.lab.report import report

    drawn = report(list(folders.values()), page, figures=config.out / "figures")
    curve = next((config.out / "figures").glob("*shift*.png"))
    print(f"the curve: {curve}\nthe page: {drawn}")


def side_by_side(found: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """Results by the model's name, as a table by the honest rule."""
    lines = []
    for name, result in found.items():
        rows = [r for r in result["rows"] if r["chosen_on"] == result["rows"][0]["chosen_on"]]
        cost = (f"{result['parameters']}", f"{result['seconds']:.0f}")
        lines.append([name, *cost, *map(text.show, rows)])
    heads = ["", "parameters", "seconds", *(row["condition"] for row in rows)]
    return markdown(TextTable(title, heads, lines, lead=1))


def specs(config: Demo) -> dict[str, RunSpec]:
    """Both runs, by the model's name."""
    fit = Fit(
        updates=config.updates,
        lr=1.5e-2,
        warmup=min(50, config.updates - 1),
        decay="linear",
        evaluate_every=200,
        checkpoint_every=200,
        device=config.device,
    )
    scale = (config.hidden_size / config.num_cells) ** -0.5
    rig = {"num_cells": config.num_cells, "update_scale": scale, "update_bias": 4.0}
    size, seed = config.hidden_size, config.seed
    return {
        "RigLSTM": RunSpec("copying", TASK, "riglstm", size, rig, fit, seed),
        "LSTM": RunSpec("copying", TASK, "lstm", size, {}, fit, seed),
    }


def _result(name: str, spec: RunSpec, path: Path, again: str) -> Mapping[str, Any]:
    """Of a run: made now, gone on with, or read."""
    folder = RunFolder(path)
    if folder.state == "done":
        print(f"{name}: trained already, in {path}")
        return folder.read_json(folder.result)
    print(f"{name}: training, in {path}", flush=True)
    return run(spec, path, resume=folder.state != "new", again=again)
