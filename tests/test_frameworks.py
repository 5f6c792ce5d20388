"""The table of docs/frameworks.md: a few steps through each framework equal plain training.

sb3-contrib and torchrl have files of their own.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from helpers import GUIDE, free_port, run_guide
from riglstm import RigLSTM
from train_helpers import finish, start

slow = pytest.mark.slow


class Classifier(nn.Module):
    """A model as people write it around nn.LSTM, with a RigLSTM in its place."""

    def __init__(self, hidden_size: int = 12, num_layers: int = 2) -> None:
        super().__init__()
        self.rnn = RigLSTM(4, hidden_size, num_layers, batch_first=True)
        self.head = nn.Linear(hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to logits (B, 2)."""
        output, _ = self.rnn(x)
        logits: Tensor = self.head(output[:, -1])
        return logits


def model() -> Classifier:
    """The same start for everyone."""
    torch.manual_seed(0)
    return Classifier()


def data() -> tuple[Tensor, Tensor]:
    """Four batches of eight sequences; the answer is the sign of the last step's first number."""
    x = torch.randn(32, 6, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, -1, 0] > 0).long()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_size=8)


def train(net: nn.Module, dtype: torch.dtype = torch.float32, rows: slice = slice(None)) -> None:
    """The loop that each framework is compared with; `rows`: the part of each batch to train on."""
    adam = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(2):
        for x, y in loader():
            adam.zero_grad()
            F.cross_entropy(net(x[rows].to(dtype)), y[rows]).backward()
            adam.step()


def own(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


def assert_as_plain(weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Every weight has moved, and to where the plain loop moves it: to the bit, in float32."""
    net, start = model().to(dtype), own(model().to(dtype))
    train(net, dtype)
    atol = 0.0 if dtype == torch.float32 else 1e-8
    assert weights.keys() == start.keys()
    for name, expected in own(net).items():
        assert not torch.equal(start[name], expected), name
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=atol)


@slow
# skorch calls a part of scikit-learn, or torch, that is on its way out; not ours to mend.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_skorch_trains_as_the_plain_loop_does_and_searches_options():
    from sklearn.model_selection import GridSearchCV
    from skorch import NeuralNetClassifier

    net = NeuralNetClassifier(
        Classifier,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=0.01,
        max_epochs=2,
        batch_size=8,
        train_split=None,
        verbose=0,
    )
    x, y = (tensor.numpy() for tensor in data())
    net.initialize()
    net.module_.load_state_dict(model().state_dict())
    net.partial_fit(x, y)
    assert_as_plain(own(net.module_))
    again = pickle.loads(pickle.dumps(net))
    assert (again.predict(x) == net.predict(x)).all()
    search = GridSearchCV(net, {"module__hidden_size": [6, 12]}, cv=2).fit(x, y)
    assert {row["module__hidden_size"] for row in search.cv_results_["params"]} == {6, 12}


@slow
def test_accelerate_trains_as_the_plain_loop_does_and_goes_on(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    net, adam, batches = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), 0.01), loader()
    )

    def epoch() -> None:
        for x, y in batches:
            adam.zero_grad()
            accelerator.backward(F.cross_entropy(net(x), y))
            adam.step()

    epoch()
    accelerator.save_state(str(tmp_path))
    for _ in range(2):
        epoch()
        assert_as_plain(own(accelerator.unwrap_model(net)))
        accelerator.load_state(str(tmp_path))


@slow
# Lightning's own use of torch, and its advice on logging and on workers for data.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")
def test_lightning_trains_as_the_plain_loop_does_and_goes_on(tmp_path):
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    options = {**quiet, "accelerator": "cpu", "default_root_dir": tmp_path}
    for epochs, resume in ((1, None), (2, tmp_path / "one.ckpt")):
        trainer, lit = pl.Trainer(max_epochs=epochs, **options), Lit()
        trainer.fit(lit, loader(), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert_as_plain(own(lit.net))


def worker(title: str, rank: int, port: int, folder: Path) -> None:
    """Run a section of the guide as torchrun does, and train so, in one of two processes."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    names = run_guide("many-gpus", f"Your own loop: {title}")
    assert all(p.grad is not None for p in names["rnn"].parameters())
    net = model().double()
    trained: nn.Module = net
    if title == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        fully_shard(net.rnn, mesh=mesh)
        fully_shard(net, mesh=mesh)
        held = sum(p.to_local().numel() for p in net.parameters())  # type: ignore[attr-defined]
        assert held < 0.6 * sum(p.numel() for p in net.parameters())
    else:
        trained = DistributedDataParallel(net)
    train(trained, torch.float64, slice(rank, None, 2))
    whole = {n: getattr(p, "full_tensor", p.detach)() for n, p in net.named_parameters()}
    torch.save(whole, folder / f"{rank}.pt")
    dist.destroy_process_group()


def assert_two_processes_are_as_plain(title: str, folder: Path) -> None:
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    port = free_port()
    processes = [start(worker, title, rank, port, folder) for rank in (0, 1)]
    assert [finish(process) for process in processes] == [0, 0]
    for rank in (0, 1):
        assert_as_plain(torch.load(folder / f"{rank}.pt"), torch.float64)


@slow
def test_ddp_trains_as_one_process_does(tmp_path):
    assert_two_processes_are_as_plain("DistributedDataParallel", tmp_path)


@slow
def test_fsdp2_trains_as_one_process_does(tmp_path):
    assert_two_processes_are_as_plain("FSDP2", tmp_path)


def test_each_row_of_the_guides_tables_has_a_test():
    rows = []
    for page, head in (("frameworks", "| framework |"), ("deploying", "| way |")):
        table = (GUIDE / f"{page}.md").read_text().split(head)[1].split("\n\n")[0]
        rows += [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) >= 18
    for row in rows:
        ((file, test),) = re.findall(r"`(test_\w+\.py)::(\w+)`", row)
        assert f"\ndef {test}(" in Path(__file__).with_name(file).read_text(), row
