"""RMC against NumPy, and what its specification promises."""

import numpy as np
import pytest
import torch
from torch import Tensor

import models_oracle as oracle
from riglstm.models.rmc import RMC

NAMES = {
    "input.weight": "W",
    "input.bias": "b",
    "qkv.weight": "W_qkv",
    "qkv.bias": "b_qkv",
    "norm_qkv.weight": "gain_qkv",
    "norm_qkv.bias": "shift_qkv",
    "norm_attention.weight": "gain_1",
    "norm_attention.bias": "shift_1",
    "mlp_in.weight": "W_mlp1",
    "mlp_in.bias": "b_mlp1",
    "mlp_out.weight": "W_mlp2",
    "mlp_out.bias": "b_mlp2",
    "norm_mlp.weight": "gain_2",
    "norm_mlp.bias": "shift_2",
    "gates_input.weight": "W_x",
    "gates_input.bias": "b_x",
    "gates_memory.weight": "W_m",
    "gates_memory.bias": "b_m",
}


def random_rmc(D: int, S: int, heads: int, size: int) -> RMC:
    """All parameters drawn, so that gains of 1 and shifts of 0 hide nothing."""
    model = RMC(D, S * heads * size, num_slots=S, num_heads=heads, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize(
    ("T", "B", "D", "S", "heads", "size"),
    [(1, 1, 3, 1, 1, 2), (7, 2, 5, 4, 2, 3), (5, 3, 8, 6, 4, 5), (4, 2, 3, 9, 1, 4)],
)
def test_it_equals_the_numpy_version(T: int, B: int, D: int, S: int, heads: int, size: int) -> None:
    torch.manual_seed(S)
    model = random_rmc(D, S, heads, size)
    x = torch.randn(T, B, D, dtype=torch.float64)
    p = {NAMES[name]: value.numpy() for name, value in model.state_dict().items()}
    expected = oracle.rmc(x.numpy(), p, S, heads)
    output, (state,) = model(x)
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state[0].detach().numpy(), expected[-1], rtol=0, atol=1e-10)
    start = torch.randn(1, B, S * heads * size, dtype=torch.float64)
    expected = oracle.rmc(x.numpy(), p, S, heads, start[0].numpy())
    output, _ = model(x, (start,))
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-10)


def test_gradcheck_from_a_given_state() -> None:
    torch.manual_seed(0)
    model = random_rmc(4, 3, 2, 2)
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    start = torch.randn(1, 2, 12, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in model.named_parameters()]

    def run(x: Tensor, start: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        replaced = dict(zip(names, values, strict=True))
        y, (state,) = torch.func.functional_call(model, replaced, (x, (start,)))
        return y, state

    assert torch.autograd.gradcheck(run, (x, start, *model.parameters()), fast_mode=True)


@pytest.mark.parametrize(("S", "m"), [(4, 6), (6, 4)])
def test_the_memory_starts_as_an_identity_cut_or_padded(S: int, m: int) -> None:
    (start,) = RMC(3, S * m, num_slots=S, num_heads=2).initial_state(2)
    assert start.shape == (1, 2, S * m)
    for b in range(2):
        assert torch.equal(start[0, b].view(S, m), torch.eye(S, m))


def test_trace_shows_the_attention_that_made_the_output() -> None:
    torch.manual_seed(0)
    model = random_rmc(5, 3, 2, 4)
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    (trace,) = model.trace(x)
    assert torch.equal(trace.output, model(x)[0])
    assert trace.views is not None
    assert trace.peers is not None
    assert trace.keep is not None
    assert trace.views.shape == (6, 2, 3, 1)
    assert trace.peers.shape == (6, 2, 3, 3)
    total = trace.views.sum(-1) + trace.peers.sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    assert ((trace.keep > 0) & (trace.keep < 1)).all()


def test_trace_shows_the_scores_that_the_weights_are_made_of() -> None:
    torch.manual_seed(0)
    model = random_rmc(5, 3, 1, 4)
    (trace,) = model.trace(torch.randn(6, 2, 5, dtype=torch.float64))
    assert trace.views is not None
    assert trace.peers is not None
    assert trace.view_scores is not None
    assert trace.peer_scores is not None
    scores = torch.cat((trace.peer_scores, trace.view_scores), dim=3)
    torch.testing.assert_close(
        scores.softmax(dim=3), torch.cat((trace.peers, trace.views), dim=3), rtol=0, atol=1e-12
    )


# A processor without bf16 computes it in another way, and torch says so.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_gates_are_applied_in_full_precision_under_autocast() -> None:
    model, x = RMC(5, 24), torch.randn(3, 2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        (trace,) = model.trace(x)
    assert trace.keep is not None
    assert {trace.keep.dtype, trace.output.dtype} == {torch.float32}
    # Gates of bf16 would have all of them among its few values.
    assert not torch.equal(trace.keep, trace.keep.bfloat16().float())


@pytest.mark.parametrize(
    ("hidden", "options", "core"),
    [(600, {}, 152_000), (4000, {"num_slots": 8, "num_heads": 5}, 2_560_000)],
)
def test_parameters_at_the_specified_sizes(hidden: int, options: dict[str, int], core: int) -> None:
    model = RMC(600, hidden, **options)
    assert sum(p.numel() for p in model.parameters()) == core


def test_the_state_matched_size_is_0_16_million() -> None:
    core = sum(p.numel() for p in RMC(600, 600).parameters())
    assert round((core + 2 * 600 + 600 * 10 + 10) / 1e6, 2) == 0.16


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"multiple of num_slots \* num_heads = 24, got 30; take hidden_size=24 or 48",
    ):
        RMC(5, 30)
