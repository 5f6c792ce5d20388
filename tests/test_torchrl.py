"""torchrl's LSTMModule around RigLSTM, as docs/frameworks.md shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import close, run_guide, seeded
from riglstm import RigLSTM

pytest.importorskip("torchrl", reason="needs the extra riglstm[torchrl]")
pytest.importorskip("gymnasium", reason="the guide's environment is CartPole")

from tensordict import TensorDict
from torchrl.modules import LSTMModule, set_recurrent_mode

pytestmark = pytest.mark.slow


def build() -> Any:
    rnn = RigLSTM(3, 12, num_layers=2, batch_first=True, dtype=torch.float64)
    return LSTMModule(lstm=rnn, in_key="observation", out_key="embed")


def batch(starts: list[tuple[int, int]], B: int = 2, T: int = 9) -> Any:
    """Observations and a random state before each step; `starts`: where an episode begins."""
    is_init = torch.zeros(B, T, 1, dtype=torch.bool)
    for b, t in starts:
        is_init[b, t] = True
    gen = seeded(1)
    data = {"observation": torch.randn(B, T, 3, generator=gen, dtype=torch.float64)}
    for s in "hc":
        state = torch.randn(B, T, 2, 12, generator=gen, dtype=torch.float64)
        # What InitTracker and the primer give: no state before an episode.
        data[f"recurrent_state_{s}"] = state.masked_fill(is_init.unsqueeze(-1), 0)
    return TensorDict({**data, "is_init": is_init}, [B, T])


def in_steps(module: Any, data: Any) -> tuple[Tensor, Any]:
    """The outputs of one step after another, each with the state of the one before."""
    outputs = []
    state = data[:, 0].select("recurrent_state_h", "recurrent_state_c")
    for t in range(data.shape[1]):
        step = module(data[:, t].clone().update(state))
        outputs.append(step["embed"])
        state = step["next"].select("recurrent_state_h", "recurrent_state_c")
    return torch.stack(outputs, 1), state


STARTS = [[], [(0, 0), (1, 0)], [(0, 0), (0, 4), (0, 5), (1, 7)]]
"""No episode begins; all begin with the data; some begin within it."""


@pytest.mark.parametrize("starts", STARTS)
def test_recurrent_mode_equals_stepping(starts):
    module, data = build(), batch(starts)
    stepped, state = in_steps(module, data)
    with set_recurrent_mode(True):
        whole = module(data.clone())
    close(whole["embed"], stepped)
    for s in "hc":
        close(whole["next", f"recurrent_state_{s}"][:, -1], state[f"recurrent_state_{s}"])


def test_backends_that_bypass_the_layer_raise():
    """As the guide says: no silent arithmetic of another layer."""
    module = build()
    module.recurrent_backend = "scan"
    with set_recurrent_mode(True), pytest.raises(AttributeError, match="_all_weights"):
        module(batch([(0, 0), (1, 0)]))


def test_guides_rollout_equals_its_recurrent_pass():
    names = run_guide("frameworks", "torchrl")
    data, features = names["data"], names["features"]
    assert isinstance(names["rnn"].lstm, RigLSTM)
    assert data["is_init"][1:].any(), "the rollout has no episode that starts inside it"
    close(features, data["embed"], 1e-5)
