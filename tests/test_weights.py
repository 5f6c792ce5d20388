"""The trained networks in `weights/` do on a CPU what their tables say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from riglstm.lab.tables.run import finished, load

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
FILES = ROOT / "weights"
needs_pictures = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real pictures in {DATA}")


@pytest.mark.slow
@pytest.mark.skipif(not FILES.is_dir(), reason="there are no weights in this copy")
@pytest.mark.parametrize(
    ("task", "condition", "many", "answers"),
    [
        ("copying", "P=50", 32, 10),
        ("copying", "P=200", 32, 10),
        # Of ten thousand, at a size not trained on.
        pytest.param("mnist", "16x16", 128, 1, marks=needs_pictures),
    ],
)
def test_the_weights_are_as_often_right_as_was_recorded(task, condition, many, answers):
    """On the first examples of the test, within three standard deviations of so many answers."""
    file = FILES / f"{task}-riglstm.safetensors"
    run, (_, data, net) = finished(file), load(file, "cpu", DATA)
    batch = data.examples(condition, "test", slice(0, many))
    with torch.no_grad():
        logits, targets = net(batch.inputs), batch.targets
    if answers > 1:
        logits, targets = logits[-answers:], targets[-answers:]
    right = float((logits.argmax(-1) == targets).float().mean())
    (recorded,) = (
        row["value"]
        for row in run.rows
        if (row["condition"], row["chosen_on"]) == (condition, f"validation@{run.trained_on}")
    )
    spread = 3 * (recorded * (1 - recorded) / (many * answers)) ** 0.5
    assert abs(right - recorded) < spread
