"""What every task keeps to: what a batch depends on, what a score is, and what is refused.

And the look-up of tokens, whose gradient is summed in a fixed order on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from helpers import seeded
from riglstm.lab.cli.train import EXAMPLES
from riglstm.lab.tasks import TASKS, common
from riglstm.lab.tasks.balls import Balls
from riglstm.lab.tasks.base import means
from riglstm.lab.tasks.common import InOrder, lookup
from riglstm.lab.tasks.copying import Copying, CopyingTask
from riglstm.lab.tasks.images import CIFAR10
from riglstm.lab.train.config import score
from riglstm.models import build
from test_balls import FILMS
from test_images import noise, small
from train_helpers import assert_same
from train_task import CPU

MADE: dict[str, Callable[[torch.device], Any]] = {
    "copying": lambda device: Copying(
        **{"L": 2, "P_from": 20, "M": 2, "input_size": 8, "digits": 4, "test_size": 37},
        **{"batch_size": 7, "dropout": 0.5},
    ).open(device),
    "mnist": lambda device: small(noise(50, 37), device=device, batch_size=7, dropout=0.5),
    "cifar": lambda device: small(noise(50, 37, 3), CIFAR10, device, batch_size=7, flip=True),
    "balls": lambda device: Balls(conditions=("balls=2,curtain",), **FILMS).open(device),
}


@pytest.fixture(params=MADE)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[torch.device], Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return MADE[request.param]


def test_every_task_is_held_to_the_contract_and_has_an_example():
    assert list(MADE) == list(TASKS) == list(EXAMPLES) == ["copying", "mnist", "cifar", "balls"]
    assert TASKS["copying"] is Copying


def test_a_batch_depends_on_seed_and_step_alone(make):
    first, second = make(CPU), make(CPU)
    # Some of them within two epochs.
    steps = [3, 0, 11, 5, 4, 12]
    before = torch.get_rng_state()
    for step in steps:
        first.batch(0, step)
    for step in sorted(steps):
        assert_same(first.batch(0, step), second.batch(0, step))
    drawn = {
        tuple(first.batch(seed, step).inputs.flatten().tolist())
        for seed in range(3)
        for step in range(5)
    }
    assert len(drawn) == 15
    assert torch.equal(before, torch.get_rng_state())
    # Several devices share one batch.
    whole = first.batch(0, 5)
    for rank in range(3):
        part, rows = first.batch(0, 5, slice(rank, None, 3)), slice(rank, None, 3)
        assert torch.equal(part.inputs, whole.inputs[:, rows])
        targets = whole.targets[rows] if whole.targets.dim() == 1 else whole.targets[:, rows]
        assert torch.equal(part.targets, targets)


def test_a_score_depends_on_neither_shares_nor_batches_and_leaves_every_mode_as_it_was(
    make, monkeypatch
):
    task = make(CPU)
    net, condition = task.network(build("lstm", task.input_size, 6)), task.conditions[-1]
    net.core.eval()
    whole = score(net, task, condition, "test")
    assert_same(score(net, task, condition, "test"), whole)
    assert net.training
    assert not net.core.training
    assert whole["count"] == task.size("test")
    for total in whole.values():
        assert (total.dtype, total.dim(), total.requires_grad) == (torch.float64, 0, False)
    # Few sequences at a time.
    monkeypatch.setattr("riglstm.lab.tasks.common.CPU_TOKENS", 16 * 8 * 2)
    for parts in (1, 3, 50):
        shares = [score(net, task, condition, "test", share=(i, parts)) for i in range(parts)]
        for name, total in whole.items():
            added = sum(share[name].item() for share in shares)
            assert added == pytest.approx(total.item(), rel=0, abs=1e-5), name


# torch warns that this mode may miss some waits.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_nothing_waits_within_an_epoch_and_data_are_those_of_the_cpu(make):
    there, here = make(torch.device("cuda")), make(CPU)
    there.ready()
    net = there.network(build("lstm", there.input_size, 6)).cuda()
    there.loss(net, there.batch(0, 0))[0].backward()
    # Which pictures are mirrored is drawn on the CPU.
    waits = getattr(there.config, "flip", False)
    try:
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        batch = there.batch(0, 1)
        there.loss(net, batch)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.inputs.is_cuda
    # Copying draws training data on its device.
    if not isinstance(here, CopyingTask):
        assert_same([part.cpu() for part in batch], list(here.batch(0, 1)))
    own = here.network(build("lstm", here.input_size, 6))
    own.load_state_dict(net.state_dict())
    condition = here.conditions[-1]
    on_gpu = means(score(net, there, condition, "test"))
    assert on_gpu == pytest.approx(means(score(own, here, condition, "test")), rel=1e-4)


def test_a_split_or_a_core_that_does_not_fit_is_refused(make):
    task, split = make(CPU), "training"
    with pytest.raises(ValueError, match="split must be validation or test, got 'training'"):
        task.size(split)
    if hasattr(task, "examples"):
        with pytest.raises(ValueError, match="split must be validation or test, got 'training'"):
            task.examples(task.trained_on, split)
    wanted = f"must have input_size={task.input_size} and batch_first=False, got"
    with pytest.raises(ValueError, match=f"{wanted} 5 and False"):
        task.network(build("lstm", 5, 6))
    with pytest.raises(ValueError, match=f"{wanted} {task.input_size} and True"):
        task.network(build("lstm", task.input_size, 6, batch_first=True))


def test_a_look_up_of_tokens_is_an_embedding():
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


@pytest.mark.parametrize(("mode", "warn_only"), [(False, False), (True, True), (True, False)])
def test_only_the_gradient_of_a_look_up_asks_for_a_fixed_order(mode, warn_only, monkeypatch):
    def now() -> tuple[bool, bool]:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), warns

    def fails(*given: Any) -> None:
        assert now() == (True, warn_only or not mode), "strict where the caller is"
        raise RuntimeError("no memory")

    monkeypatch.setattr(common, "_gradient", fails)
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        loss = InOrder.apply(torch.tensor([0, 1, 1]), torch.ones(2, 3, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="no memory"):
            loss.backward()
        assert now() == (mode, warn_only)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("V", [2, 24, 48])
def test_a_gradient_of_few_tokens_has_the_same_bits_each_time(V):
    ids = torch.randint(0, V, (196, 32, 1), generator=seeded(0)).cuda()
    table = torch.randn(V, 600, generator=seeded(1)).cuda().requires_grad_()
    towards = torch.randn(196, 32, 1, 600, generator=seeded(2)).cuda()
    found = {
        torch.autograd.grad((lookup(ids, table) * towards).sum(), table)[0].cpu().numpy().tobytes()
        for _ in range(50)
    }
    assert len(found) == 1
