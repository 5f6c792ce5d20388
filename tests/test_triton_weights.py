"""The gradient of weights in bfloat16 by kernels of ours, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import clear_problem, gradients, seeded

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py", allow_module_level=True)
pytest.importorskip("triton")
triton_plan = pytest.importorskip(
    "riglstm.scan.fused.plan", reason="the kernels are not in this copy"
)
triton_tiles = pytest.importorskip("riglstm.scan.fused.tiles")
triton_back = pytest.importorskip("riglstm.scan.fused.back")
triton_gradients = pytest.importorskip("riglstm.scan.fused.gradients")
triton_weights = pytest.importorskip("riglstm.scan.kernels.weights")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nan_filled_empty")]
N, ROWS = 3, triton_weights.ROWS
BITS_OF_A_ROW = ROWS.bit_length() - 1


def random_bits(R: int, S: int, sleepy: tuple[float, ...] = (0.4,) * N) -> Tensor:
    """(R, N): what each cell took in of S slots; a cell sleeps as often as `sleepy` says."""
    rng = seeded(R)
    taken = torch.randint(1, 1 << S, (R, N), generator=rng, dtype=torch.int32)
    return taken * (torch.rand(R, N, generator=rng) >= torch.tensor(sleepy))


def lists(bits: Tensor, S: int, BR: int, per: int) -> tuple[Tensor, Tensor]:
    """(pieces, N, ROWS) and (pieces, N)."""
    R = bits.shape[0]
    pieces = -(-R // per)
    act = ((bits != 0) * (1 << torch.arange(N))).sum(1, dtype=torch.int32)
    # A bit for a reset, which is no cell's; behind the rows, all of them.
    act = torch.cat([act | 1 << N, torch.full((BR,), -1, dtype=torch.int32)])[:R]
    listed = torch.full((pieces, N, ROWS), -1, dtype=torch.int32)
    count = torch.full((pieces, N), -1, dtype=torch.int32)
    grid = (-(-per // BR), N, pieces)
    triton_weights.awake_kernel[grid](act, bits, listed, count, R, per, N=N, S=S, BR=BR)
    return listed, count


@pytest.mark.parametrize(
    ("R", "S", "per"), [(1, 5, 1), (63, 5, 63), (64, 16, 64), (150, 16, 150), (150, 16, 140)]
)
def test_a_list_has_the_rows_in_which_a_cell_was_awake_in_order(R: int, S: int, per: int) -> None:
    bits = random_bits(R, S, (0.4, 0.0, 1.0))
    listed, count = lists(bits, S, 64, per)
    for i, mine in enumerate(bits.split(per)):
        assert count[i].tolist() == (mine != 0).sum(0).tolist()
        assert count[i, 1:].tolist() == [len(mine), 0]
        for j in range(N):
            rows = (mine[:, j] != 0).nonzero().flatten()
            got = listed[i, j, : len(rows)]
            assert (got & (ROWS - 1)).tolist() == rows.tolist()
            assert (got >> BITS_OF_A_ROW).tolist() == (mine[rows, j] | 1 << S).tolist()
            assert (listed[i, j, len(rows) :] == -1).all(), "nothing is written behind it"


@pytest.mark.parametrize(("P", "R", "S"), [(8, 70, 5), (24, 1, 5), (24, 70, 5), (8, 70, 16)])
def test_the_product_adds_what_cells_took_in_and_nothing_else(P: int, R: int, S: int) -> None:
    L, wide, rng = 128, S * P + 8, seeded(3)
    # Whole numbers, so that every sum is exact. What no cell took in, and D5 of cells that slept,
    # would show.
    bits = random_bits(R, S)
    bits[:, :] &= ~(1 << 2)
    XH = torch.randint(-3, 4, (R, S, P), generator=rng).bfloat16()
    XH[:, 2] = torch.nan
    D5 = torch.randint(-3, 4, (R, N, L), generator=rng).bfloat16()
    D5[bits == 0] = torch.nan
    ones = torch.tensor([1.0] + [0.0] * 7, dtype=torch.bfloat16)
    before = torch.randint(-9, 9, (N, wide, L), generator=rng).float()
    dW = before.clone()
    tile = {"BM": 64, "BN": 64, "BK": 32, "STAGES": 1, "WIDE": True}
    grid = (N * -(-wide // 64) * (L // 64),)
    (listed,), (count,) = lists(bits, S, 64, R)
    triton_weights.weights_kernel[grid](XH, ones, D5, listed, count, dW, N=N, S=S, P=P, L=L, **tile)
    took = (bits[:, :, None] >> torch.arange(S)) & 1  # (R, N, S)
    H = torch.where(took[..., None] != 0, XH[:, None], 0).double().flatten(2)
    H = torch.cat([H, torch.ones(R, N, 1), torch.zeros(R, N, 7)], 2)
    want = torch.einsum("rnw,rnl->nwl", H, D5.double().nan_to_num())
    assert torch.equal(dW.double(), before + want)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are several tiles: of lists, and of views."""
    ours, views = triton_gradients.prepare, triton_back.views_tiles

    def prepared(kernel: Any, **constants: Any) -> Any:
        more = {"BR": 4} if kernel is triton_weights.awake_kernel else {}
        return ours(kernel, **{**constants, **more})

    def products(*given: Any) -> Any:
        by = ours_of(*given)
        return by._replace(in_lists=by.in_lists._replace(rows=4))

    ours_of = triton_gradients.products
    monkeypatch.setattr(triton_gradients, "prepare", prepared)
    monkeypatch.setattr(triton_back, "products", products)
    monkeypatch.setattr(triton_back, "views_tiles", lambda *given: views(*given) | {"BM": 16})
    # Nothing is kept.
    monkeypatch.setattr(triton_back, "plan_back", triton_back.plan_back.__wrapped__)
    monkeypatch.setattr(triton_back, "_layout", triton_back._layout.__wrapped__)


@pytest.mark.usefixtures("small_tiles")
def test_in_pieces_it_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    p = clear_problem(T=4, B=6, N=2, K=2, d=18, D=5, K_a=1, K_x=1, K_h=1)
    whole = None
    # Tiles of views have 16 rows, and those of lists 4.
    for rows in (100, 18):
        monkeypatch.setattr(triton_back, "ROWS_AT_ONCE", rows)
        with torch.autocast("cpu", torch.bfloat16):
            got = gradients(p.to(torch.float32), "triton")
        whole = got if whole is None else whole
        for n in got:
            # float32's sums in another order.
            torch.testing.assert_close(got[n], whole[n], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [16, 18])
def test_cublas_way_comes_to_the_same(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = clear_problem(T=2, B=2, N=2, K=2, d=d, D=5, K_a=1, K_x=1, K_h=1).to(torch.float32)
    monkeypatch.setattr(triton_back, "plan_back", triton_back.plan_back.__wrapped__)
    ours, products = {}, triton_gradients.products
    for by in ("ours", "cuBLAS"):
        if by == "cuBLAS":
            monkeypatch.setattr(
                triton_back, "products", lambda *g: products(*g)._replace(in_lists=None)
            )
        with torch.autocast("cpu", torch.bfloat16):
            got = gradients(p, "triton")
        ours = ours or got
    for n in got:
        torch.testing.assert_close(got[n], ours[n], rtol=1e-5, atol=1e-5)


CUDA, BF16 = torch.device("cuda"), torch.bfloat16
HOPPER = (132, 232_448)


@pytest.mark.parametrize(
    ("chip", "cells", "d", "B", "dtype", "ours"),
    [
        (HOPPER, 6, 100, 512, BF16, True),
        (HOPPER, 6, 100, ROWS, BF16, True),
        # A row's number would not fit in an entry of a list.
        (HOPPER, 6, 100, ROWS + 1, BF16, False),
        # Products of halves have units, and those of float32 another kind of instruction.
        (HOPPER, 6, 100, 512, torch.float16, False),
        (HOPPER, 6, 100, 512, torch.float32, False),
        # Few tiles would leave most of the GPU idle.
        (HOPPER, 5, 50, 64, BF16, False),
        # Lines of 640 numbers are no whole tiles.
        (HOPPER, 6, 128, 512, BF16, False),
        # An A100.
        ((108, 166_912), 6, 100, 512, BF16, False),
    ],
)
def test_who_multiplies(
    chip: tuple[int, int],
    cells: int,
    d: int,
    B: int,
    dtype: torch.dtype,
    ours: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_gradients, "interpreted", lambda: False)
    monkeypatch.setattr(triton_tiles, "interpreted", lambda: False)
    monkeypatch.setattr(triton_tiles, "chip", lambda device: chip)
    monkeypatch.setattr(triton_gradients, "chip", lambda device: chip)
    P, L = triton_plan.aligned(d, dtype), triton_plan.in_pieces(5 * d)
    z = triton_plan.Sizes(cells, cells, d, P, L, 5, dtype, dtype, dtype)
    assert (triton_gradients.products(z, B, CUDA).in_lists is not None) == ours
