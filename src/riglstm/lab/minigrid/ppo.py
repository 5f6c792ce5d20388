"""Proximal policy optimisation for an agent with a memory. One file; details are numbered.

The agent acts in B environments for T steps (`collect`), then learns from those frames a few times
over (`learn`), and so on. The names of shapes: T steps, B environments, w steps of a window, M
windows in a minibatch, U different frames, H the memory's width, A actions.

 1  All environments take a step together; an episode that ends is followed by the next at once.
 2  A frame that was seen before is not encoded again (`Frames`): those of the rollout before are
    encoded in one piece at the start, others when they come.
 3  Actions are drawn by the Gumbel rule, argmax(logits + noise), with the noise of a whole rollout
    drawn beforehand from (seed, update): a run that goes on needs no generator's state.
 4  Where an episode begins the memory is put to its initial state *before* the step; the same
    flags, `reset`, are given to the memory when it learns.
 5  Log-probabilities and values of a rollout are computed after it, from the memory's outputs, in
    one call each; acting itself needs only the logits.
 6  Time-outs count as ends: no value is added for what would have come (P34).
 7  Advantages by GAE, with γ and λ; the returns that the critic learns are advantages plus values.
 8  Advantages are not normalised, unless asked for.
 9  Backpropagation through time runs over windows of w steps, each from the state that was stored
    at its start; the whole minibatch, resets inside it, is one call of the memory.
10  Stored states are refreshed: a window's last state, under the new weights, takes the place of
    the stored start of the window after it. The first windows keep what they started with.
11  Minibatches are windows in an order drawn from (seed, update, epoch).
12  The ratio of new to old probability is clipped; so is the critic's step away from its old value.
13  Loss: policy + value_coef · value − entropy_coef · entropy; its gradient's norm is limited.
14  Acting is many small products, which threads only slow down; learning uses all of them. Both do
    without oneDNN, which prepares itself anew for every other number of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from riglstm.lab.minigrid.network import ActorCritic, Frames
from riglstm.lab.tasks.base import generator
from riglstm.lab.tasks.common import CPU, AboveZero, Count, Device, FromZero, Options, Share
from riglstm.lab.train.config import Precision
from riglstm.models.base import State
from riglstm.models.episodes import restart, run_with_resets, stepper

if TYPE_CHECKING:
    from riglstm.lab.minigrid.envs import Environments

NOISE, ORDER = 1, 2
"""What a generator is for."""


@dataclass(frozen=True)
class PPO(Options):
    """Recurrent PPO; the defaults are those of the usual MiniGrid agents, but for P35."""

    frames: Count | None = None
    """Frames to train for, at most; None: as many as the family is given."""
    envs: Count = 16
    """Environments that are stepped together."""
    steps: Count = 128
    """Steps in each of them between two updates."""
    window: Count = 32
    """Steps that are backpropagated through."""
    epochs: Count = 4
    """How often each frame is learned from."""
    minibatch: Count = 2048
    """Frames in a minibatch; a multiple of `window`."""
    lr: AboveZero = 2e-3
    """Adam's step size."""
    adam_eps: FromZero = 1e-8
    """Adam's ε."""
    gamma: Share = 0.99
    """Discount of later rewards."""
    gae_lambda: Share = 0.95
    """GAE's λ."""
    clip: FromZero = 0.2
    """How far a ratio of probabilities, and a value, may move in one update."""
    value_coef: FromZero = 0.5
    """Weight of the critic's loss."""
    entropy_coef: FromZero = 0.01
    """Weight of the policy's entropy."""
    clip_norm: AboveZero = 0.5
    """Limit of the gradient's norm."""
    normalise: bool = False
    """Scale each minibatch's advantages to mean 0 and deviation 1."""
    workers: Count | None = None
    """Processes that step environments; None: one to a core."""
    device: Device = "auto"
    """Where to learn: auto (a GPU where there is one), cpu, cuda."""
    checkpoint_every: Count = 20
    """Updates between two checkpoints; what a kill costs at most."""
    tensorboard: bool = True
    """Write TensorBoard's files too, where it is installed."""

    precision: ClassVar[Precision] = "fp32"
    devices: ClassVar[int] = 1
    test: ClassVar[bool] = True
    """What a `Fit` may choose."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps % self.window or self.minibatch % self.window:
            raise ValueError(
                f"steps and minibatch must be multiples of window = {self.window}, "
                f"got {self.steps} and {self.minibatch}"
            )
        if self.frames is not None:
            self.whole(self.frames)

    @property
    def batch(self) -> int:
        """Frames of an update."""
        return self.envs * self.steps

    def whole(self, frames: int) -> int:
        """Of so many frames those of whole updates."""
        if frames < self.batch:
            raise ValueError(
                f"frames must be those of one update at least, {self.batch} = envs · steps, "
                f"got {frames}"
            )
        return frames - frames % self.batch


class Rollout(NamedTuple):
    """What a rollout leaves to learn from, (T, B) each."""

    codes: Tensor
    """Which of `frames` was seen."""
    reset: Tensor
    """An episode began with this step."""
    actions: Tensor
    log_probs: Tensor
    """Of the actions, under the weights that chose them."""
    values: Tensor
    advantages: Tensor
    frames: Frames
    states: list[State]
    """The memory before each window, in the order of time."""


def advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, after: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """GAE: A_t = δ_t + γλ(1 − d_t) A_{t+1}, δ_t = r_t + γ(1 − d_t) V_{t+1} − V_t; (T, B).

    `dones` (T, B): the episode ended with step t. `after` (B): the value after the last step.
    """
    going_on = gamma * (1 - dones.float())
    following = torch.cat((values[1:], after.unsqueeze(0)))
    delta = rewards + going_on * following - values
    total, out = torch.zeros_like(after), torch.empty_like(values)
    for t in reversed(range(len(values))):
        total = torch.addcmul(delta[t], going_on[t], total, value=gae_lambda)
        out[t] = total
    return out


class Agent:
    """An agent that learns in its environments: `update` after `update`.

    `envs` has as many environments as `config` says; all draws depend on `seed`.
    """

    def __init__(self, net: ActorCritic, envs: Environments, config: PPO, seed: int) -> None:
        self.net, self.envs, self.config, self.seed = net, envs, config, seed
        self.device = next(net.parameters()).device
        self.optimizer = torch.optim.Adam(
            net.parameters(), lr=config.lr, eps=config.adam_eps, fused=True
        )
        self.updates = 0
        with torch.no_grad():
            self.state = net.core.initial_state(config.envs)
        self.fresh = torch.ones(config.envs, dtype=torch.bool, device=self.device)
        self.recent: deque[tuple[int, int]] = deque(maxlen=100)
        """Of the last episodes, whether each was solved, and its steps."""
        self.known: Tensor | None = None

    @property
    def frames(self) -> int:
        """Frames acted in so far."""
        return self.updates * self.config.batch

    def update(self) -> dict[str, float]:
        """Act, then learn; what it was like, by name."""
        with small_products(1):
            rollout = self.collect()
        with small_products(torch.get_num_threads()):
            figures = self.learn(rollout)
        self.updates += 1
        if self.recent:
            solved, steps = zip(*self.recent, strict=True)
            figures["success"] = sum(solved) / len(solved)
            figures["steps"] = sum(steps) / len(steps)
        return figures

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Details 1 to 8."""
        net, envs, config = self.net, self.envs, self.config
        T, B = config.steps, config.envs
        book = Frames(net.encode, self.device, self.known)
        step, act = stepper(net.core), net.prepared_logits()
        first, noise = net.core.initial_state(B), self._gumbel(T, B).unbind()
        outputs, logits, codes, actions, states = [], [], [], [], []
        # resets[t] is also whether step t - 1 was an episode's last.
        rewards, resets = torch.empty(T, B), torch.empty(T + 1, B, dtype=torch.bool)
        resets[0], state = self.fresh, self.state
        rewards_at, resets_at = rewards.numpy(), resets.numpy()
        for t in range(T + 1):
            if t % config.window == 0 and t < T:
                states.append(state)
            codes.append(book.look(envs.images))
            before = state
            if resets_at[t].any():
                state = restart(first, state, resets[t].to(self.device))
            y, state = step(book.features.index_select(0, codes[t]), state)
            outputs.append(y)
            if t == T:
                # Only the value of what comes next was wanted; the step is taken when it does.
                self.state, self.known = before, book.again()
                break
            logits.append(act(y))
            actions.append((logits[t] + noise[t]).argmax(-1))
            envs.step(actions[t].cpu().numpy())
            rewards_at[t], resets_at[t + 1] = envs.rewards, envs.dones
            for i in envs.dones.nonzero()[0]:
                self.recent.append((int(envs.rewards[i]), int(envs.steps[i])))
        values = net.values(torch.stack(outputs))  # (T + 1, B)
        acted, resets = torch.stack(actions), resets.to(self.device)
        self.fresh = resets[T]
        log_probs = torch.stack(logits).log_softmax(-1).gather(-1, acted.unsqueeze(-1)).squeeze(-1)
        gained = advantages(
            *(rewards.to(self.device), values[:-1], resets[1:], values[-1]),
            *(config.gamma, config.gae_lambda),
        )
        return Rollout(
            *(torch.stack(codes[:-1]), resets[:-1], acted, log_probs, values[:-1], gained),
            *(book, states),
        )

    def _gumbel(self, T: int, B: int) -> Tensor:
        """Noise (T, B, A) with which an argmax is a draw."""
        # Drawn on the CPU, so that an agent acts the same wherever it learns.
        draw = torch.empty(T, B, self.net.actions)
        draw.exponential_(generator=generator(CPU, self.seed, NOISE, self.updates))
        return draw.log().neg().to(self.device)

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Details 9 to 13."""
        config, w = self.config, self.config.window
        windows = config.batch // w

        def cut(v: Tensor) -> Tensor:
            """(T, B) to (w, windows), the windows in the order of time, then of environments."""
            return v.view(-1, w, config.envs).transpose(0, 1).flatten(1)

        codes, reset, actions = cut(rollout.codes), cut(rollout.reset), cut(rollout.actions)
        log_probs, values = cut(rollout.log_probs), cut(rollout.values)
        gained = cut(rollout.advantages)
        states = tuple(torch.cat(s, dim=1) for s in zip(*rollout.states, strict=True))
        images = rollout.frames.images.to(self.device)
        total = torch.zeros(4, device=self.device)
        count = 0
        for epoch in range(config.epochs):
            gen = generator(CPU, self.seed, ORDER, self.updates, epoch)
            for pick in torch.randperm(windows, generator=gen).split(config.minibatch // w):
                pick = pick.to(self.device)
                log_prob, value, entropy, last = self.replay(
                    *(images, codes[:, pick], reset[:, pick], actions[:, pick]),
                    tuple(s[:, pick] for s in states),
                )
                # Detail 10.
                after = pick + config.envs
                inside = after < windows
                for stored, new in zip(states, last, strict=True):
                    stored[:, after[inside]] = new.detach()[:, inside]
                old = (log_probs[:, pick], values[:, pick])
                policy, missed = self._clipped(log_prob, value, old, gained[:, pick])
                # Detail 13.
                entropy = entropy.mean()
                loss = policy + config.value_coef * missed - config.entropy_coef * entropy
                self.optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.net.parameters(), config.clip_norm)
                self.optimizer.step()
                total += torch.stack((policy, missed, entropy, norm)).detach()
                count += 1
        names = ("policy_loss", "value_loss", "entropy", "grad_norm")
        return dict(zip(names, (total / count).tolist(), strict=True))

    def replay(
        self, images: Tensor, codes: Tensor, reset: Tensor, actions: Tensor, state: State
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        """Windows (w, M) once more: log-probabilities, values, entropies, and the last state."""
        seen, at = codes.unique(return_inverse=True)
        x = self.net.encode(images[seen])[at]  # (w, M, D)
        y, state = run_with_resets(self.net.core, x, state, reset)
        all_log_probs = self.net.actor(y).log_softmax(-1)  # (w, M, A)
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        log_probs = all_log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return log_probs, self.net.values(y), entropy, state

    def _clipped(
        self, log_prob: Tensor, value: Tensor, old: tuple[Tensor, Tensor], gained: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Detail 12: mean losses of policy and critic; `gained` are advantages."""
        old_log_prob, old_value = old
        clip, returns = self.config.clip, old_value + gained
        if self.config.normalise:
            gained = (gained - gained.mean()) / (gained.std() + 1e-8)
        ratio = (log_prob - old_log_prob).exp()
        policy = -torch.minimum(ratio * gained, ratio.clamp(1 - clip, 1 + clip) * gained)
        near = old_value + (value - old_value).clamp(-clip, clip)
        missed = torch.maximum((value - returns).square(), (near - returns).square())
        return policy.mean(), missed.mean()

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on as if it had not stopped."""
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "state": [s.cpu() for s in self.state],
            "fresh": self.fresh.cpu(),
            "recent": list(self.recent),
            "known": self.known,
            "envs": self.envs.history(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.updates = saved["updates"]
        self.state = tuple(s.to(self.device) for s in saved["state"])
        self.fresh = saved["fresh"].to(self.device)
        self.recent = deque(saved["recent"], maxlen=100)
        self.known = saved["known"]
        self.envs.restore(saved["envs"])


@contextmanager
def small_products(threads: int) -> Iterator[None]:
    """Detail 14."""
    before = torch.get_num_threads()
    # torch.backends.mkldnn.flags would also set, and warn about, TF32.
    onednn, *_ = torch.backends.mkldnn.set_flags(False, None, None, None)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.backends.mkldnn.set_flags(onednn, None, None, None)
