"""The gradient of views over rows that are sorted by who took a view in, in the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from helpers import seeded

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py", allow_module_level=True)
pytest.importorskip("triton")
kernels = pytest.importorskip(
    "riglstm.scan.kernels.views", reason="the kernels are not in this copy"
)
pytestmark = pytest.mark.usefixtures("nan_filled_empty")

ROW = 1 << kernels.ROW_BITS
N, K = 3, 2
S = K + N


def random_bits(R: int) -> Tensor:
    """(R, N): what each cell took in of S slots; many sleep."""
    rng = seeded(R)
    taken = torch.randint(1, 1 << S, (R, N), generator=rng, dtype=torch.int32)
    return taken * (torch.rand(R, N, generator=rng) < 0.7)


def takers_of(bits: Tensor, k: int) -> Tensor:
    """(R,): a bit for each cell that took view k in."""
    cells = bits.shape[1]
    return (((bits >> k) & 1) << torch.arange(cells)).sum(1, dtype=torch.int32)


def lists(bits: Tensor, group: int, block: int) -> Tensor:
    (R, cells), blocks = bits.shape, -(-bits.shape[0] // block)
    counts = torch.full((K, blocks, 1 << cells), -1, dtype=torch.int32)
    listed = torch.full((K, R), -1, dtype=torch.int32)
    kernels.count_kernel[(blocks, K)](bits, counts, R, N=cells, BR=block)
    assert counts.sum().item() == K * R
    kernels.sort_kernel[(blocks, K)](bits, counts, listed, R, N=cells, GROUP=group, BR=block)
    return listed


def gray(i: int) -> int:
    return i ^ (i >> 1)


@pytest.mark.parametrize(
    ("R", "group", "block"), [(1, 16, 8), (16, 16, 8), (45, 16, 8), (45, 64, 16)]
)
@pytest.mark.parametrize("cells", [1, 3, 8])
def test_a_group_has_its_rows_kind_by_kind_in_their_order(
    R: int, group: int, block: int, cells: int
) -> None:
    bits = torch.randint(0, 1 << K, (R, cells), generator=seeded(R + cells), dtype=torch.int32)
    listed = lists(bits, group, block)
    number = {gray(i): i for i in range(1 << cells)}
    for k in range(K):
        takers = takers_of(bits, k).tolist()
        for first in range(0, R, group):
            rows = range(first, min(R, first + group))
            want = sorted(rows, key=lambda r: number[takers[r]])
            got = listed[k, first : first + group]
            assert (got % ROW + first).tolist() == want
            assert (got // ROW).tolist() == [takers[r] for r in want]


def test_from_one_kind_to_the_next_one_cell_comes_or_goes() -> None:
    bits = torch.arange(1 << 8, dtype=torch.int32)[:, None] >> torch.arange(8)
    kinds = lists((bits & 1).to(torch.int32), group=256, block=64)[0] // ROW
    assert sorted(kinds.tolist()) == list(range(256))
    pairs = itertools.pairwise(kinds.tolist())
    assert all((a ^ b).bit_count() == 1 for a, b in pairs)


@pytest.mark.parametrize(("R", "group"), [(7, 32), (70, 32), (70, 16)])
def test_the_product_is_that_of_who_took_a_view_in(R: int, group: int) -> None:
    d, L, BM = 5, 32, 16
    rng, bits = seeded(R), random_bits(R)
    bits[:, 2] &= ~1
    # Small whole numbers: sums are exact, in any order.
    D5 = torch.randint(-4, 5, (R, N, L), generator=rng).float()
    D5[bits == 0] = torch.nan
    W = torch.randint(-4, 5, (N, S * d, L), generator=rng).float()
    # What nobody asks for is not read: the last cell's weights for the first view.
    poisoned = W.clone()
    poisoned[2, :d] = torch.nan
    dV, sums = torch.empty(R, K, d), torch.empty(-(-R // BM), K * d)
    kernels.views_kernel[(K, -(-R // BM))](
        *(D5, None, poisoned, None, lists(bits, group, 8), dV, sums, R),
        **{"N": N, "K": K, "d": d, "L": L, "BP": 8, "BM": BM, "BK": 16, "GROUP": group},
        **{"STAGES": 1, "PRECISION": "ieee", "WIDE": True},
    )
    took = torch.stack([((bits >> k) & 1) for k in range(K)]).double()  # (K, R, N)
    of_views = W[:, : K * d].view(N, K, d, L).double()
    want = torch.einsum("krn,rnl,nkdl->rkd", took, D5.double().nan_to_num(), of_views)
    assert torch.equal(dV.double(), want)
    assert torch.equal(sums.double().sum(0), want.sum(0).flatten())
