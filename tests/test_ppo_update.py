"""Acting and learning of recurrent PPO, held to loops over single frames."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from riglstm.lab.minigrid.config import PPO
from riglstm.lab.minigrid.network import ActorCritic
from riglstm.lab.minigrid.ppo import ORDER, Agent, Rollout
from riglstm.lab.minigrid.spec import MEMORIES
from riglstm.lab.tasks.base import generator
from riglstm.models import build
from test_ppo import CPU, SMALL, Pictures

WHOLE = dataclasses.replace(SMALL, epochs=1, minibatch=SMALL.batch, clip_norm=1e9)
NAMES = ["lstm", "riglstm", "rim"]


def double_agent(name: str, config: PPO = SMALL) -> Agent:
    torch.manual_seed(0)
    memory = MEMORIES[name]
    core: Any = build(memory.model, 64, memory.hidden_size, **memory.options)
    envs: Any = Pictures(config.envs)
    return Agent(ActorCritic(core, 7).double(), envs, config, seed=3)


def moved(agent: Agent) -> None:
    """Other weights than those that acted, so that ratios and values have something to clip."""
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in agent.net.parameters():
            p += 0.1 * torch.randn(p.shape, generator=gen, dtype=p.dtype)


def one_frame(net: ActorCritic, image: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
    """Log-probabilities (A), the value, and the next state, for one image and one sequence."""
    x = net.encoder(image.permute(2, 0, 1).unsqueeze(0).double())
    y, state = net.core(x.unsqueeze(0), state)
    return net.logits(y[0, 0]).log_softmax(-1), net.values(y[0, 0]), state


class Watched(Pictures):
    """Keeps what it showed, what it was told, and what came of it."""

    def __init__(self, B: int) -> None:
        super().__init__(B)
        self.log: list[tuple[Any, Any, Any, Any]] = []

    def step(self, actions: Any) -> None:
        shown = self.images.copy()
        super().step(actions)
        self.log.append((shown, actions.copy(), self.rewards.copy(), self.dones.copy()))


@pytest.mark.parametrize("name", NAMES)
def test_three_rollouts_equal_loops(name: str) -> None:
    """Resets, carried states, actions, log-probabilities, values, the value after, advantages."""
    agent = double_agent(name)
    envs: Any = Watched(SMALL.envs)
    agent.envs = envs
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
                        for stored, own in zip(
                            rollout.states[t // SMALL.window], states[b], strict=True
                        ):
                            torch.testing.assert_close(stored[:, b : b + 1], own)
                    if fresh[b]:
                        states[b] = net.core.initial_state(1)
                    image = torch.from_numpy(shown[b])
                    log_probs, values[t, b], states[b] = one_frame(net, image, states[b])
                    action = int((log_probs + noise[t, b]).argmax())
                    assert int(rollout.actions[t, b]) == action == actions[b]
                    assert float(rollout.log_probs[t, b]) == pytest.approx(
                        float(log_probs[action]), abs=1e-10
                    )
                    assert torch.equal(rollout.frames.images[rollout.codes[t, b]], image)
                fresh = dones.astype(bool)
            for b in range(B):
                start = net.core.initial_state(1) if fresh[b] else states[b]
                values[T, b] = one_frame(net, torch.from_numpy(envs.images[b]), start)[1]
            torch.testing.assert_close(rollout.values, values[:-1], rtol=0, atol=1e-10)
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


def loss_by_frames(net: ActorCritic, rollout: Rollout, config: PPO) -> tuple[Tensor, list[float]]:
    """The loss, frame by frame, and every ratio."""
    total, ratios = torch.zeros((), dtype=torch.float64), []
    w = config.window
    for k, stored in enumerate(rollout.states):
        for b in range(config.envs):
            state: Any = tuple(s[:, b : b + 1] for s in stored)
            for t in range(k * w, (k + 1) * w):
                if rollout.reset[t, b]:
                    state = net.core.initial_state(1)
                image = rollout.frames.images[rollout.codes[t, b]]
                log_probs, value, state = one_frame(net, image, state)
                gained, old = rollout.advantages[t, b], rollout.values[t, b]
                ratio = (log_probs[rollout.actions[t, b]] - rollout.log_probs[t, b]).exp()
                ratios.append(float(ratio.detach()))
                policy = -torch.minimum(ratio * gained, ratio.clamp(0.8, 1.2) * gained)
                near = old + (value - old).clamp(-0.2, 0.2)
                missed = torch.maximum((value - old - gained) ** 2, (near - old - gained) ** 2)
                entropy = -(log_probs.exp() * log_probs).sum()
                total = total + policy + 0.5 * missed - 0.01 * entropy
    return total / config.batch, ratios


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip_norm", [1e9, 1e-3])
def test_a_step_of_learning_is_the_gradient_of_the_loss_by_frames(
    name: str, clip_norm: float
) -> None:
    agent = double_agent(name, dataclasses.replace(WHOLE, clip_norm=clip_norm))
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
    for p, after in zip(weights, expected, strict=True):
        # The norm's limit is divided by norm + 1e-6.
        torch.testing.assert_close(p.detach(), after, rtol=0, atol=1e-8)


def test_the_second_epoch_starts_from_states_under_the_new_weights() -> None:
    """Steps of size 0: windows of epoch 2 start where those before them ended in epoch 1."""
    config = dataclasses.replace(WHOLE, steps=18, minibatch=18, epochs=2)
    agent = double_agent("riglstm", config)
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
    stored = [torch.cat(s, dim=1).clone() for s in zip(*rollout.states, strict=True)]
    calls = iter(given)
    for epoch in range(2):
        gen = generator(CPU, agent.seed, ORDER, agent.updates, epoch)
        for pick in torch.randperm(windows, generator=gen).split(config.minibatch // w):
            for got, expected in zip(next(calls), stored, strict=True):
                torch.testing.assert_close(got, expected[:, pick], rtol=0, atol=1e-10)
            starts = [tuple(s[:, i : i + 1].clone() for s in stored) for i in pick]
            for i, start in zip(pick.tolist(), starts, strict=True):
                k, b = divmod(i, B)
                state: Any = start
                with torch.no_grad():
                    for t in range(k * w, (k + 1) * w):
                        if rollout.reset[t, b]:
                            state = net.core.initial_state(1)
                        image = rollout.frames.images[rollout.codes[t, b]]
                        state = one_frame(net, image, state)[2]
                if i + B < windows:
                    for s, new in zip(stored, state, strict=True):
                        s[:, i + B] = new[:, 0]
    first = [torch.cat(s, dim=1) for s in zip(*rollout.states, strict=True)]
    assert all(torch.equal(a[:, :B], b[:, :B]) for a, b in zip(first, stored, strict=True))
    assert not torch.equal(first[0][:, B:], stored[0][:, B:])
