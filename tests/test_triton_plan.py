"""How the `triton` backend lays out its work: tiles and programs for a chip, launches, buffers.

Nothing is computed here: the plans are those for GPUs that are not here.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import kernels
from riglstm.selection import Selection

plan, forward, common = kernels("plan", "forward", "kernels.common")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, B16, SINGLE = torch.float16, torch.bfloat16, torch.float32
TWO = Selection(2, 2, 1, 1, 1)


def assert_tiles_are_legal(tile: dict[str, Any], room: int, dtype: torch.dtype) -> None:
    """Lengths are powers of two, products not too short, and pieces fit in shared memory."""
    for name in ("BM", "BN", "BK", "RB", "BP", "num_warps"):
        assert tile[name] == common.power_of_two(tile[name]), name
    assert min(tile["BM"], tile["BN"], tile["BK"]) >= 16
    held = tile["STAGES"] * (tile["BM"] + tile["BN"]) * tile["BK"] * dtype.itemsize
    assert held < room or tile["STAGES"] == 1


def test_kernels_may_be_kept_to_some_multiprocessors(monkeypatch):
    found = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    chip, name = plan.chip.__wrapped__, "RIGLSTM_MULTIPROCESSORS"
    monkeypatch.delenv(name, raising=False)
    assert chip(CUDA) == (132, 232_448)
    monkeypatch.setenv(name, "20")
    assert chip(CUDA) == (20, 232_448)
    for wrong in ("0", "133", "20 %", ""):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ValueError, match=f"{name} must be a number from 1 to 132, got"):
            chip(CUDA)


@pytest.mark.usefixtures("precision_as_before")
def test_plans_are_legal_and_within_the_limits_of_any_device(monkeypatch):
    for module in (plan, forward):
        monkeypatch.setattr(module, "interpreted", lambda: False)
    kinds, r = set(), random.Random(0)
    for _ in range(3000):
        N, K, d = r.choice((1, 2, 6, 8, 16)), r.choice((1, 6, 16)), r.choice((1, 50, 100, 256))
        d = r.choice((d, r.randint(1, 256)))
        B, D = r.choice((1, 33, 64, 65, 128, 257, 600)), r.choice((None, 20, 600, 8193, 2**24))
        chip = many, room = (
            r.choice((1, 32, 64, 96, 108, 132, 264)),
            r.choice((166_912, 232_448)),
        )
        product, save = r.choice((SINGLE, B16)), r.random() < 0.5
        torch.set_float32_matmul_precision(r.choice(("highest", "high")))
        monkeypatch.setattr(plan, "chip", lambda device, chip=chip: chip)
        sel = Selection(N, K, r.randint(1, N), r.randint(1, K), r.randint(0, N - 1))
        given = (sel, B, d, CUDA, product, plan.rounds(product), r.choice((0, 2, 3)), D, save)
        made = forward.plan_forward.__wrapped__(*given)
        z, case = made.z, (*given, *chip)
        tiled = plan.forward_tiles(z, B, CUDA)
        assert_tiles_are_legal(tiled, room, z.held)
        back = plan.backward_tiles(z, B, CUDA)
        assert_tiles_are_legal(back, room, z.back)
        views = plan.views_tiles(z, CUDA)
        assert all(z.L % tile["BK"] == 0 for tile in (back, views)), "loads have no mask"
        assert 0 <= z.L - z.G * d < plan.PIECE <= back["BK"]
        assert tiled["RB"] * common.lines_of(N) <= 32, "who woke is a bit of one whole number"
        # Programs wait for each other: all are there at once.
        assert 1 <= made.programs <= many, case
        if made.by_gate:
            tiles = N * made.tile["TILES"]
            assert (B <= plan.FEW, z.held.itemsize, tiles <= many) == (True, 2, True), case
            alone = -(-B // made.tile["RB"]) if made.tile["APART"] else 0
            assert made.programs >= tiles + alone, "each tile and each sequence has a program"
        if made.map is not None:
            assert D * K * z.P < 2**31, "it counts in 32 bits"
            assert z.held == B16 or (z.held == HALF and D <= plan.MOST_FEATURES), case
        # A kernel's own map is one of ours, of many sequences; what it rounds is kept for training
        # in bfloat16.
        assert not made.inside or (made.map is not None and B > plan.FEW), case
        kept = D is not None and plan.rounded(z, B, D, SINGLE, save) > 0
        assert kept == (made.inside and save and product == B16), case
        assert D is None or plan.rounded(z, B, D, B16, save) == 0
        kinds.add((made.by_gate, made.tile.get("APART"), made.map is not None, made.inside))
    assert len(kinds) == 7, kinds


@pytest.mark.usefixtures("tf32")
def test_sums_in_halves_are_not_risked():
    assert plan.sizes(18, TWO, True, SINGLE).back == HALF
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        kinds = [plan.sizes(18, TWO, True, dtype).back for dtype in (SINGLE, B16)]
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    assert kinds == [SINGLE, B16]


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


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(plan, "interpreted", lambda: False)
    monkeypatch.setattr(plan, "_LAUNCHES", {})
    monkeypatch.setattr(plan, "KNOWN", True)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(plan, "driver", driver)
    # That of a tensor on a CPU.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    return Kernel()


@pytest.mark.parametrize("why", ["", "another Triton", "a hook", "a tensor elsewhere"])
def test_the_second_launch_goes_straight_to_what_was_compiled_where_addresses_do(
    kernel, why, monkeypatch
):
    """Elsewhere Triton launches what it compiled, with the tensors."""
    if why == "a hook":
        hooks = plan.knobs.runtime.launch_exit_hook
        monkeypatch.setattr(hooks, "calls", [lambda metadata: None])
    elif why == "a tensor elsewhere":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    elif why == "another Triton":
        monkeypatch.setattr(plan, "KNOWN", False)
    x, other = torch.zeros(16), torch.ones(32)
    # Constants may come in any order, and options of the launch among them.
    plan.prepare(kernel, TALL=2, WIDE=True, num_warps=8)((3,), (x, None, 5))
    plan.prepare(kernel, TALL=2, WIDE=True, num_warps=8)((4, 2), (other, None, 7))
    assert kernel.compiled == [{"TALL": 2, "WIDE": True, "num_warps": 8}]
    straight = (7, Compiled.function, Compiled.packed_metadata, None, None, None, other.data_ptr())
    assert kernel.direct == [((4, 2, 1), (*((other,) if why else straight), None, 7, True, 2))]


def test_the_compiled_kernel_of_this_triton_has_what_a_launch_uses():
    if not plan.KNOWN:
        pytest.skip("of this version of Triton nothing is known")
    from triton.compiler import CompiledKernel

    names = inspect.getsource(CompiledKernel)
    call = "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, "
    assert call + "launch_metadata," in names


def test_buffers_lie_apart_in_one_allocation(monkeypatch):
    monkeypatch.setattr(plan, "interpreted", lambda: False)
    wanted = ((torch.float16, (3, 5)), (torch.int32, (1,)), (torch.float32, (0, 4)))
    layout = plan.Layout(*wanted, (torch.bool, (129,)))
    places = layout.make(torch.zeros(1))
    assert [p.dtype for p in places] == [torch.float16, torch.int32, torch.float32, torch.bool]
    (memory,) = {id(p.memory): p.memory for p in places}.values()
    starts = [p.data_ptr() - memory.data_ptr() for p in places]
    assert starts == [0, 128, 256, 256]
    assert memory.nbytes == 512
    # A part of one is counted in its numbers.
    part = plan.nth(plan.Buffer(torch.int32, 1000, memory), 3, 5)
    assert (part.dtype, part.address, part.memory) == (torch.int32, 1060, memory)


def test_whatever_a_kernel_is_compiled_for_compiles_anew(kernel, monkeypatch):
    x, usual = torch.zeros(16), {"WIDE": 1, "TALL": 2}
    (place,) = plan.Layout((torch.float32, (16,))).make(torch.zeros(1))
    for device, given, y, n, constants, anew in (
        (-1, x, None, 5, usual, True),
        (-1, x, None, 5, usual, False),
        (-1, place, None, 5, usual, False),  # as good as a tensor
        (-1, x.half(), None, 5, usual, True),
        (-1, torch.zeros(17)[1:], None, 5, usual, True),
        (-1, x, x, 5, usual, True),
        (-1, x, None, 2**31, usual, True),
        (-1, x, None, 5, {"WIDE": 1, "TALL": 3}, True),
        (-1, x, None, 5, {**usual, "num_warps": 4}, True),
        (0, place, None, 5, usual, True),
        (1, place, None, 5, usual, True),
        (0, place, None, 5, usual, False),
    ):
        kernel.compiled.clear(), kernel.direct.clear()
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        plan.prepare(kernel, **constants)((1,), (given, y, n))
        case = (device, given, y, n, constants)
        assert (len(kernel.compiled), len(kernel.direct)) == ((1, 0) if anew else (0, 1)), case
