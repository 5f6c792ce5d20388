"""The gradient of views over rows that are sorted by who took a view in, in the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from helpers import clear_problem, gradients, seeded

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py", allow_module_level=True)
pytest.importorskip("triton")
kernels = pytest.importorskip(
    "riglstm.scan.kernels.views", reason="the kernels are not in this copy"
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nan_filled_empty")]

ROW = kernels.ROWS
K = 2


def takers_of(bits: Tensor, k: int) -> Tensor:
    """(R,): a bit for each cell that took view k in."""
    cells = bits.shape[1]
    return (((bits >> k) & 1) << torch.arange(cells)).sum(1, dtype=torch.int32)


def lists(bits: Tensor, group: int, block: int, per: int, K: int = K) -> Tensor:
    """(pieces, K, per)."""
    R, cells = bits.shape
    pieces, blocks = -(-R // per), -(-per // block)
    counts = torch.full((pieces, K, blocks, 1 << cells), -1, dtype=torch.int32)
    listed = torch.full((pieces, K, per), -1, dtype=torch.int32)
    grid = (blocks, K, pieces)
    kernels.count_kernel[grid](bits, counts, R, per, N=cells, BR=block)
    assert counts.sum().item() == K * R
    starts = (-(-per // group), K, pieces)
    kernels.starts_kernel[starts](counts, blocks, N=cells, GROUP=group, BR=block)
    parts = (4 * blocks, K, pieces)
    of_block = {"N": cells, "GROUP": group, "BR": block, "PART": block // 4}
    kernels.sort_kernel[parts](bits, counts, listed, R, per, **of_block)
    assert (listed.transpose(0, 1).reshape(K, -1)[:, R:] == -1).all(), (
        "nothing is written behind it"
    )
    return listed


def gray(i: int) -> int:
    return i ^ (i >> 1)


@pytest.mark.parametrize(
    ("R", "group", "block", "per"),
    [
        (1, 16, 8, 1),
        (16, 16, 8, 16),
        (45, 16, 8, 45),
        (45, 64, 16, 45),
        (45, 16, 8, 37),
        (45, 16, 8, 9),
    ],
)
@pytest.mark.parametrize("cells", [1, 3, 8])
def test_a_group_has_its_rows_kind_by_kind_in_their_order(
    R: int, group: int, block: int, per: int, cells: int
) -> None:
    bits = torch.randint(0, 1 << K, (R, cells), generator=seeded(R + cells), dtype=torch.int32)
    listed = lists(bits, group, block, per)
    number = {gray(i): i for i in range(1 << cells)}
    for k, i in itertools.product(range(K), range(len(listed))):
        takers = takers_of(bits[i * per : (i + 1) * per], k).tolist()
        for first in range(0, len(takers), group):
            rows = range(first, min(len(takers), first + group))
            want = sorted(rows, key=lambda r: number[takers[r]])
            got = listed[i, k, first : rows.stop]
            assert (got % ROW + first).tolist() == want
            assert (got // ROW).tolist() == [takers[r] for r in want]


def test_from_one_kind_to_the_next_one_cell_comes_or_goes() -> None:
    bits = torch.arange(1 << 8, dtype=torch.int32)[:, None] >> torch.arange(8)
    kinds = lists((bits & 1).to(torch.int32), group=256, block=64, per=256)[0, 0] // ROW
    assert sorted(kinds.tolist()) == list(range(256))
    pairs = itertools.pairwise(kinds.tolist())
    assert all((a ^ b).bit_count() == 1 for a, b in pairs)


@pytest.mark.parametrize(
    ("R", "group", "N", "K", "in_units"),
    [
        (7, 32, 3, 2, True),
        (70, 32, 3, 2, False),
        (70, 16, 3, 2, True),
        (70, 32, 1, 3, False),
        (70, 16, 8, 1, False),
        (20, 32, 8, 8, True),
    ],
)
def test_the_product_is_that_of_who_took_a_view_in(
    R: int, group: int, N: int, K: int, in_units: bool
) -> None:
    d, L, BM, rng = 5, 32, 16, seeded(R)
    bits = torch.randint(1, 1 << (K + N), (R, N), generator=rng, dtype=torch.int32)
    bits *= torch.rand(R, N, generator=rng) < 0.7  # the others sleep
    bits[:, -1] &= ~1
    # Small whole numbers: sums are exact, in any order.
    D5 = torch.randint(-4, 5, (R, N, L), generator=rng).float()
    D5[bits == 0] = torch.nan
    W = torch.randint(-4, 5, (N, (K + N) * d, L), generator=rng).float()
    # What nobody asks for is not read: the last cell's weights for the first view.
    poisoned = W.clone()
    poisoned[-1, :d] = torch.nan
    units = [2.0 ** torch.randint(-3, 4, (n,), generator=rng) for n in (R, (K + N) * d)]
    dV, sums = torch.empty(R, K, d), torch.empty(-(-R // BM), K * d)
    of_rows, of_lines = units if in_units else (None, None)
    kernels.views_kernel[(K, -(-R // BM))](
        *(D5, of_rows, poisoned, of_lines, lists(bits, group, 8, R + 3, K)[0], dV, sums, R, R + 3),
        **{"N": N, "K": K, "d": d, "L": L, "BP": 8, "BM": BM, "BK": 16, "GROUP": group},
        **{"STAGES": 1, "PRECISION": "ieee", "WIDE": True},
    )
    took = torch.stack([((bits >> k) & 1) for k in range(K)]).double()  # (K, R, N)
    of_views = W[:, : K * d].view(N, K, d, L).double()
    want = torch.einsum("krn,rnl,nkdl->rkd", took, D5.double().nan_to_num(), of_views)
    if in_units:
        want *= units[0][:, None, None].double() * units[1][: K * d].view(K, d).double()
    assert torch.equal(dV.double(), want)
    assert torch.equal(sums.double().sum(0), want.sum(0).flatten())


@pytest.mark.parametrize(("tiles", "width"), [(1, 10), (7, 32), (70, 40)])
def test_the_sums_of_tiles_are_added_up(tiles: int, width: int) -> None:
    sums, total = (
        torch.randint(-9, 9, (tiles, width), generator=seeded(0)).float(),
        torch.empty(width),
    )
    kernels.sums_kernel[(-(-width // 16),)](sums, total, tiles, WIDTH=width, BR=32, BC=16)
    assert torch.equal(total, sums.sum(0))


@pytest.mark.parametrize("per", [1, 127, 128, 129, 300])
def test_there_is_room_for_every_block_and_row(per: int) -> None:
    views = pytest.importorskip("riglstm.scan.fused.views")
    plan = pytest.importorskip("riglstm.scan.fused.plan")
    f32 = torch.float32
    z = plan.Sizes(N=3, K=5, d=16, P=16, L=128, G=5, dtype=f32, held=f32, back=f32)
    (_, counts), (_, listed) = views.room(z, 2 * per + 1, per)
    pieces = 3
    assert counts == (pieces, 5, -(-per // views.COUNTED), 8)
    assert listed == (pieces, 5, per)


def test_the_room_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    back = pytest.importorskip("riglstm.scan.fused.back")
    asked = list[tuple[int, int]]()
    ours = back.room_for_views
    monkeypatch.setattr(
        back, "room_for_views", lambda z, *rows: asked.append(rows) or ours(z, *rows)
    )
    monkeypatch.setattr(back, "_layout", back._layout.__wrapped__)
    monkeypatch.setattr(back, "ROWS_AT_ONCE", 12)
    p = clear_problem(T=3, B=6, N=2, K=2, d=16, D=5, K_a=1, K_x=1, K_h=1).to(torch.float32)
    gradients(p, "triton")
    assert asked == [(18, 12)]


def test_every_group_of_every_piece_is_sorted() -> None:
    views, grids = pytest.importorskip("riglstm.scan.fused.views"), []
    launch = lambda grid, _: grids.append(grid)  # noqa: E731
    fields = dict.fromkeys(views.Views._fields)
    by = views.Views(
        **fields
        | {"counting": launch, "starts": launch, "sorting": launch, "group": 256, "parts": 4}
    )
    views.sort_views(by, None, (None, None), K=3, R=700, per=300)
    assert grids == [(3, 3, 3), (2, 3, 3), (12, 3, 3)]


def test_a_part_of_a_buffer_is_counted_in_its_numbers() -> None:
    launch, memory = pytest.importorskip("riglstm.scan.fused.launch"), torch.empty(64)
    part = launch.nth(launch.Place(torch.int32, 1000, memory), 3, 5)
    assert (part.dtype, part.address, part.memory) == (torch.int32, 1060, memory)


def test_what_slept_is_written_where_all_of_it_is_read() -> None:
    back, plan = (pytest.importorskip(f"riglstm.scan.fused.{n}") for n in ("back", "plan"))
    sel = clear_problem(T=1, B=1, N=2, K=2, d=16, D=5, K_a=1, K_x=1, K_h=1).sel
    for product, zeros in ((torch.bfloat16, False), (torch.float32, True)):
        z = plan.sizes(16, sel, True, product)
        made = back.plan_back(z, 1, torch.device("cpu"), 1.0, False, "ieee")
        assert made.phases[1].constants["ZEROS"] == zeros
