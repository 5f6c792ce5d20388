"""How the `triton` backend lays out its work: tiles and programs for a chip, launches, buffers.

Nothing is computed here: the plans are those for GPUs that are not here.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers import kernels
from riglstm.selection import Selection

plan, forward = kernels("plan", "forward")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, B16, SINGLE = torch.float16, torch.bfloat16, torch.float32
PAPERS = Selection(6, 6, 4, 4, 4)
TWO = Selection(2, 2, 1, 1, 1)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Plan for a GPU of so many multiprocessors, with the memory of an H100."""
    for module in (plan, forward):
        monkeypatch.setattr(module, "interpreted", lambda: False)

    def use(multiprocessors: int) -> None:
        monkeypatch.setattr(plan, "chip", lambda device: (multiprocessors, 232_448))

    return use


def programs_of(sel: Selection, B: int, d: int, features: int | None) -> Any:
    given = (sel, B, d, CUDA, B16, True, 2, features, False)
    return forward.plan_forward.__wrapped__(*given)


# Rows, columns, sequences at a time and warps.
WIDE, FLAT = (128, 128, 4, 8), (64, 128, 2, 8)


@pytest.mark.parametrize(
    ("multiprocessors", "B", "forward", "back"),
    [
        # Up to 64 sequences, as narrow as the multiprocessors are many.
        (132, 64, (64, 32, 1, 8), (64, 32, 1, 8)),
        (108, 64, (64, 32, 1, 8), (64, 64, 1, 8)),
        (64, 64, (64, 64, 1, 8), (64, 64, 1, 8)),
        (32, 64, FLAT, FLAT),
        # Of more, half the rows where all tiles are done at once.
        (132, 65, (64, 64, 2, 4), (64, 64, 1, 4)),
        (132, 128, (64, 64, 2, 4), (64, 64, 1, 4)),
        (132, 129, (64, 128, 2, 4), FLAT),
        (132, 256, (64, 128, 2, 4), FLAT),
        (132, 257, WIDE, WIDE),
        # As many as an A100 has: two sequences each are 216, and 120 tiles are too many.
        (108, 128, (64, 64, 2, 4), FLAT),
        (108, 129, WIDE, WIDE),
        (32, 65, WIDE, WIDE),
    ],
)
def test_tiles_follow_the_sequences_and_the_multiprocessors(
    multiprocessors: int,
    B: int,
    forward: tuple[int, ...],
    back: tuple[int, ...],
    chip: Callable[[int], None],
) -> None:
    chip(multiprocessors)
    z = plan.Sizes(6, 6, 100, 104, 512, 5, B16, B16, B16)
    made = plan.forward_tiles(z, B, CUDA), plan.backward_tiles(z, B, CUDA)
    for tiles, expected in zip(made, (forward, back), strict=True):
        assert tuple(tiles[n] for n in ("BM", "BN", "RB", "num_warps")) == expected
    if B > 64:
        # float32 without TF32 has the widest ones always.
        wide = z._replace(held=SINGLE, back=SINGLE)
        assert plan.forward_tiles(wide, B, CUDA)["BM"] == 128
        assert plan.backward_tiles(wide, B, CUDA)["BM"] == 128


@pytest.mark.parametrize(
    ("N", "d", "multiprocessors", "apart", "rows"),
    [
        (6, 100, 132, True, 2),  # 96 tiles, as the last of W_q Q has none of its own
        (6, 100, 127, False, 1),
        (6, 100, 108, False, 1),
        (5, 50, 132, True, 1),
        (4, 16, 132, True, 1),
        (4, 64, 84, True, 2),
    ],
)
def test_programs_select_or_multiply_where_there_are_enough_of_them(
    N: int, d: int, multiprocessors: int, apart: bool, rows: int, chip: Callable[[int], None]
) -> None:
    chip(multiprocessors)
    P = plan.aligned(d, B16)
    z = plan.Sizes(N, N, d, P, 5 * P, 5, B16, B16, B16)
    for B in (1, 64):
        tile = plan.resident_tiles(z, B, CUDA)
        assert (tile["APART"], tile["RB"]) == (apart, rows)
        assert not apart or N * tile["TILES"] + -(-64 // rows) <= multiprocessors


def test_weights_are_kept_where_each_program_has_one_tile_of_halves(
    chip: Callable[[int], None],
) -> None:
    for held, B, multiprocessors, kept in (
        (HALF, 64, 132, True),
        (B16, 1, 96, True),
        (B16, 64, 95, False),
        (HALF, 65, 132, False),
        (SINGLE, 64, 132, False),
    ):
        chip(multiprocessors)
        z = plan.Sizes(6, 6, 100, 104, 512, 5, SINGLE, held, held)
        assert (plan.resident_tiles(z, B, CUDA) is not None) == kept, (held, B, multiprocessors)


def test_there_is_a_program_for_each_pair_of_sequences_and_each_tile_or_multiprocessor(
    chip: Callable[[int], None],
) -> None:
    chip(132)
    for B, programs in ((1, 97), (33, 113), (64, 128)):
        made = programs_of(PAPERS, B, 100, None)
        assert made.tile["APART"]
        assert made.programs == programs
    for features, B, programs in (
        # All run where the kernel maps its input.
        *((600, B, 132) for B in (65, 109, 512)),
        *((None, 65, 108), (None, 109, 109)),  # views as they come: tiles, or sequences
    ):
        assert programs_of(Selection(6, 6, 4, 4, 1), B, 100, features).programs == programs


@pytest.mark.usefixtures("precision_as_before")
def test_products_in_halves_take_a_map_of_ours_and_many_sequences_in_the_forward_kernel() -> None:
    K, P = 2, 24
    most, large = 2 * (2 + K) * P // 3, 2**31 // (K * P)
    for product, precision, B, features, own, inside in (
        (B16, "highest", 13, 5, True, False),
        (SINGLE, "highest", 13, 5, False, False),
        (SINGLE, "high", 13, 5, True, False),
        (SINGLE, "high", 13, 8192, True, False),
        (SINGLE, "high", 13, 8193, False, False),
        (SINGLE, "high", 13, None, False, False),
        (B16, "highest", 13, None, False, False),
        (B16, "highest", 13, large, True, False),
        (B16, "highest", 13, large + 1, False, False),
        (B16, "high", 64, 5, True, False),
        (B16, "high", 65, 5, True, True),
        (B16, "high", 65, most, True, True),
        (B16, "high", 65, most + 1, True, False),
        (SINGLE, "high", 64, 5, True, False),
        (SINGLE, "high", 65, most, True, True),
    ):
        torch.set_float32_matmul_precision(precision)
        for save in (False, True):
            given = (TWO, B, 18, CPU, product, True, 2, features, save)
            made = forward.plan_forward.__wrapped__(*given)
            case = (product, precision, B, features, save)
            assert (made.map is not None, made.inside) == (own, inside), case
            if precision == "high" and features is not None and B > 13:
                # Only an input of more bits is kept rounded, for the backward pass.
                z = plan.sizes(18, TWO, True, product)
                kept = inside and save and product == B16
                assert (plan.rounded(z, B, features, SINGLE, save) > 0) == kept, case
                assert plan.rounded(z, B, features, B16, save) == 0


@pytest.mark.parametrize("product", [SINGLE, B16])
def test_lines_are_whole_pieces_of_every_product_over_them(product: torch.dtype) -> None:
    from riglstm.scan.triton.kernels.common import power_of_two

    for d in range(16, 129):
        for soft_update in (False, True):
            z = plan.sizes(d, TWO, soft_update, product)
            assert z.G * d <= z.L < z.G * d + plan.PIECE
            # What `lines_kernel` writes of a line, as `plan_backward` has it.
            written = 4 * d + power_of_two(z.L - 4 * d) if soft_update else power_of_two(4 * d)
            assert written >= z.L
            for tile in (
                *(plan.backward_tiles(z, B, CPU) for B in (64, 65, 129, 257)),
                plan.views_tiles(z, CPU),
            ):
                assert z.L % tile["BK"] == 0
                assert tile["BK"] >= plan.PIECE


@pytest.mark.usefixtures("tf32")
def test_sums_in_halves_are_not_risked() -> None:
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


class Driver:
    @staticmethod
    def get_current_stream(device: int) -> int:
        return 7


class Active:
    active = Driver


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(plan, "interpreted", lambda: False)
    monkeypatch.setattr(plan, "_LAUNCHES", {})
    monkeypatch.setattr(plan, "KNOWN", True)
    monkeypatch.setattr(plan, "driver", Active)
    # That of a tensor on a CPU.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    return Kernel()


@pytest.mark.parametrize("why", ["", "another Triton", "a hook", "a tensor elsewhere"])
def test_the_second_launch_goes_straight_to_what_was_compiled_where_addresses_do(
    kernel: Kernel, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_compiled_kernel_of_this_triton_has_what_a_launch_uses() -> None:
    if not plan.KNOWN:
        pytest.skip("of this version of Triton nothing is known")
    from triton.compiler import CompiledKernel

    names = inspect.getsource(CompiledKernel)
    call = "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, "
    assert call + "launch_metadata," in names


def test_buffers_lie_apart_in_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
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
    plan.prepare(kernel, WIDE=1, TALL=2)((1,), (torch.zeros(16), None, 5))
    plan.prepare(kernel, **constants)((1,), arguments)
    assert len(kernel.compiled) == 2
    assert not kernel.direct


def test_each_device_has_its_own_and_a_part_of_an_allocation_is_as_good_as_a_tensor(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place,) = plan.Layout((torch.float32, (16,))).make(torch.zeros(1))
    for device, given in ((-1, torch.zeros(16)), (-1, place), (0, place), (1, place), (0, place)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        plan.prepare(kernel, WIDE=1, TALL=2)((1,), (given, None, 5))
    assert (len(kernel.compiled), len(kernel.direct)) == (3, 2)


def test_a_trace_is_to_hear_of_everything() -> None:
    heard = []

    def called(x: torch.Tensor) -> torch.Tensor:
        heard.append(not plan.watched())
        return x + 1

    called(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(called, (torch.ones(1),), check_trace=False)  # type: ignore[no-untyped-call]
    assert heard == [True, False]
