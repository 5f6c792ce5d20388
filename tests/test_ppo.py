"""Recurrent PPO: its parts, acting and learning, held to explicit loops over single frames."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import close, seeded
from riglstm.lab.minigrid.network import ActorCritic, Frames
from riglstm.lab.minigrid.ppo import ORDER, PPO, Agent, Rollout
from riglstm.lab.tables.recipes import MEMORIES
from riglstm.lab.tasks.base import generator
from riglstm.lab.tasks.common import CPU
from riglstm.models import MODELS, build

SMALL = PPO(envs=3, steps=12, window=6, minibatch=18, epochs=2)
WHOLE = replace(SMALL, epochs=1, minibatch=SMALL.batch, clip_norm=1e9)
NAMES = ["lstm", "riglstm", "rim"]


class Pictures:
    """Environments made up: few different frames, episodes of random length, no processes.

    `log` keeps what was shown, what was told, and what came of it.
    """

    def __init__(self, B: int, seed: int = 0) -> None:
        self.rng, self.B = np.random.default_rng(seed), B
        self.all = self.rng.integers(0, 10, (9, 7, 7, 3)).astype(np.uint8)
        self.dones, self.rewards = np.zeros(B, np.uint8), np.zeros(B, np.uint8)
        self.steps = np.ones(B, np.int32)
        self.log: list[tuple[Any, Any, Any, Any]] = []
        self.look()

    def look(self) -> None:
        self.images = self.all[self.rng.integers(0, len(self.all), self.B)]

    def step(self, actions: Any) -> None:
        assert actions.shape == (self.B,)
        shown = self.images
        self.dones = (self.rng.random(self.B) < 0.25).astype(np.uint8)
        self.rewards = self.dones * (self.rng.random(self.B) < 0.5).astype(np.uint8)
        self.look()
        self.log.append((shown, actions.copy(), self.rewards, self.dones))


def agent_with(name: str, config: PPO = SMALL, dtype: torch.dtype = torch.float32) -> Agent:
    memory = MEMORIES[name]
    core: Any = build(memory.model, 64, memory.hidden_size, **memory.options)
    net, envs = ActorCritic(core, 7).to(dtype), Pictures(config.envs)
    return Agent(net, envs, config, seed=3)  # type: ignore[arg-type]


def test_every_model_that_streams_has_a_memory():
    assert {m.model for m in MEMORIES.values()} == set(MODELS) - {"transformer"}


@pytest.mark.parametrize("name", ["riglstm", "entnet"])
def test_an_update_moves_every_weight(name):
    agent = agent_with(name)
    before = {n: p.detach().clone() for n, p in agent.net.named_parameters()}
    figures = agent.update()
    assert all(math.isfinite(v) for v in figures.values())
    assert agent.frames == SMALL.batch
    after = dict(agent.net.named_parameters())
    assert [n for n in before if torch.equal(before[n], after[n])] == []


def test_actions_are_drawn_from_the_policy():
    """The Gumbel rule, over many draws from known probabilities."""
    agent = agent_with("lstm", replace(SMALL, envs=400, steps=60))
    noise = agent._gumbel(60, 400)
    p = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.03, 0.015, 0.005])
    drawn = (p.log() + noise).argmax(-1).flatten().bincount(minlength=7) / (60 * 400)
    close(drawn, p, 0.01)


def test_frames_are_encoded_once_and_codes_lead_back():
    calls = []

    def encode(images: Tensor) -> Tensor:
        calls.append(len(images))
        return images.flatten(1)[:, :3].float()

    envs = Pictures(50)
    book = Frames(encode, CPU, known=torch.from_numpy(envs.all[:2]))
    seen = [(envs.images.copy(), book.look(envs.images)) for _ in range(3)]
    envs.look()
    seen.append((envs.images.copy(), book.look(envs.images)))
    assert sum(calls) == 9
    assert calls[0] == 2
    for images, codes in seen:
        assert torch.equal(book.images[codes], torch.from_numpy(images))
        assert torch.equal(book.features[codes], encode(torch.from_numpy(images)))
    assert torch.equal(book.again(), book.images)
    calls.clear()
    next_time = Frames(encode, CPU, known=book.again())
    codes = next_time.look(envs.all[4:6])
    assert calls == [9], "a known frame was encoded twice"
    first = next_time.again()[:2]
    assert torch.equal(first, next_time.images[codes.sort().values]), "what was seen comes first"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 100}, "steps and minibatch must be multiples of window = 32, got 100 and 2048"),
        ({"envs": 0}, "envs must be a whole number from 1 on, got 0"),
        ({"lr": math.nan}, "lr must be a number above 0, got nan"),
        ({"clip_norm": 0.0}, r"clip_norm must be a number above 0, got 0\.0"),
        ({"gamma": 1.5}, r"gamma must be a number from 0 to 1, got 1\.5"),
        ({"gae_lambda": -0.1}, r"gae_lambda must be a number from 0 to 1, got -0\.1"),
        ({"entropy_coef": math.inf}, "entropy_coef must be a number from 0 on, got inf"),
        ({"workers": 0}, "workers must be a whole number from 1 on, or none, got 0"),
        ({"frames": 0}, "frames must be a whole number from 1 on, or none, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PPO(**options)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("rim", {"dropout": 0.1}, r"draws nothing, got dropout=0\.1"),
        ("riglstm", {"cells": "random"}, "draws nothing, got cells='random'"),
        ("riglstm", {"views": "random"}, "draws nothing, got views='random'"),
        ("riglstm", {"peers": "random"}, "draws nothing, got peers='random'"),
        ("riglstm", {"bidirectional": True}, "that streams, got Rig, which does not"),
    ],
)
def test_a_memory_that_cannot_serve_is_refused(model, options, message):
    core: Any = build(model, 64, 64, num_cells=4, **options)
    with pytest.raises(ValueError, match=message):
        ActorCritic(core, 7)


def moved(agent: Agent) -> None:
    """Other weights than those that acted, so that ratios and values have something to clip."""
    gen = seeded(5)
    with torch.no_grad():
        for p in agent.net.parameters():
            p += 0.1 * torch.randn(p.shape, generator=gen, dtype=p.dtype)


def one_frame(net: ActorCritic, image: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
    """Log-probabilities (A), the value, and the next state, for one image and one sequence."""
    x = net.encoder(image.permute(2, 0, 1).unsqueeze(0).double())
    y, state = net.core(x.unsqueeze(0), state)
    return net.actor(y[0, 0]).log_softmax(-1), net.values(y[0, 0]), state


@pytest.mark.parametrize("name", NAMES)
def test_three_rollouts_equal_loops(name):
    """Resets, carried states, actions, log-probabilities, values, the value after, advantages."""
    agent = agent_with(name, SMALL, torch.float64)
    envs: Any = agent.envs
    net, T, B = agent.net, SMALL.steps, SMALL.envs
    states = [net.core.initial_state(1) for _ in range(B)]
    fresh = np.ones(B, bool)
    carried = earned = 0
    with torch.no_grad():
        for update in range(3):
            agent.updates = update
            envs.log.clear()
            rollout, noise = agent.collect(), agent._gumbel(T, B)
            carried += int((~fresh).sum())
            values = torch.zeros(T + 1, B, dtype=torch.float64)
            for t in range(T):
                shown, actions, _, dones = envs.log[t]
                assert rollout.reset[t].tolist() == fresh.tolist()
                for b in range(B):
                    if t % SMALL.window == 0:
                        stored = rollout.states[t // SMALL.window]
                        close(tuple(s[:, b : b + 1] for s in stored), states[b])
                    if fresh[b]:
                        states[b] = net.core.initial_state(1)
                    image = torch.from_numpy(shown[b])
                    log_probs, values[t, b], states[b] = one_frame(net, image, states[b])
                    action = int((log_probs + noise[t, b]).argmax())
                    assert int(rollout.actions[t, b]) == action == actions[b]
                    close(rollout.log_probs[t, b], log_probs[action])
                    assert torch.equal(rollout.frames.images[rollout.codes[t, b]], image)
                fresh = dones.astype(bool)
            for b in range(B):
                start = net.core.initial_state(1) if fresh[b] else states[b]
                values[T, b] = one_frame(net, torch.from_numpy(envs.images[b]), start)[1]
            close(rollout.values, values[:-1])
            total = np.zeros(B)
            for t in reversed(range(T)):
                _, _, rewards, dones = envs.log[t]
                earned += int(rewards.sum())
                going_on = 0.99 * (1 - dones.astype(float))
                delta = rewards + going_on * values[t + 1].numpy() - values[t].numpy()
                total = delta + going_on * 0.95 * total
                # The factors are 0.99 and 0.95 in single precision.
                np.testing.assert_allclose(rollout.advantages[t].numpy(), total, atol=1e-6)
    assert 0 < carried < 2 * B, "no episode went on into a rollout, or all did"
    assert earned > 0


def window(
    net: ActorCritic, rollout: Rollout, config: PPO, i: int, state: Any
) -> Iterator[tuple[int, int, Tensor, Tensor, Any]]:
    """Window i frame by frame from a state: t, b, log-probabilities, the value, the state after."""
    k, b = divmod(i, config.envs)
    for t in range(k * config.window, (k + 1) * config.window):
        if rollout.reset[t, b]:
            state = net.core.initial_state(1)
        image = rollout.frames.images[rollout.codes[t, b]]
        log_probs, value, state = one_frame(net, image, state)
        yield t, b, log_probs, value, state


def loss_by_frames(net: ActorCritic, rollout: Rollout, config: PPO) -> tuple[Tensor, list[float]]:
    """The loss, frame by frame, and every ratio."""
    total, ratios, scaled = torch.zeros((), dtype=torch.float64), [], rollout.advantages
    if config.normalise:
        scaled = (scaled - scaled.mean()) / (scaled.std() + 1e-8)
    for i in range(config.batch // config.window):
        k, b = divmod(i, config.envs)
        state = tuple(s[:, b : b + 1] for s in rollout.states[k])
        for t, b, log_probs, value, _ in window(net, rollout, config, i, state):
            gained, old = rollout.advantages[t, b], rollout.values[t, b]
            ratio = (log_probs[rollout.actions[t, b]] - rollout.log_probs[t, b]).exp()
            ratios.append(float(ratio.detach()))
            policy = -torch.minimum(ratio * scaled[t, b], ratio.clamp(0.8, 1.2) * scaled[t, b])
            near = old + (value - old).clamp(-0.2, 0.2)
            missed = torch.maximum((value - old - gained) ** 2, (near - old - gained) ** 2)
            entropy = -(log_probs.exp() * log_probs).sum()
            total = total + policy + 0.5 * missed - 0.01 * entropy
    return total / config.batch, ratios


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("clip_norm", "normalise"), [(1e9, False), (1e9, True), (1e-3, False)])
def test_a_step_of_learning_is_the_gradient_of_the_loss_by_frames(name, clip_norm, normalise):
    config = replace(WHOLE, clip_norm=clip_norm, normalise=normalise)
    agent = agent_with(name, config, torch.float64)
    agent.collect()
    agent.updates = 1
    rollout = agent.collect()
    moved(agent)
    weights = [p for p in agent.net.parameters() if p.requires_grad]
    loss, ratios = loss_by_frames(agent.net, rollout, agent.config)
    assert any(abs(r - 1) > 0.2 for r in ratios)
    assert any(abs(r - 1) < 0.2 for r in ratios)
    grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    norm = float(torch.stack([g.square().sum() for g in grads]).sum().sqrt())
    factor = min(1.0, clip_norm / norm)
    expected = [(p - factor * g).detach() for p, g in zip(weights, grads, strict=True)]
    agent.optimizer = torch.optim.SGD(weights, lr=1.0)  # type: ignore[assignment]
    figures = agent.learn(rollout)
    assert norm > 1e-3
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-5)
    # The norm's limit is divided by norm + 1e-6.
    close([p.detach() for p in weights], expected, 1e-8)


def test_the_second_epoch_starts_from_states_under_the_new_weights():
    """Steps of size 0: windows of epoch 2 start where those before them ended in epoch 1."""
    config = replace(WHOLE, steps=18, minibatch=18, epochs=2)
    agent = agent_with("riglstm", config, torch.float64)
    agent.collect()
    rollout = agent.collect()
    moved(agent)
    net, w, B = agent.net, config.window, config.envs
    windows = config.batch // w
    agent.optimizer = torch.optim.SGD(nn.ParameterList(net.parameters()), lr=0.0)  # type: ignore[assignment]
    given: list[Any] = []
    replay = agent.replay

    def watched(images: Tensor, codes: Any, reset: Any, actions: Any, state: Any) -> Any:
        given.append(tuple(s.clone() for s in state))
        return replay(images, codes, reset, actions, state)

    agent.replay = watched  # type: ignore[method-assign]
    agent.learn(rollout)
    assert len(given) == 2 * windows * w // config.minibatch
    stored = [torch.cat(s, dim=1) for s in zip(*rollout.states, strict=True)]
    calls = iter(given)
    for epoch in range(2):
        gen = generator(CPU, agent.seed, ORDER, agent.updates, epoch)
        for pick in torch.randperm(windows, generator=gen).split(config.minibatch // w):
            close(next(calls), tuple(s[:, pick] for s in stored))
            starts = [tuple(s[:, i : i + 1].clone() for s in stored) for i in pick]
            for i, start in zip(pick.tolist(), starts, strict=True):
                with torch.no_grad():
                    *_, (*_, state) = window(net, rollout, config, i, start)
                if i + B < windows:
                    for s, new in zip(stored, state, strict=True):
                        s[:, i + B] = new[:, 0]
    first = [torch.cat(s, dim=1) for s in zip(*rollout.states, strict=True)]
    assert all(torch.equal(a[:, :B], b[:, :B]) for a, b in zip(first, stored, strict=True))
    assert not torch.equal(first[0][:, B:], stored[0][:, B:])
