"""What is timed: nn.LSTM and our backends on a CPU, the kernels beside cuDNN on a GPU.

Shapes: T steps, B sequences, D input features, N cells of size d.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from riglstm.lab.bench.timing import Job, Section, compare
from riglstm.layer import RigLSTM
from riglstm.scan import Backend

BATCHED, REFERENCE = "RigLSTM batched", "RigLSTM reference"


class Contestant(NamedTuple):
    """A layer that is timed."""

    name: str
    layer: nn.LSTM | RigLSTM
    ours: bool = True
    """Whether it must give what the reference gives."""
    onednn: bool | None = None
    """The mode it runs in; None: torch's own choice."""

    @property
    def takes(self) -> tuple[torch.dtype, int]:
        """The dtype and the width of its input."""
        return next(self.layer.parameters()).dtype, self.layer.input_size


def contestants(
    D: int, hidden_size: int, num_cells: int, backends: Sequence[Backend], device: str
) -> list[Contestant]:
    """nn.LSTM in each mode that it has on the device, and our backends on equal weights."""
    lstm = nn.LSTM(D, hidden_size, device=device)
    modes: dict[str, bool | None] = {"nn.LSTM": None}
    if device == "cpu" and torch.backends.mkldnn.is_available():
        modes = {"nn.LSTM, oneDNN on": True, "nn.LSTM, oneDNN off": False}
    rows = [Contestant(name, lstm, False, onednn) for name, onednn in modes.items()]
    first = RigLSTM(D, hidden_size, num_cells=num_cells, device=device)
    for backend in backends:
        layer = RigLSTM(D, hidden_size, num_cells=num_cells, backend=backend, device=device)
        layer.load_state_dict(first.state_dict())
        rows.append(Contestant(f"RigLSTM {backend}", layer))
    return rows


def infer(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """One call on the whole sequence, without gradients."""
    with torch.no_grad():
        return (layer(x)[0],)


def stream(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """One call for each step, the state carried, without gradients."""
    state, y = None, []
    with torch.no_grad():
        for x_t in x.split(1):
            y_t, state = layer(x_t, state)
            y.append(y_t)
    return (torch.cat(y),)


def train(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Forward, and backward to the input and all weights."""
    y, _ = layer(x)
    dx, *_ = torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))
    return y.detach(), dx


WORK: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, ...]]] = {
    "inference": infer,
    "training": train,
    "streaming": stream,
}


def in_mode(layer: nn.Module, work: str) -> nn.Module:
    """The layer, in eval mode for all work but training; its weights are shared.

    Without gradients, too, cuDNN saves all that a backward pass needs while a layer is in training.
    """
    if work == "training":
        return layer
    layer = copy.copy(layer)
    layer.training = False
    return layer


@contextlib.contextmanager
def onednn(enabled: bool | None) -> Iterator[None]:
    """Switch oneDNN. torch.backends.mkldnn.flags would also set, and warn about, TF32."""
    if enabled is None:
        yield
        return
    before, *_ = torch.backends.mkldnn.set_flags(enabled, None, None, None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before, None, None, None)


def job(who: Contestant, work: str, x: Tensor) -> Job:
    """A contestant's work on x (T, B, D), in the contestant's mode."""
    layer = in_mode(who.layer, work)

    def run() -> tuple[Tensor, ...]:
        with onednn(who.onednn):
            return WORK[work](layer, x)

    return Job(who.name, run, x.shape[0], who.ours)


def against_lstm(
    table: str, work: str, who: Sequence[Contestant], x: Tensor, rounds: int
) -> Section:
    """All contestants on the same input x (T, B, D); ratios are to the faster nn.LSTM."""
    reference = next(w for w in who if w.name == REFERENCE)
    return Section(
        table,
        work,
        B=x.shape[1],
        jobs=[job(w, work, x) for w in who],
        bases=[w.name for w in who if not w.ours],
        rounds=rounds,
        expected=job(reference, work, x).run,
    )


def growth(table: str, work: str, who: Contestant, xs: Sequence[Tensor], rounds: int) -> Section:
    """One contestant at several lengths; ratios are to the first."""
    jobs = [job(who, work, x)._replace(name=f"T = {x.shape[0]}") for x in xs]
    return Section(table, work, xs[0].shape[1], jobs, [jobs[0].name], rounds)


# On a GPU: the fused kernels beside cuDNN's nn.LSTM, each precision with its own.


class Size(NamedTuple):
    """The sizes of one table."""

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

INPUTS = 4
"""Inputs that a job takes in turn, so that none stays in the cache."""
PRECISIONS = ("tf32", "bf16", "fp32")
LIMITS = {"tf32": 2e-3, "bf16": 2e-2, "fp32": 1e-5}
"""How far from float64 outputs may be, as a share of the largest."""
STEPS = 2
"""Steps that are compared with float64 before ours is timed: in each more near ties tip."""
AGREEING = 0.9
"""Least share of sequences within the limit in these: on an H200 0.96 and more, in 113 checks."""


def kernel_sections(quick: bool, rounds: int) -> list[Section]:
    """A section for each size, precision and kind of work on a GPU."""
    made = []
    for size in QUICK_SIZES if quick else SIZES:
        # float32 without TF32, and cuDNN's persistent kernel, at one size only.
        first = size.T == 196 and size.B == 64
        for precision in PRECISIONS if first or quick else PRECISIONS[:2]:
            who = _beside_cudnn(size, precision, persistent=first and precision == "bf16")
            # Contestants of one dtype and width share their inputs.
            inputs = {takes: _inputs(size, *takes) for takes in dict.fromkeys(w.takes for w in who)}
            made += [_section(size, precision, work, who, inputs, rounds) for work in size.work]
    return made


def _beside_cudnn(size: Size, precision: str, persistent: bool) -> list[Contestant]:
    """Ours, and nn.LSTM before and after it."""
    H = size.N * size.d
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    lstm = in_one_piece(nn.LSTM(H, H, device="cuda", dtype=dtype))
    ours = RigLSTM(H, H, num_cells=size.N, backend="triton", device="cuda")
    rows = [
        Contestant("nn.LSTM", lstm, ours=False),
        Contestant("RigLSTM triton", ours),
        Contestant("nn.LSTM again", lstm, ours=False),
    ]
    if persistent:
        wide = nn.LSTM(640, 640, device="cuda", dtype=torch.float16)
        rows.append(Contestant("nn.LSTM(640) fp16", wide, ours=False))
    return rows


def _inputs(size: Size, dtype: torch.dtype, width: int) -> list[Tensor]:
    return [
        torch.randn(size.T, size.B, width, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(INPUTS)
    ]


def in_one_piece(lstm: nn.LSTM) -> nn.LSTM:
    """The layer with its weights as cuDNN wants them, in bfloat16 as well.

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
    who: Sequence[Contestant],
    inputs: Mapping[tuple[torch.dtype, int], Sequence[Tensor]],
    rounds: int,
) -> Section:
    jobs = []
    for w in who:
        xs = inputs[w.takes]
        check = functools.partial(sound, w, precision, work, xs[0]) if w.ours else None
        run = in_turn(w, precision, work, xs)
        jobs.append(Job(w.name, run, size.T, w.ours, check, AGREEING))
    table = f"N = K = {size.N}, d = {size.d}, B = {size.B}, T = {size.T}"
    return Section(table, f"{work}, {precision}", size.B, jobs, ["nn.LSTM"], rounds)


def in_turn(
    who: Contestant, precision: str, work: str, xs: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """The work in a precision, on another of the inputs at each call."""
    calls, layer = 0, in_mode(who.layer, work)

    def run() -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        tf32 = precision == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        x = xs[calls % len(xs)]
        half = who.ours and precision == "bf16"
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            return WORK[work](layer, x)

    return run


def sound(who: Contestant, precision: str, work: str, x: Tensor) -> tuple[float, float]:
    """How far a layer's first steps are from float64, and the share of sequences that agree.

    None agrees where two runs of the work differ in a bit. What a kernel makes of its own choices,
    gradients too, `make test-gpu` compares: in the long run other choices are as good.
    """
    again = in_turn(who, precision, work, [x])
    if not all(map(torch.equal, again(), again())):
        return math.inf, 0.0
    assert isinstance(who.layer, RigLSTM)
    exact, first = copy.deepcopy(who.layer).double(), x[:STEPS].detach()
    exact.backend = "batched"
    (got,) = in_turn(who, precision, "inference", [first])()
    with torch.no_grad():
        return compare([got.double()], [exact(first.double())[0]], LIMITS[precision])
