"""Copying: the layout of sequences, what is drawn from which seed, the loss and the score."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from riglstm.lab.tasks import copying
from riglstm.lab.tasks.base import generator, means
from riglstm.lab.tasks.common import CPU
from riglstm.lab.tasks.copying import Copying, CopyingTask, sequences
from riglstm.models import build

BLANK, MARKER = 10, 11


def open_task(**options: Any) -> CopyingTask:
    return Copying(**options).open(CPU)


def sure(targets: Tensor) -> Tensor:
    """Logits (T, B, M, 11) that are sure of the targets."""
    return 50.0 * nn.functional.one_hot(targets.long(), BLANK + 1).float()


def copies(tokens: Tensor, L: int, channels: int) -> Tensor:
    """Reads the first channels of the first L steps, and says them again at the end."""
    answer = torch.full_like(tokens, BLANK)
    answer[-L:, :, :channels] = tokens[:L, :, :channels]
    return sure(answer)


def blank_then_guess(tokens: Tensor) -> Tensor:
    """Sure of the blanks, and of any digit alike in the last ten steps."""
    out = sure(torch.full_like(tokens, BLANK))
    out[-10:] = torch.cat((torch.zeros(BLANK), torch.tensor([-50.0])))
    return out


@pytest.mark.parametrize(("L", "B", "M", "P"), [(3, 2, 1, 4), (2, 3, 2, 1), (10, 4, 8, 50)])
def test_sequences_are_laid_out_as_a_loop_would(L, B, M, P):
    digits = torch.randint(10, (L, B, M), dtype=torch.uint8)
    batch = sequences(digits, P, 10)
    assert batch.inputs.shape == batch.targets.shape == (2 * L + P, B, M)
    for b in range(B):
        for m in range(M):
            shown = [int(d) for d in digits[:, b, m]]
            tokens = shown + [BLANK] * (P - 1) + [MARKER] + [BLANK] * L
            assert batch.inputs[:, b, m].tolist() == tokens
            assert batch.targets[:, b, m].tolist() == [BLANK] * (L + P) + shown


def test_training_draws_dormant_phases_between_p_from_and_p():
    task = open_task(P=6, P_from=3, batch_size=2)
    lengths = [len(task.batch(0, step).inputs) - 20 for step in range(60)]
    assert set(lengths) == {3, 4, 5, 6}
    assert lengths == [len(task.batch(0, step).inputs) - 20 for step in range(60)]
    assert lengths != [len(task.batch(1, step).inputs) - 20 for step in range(60)]


def test_held_out_sequences_are_the_same_for_every_run():
    first, second = open_task(validation_size=50, test_size=50), open_task(test_size=50)
    first.batch(7, 3)
    test = first.examples("P=100", "test")
    assert torch.equal(test.inputs, second.examples("P=100", "test").inputs)
    assert torch.equal(test.inputs, first.examples("L=10,P=100", "test").inputs)
    assert len(test.inputs) == 120
    assert not torch.equal(test.inputs, first.examples("P=100", "validation").inputs)
    assert not torch.equal(test.targets[-10:], first.examples("P=200", "test").targets[-10:])
    # Pinned, so that results of other days stay comparable.
    assert test.inputs[:10, 0, 0].tolist() == [0, 4, 8, 5, 4, 2, 0, 8, 7, 9]


def test_every_number_of_a_seed_counts_in_all_its_bits():
    lists = ((), (0,), (1,), (-1,), (2**32,), (2**40,), (0, 0), (0, 1), (1, 0), (2**32, 0), (12, 3))
    drawn = [torch.randint(2**40, (2,), generator=generator(CPU, *numbers)) for numbers in lists]
    assert len({tuple(d.tolist()) for d in drawn}) == len(lists)
    again = torch.randint(2**40, (2,), generator=generator(CPU, 2**32, False))
    assert torch.equal(again, drawn[lists.index((2**32, 0))])
    assert all(0 <= generator(CPU, number).initial_seed() < 2**63 for number in range(100))


def test_no_update_draws_from_the_seed_of_held_out_data(monkeypatch):
    seeds: list[int] = []

    def spy(*args: Any) -> torch.Generator:
        gen = generator(*args)
        # All that the CPU's generator takes from a seed.
        seeds.append(gen.initial_seed() % 2**32)
        return gen

    monkeypatch.setattr(copying, "generator", spy)
    task = open_task(batch_size=1, P_from=2)
    for condition in (*task.conditions, "L=20,P=100"):
        task.examples(condition, "validation")
        task.examples(condition, "test")
    held_out = set(seeds)
    assert len(held_out) == 10
    seeds.clear()
    for seed in range(10):
        for step in range(100):
            task.batch(seed, step)
    assert len(set(seeds)) == 2000
    assert not held_out & set(seeds)


@pytest.mark.parametrize("P", [50, 400])
def test_blank_then_guess_has_the_known_loss_of_all_steps_and_of_the_answer(P):
    task = open_task(P=P, M=2, test_size=40)
    net = blank_then_guess
    loss, accuracy = task.loss(net, task.batch(0, 0))
    floor = 10 * math.log(10) / (20 + P)
    assert loss.item() == pytest.approx(floor, rel=1e-5)
    zeros = (task.batch(0, 0).targets[-10:] == 0).float().mean()
    assert accuracy.item() == pytest.approx(zeros.item())
    scored = means(task.score(net, task.trained_on, "test"))
    assert scored["loss"] == pytest.approx(floor, rel=1e-5)
    assert scored["answer_loss"] == pytest.approx(math.log(10), rel=1e-5)
    assert 0.05 < scored["accuracy"] < 0.15
    task = open_task(P=P, loss_on="answer", test_size=40)
    assert task.loss(net, task.batch(0, 0))[0].item() == pytest.approx(math.log(10), rel=1e-5)
    scored = means(task.score(net, "P=100", "test"))
    assert scored["loss"] == scored["answer_loss"] == pytest.approx(math.log(10), rel=1e-5)


@pytest.mark.parametrize(("channels", "accuracy"), [(4, 1.0), (1, 0.25)])
def test_accuracy_is_counted_digit_by_digit_under_every_condition(channels, accuracy):
    task = open_task(M=4, test_size=20, validation_size=20)
    lengths = {"P=50": 10, "P=100": 10, "P=400": 10, "L=20,P=100": 20, "L=1,P=1": 1}
    for condition, L in lengths.items():
        net = partial(copies, L=L, channels=channels)
        assert means(task.score(net, condition, "validation"))["accuracy"] == accuracy
        assert means(task.score(net, condition, "test"))["accuracy"] == accuracy
    net = partial(copies, L=10, channels=channels)
    assert task.loss(net, task.batch(0, 0))[1] == accuracy


def test_training_drops_something():
    task = open_task(input_size=8, dropout=0.5)
    net = task.network(build("lstm", 8, 6))
    loss = [task.loss(net, task.batch(0, 0))[0].item() for _ in range(2)]
    assert loss[0] != loss[1]


@pytest.mark.parametrize("M", [1, 2, 4, 8])
def test_the_network_has_a_table_and_a_reading_for_each_channel(M):
    task = open_task(M=M, batch_size=2)
    net = task.network(build("lstm", 600, 12))
    assert net.get_parameter("tables.weight").shape == (12 * M, 600 // M)
    tokens = task.batch(0, 0).inputs[:3]
    table, seen = net.get_parameter("tables.weight"), []
    net.get_submodule("core").register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    assert net(tokens).shape == (3, 2, M, 11)
    rows = [table[12 * m : 12 * (m + 1)][tokens[:, :, m].long()] for m in range(M)]
    assert torch.equal(seen[0], torch.cat(rows, dim=-1))


def test_conditions_begin_with_that_of_training_and_are_written_in_one_way():
    task = open_task(conditions=("P=100", "L=10,P=50", "L=20,P=50", "L=10,P=100"))
    assert task.trained_on == "P=50"
    assert task.conditions == ("P=50", "P=100", "L=20,P=50")
    assert open_task().conditions == ("P=50", "P=100", "P=200", "P=400")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"M": 0}, "M must be a whole number from 1 on, got 0"),
        ({"L": True}, "L must be a whole number from 1 on, got True"),
        ({"P": 2.5}, "P must be a whole number from 1 on, got 2.5"),
        ({"P": 9, "P_from": 10}, "P_from must be a whole number from 1 to 9, got 10"),
        ({"digits": 1}, "digits must be a whole number from 2 to 250, got 1"),
        ({"M": 7}, "input_size must be a multiple of M = 7, got 600; take input_size=595"),
        ({"loss_on": "last"}, "loss_on must be one of all, answer, got 'last'"),
        ({"dropout": 1.0}, "dropout must be a number at least 0 and below 1, got 1.0"),
        ({"conditions": ("P=0",)}, "P in 'P=0' must be a whole number from 1 on, got 0"),
        *(
            ({"conditions": (condition,)}, "must be like P=100 or L=20,P=100, got")
            for condition in ("", "100", "P=x", "P=-1", "P=1.5", "P=100,", "P=1,P=2")
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Copying(**options)
