"""Training on a GPU: captured, in every precision, stopped and gone on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import riglstm.lab.train.graphed
from riglstm.lab.train.config import Fit
from riglstm.lab.train.graphed import GraphedModule
from train_helpers import outcome
from train_task import QUICK, Halves, network, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = replace(QUICK, device="cuda")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of each captured core."""
    calls: list[int] = []

    class Counted(GraphedModule):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.number = len(calls)
            calls.append(0)

        def __call__(self, *given: Any) -> Any:
            calls[self.number] += 1
            return super().__call__(*given)

    monkeypatch.setattr(riglstm.lab.train.graphed, "GraphedModule", Counted)
    return calls


def trained(path: Path, config: Fit, task: Halves | None = None, **options: Any) -> nn.Module:
    task = Halves(torch.device("cuda", 0)) if task is None else task
    return train(path, config, task=task, net=network(task, **options))


@pytest.mark.parametrize("model", ["lstm", "riglstm"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_captured_run_is_close_to_one_that_is_not(model, precision, tmp_path, captures):
    config = replace(GPU, precision=precision, updates=30)
    options: dict[str, Any] = {"model": model, "hidden_size": 12}
    with_graphs = trained(tmp_path / "a", config, **options)
    assert captures == [30]
    without = trained(tmp_path / "b", replace(config, capture=False), **options)
    assert captures == [30]
    assert all(p.is_cuda for p in with_graphs.parameters())
    # Dropout draws from the same state in both: a run captured with other masks is far off.
    tolerance = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 2e-2}[precision]
    for a, b in zip(with_graphs.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_a_run_on_a_gpu_goes_on_close_to_where_it_would_have_come(tmp_path):
    task = Halves(torch.device("cuda", 0))
    whole = trained(tmp_path / "whole", GPU)

    def stop(update, net, loss):
        if update == 31:
            raise ZeroDivisionError
        return loss

    with pytest.raises(ZeroDivisionError):
        trained(tmp_path / "parts", GPU, Halves(task.device, twist=stop))
    net = train(tmp_path / "parts", GPU, task=task, resume=True)
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    one, two = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    assert one["files"] == two["files"]
    assert len(one["metrics"]) == len(two["metrics"])


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_products_are_in_the_precision_that_was_asked_for(precision, tmp_path):
    seen = set()

    def look(update, net, loss):
        x = torch.full((64, 64), 1 + 2**-12, device=loss.device)
        exact = bool((x @ x)[0, 0] == 64 * (1 + 2**-12) ** 2)
        seen.add((exact, torch.backends.cudnn.allow_tf32))
        return loss

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    config = replace(GPU, precision=precision, updates=9, warmup=0)
    trained(tmp_path, config, Halves(torch.device("cuda", 0), twist=look))
    assert seen == {(precision == "fp32", precision == "tf32")}
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
