"""The report: what the figures hold, what the page says, and that it needs nothing else."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import test_images
from riglstm.lab.cli.main import main
from riglstm.lab.report import cells, curves, page, report, runs
from riglstm.lab.report.cells import Loaded
from riglstm.lab.tables.plan import RunSpec, plan
from riglstm.lab.tables.result import Series, read_record
from riglstm.lab.tables.run import build as build_run
from riglstm.lab.tables.run import evaluate, load
from riglstm.lab.tables.table import TextTable
from riglstm.lab.tasks.datasets import DataError
from riglstm.lab.tasks.datasets import Images as Files
from riglstm.lab.train.checkpoints import save_weights
from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder
from test_plot import shown, with_images

VALUES = {"4x4": 0.5, "5x5": 0.25}
STEP = 7
"""The update whose weights are in every run here."""
DIGITS: dict[str, Any] = {"size": 4, "conditions": ("5x5",), "input_size": 12}
CELLS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "rim": {"num_cells": 3, "active_cells": 2},
    "brim": {"num_cells": (3, 2), "active_cells": (2, 1)},
    "rmc": {"num_slots": 3, "num_heads": 2},
    "riglstm": {"num_cells": 3, "active_cells": 2, "num_views": 4, "views_per_cell": 3},
}
PNG = b"\x89PNG\r\n\x1a\n"


def noise(*_: object) -> Files:
    return test_images.noise(20, 12)


def without_digits(monkeypatch: pytest.MonkeyPatch, said: str = "no digits here") -> None:
    """From now on there are none."""

    def gone(*_: object) -> Files:
        raise DataError(said)

    monkeypatch.setattr("riglstm.lab.tasks.images.obtain", gone)


@pytest.fixture(autouse=True)
def _small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riglstm.lab.tasks.images.obtain", noise)


def on_digits(model: str, seed: int = 0, **options: Any) -> RunSpec:
    fit = Fit(updates=10, evaluate_every=5, checkpoint_every=5, device="cpu")
    return RunSpec("mnist", DIGITS, model, 12, {**CELLS[model], **options}, fit, seed)


def on_balls(model: str) -> RunSpec:
    data = {"conditions": ("curtain",), "sequences": 8, "batch_size": 4, "frames": 8}
    sizes = {"validation_size": 1, "test_size": 2, "context": 4, "rollout_frames": 3}
    return RunSpec("balls", {**data, **sizes}, model, 12, {}, Fit(updates=10, device="cpu"), 0)


def begin(path: Path, spec: RunSpec, conditions: Sequence[str], updates: int = 10) -> RunFolder:
    """A folder as training leaves it that was stopped."""
    folder = RunFolder(path)
    folder.begin(spec.resolved(), command="riglstm train", device="CPU", resume=False)
    metric = "bce" if spec.task == "balls" else "accuracy"
    lines = ["step,name,value"]
    for step in range(5, updates + 1, 5):
        lines.append(f"{step},train/loss,{2.0 / step}")
        lines += [f"{step},validation/{metric}@{c},{step / 20}" for c in conditions]
    folder.metrics.write_text("\n".join(lines) + "\n")
    return folder


def finish(
    path: Path, spec: RunSpec, values: Mapping[str, float] = VALUES, weights: bool = True
) -> Path:
    """A folder as training leaves it that was done, with these figures and untrained weights."""
    home, *others = values
    folder = begin(path, spec, list(values))
    if weights:
        folder.weights.mkdir()
        save_weights(build_run(spec)[1], folder.weights_of(STEP))
    metric = "bce" if spec.task == "balls" else "accuracy"
    common = {"table": None, "model": spec.name, "seed": spec.seed, "metric": metric, "step": STEP}
    chosen = [(c, home) for c in values] + [(c, c) for c in others]
    rows = [
        {**common, "condition": c, "value": values[c], "chosen_on": f"validation@{by}"}
        for c, by in chosen
    ]
    folder.finish(
        {
            "rows": rows,
            "chosen": {c: {"step": STEP, "value": 0.5} for c in values},
            "updates": 10,
            "stopped": "updates",
            "seconds": 3.0,
            "parameters": 1234,
            "device": "CPU",
            "commit": "0123abc",
        }
    )
    return path


def opened(path: Path, model: str, **options: Any) -> Loaded:
    """A run of a model on digits, with its network."""
    finish(path / model, on_digits(model, **options))
    return Loaded(model, path / model, *load(path / model, "cpu"))


@pytest.fixture
def rig(tmp_path: Path) -> Loaded:
    return opened(tmp_path, "riglstm")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What is made into files from now on."""
    found: list[Figure] = []
    monkeypatch.setattr(cells, "png", lambda figure: found.append(figure) or PNG)
    return found


def test_activation_images_are_the_trace_in_the_order_of_lines(rig, figures):
    cells.activation_picture(rig, cells.read_images(rig, "5x5", (3, 1)))
    task: Any = rig.task
    batch = task.examples("5x5", "test", torch.tensor([3, 1]))
    net: Any = rig.net
    (trace,) = net.core.trace(net.tables(batch.inputs.long()).flatten(2))
    axes = with_images(figures[0])
    assert len(axes) == 2 * (1 + 3)
    for b in range(2):
        np.testing.assert_array_equal(shown(axes[4 * b]).ravel(), batch.inputs[:, b, 0])
        for j in range(3):
            np.testing.assert_array_equal(shown(axes[4 * b + 1 + j]).ravel(), trace.active[:, b, j])
    label = int(batch.targets[0])
    read_as = int(net(batch.inputs)[0].argmax())
    assert axes[0].get_xlabel() == f"“{label}”, read as “{read_as}”\ntest no. 3"


def test_every_model_with_cells_is_drawn(tmp_path, figures):
    for model, slots, sizes in (
        ("rmc", ["x"], [3]),
        ("rim", ["null", "x"], [3]),
        ("brim", ["0", "1", "2"], [3, 2]),
    ):
        run = opened(tmp_path, model)
        seen = cells.read_images(run, "5x5", (0,))
        if model in cells.SLEEPING:
            cells.activation_picture(run, seen)
            assert len(with_images(figures[-1])) == 1 + sum(sizes)
        cells.score_picture(run, seen, 1)
        maps = with_images(figures[-1])
        heard = [a for a in maps if a.get_xlabel() == "cell listened to"]
        assert [shown(where).shape for where in heard] == [(N, N) for N in sizes]
        looked = next(a for a in maps if a.get_xlabel() == "view of the input")
        assert [t.get_text() for t in looked.get_xticklabels()] == slots
        assert not looked.patches, "these weigh, and choose nothing"


def test_score_maps_are_of_the_step_counted_from_one(rig, figures):
    seen = cells.read_images(rig, "5x5", (0, 2))
    cells.score_picture(rig, seen, 13)
    trace = seen.traces[0]
    axes = with_images(figures[0])
    # Beside each map stands its colour bar, which is an image of its own.
    maps = [a for a in axes if a.get_xlabel() in ("view of the input", "cell listened to")]
    assert [a.get_xlabel() for a in maps] == ["view of the input", "cell listened to"] * 2
    assert trace.view_scores is not None
    assert trace.peer_scores is not None
    for b in range(2):
        raw = (trace.view_scores[12, b].numpy(), trace.peer_scores[12, b].numpy())
        for where, scores in zip(maps[2 * b : 2 * b + 2], raw, strict=True):
            np.testing.assert_allclose(shown(where), scores)
    assert "step 13: line 3,\npixel 3" in axes[0].get_xlabel()


def test_digits_are_of_different_classes_and_in_the_test_set(rig, monkeypatch):
    classes = torch.tensor([3, 3, 1, 3, 1, 0, 2, 2, 2, 2, 2, 2])
    files = noise()._replace(test_labels=classes)
    monkeypatch.setattr("riglstm.lab.tasks.images.obtain", lambda *_: files)
    again = Loaded("riglstm", rig.path, *load(rig.path, "cpu"))
    labels = cells.read_images(again, "5x5").labels
    assert [label.rpartition(" ")[2] for label in labels] == ["0", "2", "5"]
    with pytest.raises(ValueError, match="numbers from 0 to 11, the run's test set, got 12"):
        cells.read_images(rig, "5x5", (12,))


def test_a_rollout_has_the_truth_above_and_an_overlay_below():
    truth = np.zeros((3, 4, 4))
    truth[:, :2] = 1
    models = {"riglstm": np.full((3, 4, 4), 0.25), "rim": truth.copy(), "lstm": truth.copy()}
    axes = with_images(cells.draw_rollout(truth, models, 15, {"riglstm": "solid", "rim": "dashed"}))
    assert len(axes) == 3 * 5
    assert [a.get_title() for a in axes[:3]] == ["frame 15", "frame 16", "frame 17"]
    assert [a.get_ylabel() for a in axes[::3]] == ["truth", "riglstm", "rim", "lstm", "overlay"]
    np.testing.assert_allclose(
        shown(axes[0])[0, 0], tuple(bytes.fromhex("CC79A7")[i] / 255 for i in range(3))
    )
    assert (shown(axes[0])[3] == 1).all()
    expected = -(np.log(0.25) + np.log(0.75)) / 2
    np.testing.assert_allclose(cells.frame_bce(truth, models["riglstm"]), expected)
    assert axes[3].get_xlabel() == f"{expected:.3f}"
    assert [len(a.collections) for a in axes[-3:]] == [1] * 3, "an outline where a ball ends"


def test_balls_are_rolled_out_from_run_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = []
    for model in ("lstm", "riglstm"):
        finish(tmp_path / model, on_balls(model), {"4": 0.4, "curtain": 0.5})
        runs.append(Loaded(model, tmp_path / model, *load(tmp_path / model, "cpu", tmp_path)))
    picture = cells.rollout_picture(runs, "curtain", 1)
    assert picture.png.startswith(PNG)
    assert "frames 0 to 3" in picture.caption
    assert "outlines (probability 0.5) of riglstm (solid)." in picture.caption
    assert "validation@4" in picture.caption


def test_the_shift_figure_has_means_spreads_and_the_papers_figures():
    models = {
        "lstm": {"P=50": [90.0, 92.0, 94.0], "P=100": [50.0, 55.0, 60.0]},
        "rim": {"P=50": [80.0, 70.0]},
    }
    figure = curves.draw_shift(
        curves.Shift(
            *("Copying", ["P=50", "P=100"], "P=50", models, "accuracy in %", True),
            paper={"lstm": {"P=100": 45.4}},
            yardsticks={"chance": {"P=50": 10.0, "P=100": 10.0}},
        )
    )
    (axes,) = figure.get_axes()
    drawn: dict[str, Any] = {str(c.get_label()): c for c in axes.containers}
    line, _, (bars,) = drawn["lstm (n = 3)"].lines
    assert [float(y) for y in line.get_ydata()] == [92, 55]
    assert line.get_linestyle() == "-"
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    np.testing.assert_allclose(np.diff(ends)[:, 0], [4, 10])
    # Two runs have dots, but no spread.
    assert drawn["rim (n = 2)"].lines[2] == ()
    dots = [list(x.get_ydata()) for x in axes.get_lines() if x.get_marker() == "."]
    assert dots == [[90, 92, 94], [50, 55, 60], [80, 70]]
    hollow: Any = next(x for x in axes.get_lines() if x.get_label() == "_lstm, paper")
    assert [float(y) for y in hollow.get_ydata()] == [45.4]
    assert hollow.get_markerfacecolor() == "none"
    assert "trained here" in [t.get_text() for t in axes.texts]
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["lstm (n = 3)", "rim (n = 2)", "chance", "hollow: the paper"]


@pytest.mark.parametrize(
    ("conditions", "scale"),
    [
        (["P=50", "P=100"], True),
        (["14x14", "16x16", "24x24"], True),
        (["4", "678", "curtain"], False),
    ],
)
def test_only_steps_of_one_scale_are_joined(conditions, scale):
    models = {"lstm": {c: [1.0] for c in conditions}}
    shift = curves.Shift("", conditions, conditions[0], models, "bce", False, {}, {})
    figure = curves.draw_shift(shift)
    (axes,) = figure.get_axes()
    container: Any = axes.containers[0]
    assert (container.lines[0].get_linestyle() == "-") == scale
    assert "lower is better" in axes.get_ylabel()


def test_what_needs_no_model_is_a_line_of_the_table(tmp_path):
    path = finish(tmp_path / "lstm", on_balls("lstm"), {"4": 0.4, "curtain": 0.5}, weights=False)
    result = json.loads((path / "result.json").read_text())
    result["yardsticks"] = {"4": {"mean image": 0.31}, "curtain": {"mean image": 0.32}}
    (path / "result.json").write_text(json.dumps(result))
    (group,) = runs.group([read_record(path)])
    assert [line.label for line in group.table.lines] == ["lstm", "no model: mean image"]
    assert group.table.lines[1].ours["curtain"].text() == "32.0"
    what = curves.shift(group.table, "4")
    assert what is not None
    assert "Grey lines need no model" in curves.shift_picture(what).caption


def test_training_curves_have_means_dots_and_ticks_that_are_numbers():
    a = Series(np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0]))
    b = Series(np.array([1, 2]), np.array([3.0, 4.0]))
    one, steps = Series(np.array([5]), np.array([0.5])), np.arange(1, 50)
    panels = {
        "training loss": {"lstm": [a, b], "rim": [a]},
        "accuracy": {"lstm": [one]},
        "validation loss": {"lstm": [Series(steps, 10.0 / steps**2)]},
    }
    figure = curves.draw_training(panels)
    means, dots, ticks = figure.get_axes()
    lines: list[Any] = [
        [list(line.get_xdata()), list(line.get_ydata())] for line in means.get_lines()
    ]  # type: ignore[arg-type]
    assert lines[:2] == [[[1, 2, 3], [1, 2, 3]], [[1, 2], [3, 4]]]
    assert lines[2] == [[1, 2], [2, 3]], "the mean goes as far as all runs"
    assert lines[3:] == [[[1, 2, 3], [1, 2, 3]]]
    assert [line.get_marker() for line in dots.get_lines()] == ["."], "one point is no line"
    assert ticks.get_yscale() == "log"
    curves.png(figure)
    texts = [tick.get_text() for tick in ticks.get_yticklabels(which="both")]
    assert {"0.01", "0.1", "1"} <= set(texts)
    assert not any("$" in text for text in texts)


def test_no_two_labels_look_alike():
    labels = ["riglstm", "riglstm lr=0.1", "RIM", "all_h", "rand_h", "lstm"]
    given = curves.looks(labels)
    assert len(set(given.values())) == len(labels)
    assert given["riglstm"].colour == curves.GREEN
    assert given["RIM"].colour == curves.BLUE
    nine = curves.looks(["RigLSTM", *"abcdefgh"])
    assert len({look[:2] for look in nine.values()}) == 9, "a colour comes again, not the marker"
    assert len({look.colour for look in list(nine.values())[:8]}) == 8


def test_runs_are_named_by_what_sets_them_apart():
    specs = [on_digits("lstm"), on_digits("riglstm"), on_digits("riglstm", soft_update=False)]
    specs.append(on_digits("lstm", seed=1))
    labels = runs.label([spec.identity() for spec in specs])
    soft = "riglstm soft_update=True update_scale=0.25 update_bias=4.0"
    assert labels == ["lstm", soft, "riglstm soft_update=False", "lstm"]


def assert_needs_nothing(text: str) -> Element:
    """No script, nothing to fetch, every picture inside and described; returns the body."""
    assert not re.search(r"https?://|//cdn|@import|url\(|javascript:|<script|<link", text)
    # A parser of XML sees that all is closed, and that every mark is escaped.
    found = fromstring(text[text.index("<body>") : text.index("</html>")])
    for image in found.iter("img"):
        kind, _, data = image.attrib["src"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(PNG)
        assert image.attrib["alt"]
    ids = {section.attrib["id"] for section in found.iter("section")}
    assert {a.attrib["href"][1:] for a in found.iter("a")} == ids
    for cell in found.iter("th"):
        assert cell.attrib["scope"] in ("row", "col")
    return found


def test_everything_given_is_escaped():
    evil = '<script>alert("x")</script> & \'"'
    parts: list[page.Part] = [evil, [evil], curves.Picture(evil, evil, PNG)]
    parts.append(TextTable(evil, [evil, evil], [[evil, evil]], 1, notes=[evil]))
    sections = [page.Section(evil, parts), page.Section(evil, [])]
    found = assert_needs_nothing(page.render_page(evil, evil, sections))
    assert [image.attrib["alt"] for image in found.iter("img")] == [evil]
    assert "".join(found.itertext()).count(evil) >= 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs of all kinds: done, stopped, failed, and a folder that is none."""
    runs = tmp_path / "runs <b>"
    for model, seed in (("lstm", 0), ("lstm", 1), ("riglstm", 0)):
        values = {"4x4": 0.5 + seed / 10, "5x5": 0.25}
        finish(runs / f"{model}-{seed}", on_digits(model, seed), values)
    begin(runs / "riglstm-1", on_digits("riglstm", 1), ("4x4", "5x5"), updates=5)
    begin(runs / "rim-0", on_digits("rim"), ("4x4", "5x5"), updates=5)
    (runs / "rim-0" / "failed.json").write_text(json.dumps({"reason": "the loss <is> gone"}))
    (runs / "broken").mkdir()
    (runs / "broken" / "config.json").write_text("{}")
    return runs


def test_a_report_holds_figures_tables_records_and_what_is_missing(folder, tmp_path):
    said: list[str] = []
    out = report([folder], tmp_path, size=5, step=3, figures=tmp_path / "png", show=said.append)
    assert out == tmp_path / "report.html"
    text = out.read_text()
    found = assert_needs_nothing(text)
    words = " ".join("".join(found.itertext()).split())
    assert "6 runs, 3 of them done" in words
    assert "weights are those chosen on validation data of the training condition." in words
    assert "riglstm-1: riglstm on mnist, seed 1: not finished, update 5 of 10" in words
    assert "failed after update 5 of 10: the loss <is> gone" in words
    assert "broken/config.json: a run's configuration must have the fields" in words
    assert "50.0, 60.0 (2 runs)" in words
    assert "seed 0, trained on 4x4, weights of update 7, chosen on validation@4x4" in words
    assert '"hidden_size": 12' in words
    for fact in ("0123abc", '"torch": "' + torch.__version__.split("+")[0], "riglstm train"):
        assert fact in words
    titles = [t for t in found.itertext() if t.endswith(".") and ":" in t]
    for part in ("against the shift", "training", "cells awake at 5x5", "scores at step 3 of 5x5"):
        assert any(part in title for title in titles), part
    files = sorted((tmp_path / "png").iterdir())
    assert len(files) == len(list(found.iter("img"))) == 4
    assert all(file.read_bytes().startswith(PNG) for file in files)
    assert said == ["drawing riglstm, trained on 4x4"]


def test_what_weights_would_show_is_missing_and_the_page_is_written(folder, tmp_path, monkeypatch):
    text = report([folder], tmp_path, size=5, step=3, digits=(99,)).read_text()
    assert "pictures of riglstm" in text
    assert "test images must be numbers from 0 to 11" in text
    without_digits(monkeypatch)
    out = report([folder], tmp_path / "page.html", size=5, step=3)
    found = assert_needs_nothing(out.read_text())
    assert any("pictures of riglstm" in t and "no digits here" in t for t in found.itertext())
    assert len(list(found.iter("img"))) == 2


def test_a_paper_table_is_known_by_its_runs(tmp_path):
    values = {"14x14": 0.9, "16x16": 0.8, "19x19": 0.6, "24x24": 0.3}
    for seed in (0, 12345):
        (planned,) = plan("mnist", ["lstm"], 1, "paper")
        data = {**planned.spec.resolved(), "seed": seed}
        finish(tmp_path / f"renamed{seed}", RunSpec.from_json(data), values, weights=False)
    (group,) = runs.group([read_record(p) for p in runs.find([tmp_path])])
    assert group.table.name == "mnist"
    (line,) = group.table.lines
    assert line.ours["24x24"].values == pytest.approx((30, 30))
    assert line.paper["24x24"] == "21.9"
    assert group.table.title == "Sequential MNIST, trained on 14x14"
    assert group.table.missing == "RIM, EntNet, RMC, Transformer, GridLSTM, BRIM, RigLSTM"
    what = curves.shift(group.table, "14x14")
    assert what is not None
    assert "Hollow: the paper's figures" in curves.shift_picture(what).caption


def test_runs_that_two_tables_share_are_shown_in_that_which_has_more(tmp_path):
    for planned in plan("ablation", ["riglstm", "all_cells"], 1, "paper", tmp_path):
        finish(planned.folder, planned.spec, {"14x14": 0.9, "16x16": 0.8}, weights=False)
    (group,) = runs.group([read_record(p) for p in runs.find([tmp_path])])
    assert (group.table.name, len(group.table.lines)) == ("ablation", 2)


@pytest.mark.parametrize("complete", [True, False])
def test_a_quick_table_has_no_figures_of_the_paper(complete, tmp_path):
    """A run without a figure of its table does not lose the page."""
    (planned,) = plan("mnist", ["lstm"], 1, "quick")
    conditions = (planned.setting, *planned.spec.task_options["conditions"])
    values = dict.fromkeys(conditions if complete else ("7x7",), 0.5)
    finish(tmp_path / "lstm", planned.spec, values, weights=False)
    text = report([tmp_path / "lstm"], tmp_path).read_text().replace(str(tmp_path), "")
    assert "50.0 (1 run)" in text
    assert "quick" in text
    assert "hollow" not in text.lower()
    assert ", paper" not in text


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("lstm-0/weights", {}, r"folders with a config.json, got none in .*; train"),
        ("broken", {}, r"got none that can be read: .*broken cannot be read"),
        ("nowhere", {}, "got nothing of that name"),
        ("lstm-0/config.json", {}, "got a file"),
        ("", {"size": 4}, r"the step must be from 1 to size² = 16, .*, got 289"),
        (
            "",
            {"models": ["no_such_model"]},
            "models must be some of lstm, riglstm, rim, got 'no_such_model'",
        ),
        ("", {"device": "banana"}, "device must be auto, cpu, cuda or cuda:N, got 'banana'"),
        ("", {"out": "lstm-0/config.json/page.html"}, "File exists|Not a directory"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_work(path, options, said, folder, tmp_path):
    options["out"] = folder / options.get("out", tmp_path)
    with pytest.raises((ValueError, OSError), match=said):
        report([folder / path], **options)
    assert not (tmp_path / "report.html").exists()


DAMAGED = {
    "config.json": ("{", "null", "[1]", '{"task": "minigrid"}', "[" * 100_000, "\udcff", None),
    "result.json": ("{", "null", "{}", "[" * 100_000, "\udcff", None),
    "run.json": ("3", '{"resumed": [3]}', None),
    "metrics.csv": (
        *("step,name,value\n5,loss\n", "step,name,value\n5,a,b,c\n", "a\n\udcff\n", None),
        f"step,name,value\n5,{'x' * 200_000},1\n",
        f"step,name,value\n{'9' * 30},loss,1\n",
    ),
}
"""What a damaged folder may have in place of a file; None: a folder."""


def test_damaged_runs_are_named_and_the_others_are_shown(tmp_path, capsys):
    finish(tmp_path / "runs" / "good", on_digits("lstm"), weights=False)
    bad = []
    for file, contents in DAMAGED.items():
        for i, content in enumerate(contents):
            bad.append(tmp_path / "runs" / f"bad-{file}-{i}")
            finish(bad[-1], on_digits("lstm", 1 + len(bad)), weights=False)
            (bad[-1] / file).unlink()
            if content is None:
                (bad[-1] / file).mkdir()
            else:
                (bad[-1] / file).write_bytes(content.encode(errors="surrogateescape"))
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 1
    words, error = out.read_text(), capsys.readouterr().err
    assert f"{len(bad)} of the runs cannot be read, and the page names them:\n" in error
    for path in bad:
        assert f"{path} cannot be read: " in words
        assert f"{path} cannot be read: " in error
    for said in (
        "config.json-0/config.json must be a JSON file, and cannot be read: ",
        "config.json-2/config.json must hold a JSON object, got list",
        "result.json-2/result.json must be the result of a run, with rows",
        "metrics.csv-0/metrics.csv, line 2, must be step,name,value",
    ):
        assert said in words
    with pytest.raises(ValueError, match="must be the result of a run, with rows"):
        evaluate(tmp_path / "runs" / "bad-result.json-2", "cpu")
    assert "<td>50.0 (1 run)</td>" in words
    assert len(error) < 20_000
    assert main(["report", str(tmp_path / "runs" / "good"), "--out", str(out)]) == 0
    assert "What is missing" not in out.read_text()


def test_folders_are_read_as_a_stop_or_a_link_leaves_them(tmp_path):
    path = tmp_path / "runs" / "a"
    begin(path, on_digits("lstm"), ("4x4",))
    (path / "failed.json").write_text("{}")
    (path / "metrics.csv").write_text(
        "step,name,value\n5,train/loss,1.5\n10,train/loss,0.5\n15,train/lo"
    )
    record = read_record(path)
    assert (record.state, record.reason) == ("failed", "for a reason not recorded")
    (series,) = record.metrics.values()
    assert (list(series.steps), list(series.values)) == ([5, 10], [1.5, 0.5])
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / "up").symlink_to(tmp_path / "runs")
    assert runs.find([tmp_path / "runs"])[0] == path
    assert len(runs.find([tmp_path / "runs"])) <= 2


def test_a_loss_beside_the_metric_is_not_drawn_as_one(tmp_path, monkeypatch):
    run = finish(tmp_path, on_digits("lstm"), weights=False)
    lines = "".join(
        f"{step},validation/{name}@{c},{value}\n"
        for step in (5, 10)
        for c in ("4x4", "5x5")
        for name, value in (("loss", 3.0), ("accuracy", 0.5), ("answer_loss", 2.5))
    )
    (run / "metrics.csv").write_text(f"step,name,value\n{lines}")
    for state in ("done", "partial"):
        record = read_record(run)
        (run / "result.json").unlink(missing_ok=True)
        assert record.state == state
        assert record.metric == "accuracy"
        assert {c: max(s.values) for c, s in record.validated.items()} == {"4x4": 0.5, "5x5": 0.5}
    drawn: list[Any] = []
    draw = curves.draw_training
    monkeypatch.setattr(curves, "draw_training", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    (group,) = runs.group([record])
    assert curves.training_picture(group, "4x4") is not None
    for axes in drawn[0].get_axes():
        if axes.get_ylabel() == "accuracy in %":
            assert max(max(line.get_ydata()) for line in axes.get_lines()) <= 100


def test_a_heading_says_in_words_how_the_data_differ(tmp_path):
    for name, size in (("a", 3), ("b", 1000)):
        spec = on_digits("lstm")
        spec = replace(spec, task_options={**spec.task_options, "validation_size": size})
        finish(tmp_path / name, spec, weights=False)
    found = runs.group([read_record(path) for path in runs.find([tmp_path])])
    assert [group.table.title for group in found] == [
        f"Sequential MNIST (validation size {size}), trained on 4x4" for size in ("3", "1,000")
    ]


def test_copies_of_a_run_count_once(tmp_path):
    begin(tmp_path / "a", on_digits("lstm"), ("4x4", "5x5"))
    for name, seed in (("b", 0), ("c", 0), ("d", 1)):
        finish(tmp_path / name, on_digits("lstm", seed), weights=False)
    found = [read_record(path) for path in runs.find([tmp_path])]
    kept, said = runs.without_copies(found)
    assert [record.path.name for record in kept] == ["b", "d"]
    assert [line.partition(":")[0] for line in said] == [str(tmp_path / n) for n in ("a", "c")]
    text = report([tmp_path], tmp_path / "page").read_text()
    assert f"the same run as {tmp_path / 'b'}" in text
    assert "50.0, 50.0 (2 runs)" in text
