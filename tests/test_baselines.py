"""The models beside RigLSTM, RIM and BRIM, each against another version of its equations.

RMC and EntNet: NumPy; the Transformer: torch's encoder layers; LSTM and GridLSTM: nn.LSTM.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models_oracle as oracle
from helpers import close, slow_bf16
from riglstm.models.base import summary
from riglstm.models.entnet import EntNet
from riglstm.models.lstm import LSTM, GridLSTM
from riglstm.models.rmc import RMC
from riglstm.models.transformer import Transformer, positions


def random_rmc(D: int, S: int, heads: int, size: int) -> RMC:
    """All parameters drawn, so that gains of 1 and shifts of 0 hide nothing."""
    model = RMC(D, S * heads * size, num_slots=S, num_heads=heads, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def check_against_numpy(model: Any, x: Tensor, run: Any) -> None:
    """From the start and from a given state: outputs, and the last of them as the state."""
    p = {name: value.numpy() for name, value in model.state_dict().items()}
    start = torch.randn(1, x.shape[1], model.hidden_size, dtype=torch.float64)
    for given in (None, start):
        own = () if given is None else (given[0].numpy(),)
        expected = run(x.numpy(), p, *own)
        output, (state,) = model(x) if given is None else model(x, (given,))
        np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(state[0].detach().numpy(), expected[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("T", "B", "D", "S", "heads", "size"),
    [(1, 1, 3, 1, 1, 2), (7, 2, 5, 4, 2, 3), (5, 3, 8, 6, 4, 5), (4, 2, 3, 9, 1, 4)],
)
def test_rmc_equals_numpy(T, B, D, S, heads, size):
    torch.manual_seed(S)
    x = torch.randn(T, B, D, dtype=torch.float64)
    run = lambda x, p, *start: oracle.rmc(x, p, S, heads, *start)  # noqa: E731
    check_against_numpy(random_rmc(D, S, heads, size), x, run)


@pytest.mark.parametrize(
    ("T", "B", "D", "N", "d"), [(1, 1, 2, 1, 1), (7, 3, 5, 4, 3), (12, 2, 9, 6, 8)]
)
def test_entnet_equals_numpy(T, B, D, N, d):
    torch.manual_seed(N)
    model = EntNet(D, N * d, num_slots=N, dtype=torch.float64)
    with torch.no_grad():
        model.slope.copy_(torch.rand(d))
    check_against_numpy(model, 3 * torch.randn(T, B, D, dtype=torch.float64), oracle.entnet)


def test_a_trace_of_rmc_shows_the_attention_that_made_the_output():
    model = random_rmc(5, 3, 1, 4)
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    (trace,) = model.trace(x)
    assert torch.equal(trace.output, model(x)[0])
    assert ((trace.keep > 0) & (trace.keep < 1)).all()
    weights, scores = (
        torch.cat([p for p in pair if p is not None], dim=3)
        for pair in ((trace.peers, trace.views), (trace.peer_scores, trace.view_scores))
    )
    assert weights.shape == (6, 2, 3, 4)
    close(scores.softmax(dim=3), weights)


@slow_bf16
def test_gates_of_rmc_are_applied_in_full_precision_under_autocast():
    model, x = RMC(5, 24), torch.randn(3, 2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        (trace,) = model.trace(x)
    assert {trace.keep.dtype, trace.output.dtype} == {torch.float32}
    # Gates of bf16 would have all of them among its few values.
    assert not torch.equal(trace.keep, trace.keep.bfloat16().float())


def test_a_slot_of_entnet_that_cancels_itself_stays_zero_with_a_finite_gradient():
    model = EntNet(2, 6, num_slots=2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    output, _ = model(torch.randn(3, 2, 2))
    assert torch.equal(output, torch.zeros(3, 2, 6))
    output.sum().backward()
    for p in model.parameters():
        assert p.grad.isfinite().all()


def test_start_values_of_entnet_have_a_spread_of_a_tenth_and_slopes_of_one():
    model = EntNet(600, 600)
    assert torch.equal(model.slope, torch.ones(100))
    for name in ("weight_in", "keys", "weight_state", "weight_input", "weight_key"):
        assert abs(getattr(model, name).std().item() - 0.1) < 0.01
    # Biases are drawn like all else, but short: these are as many as the numbers allow.
    drawn = EntNet(1, 1200, num_slots=400).bias_gate, EntNet(1, 1200, num_slots=3).bias
    for bias in drawn:
        assert abs(bias.std().item() - 0.1) < 0.02
        assert abs(bias.mean().item()) < 0.02


def test_the_transformer_equals_torchs_encoder_layers_with_copied_weights():
    ours = Transformer(5, 16, num_layers=2, num_heads=4, ffn_size=24, dtype=torch.float64).eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.2 * torch.randn_like(p))
    names = {
        **{"qkv.": "self_attn.in_proj_", "attention_out.": "self_attn.out_proj."},
        **{"norm_attention.": "norm1.", "norm_ffn.": "norm2."},
        **{"ffn_in.": "linear1.", "ffn_out.": "linear2."},
    }
    x = torch.randn(7, 3, 5, dtype=torch.float64)
    z = ours.input(x) + positions(7, 16, x).unsqueeze(1)
    for layer in ours.layers:
        theirs = nn.TransformerEncoderLayer(16, 4, 24, norm_first=True, dtype=torch.float64).eval()
        state = {}
        for name, value in layer.state_dict().items():
            prefix, kind = name.rsplit(".", 1)
            state[names[prefix + "."] + kind] = value
        theirs.load_state_dict(state)
        z = theirs(z)
    close(ours(x)[0], ours.norm(z), atol=1e-10)


def test_positions_are_the_sinusoids_of_the_index_at_any_length_and_precision():
    p = positions(6, 8, torch.zeros(1, dtype=torch.float64))
    for t in range(6):
        for i in range(4):
            angle = t / 10000 ** (2 * i / 8)
            assert p[t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert p[t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)
    long = positions(1024, 256, torch.zeros(1))
    assert torch.equal(positions(196, 256, torch.zeros(1)), long[:196])
    assert torch.cdist(long, long).fill_diagonal_(1).min() > 0.1
    assert torch.equal(positions(1024, 256, torch.zeros(1).bfloat16()), long.bfloat16())


def test_every_output_of_the_transformer_has_seen_the_whole_sequence():
    model = Transformer(5, 16, num_layers=1, dropout=0.5)
    x = torch.randn(6, 2, 5)
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    changed = x.clone()
    changed[-1] += 1
    output, _ = model(x)
    assert (output[0] - model(changed)[0][0]).abs().max() > 1e-4
    # So that a classifier reads the mean over steps.
    assert torch.equal(summary(model, output), output.mean(dim=0))
    model.batch_first = True
    assert torch.equal(summary(model, output), output.mean(dim=1))


def grid_by_the_paper(x: Tensor, grid: GridLSTM) -> Tensor:
    """Eqs. (9)-(12), cell by cell: x (T, B, D) to (T, B, N·d)."""
    W_x, W_h, b_x, b_h = grid.stack.weights()
    N, d = grid.num_cells, grid.cell_size
    all_W = torch.cat((W_x, W_h), dim=1).unflatten(0, (4, N, d))  # gates i, f, g, o
    all_b = (b_x + b_h).unflatten(0, (4, N, d))
    cells = list(zip(all_W.unbind(1), all_b.unbind(1), strict=True))
    h = [x.new_zeros(x.shape[1], d) for _ in cells]
    c = list(h)
    outputs = []
    for x_t in x:
        H = torch.cat((x_t, *h), dim=1)
        for k, (W, b) in enumerate(cells):
            i, f, g, o = (H @ W[gate].T + b[gate] for gate in range(4))
            c[k] = f.sigmoid() * c[k] + i.sigmoid() * g.tanh()
            h[k] = o.sigmoid() * c[k].tanh()
        outputs.append(torch.cat(h, dim=1))
    return torch.stack(outputs)


@pytest.mark.parametrize(("N", "d"), [(1, 5), (3, 4), (6, 7)])
def test_cells_of_gridlstm_follow_the_papers_equations(N, d):
    torch.manual_seed(N)
    grid = GridLSTM(5, N * d, num_cells=N, dtype=torch.float64)
    x = torch.randn(9, 3, 5, dtype=torch.float64)
    close(grid(x)[0], grid_by_the_paper(x, grid))


@pytest.mark.parametrize("model", [GridLSTM, LSTM])
def test_with_copied_weights_both_equal_nn_lstm(model):
    ours, theirs = (m(7, 24).double() for m in (model, nn.LSTM))
    with torch.no_grad():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.copy_(q)
    x = torch.randn(11, 4, 7, dtype=torch.float64)
    start = (torch.randn(1, 4, 24).double(), torch.randn(1, 4, 24).double())
    got, want = ours(x, start), theirs(x, start)
    close(got, want)
    for y, _ in (got, want):
        y.square().sum().backward()
    close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


@pytest.mark.parametrize(
    ("model", "hidden", "options", "message"),
    [
        (RMC, 30, {}, r"of num_slots \* num_heads = 24, got 30; take hidden_size=24 or 48"),
        (EntNet, 20, {}, "multiple of num_slots = 6, got 20; take hidden_size=18 or 24"),
        (GridLSTM, 20, {}, "multiple of num_cells = 6, got 20; take hidden_size=18 or 24"),
        (Transformer, 20, {}, "multiple of num_heads = 8, got 20; take hidden_size=16 or 24"),
        (Transformer, 15, {"num_heads": 3}, "must be even, as positions.*take hidden_size=18"),
        (Transformer, 16, {"num_layers": 0}, "num_layers must be .* of at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(model, hidden, options, message):
    with pytest.raises(ValueError, match=message):
        model(5, hidden, **options)
