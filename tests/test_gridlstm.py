"""GridLSTM: its own equations, and the LSTM that it is."""

import math

import pytest
import torch
from torch import Tensor, nn

from riglstm.models.gridlstm import GridLSTM
from riglstm.models.lstm import LSTM


def grid_by_the_paper(x: Tensor, cells: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Eqs. (9)-(12), cell by cell: x (T, B, D) to (T, B, N·d)."""
    d = cells[0][1].shape[1]
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
def test_cells_follow_the_papers_equations(N: int, d: int) -> None:
    torch.manual_seed(N)
    grid = GridLSTM(5, N * d, num_cells=N, dtype=torch.float64)
    x = torch.randn(9, 3, 5, dtype=torch.float64)
    expected = grid_by_the_paper(x, [grid.cell_parameters(k) for k in range(N)])
    torch.testing.assert_close(grid(x)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", [GridLSTM, LSTM])
def test_with_copied_weights_it_equals_nn_lstm(model: type[GridLSTM] | type[LSTM]) -> None:
    torch.manual_seed(0)
    ours, theirs = (m(7, 24).double() for m in (model, nn.LSTM))
    with torch.no_grad():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.copy_(q)
    x = torch.randn(11, 4, 7, dtype=torch.float64)
    start = (torch.randn(1, 4, 24).double(), torch.randn(1, 4, 24).double())
    (y, (h, c)), (y_lstm, (h_lstm, c_lstm)) = ours(x, start), theirs(x, start)
    for a, b in ((y, y_lstm), (h, h_lstm), (c, c_lstm)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    for y_any in (y, y_lstm):
        y_any.square().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


def test_start_values_span_the_range_of_a_cell_of_size_d() -> None:
    torch.manual_seed(0)
    for model, bound in ((GridLSTM(40, 60), 10**-0.5), (LSTM(40, 60), 60**-0.5)):
        for p in model.parameters():
            assert p.abs().max() <= bound
        assert math.isclose(
            max(p.abs().max().item() for p in model.parameters()), bound, rel_tol=1e-2
        )


@pytest.mark.parametrize("model", [GridLSTM, LSTM])
def test_the_paper_size_has_2_884_800_parameters(model: type[GridLSTM] | type[LSTM]) -> None:
    core = sum(p.numel() for p in model(600, 600).parameters())
    assert core == 2_884_800
    embedding, readout = 2 * 600, 600 * 10 + 10
    assert core + embedding + readout == 2_892_010


def test_cells_that_do_not_share_the_width_evenly_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"multiple of num_cells = 6, got 20; take hidden_size=18 or 24"
    ):
        GridLSTM(5, 20)
