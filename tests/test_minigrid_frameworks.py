"""The blocks of docs/minigrid.md: RigLSTM in sb3-contrib and torchrl, on a real MiniGrid level."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from riglstm import RigLSTM

pytest.importorskip("minigrid", reason="needs the extra riglstm[rl]")

pytestmark = pytest.mark.slow
GUIDE = Path(__file__).parents[1] / "docs" / "minigrid.md"


def block(word: str) -> dict[str, Any]:
    """What the block with that word in it defines, run."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    (text,) = [b for b in blocks if word in b]
    names: dict[str, Any] = {"__name__": "guide"}
    exec(text, names)
    return names


def test_sb3_contrib_learns_on_a_level() -> None:
    pytest.importorskip("sb3_contrib", reason="needs the extra riglstm[sb3]")
    torch.manual_seed(0)
    model = block("RecurrentPPO")["model"]
    assert model.num_timesteps == 64
    layers = [m for m in model.policy.modules() if isinstance(m, RigLSTM)]
    assert [layer.input_size for layer in layers] == [147, 147]
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    model.learn(64)
    after = [p for layer in layers for p in layer.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_torchrl_steps_and_sequences_agree_on_a_level() -> None:
    pytest.importorskip("torchrl", reason="needs the extra riglstm[torchrl]")
    torch.manual_seed(0)
    names = block("LSTMModule")
    data = names["data"]
    assert data["is_init"][1:].any(), "no episode starts inside the rollout"
    assert isinstance(names["rnn"].lstm, RigLSTM)
    torch.testing.assert_close(names["features"], data["embed"], rtol=0, atol=1e-5)
