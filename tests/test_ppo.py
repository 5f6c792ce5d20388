"""Recurrent PPO, held to versions of its parts in NumPy with explicit loops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from riglstm.lab.minigrid.config import PPO
from riglstm.lab.minigrid.frames import Frames
from riglstm.lab.minigrid.network import ActorCritic
from riglstm.lab.minigrid.ppo import Agent, advantages, ppo_losses
from riglstm.lab.minigrid.spec import MEMORIES
from riglstm.models import MODELS, build

SMALL = PPO(envs=3, steps=12, window=6, minibatch=18, epochs=2)
CPU = torch.device("cpu")


class Pictures:
    """Environments made up: few different frames, episodes of random length, no processes."""

    def __init__(self, B: int, seed: int = 0) -> None:
        self.rng, self.B = np.random.default_rng(seed), B
        self.all = self.rng.integers(0, 10, (9, 7, 7, 3)).astype(np.uint8)
        self.dones, self.rewards = np.zeros(B, np.uint8), np.zeros(B, np.uint8)
        self.steps = np.ones(B, np.int32)
        self.look()

    def __len__(self) -> int:
        return self.B

    def look(self) -> None:
        self.images = self.all[self.rng.integers(0, len(self.all), self.B)]

    def step(self, actions: Any) -> None:
        assert actions.shape == (self.B,)
        self.dones = (self.rng.random(self.B) < 0.25).astype(np.uint8)
        self.rewards = self.dones * (self.rng.random(self.B) < 0.5).astype(np.uint8)
        self.look()


def agent_with(name: str, config: PPO = SMALL) -> Agent:
    torch.manual_seed(0)
    memory = MEMORIES[name]
    core: Any = build(memory.model, 64, memory.hidden_size, **memory.options)
    return Agent(ActorCritic(core, 7), Pictures(config.envs), config, seed=3)  # type: ignore[arg-type]


def test_advantages_equal_loops() -> None:
    gen = torch.Generator().manual_seed(0)
    T, B, gamma, lam = 9, 4, 0.97, 0.8
    rewards, values = (torch.randn(T, B, generator=gen) for _ in range(2))
    dones, after = (torch.rand(T, B, generator=gen) < 0.3).float(), torch.randn(B, generator=gen)
    got = advantages(rewards, values, dones, after, gamma, lam)
    for b in range(B):
        for t in range(T):
            # The sum that GAE's recursion stands for, until the episode's end.
            total, factor = 0.0, 1.0
            for k in range(t, T):
                following = float(values[k + 1, b]) if k + 1 < T else float(after[b])
                going_on = 1 - float(dones[k, b])
                total += factor * (
                    float(rewards[k, b]) + gamma * going_on * following - float(values[k, b])
                )
                factor *= gamma * lam * going_on
            assert float(got[t, b]) == pytest.approx(total, abs=1e-5)


def conv(image: Any, layer: Any) -> Any:
    """A 2 × 2 convolution of (C, h, w) and a ReLU, tile by tile."""
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    _, h, w = image.shape
    out = np.zeros((len(weight), h - 1, w - 1))
    for o in range(len(weight)):
        for i in range(h - 1):
            for j in range(w - 1):
                out[o, i, j] = max(0, (weight[o] * image[:, i : i + 2, j : j + 2]).sum() + bias[o])
    return out


def encode(image: Any, net: ActorCritic) -> Any:
    """The network's encoder for one image (7, 7, 3)."""
    z = conv(image.transpose(2, 0, 1).astype(float), net.encoder[0])
    z = np.array([[[c[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max() for j in range(3)]
                   for i in range(3)] for c in z])  # fmt: skip
    return conv(conv(z, net.encoder[3]), net.encoder[5]).reshape(-1)


def head(y: Any, layers: Any) -> Any:
    first, last = (
        (m.weight.detach().numpy(), m.bias.detach().numpy()) for m in (layers[0], layers[2])
    )
    return last[0] @ np.tanh(first[0] @ y + first[1]) + last[1]


def sigmoid(z: Any) -> Any:
    return 1 / (1 + np.exp(-z))


def test_replay_equals_loops() -> None:
    """Frame by frame: encoder, LSTM with states put to zero where an episode begins, heads."""
    agent = agent_with("lstm")
    agent.net.double()
    gen = torch.Generator().manual_seed(0)
    w, M, H = 5, 2, 64
    images = torch.from_numpy(Pictures(1).all)
    codes = torch.randint(3, (w, M), generator=gen)
    actions = torch.randint(7, (w, M), generator=gen)
    reset = torch.zeros(w, M, dtype=torch.bool)
    reset[0, 1] = reset[3, 0] = True
    state = tuple(torch.randn(1, M, H, generator=gen, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        log_probs, values, entropies, last = agent.replay(images, codes, reset, actions, state)
    W_x, W_h, b_x, b_h = (p.detach().numpy() for p in agent.net.core.parameters())  # type: ignore[attr-defined]
    features = {int(k): encode(images[k].numpy(), agent.net) for k in codes.unique()}
    for m in range(M):
        h, c = (s[0, m].numpy().copy() for s in state)
        for t in range(w):
            if reset[t, m]:
                h, c = np.zeros(H), np.zeros(H)
            x = features[int(codes[t, m])]
            i, f, g, o = np.split(W_x @ x + b_x + W_h @ h + b_h, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            logits = head(h, agent.net.actor)
            log_p = logits - np.log(np.exp(logits).sum())
            assert float(log_probs[t, m]) == pytest.approx(log_p[actions[t, m]], abs=1e-10)
            assert float(entropies[t, m]) == pytest.approx(
                -sum(math.exp(p) * p for p in log_p), abs=1e-10
            )
            assert float(values[t, m]) == pytest.approx(head(h, agent.net.critic)[0], abs=1e-10)
        np.testing.assert_allclose(last[0][0, m].numpy(), h, atol=1e-10)
        np.testing.assert_allclose(last[1][0, m].numpy(), c, atol=1e-10)


def test_encoding_by_products_equals_the_convolutions() -> None:
    """Values and every weight's gradient."""
    net = agent_with("lstm").net.double()
    images = torch.from_numpy(Pictures(1).all)
    seen = images.permute(0, 3, 1, 2).double()
    factor = torch.randn(9, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (got, *grads), (expected, *others) = (
        (y, *torch.autograd.grad((y * factor).sum(), list(net.encoder.parameters())))
        for y in (net.encode(images), net.encoder(seen))
    )
    for a, b in zip((got, *grads), (expected, *others), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("normalise", [False, True])
def test_losses_equal_loops(normalise: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    draws = [torch.randn(6, 4, generator=gen, dtype=torch.float64) for _ in range(6)]
    got = ppo_losses(*draws, 0.2, normalise)  # type: ignore[arg-type]
    log_prob, value, entropy, old_log_prob, old_value, gained = (d.flatten().numpy() for d in draws)
    scaled = (gained - gained.mean()) / (gained.std(ddof=1) + 1e-8) if normalise else gained
    policy, missed = [], []
    for i in range(len(value)):
        ratio = math.exp(log_prob[i] - old_log_prob[i])
        policy.append(-min(ratio * scaled[i], min(max(ratio, 0.8), 1.2) * scaled[i]))
        target = old_value[i] + gained[i]
        near = old_value[i] + min(max(value[i] - old_value[i], -0.2), 0.2)
        missed.append(max((value[i] - target) ** 2, (near - target) ** 2))
    expected = (np.mean(policy), np.mean(missed), entropy.mean())
    assert [float(g) for g in got] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", MEMORIES)
def test_replayed_log_probabilities_are_the_stored_ones(name: str) -> None:
    """At the old weights, with episodes that end inside the windows."""
    agent = agent_with(name)
    for _ in range(2):  # the second rollout starts from a carried state
        rollout = agent.collect()
    w, images = SMALL.window, rollout.frames.images
    assert rollout.reset[1:w].any(), "no episode begins inside a window"
    for i, state in enumerate(rollout.states):
        part = slice(i * w, (i + 1) * w)
        with torch.no_grad():
            log_probs, values, _, _ = agent.replay(
                *(images, rollout.codes[part], rollout.reset[part], rollout.actions[part], state)
            )
        torch.testing.assert_close(log_probs, rollout.log_probs[part], rtol=0, atol=1e-5)
        torch.testing.assert_close(values, rollout.values[part], rtol=0, atol=1e-5)


def test_every_model_that_streams_has_a_memory() -> None:
    assert {m.model for m in MEMORIES.values()} == set(MODELS) - {"transformer"}


@pytest.mark.parametrize("name", ["riglstm", "entnet"])
def test_an_update_moves_every_weight(name: str) -> None:
    agent = agent_with(name)
    before = {n: p.detach().clone() for n, p in agent.net.named_parameters()}
    figures = agent.update()
    assert all(math.isfinite(v) for v in figures.values())
    assert agent.frames == SMALL.batch
    after = dict(agent.net.named_parameters())
    assert [n for n in before if torch.equal(before[n], after[n])] == []


def test_stored_states_are_refreshed_by_the_window_before() -> None:
    agent = agent_with("lstm")
    windows = SMALL.batch // SMALL.window
    states = tuple(torch.zeros(1, windows, 64) for _ in range(2))
    pick = torch.tensor([1, 4])  # of windows 0 to 5: environment 1 first, then its later window
    last = tuple(torch.ones(1, 2, 64) * torch.tensor([5.0, 7.0]).view(1, 2, 1) for _ in range(2))
    agent._refresh(states, pick, last)
    for stored in states:
        assert stored[0, :, 0].tolist() == [0, 0, 0, 0, 5, 0]


def test_actions_are_drawn_from_the_policy() -> None:
    """The Gumbel rule, over many draws from known probabilities."""
    agent = agent_with("lstm", dataclasses.replace(SMALL, envs=400, steps=60))
    noise = agent._gumbel(60, 400)
    p = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.03, 0.015, 0.005])
    drawn = (p.log() + noise).argmax(-1).flatten().bincount(minlength=7) / (60 * 400)
    torch.testing.assert_close(drawn, p, rtol=0, atol=0.01)


def test_frames_are_encoded_once_and_codes_lead_back() -> None:
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
        assert book.features is not None
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
        ({"lr": -1}, "lr must be a number above 0, got -1"),
        ({"lr": 0.0}, r"lr must be a number above 0, got 0\.0"),
        ({"clip_norm": 0.0}, r"clip_norm must be a number above 0, got 0\.0"),
        ({"gamma": 1.5}, r"gamma must be a number from 0 to 1, got 1\.5"),
        ({"gae_lambda": -0.1}, r"gae_lambda must be a number from 0 to 1, got -0\.1"),
        ({"entropy_coef": math.inf}, "entropy_coef must be a number from 0 on, got inf"),
        ({"workers": 0}, "workers must be a whole number from 1 on, or none, got 0"),
        ({"workers": -3}, "workers must be a whole number from 1 on, or none, got -3"),
        ({"frames": 0}, "frames must be a whole number from 1 on, or none, got 0"),
        (
            {"envs": 3, "steps": 3, "window": 1, "minibatch": 4, "normalise": True},
            "expected minibatches of 2 frames or more, got 9 frames in minibatches of 4",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPO(**options)


def test_a_memory_with_dropout_is_refused() -> None:
    core: Any = build("rim", 64, 64, num_cells=4, dropout=0.1)
    with pytest.raises(ValueError, match=r"expected a memory with dropout=0, got 0\.1"):
        ActorCritic(core, 7)


@pytest.mark.parametrize("rule", ["cells", "views", "peers"])
def test_a_memory_that_draws_its_selection_is_refused(rule: str) -> None:
    core: Any = build("riglstm", 64, 64, num_cells=4, **{rule: "random"})
    with pytest.raises(ValueError, match=f"draws nothing, got {rule}='random'"):
        ActorCritic(core, 7)


def test_a_memory_that_looks_ahead_is_refused() -> None:
    core: Any = build("riglstm", 64, 64, num_cells=4, bidirectional=True)
    with pytest.raises(ValueError, match="a memory that streams, got Rig, which does not"):
        ActorCritic(core, 7)


def test_a_memory_of_another_width_is_refused() -> None:
    core: Any = build("lstm", 32, 64)
    with pytest.raises(ValueError, match="must have input_size = 64, got 32"):
        ActorCritic(core, 7)
