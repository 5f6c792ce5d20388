"""What is timed on a GPU: the fused kernels beside cuDNN's nn.LSTM, each precision with its own.

Shapes: T steps, B sequences, N cells of size d.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from riglstm.lab.bench.contestants import WORK, Contestant, in_mode
from riglstm.lab.bench.tables import Section
from riglstm.lab.bench.timing import Job, compare
from riglstm.layer import RigLSTM

INPUTS = 4
"""Inputs that a job takes in turn, so that none stays in the cache."""


class Size(NamedTuple):
    """One table."""

    N: int
    d: int
    B: int
    T: int
    work: tuple[str, ...] = ("inference", "training")


SIZES = (
    *(Size(6, 100, 64, T) for T in (196, 361, 576, 1024)),
    *(Size(6, 100, B, 196) for B in (128, 256, 512, 1024, 2048)),
    Size(5, 50, 64, 51),
    *(Size(4, d, 64, 128) for d in (16, 32, 64)),
    Size(6, 100, 1, 1, ("inference",)),
)
"""The paper's images, the bouncing balls, the grid worlds, and one step of one sequence."""

QUICK_SIZES = (Size(2, 16, 4, 3),)

PRECISIONS = ("tf32", "bf16", "fp32")
LIMITS = {"tf32": 2e-3, "bf16": 2e-2, "fp32": 1e-5}
"""How far from float64 outputs may be, as a share of the largest."""
STEPS = 2
"""That are compared with float64 before ours is timed: in each more near ties tip."""
AGREEING = 0.9
"""Least share of sequences within the limit in these: on an H200 0.96 and more, in 113 checks."""


def sections(quick: bool, rounds: int) -> list[Section]:
    """A section for each size, precision and kind of work."""
    made = []
    for size in QUICK_SIZES if quick else SIZES:
        # float32 without TF32, and cuDNN's persistent kernel, at one size only.
        first = size.T == 196 and size.B == 64
        for precision in PRECISIONS if first or quick else PRECISIONS[:2]:
            who = _contestants(size, precision, persistent=first and precision == "bf16")
            kinds = dict.fromkeys((c.parameters[0].dtype, width) for c, width in who)
            inputs = {kind: _inputs(size, *kind) for kind in kinds}
            made += [_section(size, precision, work, who, inputs, rounds) for work in size.work]
    return made


def _contestants(size: Size, precision: str, persistent: bool) -> list[tuple[Contestant, int]]:
    """Each with the width of its input: ours, and nn.LSTM before and after it."""
    H = size.N * size.d
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    lstm = in_one_piece(nn.LSTM(H, H, device="cuda", dtype=dtype))
    ours = RigLSTM(H, H, num_cells=size.N, backend="triton", device="cuda")
    rows = [
        (Contestant("nn.LSTM", lstm, tuple(lstm.parameters()), False), H),
        (Contestant("RigLSTM triton", ours, tuple(ours.parameters())), H),
        (Contestant("nn.LSTM again", lstm, tuple(lstm.parameters()), False), H),
    ]
    if persistent:
        wide = nn.LSTM(640, 640, device="cuda", dtype=torch.float16)
        rows.append((Contestant("nn.LSTM(640) fp16", wide, tuple(wide.parameters()), False), 640))
    return rows


def in_one_piece(lstm: nn.LSTM) -> nn.LSTM:
    """The weights as cuDNN wants them, in bfloat16 as well.

    There nn.LSTM leaves them in pieces, as its list of cuDNN's dtypes is older than cuDNN's
    bfloat16, and they are copied at each call: a handicap that is not cuDNN's.
    """
    known = torch.backends.cudnn.CUDNN_TENSOR_DTYPES
    before = set(known)
    known.add(torch.bfloat16)
    try:
        lstm.flatten_parameters()
    finally:
        known.intersection_update(before)
    return lstm


def _section(
    size: Size,
    precision: str,
    work: str,
    who: Sequence[tuple[Contestant, int]],
    inputs: Mapping[tuple[torch.dtype, int], Sequence[Tensor]],
    rounds: int,
) -> Section:
    jobs = []
    for contestant, width in who:
        xs = inputs[contestant.parameters[0].dtype, width]
        run, check = _in_turn(contestant, precision, work, xs), None
        if contestant.ours:
            check = functools.partial(sound, contestant, precision, work, xs[0])
        jobs.append(Job(contestant.name, run, size.T, contestant.ours, check, AGREEING))
    table = f"N = K = {size.N}, d = {size.d}, B = {size.B}, T = {size.T}"
    return Section(table, f"{work}, {precision}", size.B, jobs, ["nn.LSTM"], rounds)


def _inputs(size: Size, dtype: torch.dtype, width: int) -> list[Tensor]:
    return [
        torch.randn(size.T, size.B, width, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(INPUTS)
    ]


def sound(who: Contestant, precision: str, work: str, x: Tensor) -> tuple[float, float]:
    """How far a layer's first steps are from float64, and the share of sequences that agree.

    None does where two runs of the work differ in a bit. What a kernel makes of its own choices,
    gradients too, `make test-gpu` compares: in the long run other choices are as good.
    """
    again = _in_turn(who, precision, work, [x])
    if not all(map(torch.equal, again(), again())):
        return math.inf, 0.0
    assert isinstance(who.call, RigLSTM)
    exact, first = copy.deepcopy(who.call).double(), x[:STEPS].detach()
    exact.backend = "batched"
    (got,) = _in_turn(who, precision, "inference", [first])()
    with torch.no_grad():
        return compare([got.double()], [exact(first.double())[0]], LIMITS[precision])


def kernels(sections: Sequence[Section]) -> dict[str, dict[str, list[str]]]:
    """By table and work, of each job without gradients: which kernels take most of its time.

    They tell which of its ways cuDNN took. To be asked when all is timed: what is watched once may
    be slower ever after.
    """
    named: dict[str, dict[str, list[str]]] = {}
    for section in sections:
        if section.work.startswith("inference"):
            names = {job.name: _longest(job.run) for job in section.jobs}
            named[f"{section.table}, {section.work}"] = names
    return named


def _longest(run: Callable[[], object], most: int = 3) -> list[str]:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    spent = sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
    return [event.key for event in spent[:most]]


def _in_turn(
    who: Contestant, precision: str, work: str, xs: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    calls, who = 0, in_mode(who, work)

    def run() -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        tf32 = precision == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        x = xs[calls % len(xs)]
        half = who.ours and precision == "bf16"
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            return WORK[work](who, x)

    return run
