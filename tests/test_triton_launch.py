"""A launch takes the kernel that was compiled for just such arguments, and compiles for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
triton_launch = pytest.importorskip(
    "riglstm.scan.triton_launch", reason="the kernels are not in this copy"
)


class Kernel:
    """Remembers how it was launched: through Triton, or what Triton had compiled."""

    arg_names = ("x", "y", "n", "WIDE", "TALL")

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.direct: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **constants: Any) -> Any:
            self.compiled.append(constants)
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.direct.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    monkeypatch.setattr(triton_launch, "_READY", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def test_the_second_launch_goes_straight_to_what_was_compiled(kernel: Kernel) -> None:
    x, other = torch.zeros(16), torch.ones(32)
    # Constants may come in any order, and options of the launch among them.
    triton_launch.launch(kernel, (3,), (x, None, 5), TALL=2, WIDE=True, num_warps=8)
    triton_launch.launch(kernel, (4, 2), (other, None, 7), TALL=2, WIDE=True, num_warps=8)
    assert kernel.compiled == [{"TALL": 2, "WIDE": True, "num_warps": 8}]
    assert kernel.direct == [((4, 2, 1), (other, None, 7, True, 2))]


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((torch.zeros(16, dtype=torch.float16), None, 5), {"WIDE": 1, "TALL": 2}),
        ((torch.zeros(17)[1:], None, 5), {"WIDE": 1, "TALL": 2}),
        ((torch.zeros(16), torch.zeros(16), 5), {"WIDE": 1, "TALL": 2}),
        ((torch.zeros(16), None, 2**31), {"WIDE": 1, "TALL": 2}),
        ((torch.zeros(16), None, 5), {"WIDE": 1, "TALL": 3}),
        ((torch.zeros(16), None, 5), {"WIDE": 1, "TALL": 2, "num_warps": 4}),
    ],
)
def test_whatever_a_kernel_is_compiled_for_compiles_anew(
    kernel: Kernel, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    triton_launch.launch(kernel, (1,), (torch.zeros(16), None, 5), WIDE=1, TALL=2)
    triton_launch.launch(kernel, (1,), arguments, **constants)
    assert len(kernel.compiled) == 2
    assert not kernel.direct


def test_each_device_has_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        triton_launch.launch(kernel, (1,), (torch.zeros(16), None, 5), WIDE=1, TALL=2)
    assert (len(kernel.compiled), len(kernel.direct)) == (2, 1)
