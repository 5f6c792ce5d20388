# %% [markdown]
"""
A forecaster that learns from short pieces and then runs on a long stream.

The signal is the sum of two waves of random frequency and phase, with noise. The model predicts
its next value. It is trained on pieces of 40 steps and tested on streams of 40, 200 and 1,000
steps, with an LSTM of the same width beside it. It takes about 40 seconds on one core, and needs
matplotlib for its picture. The notebook beside this script is made from it:
`jupytext --to ipynb --execute examples/forecaster.py`.
"""

# %%
import math
import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

from riglstm import RigLSTM

torch.set_num_threads(1)


# %%
def signals(steps, size, seed):
    """(T + 1, B, 1): two waves each, and noise with a deviation of 0.1."""
    gen = torch.Generator().manual_seed(seed)
    t = torch.arange(steps + 1.0).view(-1, 1, 1)
    period = 6 + 14 * torch.rand(size, 2, generator=gen)
    phase = 2 * math.pi * torch.rand(size, 2, generator=gen)
    waves = torch.sin(2 * math.pi * t / period + phase).sum(-1, keepdim=True)
    return waves + 0.1 * torch.randn(steps + 1, size, 1, generator=gen)


class Forecaster(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size, 1)

    def forward(self, x):
        y, _ = self.rnn(x)
        return x + self.head(y)


def train(net, updates=400):
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for step in range(updates):
        x = signals(40, 64, seed=step)
        loss = F.mse_loss(net(x[:-1]), x[1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def error(predict, steps):
    """The root mean square error of the last 20 steps of each stream."""
    x = signals(steps, 200, seed=10**6 + steps)
    return F.mse_loss(predict(x[:-1])[-20:], x[-20:]).sqrt().item()


# %%
def line(name, errors, last=""):
    print(f"{name:<14}" + "".join(f"{error:>12}" for error in errors) + f"{last:>12}")


line("error after", ["40 steps", "200 steps", "1000 steps"], "training")
torch.manual_seed(0)
nets = {"RigLSTM": RigLSTM(1, 48, num_cells=4), "LSTM": nn.LSTM(1, 48), "last value": None}
for name, rnn in nets.items():
    start, predict = time.process_time(), Forecaster(rnn) if rnn else lambda x: x
    if rnn:
        train(predict)
    seconds = f"{time.process_time() - start:.0f} s" if rnn else ""
    line(name, [f"{error(predict, n):.3f}" for n in (40, 200, 1000)], seconds)

# %%
x = signals(120, 1, seed=10**6)
awake = nets["RigLSTM"].trace(x[:-1])[0].active[:, 0]  # (T, N)
figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 3), layout="constrained")
above.plot(x[:-1, 0, 0])
above.set_ylabel("signal")
below.imshow(awake.T, aspect="auto", cmap="Greys", interpolation="nearest")
below.set(ylabel="cells awake", xlabel="step", yticks=range(4))
figure.savefig("forecaster.png")
