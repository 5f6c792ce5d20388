"""Pictures of a trace of one's own: what they show, what they refuse, and the saved file."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from riglstm import RigLSTM, plot
from riglstm.layer import Trace
from riglstm.models import build
from riglstm.plot.reading import correlation, number, percent

OPTIONS: dict[str, Any] = {"num_cells": 3, "active_cells": 2, "num_views": 4, "views_per_cell": 3}


@pytest.fixture
def rnn() -> RigLSTM:
    torch.manual_seed(0)
    return RigLSTM(2, 12, **OPTIONS)


def shown(axes: Axes) -> Any:
    """The array of an image."""
    (image,) = axes.get_images()
    return image.get_array()


def with_images(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.get_axes() if axes.get_images()]


def made(awake: list[bool], views: list[list[bool]], numbers: list[list[float]]) -> Trace:
    """One step of one sequence of two cells."""
    peers, ones = torch.ones(1, 1, 2, 2, dtype=torch.bool), torch.ones(1, 1, 2)
    scores = torch.tensor(numbers)[None, None]
    taken = torch.tensor(views)[None, None]
    active = torch.tensor(awake)[None, None]
    return Trace(0, False, ones, active, taken, peers, scores, scores, ones)


def test_a_cell_that_wakes_on_the_stroke_correlates_with_it():
    stroke = torch.tensor([1, 0, 0, 1, 0, 0, 1, 1, 0])
    on, line = stroke.bool(), torch.eye(3).bool().flatten()
    active = torch.stack([on, ~on, torch.ones(9, dtype=torch.bool), line], 1).unsqueeze(1)
    r = correlation(active, stroke.unsqueeze(1))[0]
    np.testing.assert_allclose(r[:2], [1, -1])
    assert math.isnan(r[2])
    np.testing.assert_allclose(r[3], np.corrcoef(line.numpy(), stroke.numpy())[0, 1])
    said = [percent(share) for share in (0, 0.001, 0.25, 0.999, 1)]
    assert said == ["0%", "<1%", "25%", ">99%", "100%"]
    assert [number(r) for r in (-0.5, math.nan)] == ["−0.50", "–"]


def test_cells_of_pictures_are_drawn_as_pictures(rnn):
    pixels = torch.rand(4, 5, 3, 2)
    traces = rnn.trace(pixels.flatten(1, 2).transpose(0, 1))
    figure = plot.cells(traces, pixels[..., :1].squeeze(3), sequences=[3, 1], labels=["a", "b"])
    axes = with_images(figure)
    assert len(axes) == 2 * (1 + 3)
    for row, b in enumerate((3, 1)):
        np.testing.assert_array_equal(shown(axes[4 * row]), pixels[b, :, :, 0])
        for j in range(3):
            active = traces[0].active[:, b, j].reshape(5, 3)
            np.testing.assert_array_equal(shown(axes[4 * row + 1 + j]), active)
    assert [a.get_title() for a in axes[:4]] == ["input", "cell 0", "cell 1", "cell 2"]
    share = percent(float(traces[0].active[:, 3, 0].float().mean()))
    assert axes[1].get_xlabel().startswith(f"awake {share}\nr = ")
    assert [axes[0].get_xlabel(), axes[4].get_xlabel()] == ["a", "b"]


def test_cells_of_any_sequence_are_rows_under_its_input():
    rnn = RigLSTM(2, 12, num_layers=2, bidirectional=True, batch_first=True, **OPTIONS)
    x = torch.randn(5, 9, 2)
    traces = rnn.trace(x)
    axes = with_images(plot.cells(traces, x))
    # Of the first three sequences: the input, and two layers in two directions.
    assert len(axes) == 3 * (1 + 4)
    np.testing.assert_array_equal(shown(axes[5]), x[1].T)
    for i, trace in enumerate(traces):
        np.testing.assert_array_equal(shown(axes[6 + i]), trace.active[:, 1].T)
    labels = [t.get_text() for t in axes[2].get_yticklabels()]
    assert labels == [f"layer 0 reverse cell {j}" for j in range(3)]
    assert len(with_images(plot.cells(traces[0]))) == 3


def test_one_number_a_step_is_a_line_and_no_picture_of_one_column():
    rnn, x = RigLSTM(1, 12, batch_first=True, **OPTIONS), torch.randn(2, 50, 1)
    figure = plot.cells(rnn.trace(x), x)
    assert len(with_images(figure)) == 2
    (line,) = figure.get_axes()[0].get_lines()
    np.testing.assert_array_equal(line.get_ydata(), x[0, :, 0])


@pytest.mark.parametrize("scores", [[[1.0, math.nan], [3.0, -4.0]], [[math.nan] * 2] * 2])
def test_scores_that_are_no_numbers_are_left_empty(scores):
    found = made([True, False], [[True, False], [True, True]], scores)
    left = with_images(plot.views(found, step=1))[0]
    said = [text.get_text() for text in left.texts]
    assert [not text for text in said] == [math.isnan(v) for row in scores for v in row]
    none = found._replace(keep=torch.full_like(found.keep, math.nan))
    figure = plot.keep(none, torch.tensor([[[math.nan, 1.0]]]))
    figure.draw_without_rendering()
    assert shown(with_images(figure)[1]).mask.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keep_is_drawn_where_a_cell_was_awake_in_any_dtype(dtype, rnn):
    x = torch.randn(9, 1, 2, dtype=dtype)
    (trace,) = rnn.to(dtype).trace(x)
    trace = trace._replace(keep=trace.keep.to(dtype))
    first, *_ = with_images(plot.keep(trace, x[..., :1]))
    kept = shown(first)
    np.testing.assert_array_equal(kept.mask, ~trace.active[:, 0].T.numpy())
    np.testing.assert_array_equal(kept.data, trace.keep[:, 0].T.float())
    for figure in (plot.views(trace), plot.views(trace, step=3), plot.cells(trace, x)):
        figure.draw_without_rendering()


def test_views_are_shares_of_the_steps_awake(rnn):
    (trace,) = rnn.trace(torch.randn(40, 2, 2))
    axes = with_images(plot.views(trace, sequences=[1]))
    maps = [a for a in axes if a.get_xlabel() in ("view of the input", "cell listened to")]
    awake = trace.active[:, 1]
    for where, taken in zip(maps, (trace.views, trace.peers), strict=True):
        for j in range(3):
            mine = taken[awake[:, j], 1, j].double().mean(0)
            np.testing.assert_allclose(shown(where)[j], mine)


def test_what_awake_cells_took_in_is_framed():
    found = made([True, False], [[True, False], [True, True]], [[1.0, -2.0], [3.0, 4.0]])
    left, right = with_images(plot.views(found, step=1))[:2]

    def frames(axes: Axes) -> list[tuple[int, int, object]]:
        patches = [p for p in axes.patches if isinstance(p, Rectangle)]
        return [(round(p.get_x()), round(p.get_y()), p.get_linestyle()) for p in patches]

    maps = {a.get_xlabel(): a for a in (left, right)}
    assert frames(maps["view of the input"]) == [(0, 0, "-")]
    assert frames(maps["cell listened to"]) == [(0, 0, ":"), (1, 0, "-")]
    assert [t.get_text() for t in left.get_yticklabels()] == ["0", "1 asleep"]
    weighed = found._replace(views=found.views.float(), peers=found.peers.float())
    for axes in with_images(plot.views(weighed, step=1))[:2]:
        assert not frames(axes)


def test_a_model_without_a_part_is_refused_by_its_name():
    core: Any = build("rmc", 4, 12, num_slots=3, num_heads=2)
    (trace,) = core.trace(torch.randn(4, 1, 4))
    assert with_images(plot.views(trace))
    with pytest.raises(ValueError, match="a trace with 'active', got one of a model that has none"):
        plot.cells(trace)


def test_what_does_not_fit_the_trace_is_refused(rnn):
    traces = rnn.trace(torch.randn(6, 2, 2))
    with pytest.raises(ValueError, match=r"T = 6 and B = 2, or pictures .* = 6, got shape \(5, 2"):
        plot.cells(traces, torch.randn(5, 2, 2))
    with pytest.raises(ValueError, match=r"sequences must be numbers from 0 to 1, got \[2\]"):
        plot.cells(traces, sequences=[2])
    with pytest.raises(ValueError, match="labels must be 1, one a sequence, got 2"):
        plot.keep(traces, sequences=[0], labels=["a", "b"])
    with pytest.raises(ValueError, match="step must be from 1 to 6, the steps of the trace, got 0"):
        plot.views(traces, step=0)
    with pytest.raises(TypeError, match=r"expected what rnn\.trace\(x\) returns"):
        plot.cells(torch.ones(3))  # type: ignore[arg-type]


def decoded(array: dict[str, Any]) -> Any:
    kind = {"uint8": "u1", "float32": "<f4"}[array["dtype"]]
    return np.frombuffer(base64.b64decode(array["data"]), kind).reshape(array["shape"])


def test_a_saved_trace_holds_the_bits_of_the_trace(rnn, tmp_path):
    x = torch.randn(6, 2, 2)
    (trace,), likely = rnn.trace(x), torch.rand(6, 2, 3)
    file = tmp_path / "trace.json"
    plot.save_trace(file, [trace], x, probabilities=likely, classes=["a", "b", "c"])
    said = json.loads(file.read_text())
    assert (said["format"], said["version"]) == ("riglstm-trace", 1)
    assert (said["steps"], said["sequences"], said["picture"]) == (6, 2, None)
    assert said["classes"] == ["a", "b", "c"]
    (layer,) = said["layers"]
    for name in ("active", "views", "peers", "view_scores", "peer_scores", "keep"):
        np.testing.assert_array_equal(decoded(layer[name]), getattr(trace, name))
    np.testing.assert_array_equal(decoded(said["input"]), x)
    np.testing.assert_array_equal(decoded(said["probabilities"]), likely)
    pictures = torch.rand(2, 2, 3)
    said = plot.trace_content(trace, pictures)
    assert (said["picture"], said["probabilities"]) == ((2, 3), None)
    np.testing.assert_array_equal(decoded(said["input"])[:, 1, 0], pictures[1].flatten())


def test_a_trace_that_is_too_large_or_does_not_fit_is_not_saved(rnn, tmp_path, monkeypatch):
    file, traces = tmp_path / "trace.json", rnn.trace(torch.randn(6, 2, 2))
    with pytest.raises(ValueError, match=r"\(T, B, classes\) with T = 6 and B = 2, got \(6, 3\)"):
        plot.save_trace(file, traces, probabilities=torch.rand(6, 3))
    with pytest.raises(ValueError, match="got 2 names for no probabilities"):
        plot.save_trace(file, traces, classes=["a", "b"])
    monkeypatch.setattr(plot, "MOST_BYTES", 1000)
    too_large = r"arrays of at most 0 MiB, got .* for 6 steps of 2 sequences; trace fewer of them"
    with pytest.raises(ValueError, match=rf"{too_large}, as in"):
        plot.save_trace(file, traces)
    assert not file.exists()


def test_without_matplotlib_it_says_what_to_install_and_saves_all_the_same(tmp_path):
    code = f"""
import sys
for name in ("matplotlib", "numpy"):
    sys.modules[name] = None
import torch
from riglstm import RigLSTM, plot
traces = RigLSTM(2, 6, num_cells=2).trace(torch.ones(4, 1, 2))
plot.save_trace({str(tmp_path / "trace.json")!r}, traces)
for draw in (plot.cells, plot.keep, plot.views):
    try:
        draw(traces)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("install it with: pip install matplotlib") == 3
    assert json.loads((tmp_path / "trace.json").read_text())["steps"] == 4


@pytest.mark.slow
def test_the_gallery_is_drawn_by_the_code_on_its_page(tmp_path):
    docs = Path(__file__).parents[1] / "docs"
    subprocess.run([sys.executable, docs / "gallery.py", tmp_path], check=True)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in (docs / "gallery").iterdir()}
    assert len(drawn) >= 4
    page = (docs / "gallery.md").read_text(encoding="utf-8")
    for name in drawn:
        assert f"](gallery/{name})" in page
        now, then = (imread(folder / name) for folder in (tmp_path, docs / "gallery"))
        # Another machine rounds otherwise, and a cell may wake elsewhere, but not many.
        assert now.shape == then.shape, f"python docs/gallery.py draws {name} anew"
        assert np.abs(now - then).mean() < 0.02, f"python docs/gallery.py draws {name} anew"
    assert json.loads((tmp_path / "trace.json").read_text())["picture"] == [16, 16]
