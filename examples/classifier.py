"""A classifier of sequences that all have different lengths.

A sequence holds letters; three of them, a, b and c, count, and the class is the one that came
last, perhaps long ago. Batches are padded and packed, as for nn.LSTM. Training sees 5 to 30
letters, the test also 31 to 120, with an LSTM of the same width beside it. It takes about 35
seconds on one core.
"""

import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from riglstm import RigLSTM

torch.set_num_threads(1)
LETTERS, CLASSES = 12, 3


def sequences(size, shortest, longest, seed):
    """Sequences of letters, padded (T, B), their lengths (B), and their classes (B)."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (size,), generator=gen)
    made, classes = [], torch.randint(CLASSES, (size,), generator=gen)
    for length, label in zip(lengths.tolist(), classes, strict=True):
        letters = torch.randint(LETTERS, (length,), generator=gen)
        last = int(torch.randint(length, (), generator=gen))
        letters[last] = label
        after = letters[last + 1 :]
        after[after < CLASSES] += CLASSES  # nothing that counts comes later
        made.append(letters)
    return pad_sequence(made), lengths, classes


class Classifier(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, rnn.input_size)
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size, CLASSES)

    def forward(self, letters, lengths):
        packed = pack_padded_sequence(self.embed(letters), lengths, enforce_sorted=False)
        _, (h_n, _) = self.rnn(packed)  # the state after each sequence's own last letter
        return self.head(h_n[-1])


def train(net, updates=300):
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(updates):
        letters, lengths, classes = sequences(64, 5, 30, seed=step)
        loss = F.cross_entropy(net(letters, lengths), classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def accuracy(net, shortest, longest):
    letters, lengths, classes = sequences(1000, shortest, longest, seed=10**6 + longest)
    return (net(letters, lengths).argmax(-1) == classes).float().mean().item()


print(f"{'classes right':<14}{'5-30 letters':>14}{'31-120':>10}   training")
for name, rnn in {
    "RigLSTM": lambda: RigLSTM(16, 48, num_cells=4),
    "LSTM": lambda: nn.LSTM(16, 48),
}.items():
    torch.manual_seed(0)
    net, start = Classifier(rnn()), time.process_time()
    train(net)
    seconds = time.process_time() - start
    short, long = accuracy(net, 5, 30), accuracy(net, 31, 120)
    print(f"{name:<14}{short:>14.1%}{long:>10.1%}{seconds:>9.0f} s")
