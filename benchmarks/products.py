"""Which batched products a GPU, or the part of it that a process has, gets right.

`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=16 python benchmarks/products.py` prints the multiprocessors that
torch sees, and each product that is off by more than rounding. The shapes are those of weights'
gradients in RigLSTM's kernels: N cells, H numbers that a cell reads, L of its gates, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

SHAPES = [(6, 1248, 512), (6, 1256, 512), (6, 1248, 448), (6, 1144, 512), (4, 1248, 512)]
SHAPES += [(4, 416, 256), (1, 560, 256), (5, 560, 256), (8, 560, 256)]
ROWS = (32, 64, 384, 576, 960, 1024, 2048, 2176, 3200, 4096)
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to float32": lambda a, b: torch.bmm(a, b, out_dtype=torch.float32),
    "added to zeros": lambda a, b: torch.baddbmm(
        a.new_zeros(*a.shape[:2], b.shape[2], dtype=torch.float32), a, b, out_dtype=torch.float32
    ),
    "without gaps": lambda a, b: torch.bmm(a.contiguous(), b.contiguous(), out_dtype=torch.float32),
    "to float16": torch.bmm,
}


def errors(N: int, H: int, L: int, R: int) -> dict[str, float]:
    """The relative error of each way, float16 matrices against float32."""
    half = {"device": "cuda", "dtype": torch.float16}
    a = torch.randn(N, R, H, **half).mT
    b = torch.randn(R, N, L, **half).transpose(0, 1)
    wanted = torch.stack([x.float() @ y.float() for x, y in zip(a, b, strict=True)])
    found = {}
    for name, way in WAYS.items():
        # What is not written then holds this, and not an older result.
        torch.full((2 * wanted.numel(),), 1e4, device="cuda")
        found[name] = ((way(a, b).float() - wanted).norm() / wanted.norm()).item()
    return found


def main() -> None:
    """Print the table."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found = [(shape, R, errors(*shape, R)) for shape, R in product(SHAPES, ROWS)]
    # NaN is no less than any number.
    wrong = [one for one in found if not all(error < 0.01 for error in one[2].values())]
    there = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{there} multiprocessors, {len(wrong)} of {len(SHAPES) * len(ROWS)} shapes are wrong")
    for shape, R, of in wrong:
        said = ", ".join(f"{name} {error:.2g}" for name, error in of.items())
        print(f"N, H, L = {shape}, R = {R}: {said}")


if __name__ == "__main__":
    main()
