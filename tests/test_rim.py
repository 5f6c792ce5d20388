"""RIM and BRIM: against the NumPy versions, and the properties that make them what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models_oracle
from helpers import seeded, slow_bf16
from riglstm.models.base import State
from riglstm.models.brim import BRIM
from riglstm.models.rim import RIM, RIMCell, log_odds

TOL = 1e-10
"""float64 against NumPy: sums in another order."""
FD_TOL = 1e-7
"""Central differences with a step of 1e-6 of a loss of some 10: rounding leaves 1e-9."""


def scrambled(model: Any, gen: torch.Generator) -> Any:
    """Weights far from their small start values, so that every path counts; in eval mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=gen)
    return model.eval()


def a_rim(gen: torch.Generator, D: int = 5, N: int = 4, d: int = 3, **options: Any) -> RIM:
    options = {"key_size": 4, "comm_size": 2, "active_cells": 2, **options}
    model: RIM = scrambled(RIM(D, N * d, num_cells=N, dtype=torch.float64, **options), gen)
    return model


def a_brim(gen: torch.Generator, D: int = 5, H: int = 8, **options: Any) -> BRIM:
    options = {"num_cells": (4, 2), "active_cells": (2, 1), "key_size": 3, "comm_size": 2} | options
    model: BRIM = scrambled(BRIM(D, H, dtype=torch.float64, **options), gen)
    return model


def random(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def a_state(gen: torch.Generator, model: nn.Module, B: int) -> State:
    return tuple(random(gen, *s.shape) for s in model.initial_state(B))


def group(weight: Tensor, M: int) -> np.ndarray:
    """A map per cell (N, in, M·out) as the oracle has it, (N, M, out, in)."""
    return weight.detach().unflatten(2, (M, -1)).permute(0, 2, 3, 1).numpy()


def oracle_weights(cell: RIMCell) -> models_oracle.Weights:
    """A cell's parameters under the specification's names."""
    lstm, attention, comm = cell.lstm, cell.input_attention, cell.communication
    order = [1, 0, 3, 2]  # from i, f, g, o
    p: models_oracle.Weights = {"W": group(lstm.weight, 4)[:, order]}
    bias = (lstm.bias_ih + lstm.bias_hh).detach()
    p["b"] = bias.unflatten(1, (4, -1)).numpy()[:, order]
    p["W_q"] = group(attention.query.weight, attention.heads)
    for name, maps in (("W_k", attention.keys), ("W_v", attention.values)):
        p[name] = [group(W.unsqueeze(0), attention.heads)[0] for W in maps]
    p["G"], p["F"] = np.split(comm.gate_update.weight.detach().numpy(), 2)
    p["b_g"], p["b_f"] = np.split(comm.gate_update.bias.detach().numpy(), 2)
    p["C_q"], p["C_k"], p["C_v"] = np.split(group(comm.qkv.weight, comm.heads), 3, axis=2)
    return p


def cells_of(model: RIM | BRIM) -> list[tuple[RIMCell, int]]:
    """Each layer, and how many cells it has."""
    if isinstance(model, RIM):
        return [(model.cell, model.num_cells)]
    return list(zip((model.lower, model.upper), model.num_cells, strict=True))


def run_oracle(
    model: RIM | BRIM,
    x: Tensor,
    state: State,
    held: list[np.ndarray] | None = None,
    drops: list[dict[str, np.ndarray]] | None = None,
) -> list[dict[str, np.ndarray]]:
    """What happened in each layer."""
    cells = cells_of(model)
    drops = drops or [{} for _ in cells]
    p = [oracle_weights(cell) | drop for (cell, _), drop in zip(cells, drops, strict=True)]
    h, c = (
        [rows.detach().unflatten(1, (N, -1)).numpy() for (_, N), rows in zip(cells, s, strict=True)]
        for s in state
    )
    K_a = [model.active_cells] if isinstance(model, RIM) else list(model.active_cells)
    return models_oracle.rim(x.detach().numpy(), h, c, p, K_a, held)


def same(got: Tensor, want: np.ndarray, tol: float = TOL) -> None:
    assert got.shape == want.shape
    assert np.abs(got.detach().numpy() - want).max() < tol


def check_gradients(
    leaves: list[Tensor], loss: Callable[[], Tensor], oracle_loss: Callable[[], float]
) -> None:
    """Autograd's gradient of the loss, at entries of every leaf, equals the oracle's slope."""
    gradients = torch.autograd.grad(loss(), leaves)
    gen, step = np.random.default_rng(0), 1e-6
    for leaf, gradient in zip(leaves, gradients, strict=True):
        values, slopes = leaf.data.view(-1), gradient.reshape(-1)
        assert slopes.abs().max() > 0
        entries = {int(slopes.abs().argmax()), *gen.integers(0, len(values), 3).tolist()}
        for i in entries:
            at, side = values[i].item(), []
            for value in (at + step, at - step):
                values[i] = value
                side.append(oracle_loss())
            values[i] = at
            assert abs((side[0] - side[1]) / (2 * step) - slopes[i].item()) < FD_TOL


def known_dropout(monkeypatch: pytest.MonkeyPatch) -> Callable[..., np.ndarray]:
    """Dropout at 0.3 by a mask that the shape of a sample decides; the mask as a function of it."""

    def mask(*shape: int) -> np.ndarray:
        kept: np.ndarray = np.random.default_rng(shape).random(shape) > 0.3
        kept.flat[0] = False
        return kept / 0.7

    def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        assert (p, training) == (0.3, True)
        return x * torch.as_tensor(mask(*x.shape[1:]))

    monkeypatch.setattr(F, "dropout", dropout)
    return mask


@pytest.mark.parametrize("make", [a_rim, a_brim])
@pytest.mark.parametrize("seed", range(5))
def test_any_sizes_equal_numpy(seed, make):
    gen = seeded(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=gen))

    T, B = draw(3, 6), draw(1, 3)
    options: dict[str, Any] = {"D": draw(1, 6), "key_size": draw(1, 5)}
    options |= {"comm_heads": draw(1, 3), "comm_size": draw(1, 4)}
    if make is a_rim:
        N = draw(1, 6)
        options |= {"N": N, "d": draw(1, 5), "active_cells": draw(1, N)}
    else:
        pair = (1, 2, 3, 4, 6)[draw(0, 4)], (1, 2, 3, 4, 6)[draw(0, 4)]
        options |= {"H": 12, "num_cells": pair, "active_cells": tuple(draw(1, n) for n in pair)}
        options["input_heads"] = (1, 2, 4)[draw(0, 2)]
    model = make(gen, **options)
    x, state = random(gen, T, B, model.input_size), a_state(gen, model, B)
    want, (output, (h, c)) = run_oracle(model, x, state), model(x, state)
    for layer, (trace, layer_want) in enumerate(zip(model.trace(x, state), want, strict=True)):
        assert trace.layer == layer
        assert np.array_equal(trace.active.numpy(), layer_want["active"])
        same(trace.output, layer_want["h"].reshape(T, B, -1))
        same(trace.views, layer_want["views"])
        same(trace.peers, layer_want["peers"])
        same(h[layer], layer_want["h"][-1].reshape(B, -1))
        same(c[layer], layer_want["c"][-1].reshape(B, -1))
        assert trace.peer_scores.shape == trace.peers.shape
        assert torch.equal(trace.keep, (~trace.active).double())
        if isinstance(model, RIM):
            # With several heads views are their mean, and scores another.
            assert (trace.view_scores.softmax(dim=3) - trace.views).abs().max() < TOL
    same(output, want[-1]["h"].reshape(T, B, -1))


def test_scores_that_leave_the_null_slot_a_weight_of_1_still_rank():
    """The gain of each is below the rounding of its null weight, float32's 1."""
    model = RIM(1, 4, num_cells=4, active_cells=1, key_size=1)
    scores = torch.tensor([-60.0, -50.0, -40.0, -20.0])
    with torch.no_grad():
        model.cell.input_attention.query.weight.copy_(scores.view(4, 1, 1))
        model.cell.input_attention.keys[0].fill_(1)
    (trace,) = model.trace(torch.ones(1, 1, 1), (torch.ones(1, 1, 4), torch.zeros(1, 1, 4)))
    assert torch.equal(trace.view_scores[0, 0, :, 1], scores)
    assert (trace.views[0, 0, :, 0] == 1).all()
    assert trace.active[0, 0].tolist() == [False, False, False, True]


@pytest.mark.parametrize("sign", [1, -1])
def test_cells_are_ranked_by_the_null_slots_mean_weight_over_heads(sign):
    s = F.pad(3 * random(seeded(16), 50, 5, 4, 2), (1, 0))
    odds, p = log_odds(s), s.softmax(dim=3)[..., 0].mean(dim=2)
    assert (odds - ((1 - p) / p).log()).abs().max() < TOL
    # Far out the largest exponent is all that is left, whichever head and slot it is in.
    far = log_odds(sign * torch.tensor([[[[0.0, 200.0, 100.0], [0.0, 300.0, 50.0]]]]))
    assert far.item() == pytest.approx(200.0 if sign > 0 else -50.0, abs=2)


def test_small_scores_wake_the_same_cells_in_a_sequence_and_in_its_steps():
    """Start values give scores around 1e-5: rounded as log p is, at log(1/2), some of them tie."""
    model, x = RIM(1, 60, dropout=0.0), torch.randn(20, 16, 1)
    with torch.no_grad():
        (trace,) = model.trace(x)
        assert (model(x)[0] - trace.output).abs().max() < 1e-6
    s = torch.tensor([1e-8, 3e-8, 2e-8, 0.0, -1e-8])
    assert torch.equal(log_odds(F.pad(s.view(1, 5, 1, 1), (1, 0))), s.unsqueeze(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tie_at_the_zero_state_goes_to_the_lower_index(dtype):
    model = RIM(5, 24, dtype=dtype)  # 4 of 6 are active
    (trace,) = model.trace(torch.randn(1, 3, 5, dtype=dtype))
    assert not trace.view_scores.any()
    assert trace.active[0].tolist() == [[True] * 4 + [False] * 2] * 3


both = pytest.mark.parametrize(
    ("make", "options"), [(a_rim, {"comm_heads": 2}), (a_brim, {"comm_heads": 2, "input_heads": 2})]
)


@both
def test_gradients_equal_central_differences_with_sleeping_candidates_held(make, options):
    """The gradient mask makes autograd differ from the slope of the output, on purpose.

    It is the slope of the function in which the candidates of sleeping cells are constants. The
    oracle is that function when it is given the candidates of the unperturbed run.
    """
    gen = seeded(7)
    model = make(gen, **options)
    x = random(gen, 3, 2, 5).requires_grad_()
    state = tuple(s.requires_grad_() for s in a_state(gen, model, 2))
    first = run_oracle(model, x, state)
    held = [layer["candidates"] for layer in first]
    weight, weight_c = random(gen, 3, 2, model.hidden_size), random(gen, *state[1].shape)

    def loss() -> Tensor:
        y, (_, c) = model(x, state)
        return (y * weight).sum() + (c * weight_c).sum()

    def oracle_loss() -> float:
        now = run_oracle(model, x, state, held)
        for layer, before in zip(now, first, strict=True):
            assert np.array_equal(layer["active"], before["active"])
        memory = np.stack([layer["c"][-1].reshape(2, -1) for layer in now])
        y = now[-1]["h"].reshape(3, 2, -1)
        return float((y * weight.numpy()).sum() + (memory * weight_c.numpy()).sum())

    assert abs(loss().item() - oracle_loss()) < TOL
    check_gradients([x, *state, *model.parameters()], loss, oracle_loss)


@both
def test_dropout_falls_on_what_cells_take_in_and_before_the_tanh(make, options, monkeypatch):
    gen = seeded(15)
    model = make(gen, dropout=0.3, **options).train()
    mask = known_dropout(monkeypatch)
    x, state = random(gen, 3, 2, 5), a_state(gen, model, 2)
    drops = []
    for _, N in cells_of(model):
        d = model.hidden_size // N
        drops.append({"drop_u": mask(N, 4 * d), "drop_update": mask(N, d)})
    want = run_oracle(model, x, state, drops=drops)
    same(model(x, state)[0], want[-1]["h"].reshape(3, 2, -1))


@slow_bf16
def test_dropout_is_drawn_in_the_weights_precision(monkeypatch):
    """bf16's 1/0.9 is too small by 0.16%, in every element that is kept."""
    seen, dropout = [], F.dropout

    def watched(x: Tensor, p: float, training: bool) -> Tensor:
        y = dropout(x, p, training)
        seen.append((x.dtype, y.dtype))
        return y

    monkeypatch.setattr(F, "dropout", watched)
    model = RIM(5, 24, dropout=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        given, _ = model.cell.lay_out(torch.randn(9, 2, 5, dtype=torch.bfloat16), deferred=False)
    assert seen == [(torch.float32, torch.float32)] * 2
    for masks in given[2:]:
        assert set(torch.stack(masks).unique().tolist()) == {0.0, torch.tensor(1 / 0.9).item()}


@pytest.mark.parametrize(
    "register",
    ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"],
)
def test_hooks_on_parts_are_called_in_every_step(register):
    model, calls = a_rim(seeded(12)), []
    getattr(model.cell.lstm, f"register_{register}")(lambda *_: calls.append(1))
    model(random(seeded(13), 3, 2, 5))[0].sum().backward()
    assert len(calls) == 3


def test_start_values_are_the_specifications():
    cell = RIM(600, 600).cell
    lstm, attention, communication = cell.lstm, cell.input_attention, cell.communication
    for parameters, bound in (
        ((lstm.weight, lstm.bias_ih, lstm.bias_hh), 600**-0.5),
        (communication.gate_update.parameters(), 128**-0.5),
    ):
        for parameter in parameters:
            assert 0.9 * bound < parameter.abs().max() <= bound
    for weight in (
        *(attention.query.weight, attention.keys[0], attention.values[0]),
        communication.qkv.weight,
    ):
        assert abs(weight.std().item() - 0.01) < 2e-4


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (RIM, {"hidden_size": 25}, r"multiple of num_cells = 6, got 25; take hidden_size=24 or 30"),
        *((RIM, {"active_cells": v},
           rf"active_cells must be .* in \[1, num_cells\] = \[1, 6\], got {v}") for v in (7, 0)),
        *((RIM, {name: v}, rf"{name} must be a whole number of at least 1, got {v}")
          for name in ("num_cells", "key_size", "comm_heads", "comm_size") for v in (0, 1.5)),
        (RIM, {"dropout": True}, r"dropout must be a probability in \[0, 1\], got True"),
        (BRIM, {"hidden_size": 9}, r"multiple of num_cells = 6, got 9; take hidden_size=6 or 12"),
        (BRIM, {"num_cells": (6, 5)},
         r"multiple of num_cells = 5, got 12; take hidden_size=10 or 15"),
        (BRIM, {"num_cells": 6}, r"num_cells must be a pair, .* got 6; give it as \(6, 3\)"),
        (BRIM, {"num_cells": (6, 3, 2)}, r"num_cells must be a pair, .* got \(6, 3, 2\)"),
        (BRIM, {"active_cells": (4,)}, r"active_cells must be a pair, .* got \(4,\)"),
        (BRIM, {"active_cells": (4, 4)}, r"active_cells must be .* = \[1, 3\], got 4"),
        (BRIM, {"input_heads": 3},
         r"input_heads must divide .* = 8 .* num_cells = 6, got 3; take 1, 2"),
        (BRIM, {"input_heads": 0}, "input_heads must be a whole number of at least 1, got 0"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        model(**{"input_size": 5, "hidden_size": 12, **options})
