"""The trained networks in `weights/` do on a CPU what their tables say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from riglstm.lab.tables.run import finished, load

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
FILES = ROOT / "weights"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILES.is_dir(), reason="there are no weights in this copy"),
]


def right(file: str, condition: str, many: int) -> float:
    """The share of right answers among the first examples of the test."""
    _, task, net = load(FILES / file, "cpu", DATA)
    batch = task.examples(condition, "test", slice(0, many))  # type: ignore[attr-defined]
    with torch.no_grad():
        logits = net(batch.inputs)
    if "P=" in condition:
        logits, targets = logits[-10:], batch.targets[-10:]
        return float((logits.argmax(-1) == targets).float().mean())
    return float((logits.argmax(-1) == batch.targets).float().mean())


def recorded_of(file: str, condition: str) -> float:
    """What the file has from its run: the weights that its training condition chose."""
    run = finished(FILES / file)
    rows = [r for r in run.result["rows"] if r["condition"] == condition]
    (value,) = (r["value"] for r in rows if r["chosen_on"] == f"validation@{run.trained_on}")
    return float(value)


@pytest.mark.parametrize("condition", ["P=50", "P=200"])
def test_the_copying_weights_copy(condition):
    recorded = recorded_of("copying-riglstm.safetensors", condition)
    # Three standard deviations of 320 digits.
    least = recorded - 3 * (recorded * (1 - recorded) / 320) ** 0.5
    assert right("copying-riglstm.safetensors", condition, 32) > least


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real pictures in {DATA}")
def test_the_mnist_weights_read_digits_at_another_size():
    # Of ten thousand, at a size not trained on; within three standard deviations of 128.
    recorded = recorded_of("mnist-riglstm.safetensors", "16x16")
    spread = 3 * (recorded * (1 - recorded) / 128) ** 0.5
    assert abs(right("mnist-riglstm.safetensors", "16x16", 128) - recorded) < spread
