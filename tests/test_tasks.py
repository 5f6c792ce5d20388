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
from riglstm.lab.tasks.images import CIFAR10, MNIST, ImageTask, SequentialImages
from riglstm.lab.train.config import products
from riglstm.models import build
from test_images import noise
from train_helpers import assert_same
from train_task import CPU


def pictures(config: SequentialImages, device: torch.device) -> ImageTask:
    """Random pixels, of which 40 pictures are for training."""
    return ImageTask(config, lambda: noise(50, 37, config.channels), device)


SMALL: dict[str, Any] = {"size": 4, "conditions": ("5x5",), "input_size": 6, "batch_size": 7}
FILMS = {"sequences": 7, "validation_size": 5, "test_size": 5, "batch_size": 3, "frames": 8}
MADE: dict[str, Callable[[torch.device], Any]] = {
    "copying": lambda device: Copying(
        **{"L": 2, "P_from": 20, "M": 2, "input_size": 8, "digits": 4, "test_size": 37},
        **{"batch_size": 7, "dropout": 0.5},
    ).open(device),
    "mnist": lambda device: pictures(MNIST(**SMALL, dropout=0.5), device),
    "cifar": lambda device: pictures(CIFAR10(**SMALL, flip=True), device),
    "balls": lambda device: Balls(
        conditions=("balls=2,curtain",), context=3, rollout_frames=4, **FILMS
    ).open(device),
}


@pytest.fixture(params=MADE)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[torch.device], Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RIGLSTM_DATA", raising=False)
    return MADE[request.param]


def test_tasks_are_found_by_their_names() -> None:
    assert list(TASKS) == ["copying", "mnist", "cifar", "balls"]
    assert TASKS["copying"] is Copying
    # Each is held to the contract here, and has an example.
    assert list(MADE) == list(TASKS) == list(EXAMPLES)


def test_a_batch_depends_on_seed_and_step_alone(make: Callable[[torch.device], Any]) -> None:
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
    make: Callable[[torch.device], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make(CPU)
    net, condition = task.network(build("lstm", task.input_size, 6)), task.conditions[-1]
    net.core.eval()
    whole = task.score(net, condition, "test")
    assert_same(task.score(net, condition, "test"), whole)
    assert net.training
    assert not net.core.training
    assert whole["count"] == task.size("test")
    for total in whole.values():
        assert (total.dtype, total.dim(), total.requires_grad) == (torch.float64, 0, False)
    # Few sequences at a time.
    monkeypatch.setattr("riglstm.lab.tasks.common.CPU_TOKENS", 16 * 8 * 2)
    for parts in (1, 3, 50):
        shares = [task.score(net, condition, "test", (i, parts)) for i in range(parts)]
        for name, total in whole.items():
            added = sum(share[name].item() for share in shares)
            assert added == pytest.approx(total.item(), rel=0, abs=1e-5), name


# torch warns that this mode may miss some waits.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_nothing_waits_within_an_epoch_and_data_are_those_of_the_cpu(
    make: Callable[[torch.device], Any],
) -> None:
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
    with products("fp32", there.device):
        on_gpu = means(there.score(net, condition, "test"))
    assert on_gpu == pytest.approx(means(here.score(own, condition, "test")), rel=1e-4)


def test_a_split_or_a_core_that_does_not_fit_is_refused(
    make: Callable[[torch.device], Any],
) -> None:
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


MIXED = ("P=100", "L=10,P=50", "L=20,P=50", "L=10,P=100")
SPELLINGS = ("678", "balls=6-8", "balls=06-08", "balls=3,curtain", "curtain", "balls=4")


@pytest.mark.parametrize(
    ("config", "conditions"),
    [
        (Copying(), ("P=50", "P=100", "P=200", "P=400")),
        (Copying(conditions=MIXED), ("P=50", "P=100", "L=20,P=50")),
        (MNIST(), ("14x14", "16x16", "19x19", "24x24")),
        (MNIST(size=16), ("16x16", "19x19", "24x24")),
        (CIFAR10(), ("16x16", "19x19", "24x24", "32x32")),
        (Balls(conditions=SPELLINGS), ("4", "678", "curtain")),
        (Balls(balls="balls=6-8", conditions=SPELLINGS), ("678", "curtain", "4")),
    ],
)
def test_conditions_begin_with_that_of_training_and_are_written_in_one_way(
    config: Any, conditions: tuple[str, ...]
) -> None:
    task = config.open(CPU)
    assert task.conditions == conditions
    assert task.trained_on == conditions[0]


@pytest.mark.parametrize(
    ("config", "option", "value", "message"),
    [
        (Copying, "M", 0, "M must be a whole number from 1 on, got 0"),
        (Copying, "L", True, "L must be a whole number from 1 on, got True"),
        (Copying, "P", 2.5, "P must be a whole number from 1 on, got 2.5"),
        (Copying, "P_from", 51, "P_from must be a whole number from 1 to 50, got 51"),
        (Copying, "digits", 1, "digits must be a whole number from 2 to 250, got 1"),
        (Copying, "M", 7, "must be a multiple of M = 7, got 600; take input_size=595"),
        (Copying, "loss_on", "last", "loss_on must be all or answer, got 'last'"),
        (Copying, "dropout", 1.0, "dropout must be at least 0 and below 1, got 1.0"),
        (Copying, "conditions", ("P=0",), "P in 'P=0' must be a whole number from 1 on, got 0"),
        *(
            (Copying, "conditions", (condition,), "must be like P=100 or L=20,P=100, got")
            for condition in ("", "100", "P=x", "P=-1", "P=1.5", "P=100,", "P=1,P=2")
        ),
        (MNIST, "size", 0, "size must be a whole number from 1 on, got 0"),
        (MNIST, "test_size", 0, "test_size must be a whole number from 1 on, got 0"),
        (MNIST, "threshold", 256, "threshold must be a whole number from 1 to 255, got 256"),
        (MNIST, "dropout", -0.1, "dropout must be at least 0 and below 1, got -0.1"),
        (CIFAR10, "input_size", 100, "the 3 channels, got 100; take input_size=99"),
        (CIFAR10, "input_size", 2, "the 3 channels, got 2; take input_size=3"),
        (CIFAR10, "levels", 1, "levels must be a whole number from 2 to 256, got 1"),
        *(
            (MNIST, "conditions", (size,), "like 19x19, or rows and columns like 14x24, got")
            for size in ("", "19", "19x0", "19X19", "019x019", "-1x-1", "19x19x19")
        ),
        (Balls, "balls", "five", "one of 4, 678, curtain, or like balls=5, .* got 'five'"),
        (Balls, "conditions", ("balls=5,veil",), "got 'balls=5,veil'"),
        (Balls, "conditions", ("balls=",), "got 'balls='"),
        (Balls, "conditions", ("balls=0",), "must be from 1 to 9, .* got 'balls=0'"),
        (Balls, "conditions", ("balls=8-6",), "the lower one first, got 'balls=8-6'"),
        (Balls, "conditions", ("balls=7,curtain",), "with a curtain, .* from 1 to 6, .* got 'b"),
        (Balls, "frames", 24, r"must be at least context \+ rollout_frames = 25, got 24"),
        (Balls, "sequences", 10, "batch_size must be a whole number from 1 to 10, got 64"),
        (Balls, "validation_size", 0, "validation_size must be a whole number from 1 on, got 0"),
        (Balls, "data_seed", -1, "data_seed must be a whole number from 0 to"),
        (Balls, "train_rollout", 50, "train_rollout must be a whole number from 0 to 49, got 50"),
    ],
)
def test_options_that_cannot_work_are_refused(
    config: Callable[..., Any], option: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(**{option: value})


def test_a_look_up_of_tokens_is_an_embedding() -> None:
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
def test_only_the_gradient_of_a_look_up_asks_for_a_fixed_order(
    mode: bool, warn_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_gradient_of_few_tokens_has_the_same_bits_each_time(V: int) -> None:
    ids = torch.randint(0, V, (196, 32, 1), generator=seeded(0)).cuda()
    table = torch.randn(V, 600, generator=seeded(1)).cuda().requires_grad_()
    towards = torch.randn(196, 32, 1, 600, generator=seeded(2)).cuda()
    found = {
        torch.autograd.grad((lookup(ids, table) * towards).sum(), table)[0].cpu().numpy().tobytes()
        for _ in range(50)
    }
    assert len(found) == 1
