"""The gradient of views by a kernel of ours, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers import seeded

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run for real: test_triton_gpu.py", allow_module_level=True)
pytest.importorskip("triton")
kernels = pytest.importorskip(
    "riglstm.scan.triton.kernels.backward", reason="the kernels are not in this copy"
)


@pytest.mark.parametrize(
    ("R", "N", "K", "in_units"),
    [(7, 3, 2, True), (70, 3, 2, False), (70, 1, 3, False), (20, 8, 8, True)],
)
def test_the_gradient_of_a_view_is_that_of_who_took_it_in(
    R: int, N: int, K: int, in_units: bool
) -> None:
    d, L, BM, rng = 5, 32, 16, seeded(R)
    bits = torch.randint(1, 1 << (K + N), (R, N), generator=rng, dtype=torch.int32)
    bits *= torch.rand(R, N, generator=rng) < 0.7  # the others sleep
    # Small whole numbers: sums are exact, in any order. What slept is not read.
    D5 = torch.randint(-4, 5, (R, N, L), generator=rng).float()
    D5[bits == 0] = torch.nan
    W = torch.randint(-4, 5, (N, (K + N) * d, L), generator=rng).float()
    units = [2.0 ** torch.randint(-3, 4, (n,), generator=rng) for n in (R, (K + N) * d)]
    dV, sums = torch.empty(R, K, d), torch.empty(-(-R // BM), K * d)
    of_rows, of_lines = units if in_units else (None, None)
    kernels.views_kernel[(K, -(-R // BM))](
        *(D5, of_rows, W, of_lines, bits, dV, sums, R),
        **{"N": N, "K": K, "d": d, "L": L, "BP": 8, "BM": BM, "BK": 16},
        **{"STAGES": 1, "PRECISION": "ieee", "WIDE": True},
    )
    took = torch.stack([((bits >> k) & 1) for k in range(K)]).double()  # (K, R, N)
    of_views = W[:, : K * d].view(N, K, d, L).double()
    want = torch.einsum("krn,rnl,nkdl->rkd", took, D5.double().nan_to_num(), of_views)
    if in_units:
        want *= units[0][:, None, None].double() * units[1][: K * d].view(K, d).double()
    assert torch.equal(dV.double(), want)
    assert torch.equal(sums.double().sum(0), want.sum(0).flatten())


def test_a_part_of_a_buffer_is_counted_in_its_numbers() -> None:
    launch, memory = pytest.importorskip("riglstm.scan.triton.launch"), torch.empty(64)
    part = launch.nth(launch.Buffer(torch.int32, 1000, memory), 3, 5)
    assert (part.dtype, part.address, part.memory) == (torch.int32, 1060, memory)
