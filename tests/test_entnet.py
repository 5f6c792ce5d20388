"""EntNet against NumPy, and what its specification promises."""

import numpy as np
import pytest
import torch
from torch import Tensor

import models_oracle as oracle
from riglstm.models.entnet import EntNet

NAMES = {
    "weight_in": "W_in",
    "keys": "w",
    "bias_gate": "b_gate",
    "weight_state": "U",
    "weight_input": "V",
    "weight_key": "W",
    "bias": "b",
    "slope": "slope",
}


@pytest.mark.parametrize(
    ("T", "B", "D", "N", "d"), [(1, 1, 2, 1, 1), (7, 3, 5, 4, 3), (12, 2, 9, 6, 8)]
)
def test_it_equals_the_numpy_version(T: int, B: int, D: int, N: int, d: int) -> None:
    torch.manual_seed(N)
    model = EntNet(D, N * d, num_slots=N, dtype=torch.float64)
    with torch.no_grad():
        model.slope.copy_(torch.rand(d))
    x = 3 * torch.randn(T, B, D, dtype=torch.float64)
    p = {NAMES[name]: value.numpy() for name, value in model.state_dict().items()}
    expected = oracle.entnet(x.numpy(), p)
    output, (state,) = model(x)
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state[0].detach().numpy(), expected[-1], rtol=0, atol=1e-10)
    start = torch.randn(1, B, N * d, dtype=torch.float64)
    expected = oracle.entnet(x.numpy(), p, start[0].numpy())
    output, _ = model(x, (start,))
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-10)


def test_gradcheck_from_a_given_state() -> None:
    torch.manual_seed(0)
    model = EntNet(4, 12, num_slots=3, dtype=torch.float64)
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    start = torch.randn(1, 2, 12, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in model.named_parameters()]

    def run(x: Tensor, start: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        replaced = dict(zip(names, values, strict=True))
        y, (state,) = torch.func.functional_call(model, replaced, (x, (start,)))
        return y, state

    assert torch.autograd.gradcheck(run, (x, start, *model.parameters()), fast_mode=True)


def test_slots_have_unit_length() -> None:
    torch.manual_seed(0)
    output, _ = EntNet(5, 24)(torch.randn(8, 3, 5))
    torch.testing.assert_close(output.unflatten(2, (6, 4)).norm(dim=3), torch.ones(8, 3, 6))


def test_a_slot_that_cancels_itself_stays_zero_with_a_finite_gradient() -> None:
    model = EntNet(2, 6, num_slots=2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    output, _ = model(torch.randn(3, 2, 2))
    assert torch.equal(output, torch.zeros(3, 2, 6))
    output.sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()


def test_slots_start_as_their_keys_which_learn_from_there() -> None:
    model = EntNet(5, 24)
    (start,) = model.initial_state(3)
    assert torch.equal(start[0, 2], model.keys.flatten())
    start.sum().backward()
    assert torch.equal(model.keys.grad, torch.full((6, 4), 3.0))


def test_trace_shows_the_gates_and_what_the_norm_kept() -> None:
    torch.manual_seed(0)
    model = EntNet(5, 24, dtype=torch.float64)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    (trace,) = model.trace(x)
    assert torch.equal(trace.output, model(x)[0])
    assert trace.views is not None
    assert trace.view_scores is not None
    assert trace.keep is not None
    assert trace.views.shape == (4, 3, 6, 1)
    h = model.keys.detach()
    s = x[0, 0] @ model.weight_in.T
    logit = torch.stack([s @ h[j] + s @ h[j] + model.bias_gate[j] for j in range(6)])
    torch.testing.assert_close(trace.view_scores[0, 0, :, 0], logit)
    torch.testing.assert_close(trace.views[0, 0, :, 0], logit.sigmoid())
    write = model.weight_state @ h[2] + model.weight_input @ s + model.weight_key @ h[2]
    norm = (h[2] + logit[2].sigmoid() * (write + model.bias)).norm()
    torch.testing.assert_close(trace.keep[0, 0, 2], 1 / norm)


def test_start_values_have_a_spread_of_a_tenth_and_slopes_of_one() -> None:
    torch.manual_seed(0)
    model = EntNet(600, 600)
    assert torch.equal(model.slope, torch.ones(100))
    for name in ("weight_in", "keys", "weight_state", "weight_input", "weight_key"):
        assert abs(getattr(model, name).std().item() - 0.1) < 0.01
    # Both biases are drawn like all else; they are short, so the spread is that of many draws.
    for name in ("bias_gate", "bias"):
        draws = []
        for _ in range(40):
            model.reset_parameters()
            draws.append(getattr(model, name).detach().clone())
        drawn = torch.cat(draws)
        assert abs(drawn.std().item() - 0.1) < 0.02, name
        assert abs(drawn.mean().item()) < 0.02, name


@pytest.mark.parametrize(
    ("D", "N", "d", "count"), [(600, 6, 100, 90_806), (512, 5, 50, 33_455)], ids=["images", "balls"]
)
def test_parameters_at_the_papers_sizes(D: int, N: int, d: int, count: int) -> None:
    model = EntNet(D, N * d, num_slots=N)
    assert sum(p.numel() for p in model.parameters()) == count


def test_slots_that_do_not_share_the_width_evenly_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"multiple of num_slots = 6, got 20; take hidden_size=18 or 24"
    ):
        EntNet(5, 20)
