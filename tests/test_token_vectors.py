"""Vectors of tokens: the gradient of their table is summed in a fixed order on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from helpers import seeded
from riglstm.lab.tasks import common as module
from riglstm.lab.tasks.common import InOrder, lookup


def test_it_is_an_embedding() -> None:
    ids = torch.randint(0, 3, (7, 2, 2), generator=seeded(0))
    table = torch.randn(3, 4, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    towards = torch.randn(7, 2, 2, 4, generator=seeded(2), dtype=torch.float64)
    want = F.embedding(ids, table)
    (d_want,) = torch.autograd.grad((want * towards).sum(), table)
    for find in (lookup, InOrder.apply):
        got = find(ids, table)
        (d_got,) = torch.autograd.grad((got * towards).sum(), table)
        assert torch.equal(got, want)
        assert torch.equal(d_got, d_want)


def test_its_gradient_can_be_differentiated() -> None:
    ids = torch.tensor([[0, 1], [1, 1]])
    table = torch.randn(2, 3, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    found = []
    for find in (F.embedding, InOrder.apply):
        (first,) = torch.autograd.grad(find(ids, table).pow(3).sum(), table, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), table)
        by_function = torch.func.grad(lambda t, find=find: find(ids, t).pow(3).sum())(table)
        found.append((first.detach(), second, by_function))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert found[0][1].any()


@pytest.mark.parametrize(("mode", "warn_only"), [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("fails", [False, True])
def test_only_its_gradient_asks_for_a_fixed_order(
    mode: bool, warn_only: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, gradient = [], module._gradient

    def watched(*given: Any) -> Any:
        strict = not torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append((torch.are_deterministic_algorithms_enabled(), strict))
        if fails:
            raise RuntimeError("no memory")
        return gradient(*given)

    monkeypatch.setattr(module, "_gradient", watched)
    table = torch.ones(2, 3, requires_grad=True)
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        loss = InOrder.apply(torch.tensor([0, 1, 1]), table).sum()
        if fails:
            with pytest.raises(RuntimeError, match="no memory"):
                loss.backward()
        else:
            loss.backward()
        now = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(True, mode and not warn_only)]
    assert (now, warns) == (mode, warn_only)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("V", [2, 24, 48])
def test_a_gradient_of_few_symbols_has_the_same_bits_each_time(V: int) -> None:
    ids = torch.randint(0, V, (196, 32, 1), generator=seeded(0)).cuda()
    table = torch.randn(V, 600, generator=seeded(1)).cuda().requires_grad_()
    towards = torch.randn(196, 32, 1, 600, generator=seeded(2)).cuda()
    found = {
        torch.autograd.grad((lookup(ids, table) * towards).sum(), table)[0].cpu().numpy().tobytes()
        for _ in range(50)
    }
    assert len(found) == 1
