"""sb3-contrib's RecurrentPPO with RigLSTM in its policy, as docs/frameworks.md shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers import close, run_guide
from riglstm import RigLSTM

pytest.importorskip("sb3_contrib", reason="needs the extra riglstm[sb3]")
gymnasium = pytest.importorskip("gymnasium", reason="needs the extra riglstm[sb3]")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """What the page's section defines."""
    return run_guide("frameworks", "sb3-contrib")


def build(guide: dict[str, Any], policy: str) -> Any:
    return guide["RecurrentPPO"](
        guide[policy],
        # Episodes shorter than a rollout start inside the sequences that PPO learns from.
        gymnasium.make("CartPole-v1", max_episode_steps=5),
        n_steps=32,
        batch_size=32,
        n_epochs=1,
        policy_kwargs={"lstm_hidden_size": 12, "n_lstm_layers": 2, "net_arch": []},
        seed=0,
        device="cpu",
    )


def layers(model: Any) -> list[RigLSTM]:
    found = [m for m in model.policy.modules() if isinstance(m, RigLSTM)]
    assert not any(isinstance(m, torch.nn.LSTM) for m in model.policy.modules())
    return found


def test_guides_model_is_built_of_rig_lstms(guide):
    assert [m.hidden_size for m in layers(guide["model"])] == [60, 60]


@pytest.mark.parametrize("policy", ["RigLSTMPolicy", "FastRigLSTMPolicy"])
def test_recurrent_ppo_moves_every_weight(guide, policy):
    model = build(guide, policy)
    actor, critic = layers(model)
    before = {n: p.detach().clone() for n, p in model.policy.named_parameters() if "lstm" in n}
    model.learn(128)
    after = dict(model.policy.named_parameters())
    assert len(before) == len([*actor.parameters(), *critic.parameters()])
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_predict_carries_and_resets_the_state(guide):
    model = build(guide, "RigLSTMPolicy")
    observations = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)
    actor, state = layers(model)[0], None
    for t, observation in enumerate(observations):
        first = 4 * (t // 4)
        _, state = model.predict(observation, state, episode_start=np.array([t == first]))
        with torch.no_grad():
            _, expected = actor(torch.from_numpy(observations[first : t + 1]).unsqueeze(1))
        close(tuple(map(torch.from_numpy, state)), expected, atol=1e-6)


def test_one_call_with_resets_equals_the_loop_of_sb3(guide):
    B, T = 3, 7
    layer = RigLSTM(4, 12, num_layers=2, dtype=torch.float64)
    features = torch.randn(B * T, 4, dtype=torch.float64)
    state = tuple(torch.randn(2, 2, B, 12, dtype=torch.float64))
    starts = (torch.rand(B * T) < 0.3).double()
    assert starts.view(B, T)[:, 1:].any()
    by_loop, by_call = (
        guide[policy]._process_sequence(features, state, starts, layer)
        for policy in ("RigLSTMPolicy", "FastRigLSTMPolicy")
    )
    close(by_call, by_loop)
