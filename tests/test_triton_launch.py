"""A launch takes the kernel that was compiled for just such arguments, and compiles for others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
triton_launch = pytest.importorskip(
    "riglstm.scan.triton.launch", reason="the kernels are not in this copy"
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
    """Can be launched as Triton documents it, and as Triton itself does."""

    function, packed_metadata = 42, (8, 1, 0)

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.direct.append((grid, arguments))

    def run(self, *arguments: Any) -> None:
        self.kernel.direct.append((arguments[:3], arguments[3:]))


class Driver:
    @staticmethod
    def get_current_stream(device: int) -> int:
        return 7


class Active:
    active = Driver


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    monkeypatch.setattr(triton_launch, "_LAUNCHES", {})
    monkeypatch.setattr(triton_launch, "KNOWN", True)
    monkeypatch.setattr(triton_launch, "driver", Active)
    # That of a tensor on a CPU.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    return Kernel()


def twice(kernel: Kernel) -> torch.Tensor:
    """A launch, and one with other numbers, whose tensor it returns."""
    x, other = torch.zeros(16), torch.ones(32)
    # Constants may come in any order, and options of the launch among them.
    triton_launch.prepare(kernel, TALL=2, WIDE=True, num_warps=8)((3,), (x, None, 5))
    triton_launch.prepare(kernel, TALL=2, WIDE=True, num_warps=8)((4, 2), (other, None, 7))
    assert kernel.compiled == [{"TALL": 2, "WIDE": True, "num_warps": 8}]
    return other


def test_the_second_launch_goes_straight_to_what_was_compiled(kernel: Kernel) -> None:
    other = twice(kernel)
    before = (7, Compiled.function, Compiled.packed_metadata, None, None, None)
    assert kernel.direct == [((4, 2, 1), (*before, other.data_ptr(), None, 7, True, 2))]


@pytest.mark.parametrize("why", ["another Triton", "a hook", "a tensor elsewhere"])
def test_where_addresses_do_not_do_triton_launches_itself(
    kernel: Kernel, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "a hook":
        hooks = triton_launch.knobs.runtime.launch_exit_hook
        monkeypatch.setattr(hooks, "calls", [lambda metadata: None])
    elif why == "a tensor elsewhere":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    else:
        monkeypatch.setattr(triton_launch, "KNOWN", False)
    other = twice(kernel)
    assert kernel.direct == [((4, 2, 1), (other, None, 7, True, 2))]


def test_the_compiled_kernel_of_this_triton_has_what_a_launch_uses() -> None:
    if not triton_launch.KNOWN:
        pytest.skip("of this version of Triton nothing is known")
    from triton.compiler import CompiledKernel

    names = inspect.getsource(CompiledKernel)
    call = "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, "
    assert call + "launch_metadata," in names


def test_buffers_lie_apart_in_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    wanted = ((torch.float16, (3, 5)), (torch.int32, (1,)), (torch.float32, (0, 4)))
    layout = triton_launch.Layout(*wanted, (torch.bool, (129,)))
    places = layout.make(torch.zeros(1))
    assert [p.dtype for p in places] == [torch.float16, torch.int32, torch.float32, torch.bool]
    (memory,) = {id(p.memory): p.memory for p in places}.values()
    starts = [p.data_ptr() - memory.data_ptr() for p in places]
    assert starts == [0, 128, 256, 256]
    assert memory.nbytes == 512


def test_a_part_of_an_allocation_is_as_good_as_a_tensor(kernel: Kernel) -> None:
    (place,) = triton_launch.Layout((torch.float32, (16,))).make(torch.zeros(1))
    triton_launch.prepare(kernel, TALL=2, WIDE=True)((3,), (torch.zeros(16), None, 5))
    triton_launch.prepare(kernel, TALL=2, WIDE=True)((3,), (place, None, 5))
    assert (len(kernel.compiled), len(kernel.direct)) == (1, 1)


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
    triton_launch.prepare(kernel, WIDE=1, TALL=2)((1,), (torch.zeros(16), None, 5))
    triton_launch.prepare(kernel, **constants)((1,), arguments)
    assert len(kernel.compiled) == 2
    assert not kernel.direct


def test_each_device_has_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        triton_launch.prepare(kernel, WIDE=1, TALL=2)((1,), (torch.zeros(16), None, 5))
    assert (len(kernel.compiled), len(kernel.direct)) == (2, 1)


def test_a_trace_is_to_hear_of_everything() -> None:
    heard = []

    def called(x: torch.Tensor) -> torch.Tensor:
        heard.append(not triton_launch.watched())
        return x + 1

    called(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(called, (torch.ones(1),), check_trace=False)  # type: ignore[no-untyped-call]
    assert heard == [True, False]


def test_a_part_of_a_buffer_is_counted_in_its_numbers() -> None:
    memory = torch.empty(64)
    part = triton_launch.nth(triton_launch.Buffer(torch.int32, 1000, memory), 3, 5)
    assert (part.dtype, part.address, part.memory) == (torch.int32, 1060, memory)
