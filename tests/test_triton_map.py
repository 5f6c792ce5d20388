"""The `triton` backend's own map to views, in the interpreter: what it keeps, and where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import (
    Problem,
    assert_equals_the_reference,
    clear_problem,
    kernels,
    random_problem,
    seeded,
)

plan, forward, backward = kernels("plan", "forward", "backward", on_a_gpu=False)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nan_filled_empty", "tf32"),
    # The interpreter's own; a compiled kernel says nothing.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
CPU = torch.device("cpu")
B, N, K, d, P, D = 13, 2, 2, 18, 24, 35
ULP = 2**-10
"""What two operands lose that are rounded to eleven bits."""


def problem(W_in: Tensor | None = None, b_in: Tensor | None = None, h: float = 0.0) -> Problem:
    """Its own W_in, unless one is given; no bias, unless one is given; a state of this size."""
    p = random_problem(seeded(0), T=1, B=B, N=N, K=K, d=d, D=D, K_a=1, K_x=1).to(torch.float32)
    W_in = p.weights.W_in if W_in is None else W_in
    return replace(p, weights=p.weights._replace(W_in=W_in, b_in=b_in), h=p.h * h)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded(1))


def mapped(
    p: Problem, x: Tensor, product: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views by our own map (R, K, P), XH and its units, and the views in float64.

    Neither rows nor features nor columns fill their tiles, and views have gaps.
    """
    T, w = x.shape[0], p.weights
    R = T * B
    made = forward.plan_forward(p.sel, B, d, CPU, product, plan.rounds(product), 2, D, False)
    work = forward.working(T, B, made, p.h, keep=True, begun=True)
    work.XH.fill_(7)
    forward.pack(w, made, work, torch.empty_like(p.c), None, p.c)
    views = forward.write_views(x, p.h, w, made, work)
    XH = work.XH.flatten(0, 1)
    views, unit = XH if views is work.XH else views, work.unit.flatten()
    want = x.view(R, D).double() @ w.W_in.double()
    want = want if w.b_in is None else want + w.b_in.double()
    return views, XH, unit, want.view(R, K, d)


def in_XH(XH: Tensor, unit: Tensor) -> Tensor:
    """Views that XH holds, in float64."""
    return XH[:, :K, :d].double() * unit[:, None, None]


@pytest.fixture
def many(nothing_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few sequences there are, they count as many."""
    monkeypatch.setattr(plan, "FEW", 0)


def in_short_tiles(
    monkeypatch: pytest.MonkeyPatch, more: int = 0, programs: int | None = None
) -> None:
    """Tiles of 16 rows, by so many programs more than there are tiles, or so many in all."""
    tiles, planned = plan.forward_tiles, forward.plan_forward

    def plan_forward(*given: Any) -> Any:
        made = planned(*given)
        return made._replace(programs=programs or made.programs + more)

    monkeypatch.setattr(forward, "forward_tiles", lambda *given: tiles(*given) | {"BM": 16})
    monkeypatch.setattr(forward, "plan_forward", plan_forward)


@pytest.mark.parametrize("bias", [True, False])
def test_the_map_in_bf16_puts_views_to_their_places(bias):
    p = problem(b_in=normal(K * d) if bias else None)
    views, XH, _, want = mapped(p, normal(10, B, D), torch.bfloat16)
    assert views is XH
    # Two operands and the result are rounded, to eight bits.
    assert (XH[:, :K, :d] - want).norm() < 2**-8 * want.norm()
    assert XH[:, :K, d:].eq(0).all()
    assert XH[:, K:].eq(7).all()


def test_halves_hold_rows_and_features_of_any_size():
    sizes = 10.0 ** torch.arange(-9, 9).repeat(2)[:D]
    W_in = normal(D, K * d) * sizes[:, None]
    W_in[:, d:], W_in[7] = W_in[:, :d], 0
    p = problem(W_in, h=1e4)
    x = normal(10, B, D) / sizes
    x *= 10.0 ** torch.arange(-26, 26, 0.4).view(10, B, 1)
    x[0, 0], x[1, 1, 3], x[2, 2, 4], x[3, 3] = 0, float("nan"), float("inf"), x[3, 4]
    views, XH, unit, want = mapped(p, x)
    lost = torch.tensor([14, 28])
    rest = torch.ones(130, dtype=torch.bool).scatter(0, lost, False)
    assert not views[lost, :, :d].isfinite().any()
    reach = (x.view(130, D).double().abs() @ W_in.double().abs()).view(130, K, d)
    assert ((views[:, :, :d] - want).abs() <= ULP * reach)[rest].all()
    # For XH the result is rounded, too, or to its least number.
    inside = rest & (reach.amax((1, 2)) < 1e21)
    off = (in_XH(XH, unit) - want).abs()
    assert (off <= 2 * ULP * reach + 2**-25 * unit[:, None, None])[inside].all()
    # The unit leaves room for the state that is given, and not much more than views need.
    assert ((p.h.abs().amax((1, 2)).repeat(10) / unit) < 2**15).all()
    assert (XH[:, :K].abs().amax((1, 2)) > 2**10)[inside & (reach.amax((1, 2)) > 1e8)].all()
    assert torch.equal(views[rest, 0], views[rest, 1])
    assert torch.equal(views[42], views[43])
    assert views[:, :, d:][rest].eq(0).all()
    assert XH[:, K:].eq(7).all()


def test_the_unit_of_a_row_holds_a_bias_that_no_half_does_and_states_of_one():
    x = normal(1, B, D) * 1e-6
    views, XH, unit, want = mapped(problem(b_in=normal(K * d) * 1e6), x)
    assert want.abs().amax() > 65504
    assert ((views[:, :, :d] - want).abs() <= 1e-6 * want.abs()).all()
    off = (in_XH(XH, unit) - want).abs()
    assert (off <= ULP * want.abs() + 2**-24 * unit[:, None, None]).all()
    # Beside views of almost nothing.
    assert (1 / mapped(problem(), x)[2] < 2**15).all()


def test_no_view_is_beyond_what_its_row_leaves_room_for():
    # Weights are almost twice their lines' size. One feature just below a power of two, which
    # halves round up to it; in the next row all features add to the same views.
    x = torch.zeros(1, B, D)
    x[:, :, 0] = 1024 * (1 - 2**-13)
    x[:, 1] = 1024
    _, XH, unit, want = mapped(problem(torch.full((D, K * d), 2 - 2**-20)), x)
    assert ((in_XH(XH, unit) - want).abs() <= 2 * ULP * want).all()


def test_an_infinite_weight_takes_no_bits_from_the_others():
    W_in, x = normal(D, K * d), normal(1, B, D)
    W_in[3, 5] = float("inf")
    views, _, _, want = mapped(problem(W_in), x)
    got, reach = views[:, :, :d], x[0].double().abs() @ W_in.double().abs()
    assert torch.equal(got[:, 0, 5].double(), want[:, 0, 5])
    others = want.isfinite()
    assert others.sum() == B * (K * d - 1)
    assert ((got - want).abs() <= ULP * reach.view(B, K, d))[others].all()


def test_numbers_near_the_ends_of_float32_are_as_good_as_others_and_infinity_has_a_sign():
    W_in, x = torch.linspace(1, 1.2, D * K * d).view(D, K * d), torch.zeros(1, B, D)
    W_in[3] *= 2.0**-130
    x[:, :, 2], x[:, 4, 2:4] = 1.5 * 2.0**127, torch.tensor([0, 2.0**100])
    x[:, 1, 2] = float("inf")
    views, _, _, want = mapped(problem(W_in), x)
    assert want[1].eq(float("inf")).all()
    assert torch.equal(views[1, :, :d].double(), want[1])
    assert ((views[:, :, :d] - want).abs() <= ULP * want)[2:].all()


def test_a_view_far_below_another_has_all_bits_of_a_half():
    # Each view has a feature of its own: x, or else the weights, have to hold them far apart.
    x, W_in, far = 1 + torch.rand(1, B, D, generator=seeded(1)), torch.zeros(D, K * d), 2**-25
    W_in[0, :d], W_in[1, d:] = 1 + torch.rand(2, d, generator=seeded(2))
    W_in[2, :d], W_in[2, d:] = W_in[0, :d], W_in[1, d:] * far
    x[:, :, 3:], x[:, :6, 1], x[:, :6, 2] = 0, x[:, :6, 1] * far, 0
    x[:, 6:, :2] = 0
    views, XH, unit, want = mapped(problem(W_in), x * 1024)
    assert ((views[:, :, :d] - want).abs() <= ULP * want).all()
    assert ((in_XH(XH, unit) - want).abs() <= 2 * ULP * want).all()


@pytest.mark.parametrize("product", [torch.float32, torch.bfloat16])
def test_weights_may_be_of_another_dtype(product):
    b_in, x = normal(K * d), normal(1, B, D)
    p = problem(b_in=b_in)
    wide = problem(p.weights.W_in.double(), b_in.double())
    assert torch.equal(mapped(wide, x, product)[0], mapped(p, x, product)[0])


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("product", "kind", "idle"),
    [
        (torch.bfloat16, torch.float64, 0),
        (torch.bfloat16, torch.float16, 3),
        (torch.bfloat16, torch.bfloat16, 1),
        (torch.float32, torch.float32, 3),
    ],
)
def test_the_forward_kernel_maps_the_input_of_all_steps(product, kind, idle, bias, monkeypatch):
    """By all programs, where there is none without a tile, or by those that have none."""
    plans, plan_forward = [], forward.plan_forward

    def with_more(*args: Any) -> Any:
        made = plan_forward(*args)
        plans.append(made._replace(programs=made.programs + idle))
        return plans[-1]

    monkeypatch.setattr(forward, "plan_forward", with_more)
    p = random_problem(seeded(0), T=5, B=5, N=N, K=K, d=d, D=D, K_a=1, K_x=1).to(torch.float32)
    p = replace(p, weights=p.weights._replace(b_in=normal(K * d) if bias else None))
    x = p.x.to(kind)
    *_, saved = forward.forward(
        x, p.h, p.c, p.weights, p.sel, None, None, None, product, save=True, keep=True
    )
    assert plans[0].inside
    unit = torch.ones(25) if product == torch.bfloat16 else saved.unit.flatten()
    want = x.flatten(0, 1).double() @ p.weights.W_in.double()
    want += p.weights.b_in.double() if bias else 0
    got = in_XH(saved.XH.flatten(0, 1), unit).flatten(1)
    # The operands and the result are rounded, to eight or eleven bits.
    assert (got - want).norm() < (2**-7 if product == torch.bfloat16 else 2**-10) * want.norm()
    assert saved.XH[:, :, :K, d:].eq(0).all()
    if kind in (torch.float64, torch.float16):
        assert torch.equal(saved.x[:, :D], x.flatten(0, 1).bfloat16())
        assert saved.x.shape[1] % 8 == 0
    else:
        assert saved.x.numel() == 0


@pytest.mark.usefixtures("many")
def test_a_map_of_many_tiles_and_parts_is_whole(monkeypatch):
    """Three tiles of rows by three of columns, by programs without a tile or with an empty one."""
    in_short_tiles(monkeypatch, more=5)
    sizes = {"T": 2, "B": 37, "N": 4, "K": 3, "d": 50, "D": 260, "K_a": 1, "K_x": 1, "K_h": 0}
    p = random_problem(seeded(0), **sizes, soft_update=False).to(torch.float32)
    # In the first step three live, and cell 0 sleeps.
    others = (~p.run("reference")[3][0, :, 0]).nonzero().flatten()
    live = torch.ones(2, 37, dtype=torch.bool)
    live[0] = torch.isin(torch.arange(37), others[:3])
    wake = -live.int()  # all bits
    given = (p.x, p.h, p.c, p.weights, p.sel, wake, None, None, torch.bfloat16)
    *_, saved = forward.forward(*given, save=True, keep=True)
    x = p.x.flatten(0, 1)
    assert torch.equal(saved.x[:, :260], x.bfloat16())
    want = x.double() @ p.weights.W_in.double() + p.weights.b_in.double()
    got = saved.XH.flatten(0, 1)[:, :3, :50].double().flatten(1)
    assert ((got - want).norm(dim=1) < 2**-7 * want.norm(dim=1)).all()


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("T", "B", "programs", "save"),
    [
        *((2, 5, None, True), (3, 5, None, False), (5, 5, None, True)),
        (5, 40, 9, True),
        # Three parts and five tiles of the map: one program has no tile, or there are too few.
        *((4, 70, 6, False), (4, 70, 3, True)),
    ],
)
def test_an_input_is_rounded_a_step_before_it_is_mapped(T, B, programs, save, monkeypatch):
    """To the views, and to what an input gives that comes rounded, of which nothing is kept."""
    in_short_tiles(monkeypatch, programs=programs)
    sizes = {"T": T, "B": B, "N": N, "K": K, "d": d, "D": 13, "K_a": 1, "K_x": 1, "K_h": 0}
    p = random_problem(seeded(0), **sizes, soft_update=False).to(torch.float32)
    given = (p.h, p.c, p.weights, p.sel, None, None, None, torch.bfloat16)
    *got, kept = forward.forward(p.x, *given, save=save, keep=True)
    x = p.x.flatten(0, 1).bfloat16()
    assert torch.equal(kept.x, nn.functional.pad(x, (0, 3))) if save else not kept.x.numel()
    views = x.double() @ p.weights.W_in.bfloat16().double() + p.weights.b_in.double()
    error = kept.XH.flatten(0, 1)[:, :K, :d].double().flatten(1) - views
    assert (error.norm(dim=1) < 2**-7 * views.norm(dim=1)).all()
    if B > 5:
        return  # the interpreter takes its time
    *want, none = forward.forward(p.x.bfloat16(), *given, save=save, keep=True)
    assert all(map(torch.equal, got, want))
    assert torch.equal(kept.XH[:, :, :K], none.XH[:, :, :K])
    if not save:
        # With nothing kept, other buffers lie behind the two steps that are rounded.
        pair = (forward.forward(x, *given, save=False, keep=False) for x in (p.x, p.x.bfloat16()))
        assert all(map(torch.equal, *((*out[:3], out[3].woke) for out in pair)))


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("bias", [True, False])
def test_an_input_that_the_forward_kernel_maps_has_the_right_gradients(bias):
    p = clear_problem(T=2, B=2, N=2, K=2, d=18, D=7, K_a=1, K_x=1, K_h=1)
    if not bias:
        p = replace(p, weights=p.weights._replace(b_in=None))
    # As it lies in memory, a feature after another.
    p = replace(p, x=p.x.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    with torch.autocast("cpu", torch.bfloat16):
        (_, grads), _ = assert_equals_the_reference(p, "triton", limit=2e-2)
    assert len({"x", "W_in", "b_in"} & grads.keys()) == 2 + bias
    assert grads["x"].dtype == torch.float32


@pytest.mark.parametrize("save", [False, True])
def test_what_is_kept_of_it_has_the_size_that_a_compiler_is_told(save):
    from riglstm.inputs import flat

    p = clear_problem(T=1, B=65, N=1, K=1, d=16, D=5, K_a=1, K_x=1, K_h=0).to(torch.float32)
    masks = (None, None, None)
    args = (p.x, p.h, p.c, *p.weights, *masks, *flat(p.sel), torch.bfloat16, save)
    torch.library.opcheck(backward.forward_op, args, test_utils=("test_faketensor",))
