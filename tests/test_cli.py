"""The command line: what it prints, what it refuses, and the demo's problem."""

import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import riglstm
from riglstm.cli import demo
from riglstm.cli._copying import Batch, Copier, accuracy, copying_batch, train
from riglstm.cli.main import main
from riglstm.models import MODELS
from riglstm.scan import BACKENDS

Capture = pytest.CaptureFixture[str]

TINY_DEMO = (
    *("demo", "--steps", "2", "--hidden-size", "12", "--num-cells", "3", "--digits", "2"),
    *("--batch-size", "4", "--test-sequences", "5", "--train-length", "1", "3"),
    *("--test-lengths", "3", "6"),
)


def exit_code(*args: str) -> int:
    """The code the process would end with."""
    try:
        return main(args)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("args", [(), ("demo",), ("bench",), ("list",)])
def test_every_help_shows_an_example(args: tuple[str, ...], capsys: Capture) -> None:
    assert exit_code(*args, "--help") == 0
    assert f"Example: riglstm {args[0] if args else 'demo'}" in capsys.readouterr().out


def test_help_names_every_verb_and_the_version(capsys: Capture) -> None:
    assert exit_code("--help") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("demo", "bench", "list", "--version"))


def test_version_runs_as_a_module() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "riglstm", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout == f"riglstm {riglstm.__version__}\n"


def test_list_prints_all_variants_and_backends(capsys: Capture) -> None:
    assert exit_code("list") == 0
    words = capsys.readouterr().out.split()
    assert {*MODELS, *riglstm.VARIANTS, *BACKENDS, "auto"} <= set(words)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "demo, bench, list"),
        (("nope",), "nope"),
        (("demo", "--stepz", "3"), "--steps"),
        (("demo", "--steps", "many"), "many"),
        (("demo", "--num-cells", "0"), "--num-cells must be at least 1, got 0"),
        (("demo", "--lr", "0"), "--lr must be above 0, got 0.0"),
        (("demo", "--steps", "0"), "--steps must be at least 1, got 0"),
        (("demo", "--test-lengths", "0"), "--test-lengths must be one or more numbers of steps"),
        (("demo", "--train-length", "5", "4"), "--train-length must be a shortest and a longest"),
        (("demo", "--hidden-size", "50", "--num-cells", "4"), "hidden_size must be a multiple"),
        (("demo", "--device", "abacus"), "--device must be one that torch can use here"),
        (("bench", "--device", "abacus"), "--device must be one of cpu, cuda, got 'abacus'"),
        (("bench", "--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("bench", "--growth-lengths", "0"), "--growth-lengths must be one or more numbers"),
        (("bench", "--json", "no/such/folder/x.json"), "a folder that exists"),
        (("bench", "--json", "."), "--json must name a file"),
        (("bench", "--tables"), "--tables must name one or more of batch, stream, growth"),
        (("bench", "--num-cells", "7"), "hidden_size must be a multiple of num_cells = 7"),
    ],
)
def test_a_wrong_request_is_explained_and_ends_with_2(
    args: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert exit_code(*args) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in out + err


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tyro" else find_spec(name)
    )
    assert exit_code("demo") == 2
    err = capsys.readouterr().err
    assert err == "riglstm: the command line needs tyro and rich: pip install 'riglstm[cli]'\n"


def test_ctrl_c_says_so_and_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert exit_code("demo") == 130
    assert "Ctrl-C" in capsys.readouterr().err


def test_the_copying_batch_has_the_layout_of_the_specification() -> None:
    L, S, P, B = 3, 8, 5, 50
    tokens, targets = copying_batch(L, S, P, B, torch.Generator().manual_seed(0))
    blank, marker = S, S + 1
    assert tokens.shape == targets.shape == (2 * L + P, B)
    digits = tokens[:L]
    assert set(digits.flatten().tolist()) == set(range(S))
    assert (tokens[L : L + P - 1] == blank).all()
    assert (tokens[L + P - 1] == marker).all()
    assert (tokens[L + P :] == blank).all()
    assert (targets[: L + P] == blank).all()
    assert torch.equal(targets[-L:], digits)


def test_the_copying_batch_depends_on_its_generator_alone() -> None:
    def batch(seed: int) -> Batch:
        return copying_batch(3, 8, 5, 50, torch.Generator().manual_seed(seed))

    assert torch.equal(batch(1).tokens, batch(1).tokens)
    assert not torch.equal(batch(1).tokens, batch(2).tokens)


def test_accuracy_counts_the_digits_of_the_last_steps_only() -> None:
    batch = copying_batch(2, 4, 3, 200, torch.Generator().manual_seed(0))

    class Says(nn.Module):
        """Digit 1 in every step, whatever comes."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.eye(5)[1].expand(*tokens.shape, 5)

        readout = nn.Linear(1, 1)

    share = (batch.targets[-2:] == 1).float().mean()
    assert accuracy(Says(), batch, 2) == pytest.approx(float(share))  # type: ignore[arg-type]


def test_training_learns_the_digits() -> None:
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(0)
    net = Copier(nn.LSTM(8, 24), 2, 8, 24)
    losses: list[float] = []
    train(
        net,
        lambda: copying_batch(1, 2, 2, 32, gen),
        1,
        steps=80,
        lr=2e-2,
        clip_norm=1.0,
        report=lambda loss, right: losses.append(loss),
    )
    assert len(losses) == 80
    assert accuracy(net, copying_batch(1, 2, 2, 100, gen), 1) == 1.0


def test_the_demo_prints_both_models_at_every_length(capsys: Capture) -> None:
    threads = torch.get_num_threads()
    assert exit_code(*TINY_DEMO, "--seed", "7") == 0
    out = capsys.readouterr().out
    assert "seed 7" in out
    assert "P = 3" in out
    assert "P = 6" in out
    for model in ("nn.LSTM", "RigLSTM"):
        assert re.search(rf"{model} *│ +\d+ │ +\d+ │ +\d+\.\d% │ +\d+\.\d% │", out)
    assert "no evidence" in out
    assert torch.get_num_threads() == threads


def test_the_demo_gives_the_same_table_for_the_same_seed(capsys: Capture) -> None:
    def table(seed: str) -> list[str]:
        assert exit_code(*TINY_DEMO, "--seed", seed) == 0
        return re.findall(r"\d+\.\d%", capsys.readouterr().out)

    assert table("1") == table("1")
