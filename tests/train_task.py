"""A task small enough to train hundreds of times: which of two halves of a sequence is larger.

As a script it trains on it, for tests that need processes of their own.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from riglstm.lab.tasks.base import Batch, Metric, Split, Totals, generator, part
from riglstm.lab.train.config import Fit, rank
from riglstm.lab.train.folder import RunFolder
from riglstm.models import build
from riglstm.models.base import Core

if TYPE_CHECKING:
    from riglstm.lab.train.loop import Fitted

CPU = torch.device("cpu")


class Halves:
    """Sequences (T, B, 3) of noise; the class is the half with the larger sum.

    `twist`: makes another loss of an update's number, the network and its loss, or looks at them.
    """

    input_size = 3
    metric = Metric("accuracy", higher_is_better=True)
    trained_on = "T=6"
    conditions: tuple[str, ...] = ("T=6", "T=10")

    def __init__(self, device: torch.device = CPU, batch_size: int = 8, twist: Any = None) -> None:
        self.device, self.batch_size, self.twist = device, batch_size, twist

    def ready(self) -> None:
        pass

    def size(self, split: Split) -> int:
        return 64

    def network(self, core: Core) -> nn.Module:
        return HalvesNetwork(core)

    def batch(self, seed: int, step: int, rows: slice = slice(None)) -> Batch:
        self.update = step + 1
        return self._draw(6, self.batch_size, rows, seed, step)

    def loss(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = net(batch.inputs)
        right = (logits.detach().argmax(-1) == batch.targets).float().mean()
        loss = F.cross_entropy(logits.float(), batch.targets)
        return self.twist(self.update, net, loss) if self.twist else loss, right

    def score(
        self, net: nn.Module, condition: str, split: Split, share: tuple[int, int] = (0, 1)
    ) -> Totals:
        T = int(condition.removeprefix("T="))
        batch = self._draw(T, 64, part(64, share), 10**6, ("validation", "test").index(split))
        logits = net(batch.inputs)
        loss = F.cross_entropy(logits.float(), batch.targets, reduction="sum")
        right = logits.argmax(-1) == batch.targets
        totals = {"loss": loss, "accuracy": right.sum(), "count": torch.tensor(len(right))}
        return {name: total.double() for name, total in totals.items()}

    def _draw(self, T: int, B: int, rows: slice, *numbers: int) -> Batch:
        x = torch.randn(T, B, 3, generator=generator(CPU, *numbers))[:, rows]
        halves = x.unflatten(0, (2, T // 2)).sum(dim=(1, 3))
        return Batch(x.to(self.device), halves.argmax(0).to(self.device))


def slowly(update: int, net: nn.Module, loss: Tensor) -> Tensor:
    """Leaves time to be killed in."""
    time.sleep(0.015)
    return loss


class HalvesNetwork(nn.Module):
    """A core with dropout on both sides."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(core.output_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.core(self.dropout(x))
        logits: Tensor = self.head(self.dropout(y[-1]))
        return logits


def network(
    task: Halves, seed: int = 0, model: str = "lstm", hidden_size: int = 8, **options: Any
) -> nn.Module:
    """A network whose start values depend on the seed alone."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        core: Any = build(model, task.input_size, hidden_size, **options)
        net = task.network(core)
    return net.to(task.device)


QUICK = Fit(
    updates=60,
    lr=1e-2,
    warmup=5,
    decay="cosine",
    evaluate_every=12,
    checkpoint_every=9,
    log_every=7,
    device="cpu",
    tensorboard=False,
)
"""With numbers that share no factor, so that everything falls between everything else."""

SMALL = [
    *("train", "copying", "--hidden-size", "8", "--set", "num_cells=2", "--L", "2", "--P", "3"),
    *("--digits", "2", "--input-size", "4", "--batch-size", "4", "--conditions", "P=4"),
    *("--validation-size", "8", "--test-size", "8", "--device", "cpu", "--no-tensorboard"),
]
"""A command line whose run takes no time."""


def fitted(
    path: Path,
    config: Fit = QUICK,
    seed: int = 0,
    *,
    task: Any = None,
    net: nn.Module | None = None,
    resume: bool = False,
    **options: Any,
) -> Fitted:
    """A run in a folder, with options of `fit`; what it gave."""
    from riglstm.lab.train.loop import fit

    task = Halves() if task is None else task
    net = network(task, seed) if net is None else net
    folder, what = RunFolder(path), {"task": "halves", "fit": asdict(config), "seed": seed}
    with folder.held():
        folder.begin(what, command="", device="", resume=resume)
        return fit(net, task, config, seed, folder, **options)


def train(path: Path, config: Fit = QUICK, seed: int = 0, **options: Any) -> nn.Module:
    """As `fitted`; the network as it ends."""
    net: nn.Module = options.pop("net", None) or network(options.get("task") or Halves(), seed)
    fitted(path, config, seed, net=net, **options)
    return net


if __name__ == "__main__":
    torch.set_num_threads(1)
    started: list[object] = []

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen" and arguments[0] == sys.executable:
            started.append(arguments)

    sys.addaudithook(hear)
    folder, devices = sys.argv[1:]
    for name in ("first", "second"):
        trained = train(Path(folder, name), replace(QUICK, devices=int(devices)))
        torch.save(trained.state_dict(), Path(folder, name, f"rank-{rank()}.pt"))
    Path(folder, f"started-by-{rank()}").write_text(str(len(started)))
