"""An agent with a memory: sb3-contrib's RecurrentPPO, with a RigLSTM in its policy.

The first observation says left or right; then comes a corridor in which nothing is to be seen,
and at its end the agent turns. It is trained in corridors of 6 steps and tested in longer ones,
with sb3-contrib's own LSTM beside it. It takes about 25 seconds on one core, and needs
`pip install 'riglstm[sb3]'`.
"""

import time

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3.common.env_util import make_vec_env

from riglstm import RigLSTM

torch.set_num_threads(1)


class Corridor(gymnasium.Env):
    """Observations: the sign (-1 or 1, at the start alone), and whether this is the end."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, steps=6):
        self.steps = steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.goal = 0, int(self.np_random.integers(2))
        return np.array([2 * self.goal - 1, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.steps
        reward = float(over and action == self.goal)
        return np.array([0, self.t == self.steps - 1], np.float32), reward, over, False, {}


class RigLSTMPolicy(RecurrentActorCriticPolicy):
    """Both LSTMs replaced; episodes that start inside a sequence are resets of one call."""

    def __init__(self, observation_space, action_space, lr_schedule, **options):
        super().__init__(observation_space, action_space, lr_schedule, **options)
        for name in ("lstm_actor", "lstm_critic"):
            old = getattr(self, name)
            setattr(self, name, RigLSTM(old.input_size, old.hidden_size, num_cells=4))
        # The first optimizer holds the weights that were just thrown away.
        self.optimizer = self.optimizer_class(self.parameters(), lr_schedule(1))

    @staticmethod
    def _process_sequence(features, states, starts, lstm):
        B = states[0].shape[1]
        x = features.reshape(B, -1, lstm.input_size).swapaxes(0, 1)
        output, states = lstm(x, states, reset=starts.reshape(B, -1).swapaxes(0, 1).bool())
        return output.swapaxes(0, 1).flatten(0, 1), states


def success(model, steps, episodes=200):
    """The share of episodes that end well, all played at once."""
    envs = make_vec_env(Corridor, episodes, seed=1, env_kwargs={"steps": steps})
    observation, state, start = envs.reset(), None, np.ones(episodes, bool)
    for _ in range(steps):
        action, state = model.predict(observation, state, start, deterministic=True)
        observation, reward, start, _ = envs.step(action)
    return reward.mean()


print(f"{'episodes won':<14}" + "".join(f"{f'{n} steps':>10}" for n in (6, 12, 24)) + "   training")
for name, policy in {"RigLSTM": RigLSTMPolicy, "LSTM": "MlpLstmPolicy"}.items():
    model = RecurrentPPO(
        *(policy, make_vec_env(Corridor, 16, seed=0)),
        **{"n_steps": 48, "batch_size": 768, "n_epochs": 8, "learning_rate": 3e-3, "gamma": 0.9},
        policy_kwargs={"lstm_hidden_size": 32, "net_arch": []},
        **{"seed": 0, "device": "cpu"},
    )
    start = time.process_time()
    model.learn(12_000)
    seconds = time.process_time() - start
    won = "".join(f"{success(model, n):>10.1%}" for n in (6, 12, 24))
    print(f"{name:<14}{won}{seconds:>9.0f} s")
