"""What the tests share: tolerances, random problems, the oracle's answers, comparisons."""

from __future__ import annotations

import importlib
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

import oracle
from riglstm import RigLSTM
from riglstm.cell import Seen, Weights
from riglstm.layer import VARIANTS
from riglstm.parameters import shapes, to_paper
from riglstm.scan import reference, scan
from riglstm.scan.batched.forward import Saved, forward
from riglstm.selection import Noise, Selection

# A CPU without bf16 instructions says so once, and multiplies another way.
slow_bf16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
# The compiler asks carried states, which are no leaves, whether they have a gradient.
compiles_steps = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)

EAGER = ("reference", "batched")
"""Backends that run anywhere, and compile nothing."""
eager_backends = pytest.mark.parametrize("backend", EAGER)

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poisoned", "precision_as_before"),
    pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
"""Marks of files whose tests run the kernels for real, in memory that is poisoned."""


def kernels(*modules: str, on_a_gpu: bool = True) -> list[Any]:
    """Modules of the `triton` backend; skips without Triton, or with a GPU if said so."""
    if torch.cuda.is_available() and not on_a_gpu:
        why = "with a GPU the kernels run for real: test_triton_gpu.py"
        pytest.skip(why, allow_module_level=True)
    pytest.importorskip("triton")
    return [importlib.import_module(f"riglstm.scan.triton.{name}") for name in modules]


def python(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, with what it said and how it ended."""
    return subprocess.run((sys.executable, *words), capture_output=True, text=True, **how)


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def put(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files, by their names below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def files_below(folder: Path) -> list[str]:
    """All files but locks."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return sorted(str(p.relative_to(folder)) for p in files)


def relative(got: Tensor, want: Tensor) -> float:
    """How far a tensor is from another in float64, by their norms."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-300))


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(got: Any, expected: Any, atol: float = 1e-12) -> None:
    """Equal but for the last bits, in any structure of tensors."""
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


GUIDE = Path(__file__).parents[1] / "docs"


def guide_blocks(page: Path, title: str = "") -> list[str]:
    """The Python code of a page, or of one of its sections."""
    text = page.read_text(encoding="utf-8")
    if title:
        text = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def run_guide(page: str, title: str, **names: Any) -> dict[str, Any]:
    """What the code of a section of the guide defines, given what stands before it on the page."""
    names |= {"__name__": "guide", "torch": torch, "RigLSTM": RigLSTM}
    for block in guide_blocks(GUIDE / f"{page}.md", title):
        exec(block, names)
    return names


ALL_VARIANTS: dict[str, dict[str, Any]] = {"default": {}, **VARIANTS}


class Tol(NamedTuple):
    """How far a dtype may be from float64, and why that far."""

    value: float
    """Outputs and states, in units of their largest entry, or of 1 if that is smaller."""
    grad: float
    """Gradients, in units of the largest entry of each tensor."""
    margin: float
    """Scores this close, in units of the largest of the step, may be ranked either way."""
    share: float
    """Of all sequences, those in which every selection is float64's."""
    reason: str


TOL = {
    torch.float64: Tol(
        1e-10, 1e-10, 1e-10, 1.0, "64 steps of sums over 528 products leave 1e-13; the rest is room"
    ),
    torch.float32: Tol(
        3e-6, 2e-5, 3e-6, 0.99, "rounding by 6e-8 in 8 steps of sums over 96 products"
    ),
    torch.float16: Tol(
        6e-3, 3e-2, 5e-3, 0.8, "rounding by 5e-4 of each state and gate, carried over 8 steps"
    ),
    torch.bfloat16: Tol(
        8e-2, 2.5e-1, 8e-2, 0.4, "rounding by 4e-3 of each state and gate, carried over 8 steps"
    ),
}
"""Of the layer, on every backend: twice the worst of 12 draws of each short-dtype problem."""


@dataclass(frozen=True)
class Problem:
    """All arguments of `scan`."""

    x: Tensor
    h: Tensor
    c: Tensor
    weights: Weights
    sel: Selection
    noise: Noise | None = None
    live: Tensor | None = None
    reset: Tensor | None = None

    def run(self, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y (T, B, N, d), final h and c, active (T, B, N)."""
        y, (h, c), active = scan(*self._args, **self._flags, backend=backend)
        return y, h, c, active

    def trace(self) -> Seen:
        """Every decision of the reference backend, time first."""
        return reference.trace(*self._args, **self._flags)[2]

    @property
    def _args(self) -> tuple[Any, ...]:
        return self.x, self.h, self.c, self.weights, self.sel

    @property
    def _flags(self) -> dict[str, Any]:
        return {"noise": self.noise, "live": self.live, "reset": self.reset}

    def leaves(self) -> dict[str, Tensor]:
        """What can have a gradient: x, h, c and the weights that exist."""
        named = {"x": self.x, "h": self.h, "c": self.c, **self.weights._asdict()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_leaves(self, leaves: dict[str, Tensor]) -> Problem:
        """The same problem with other numbers."""
        weights = {name: leaves.get(name) for name in Weights._fields}
        return replace(
            self, x=leaves["x"], h=leaves["h"], c=leaves["c"], weights=Weights(**weights)
        )

    def to(self, dtype: torch.dtype) -> Problem:
        """The same problem, rounded to a dtype."""
        return self.with_leaves({name: leaf.to(dtype) for name, leaf in self.leaves().items()})


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for each problem."""
    return torch.Generator().manual_seed(seed)


def random_problem(
    gen: torch.Generator,
    *,
    T: int = 6,
    B: int = 3,
    N: int = 4,
    K: int = 3,
    d: int = 3,
    D: int = 5,
    K_a: int = 2,
    K_x: int = 2,
    K_h: int = 1,
    cells: str = "top",
    views: str = "top",
    peers: str = "top",
    input_views: str = "linear",
    soft_update: bool = True,
    query: str = "shared",
    bias: bool = True,
    update_scale: float = 1.0,
    update_bias: bool = False,
    live: bool = False,
    reset: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """A problem with non-zero states and weights that move every gate.

    Views that are split from the input set D themselves. As in the layer, there is no
    update_bias without the soft update.
    """

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=gen, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=gen)

    linear = input_views == "linear"
    D = D if linear else K * d
    all_shapes = shapes(
        *(D, N, K, d),
        linear=linear,
        bias=bias,
        query=query if soft_update else None,
        learned=update_bias and soft_update,
    )
    fan_in = (D, 4, (K + N) * d, 4, (K + N) * d, 1)
    weights = Weights(
        *(
            None if shape is None else normal(*shape, scale=2 * n**-0.5)
            for shape, n in zip(all_shapes, fan_in, strict=True)
        )
    )
    noise = Noise(
        uniform(T, B, N) if cells == "random" else None,
        uniform(T, B, N, K) if views == "random" else None,
        uniform(T, B, N, N) if peers == "random" else None,
    )
    sel = Selection(N, K, K_a, K_x, K_h, cells, views, peers, update_scale)  # type: ignore[arg-type]
    return Problem(
        normal(T, B, D),
        normal(B, N, d, scale=0.5),
        normal(B, N, d),
        weights,
        sel,
        noise if sel.draws else None,
        uniform(T, B) < 0.8 if live else None,
        uniform(T, B) < 0.2 if reset else None,
    ).to(dtype)


def ask_oracle(p: Problem, paper: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The oracle's answer, from the weights in the paper's notation."""
    sel = p.sel
    paper = to_paper(p.weights, sel.N, sel.K) if paper is None else paper
    drawn = {} if p.noise is None else p.noise._asdict()
    answer = oracle.run(
        *(v.detach().double().numpy() for v in (p.x, p.h, p.c)),
        {name: value.double().numpy() for name, value in paper.items()},
        **{name: value for name, value in vars(sel).items() if name not in ("N", "K")},
        soft_update=p.weights.W_q is not None,
        noise={name: n.numpy() for name, n in drawn.items() if n is not None},
        live=None if p.live is None else p.live.numpy(),
        reset=None if p.reset is None else p.reset.numpy(),
    )
    return {name: torch.from_numpy(value) for name, value in answer.items()}


def kept_by_batched(p: Problem, product: torch.dtype | None = None) -> tuple[Tensor, Saved]:
    """Who woke in `batched`, and what it keeps of each step."""
    given = (p.x, p.h, p.c, p.weights, p.sel, p.noise, p.live, p.reset)
    return forward(*given, product or p.h.dtype, save=True)[3:]


def selections(
    p: Problem, backend: str, product: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What a backend decided: active (T, B, N), views (T, B, N, K), peers (T, B, N, N).

    Bool, or the weights of soft rules. `product` is the dtype in which `batched` multiplies,
    where it is not the state's.
    """
    if backend == "reference":
        seen = p.trace()
        return seen.active, seen.views, seen.peers
    assert backend == "batched", f"{backend} does not tell"
    active, saved = kept_by_batched(p, product)
    views, peers = saved.weight.split((p.sel.K, p.sel.N), dim=3)
    return (
        active,
        views if p.sel.views == "soft" else views.bool(),
        peers if p.sel.peers == "soft" else peers.bool(),
    )


Outcome: TypeAlias = tuple[tuple[Tensor, ...], dict[str, Tensor]]


def gradients(
    p: Problem, backend: str, upstream: str = "yhc", share: Tensor | None = None
) -> dict[str, Tensor]:
    """The gradient of every leaf, from random ones of those of y, h, c that `upstream` names.

    `share` (B): the weight of each sequence in the loss; where it is y's alone, (T, B).
    """
    return outputs_and_gradients(p, backend, upstream, share)[1]


def outputs_and_gradients(
    p: Problem, backend: str, upstream: str = "yhc", share: Tensor | None = None
) -> Outcome:
    """What the problem's `run` gives, and `gradients` of the same run."""
    leaves = {n: v.detach().clone().requires_grad_() for n, v in p.leaves().items()}
    out = p.with_leaves(leaves).run(backend)
    gen = seeded(7)
    loss = p.x.new_zeros((), dtype=torch.float64)
    for name, value in zip("yhc", out, strict=False):
        towards = torch.randn(value.shape, generator=gen, dtype=torch.float64).to(value.device)
        if name not in upstream:
            continue
        if share is not None:
            towards *= share[..., None, None].to(towards)
        loss = loss + (value.double() * towards).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return tuple(o.detach() for o in out), {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


def margins(p: Problem) -> Tensor:
    """(T, B): how far the closest rival was from being selected in each step.

    In units of the largest score. Infinite where nothing competes: rules other than `top`, or a
    state that was just reset, whose scores are zero and stay so.
    """
    seen, sel, own = p.trace(), p.sel, torch.eye(p.sel.N, dtype=torch.bool)
    best = torch.full(p.x.shape[:2], float("inf"), dtype=p.h.dtype)
    for rule, score, k, n in (
        (sel.cells, seen.view_scores.sum(-1).unsqueeze(2), sel.K_a, sel.N),
        (sel.views, seen.view_scores, sel.K_x, sel.K),
        (sel.peers, seen.peer_scores.masked_fill(own, float("-inf")), sel.K_h, sel.N - 1),
    ):
        if rule == "top" and 0 < k < n:
            ranked = score.sort(dim=-1, descending=True).values
            size = score.nan_to_num(neginf=0).abs().amax((-2, -1))
            best = torch.minimum(best, (ranked[..., k - 1] - ranked[..., k]).amin(-1) / size)
    return best if p.reset is None else best.masked_fill(p.reset, float("inf"))


def clear_problem(**options: Any) -> Problem:
    """A random problem in which no selection is close, so that a small push changes none."""
    for seed in range(1000):
        p = random_problem(seeded(seed), **options)
        if margins(p).min() > 1e-4:
            return p
    raise AssertionError(f"no problem without close calls among 1000: {options}")


def assert_close(
    got: Tensor, want: Tensor, tol: float, what: str = "values", least: float = 1.0
) -> None:
    """Equal shapes, and no entry further off than tol times the largest entry, or `least`."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    error = (got.double() - want.double()).abs().max()
    scale = want.double().abs().max().clamp(min=least)
    assert error <= tol * scale, f"{what}: off by {error:.2e}, largest entry {scale:.2e}"


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor], tol: float) -> None:
    """Every gradient within tol times its largest entry."""
    assert got.keys() == want.keys()
    for name in want:
        assert_close(got[name], want[name], tol, f"d{name}", least=0)


def assert_within(got: dict[str, Tensor], want: dict[str, Tensor], limit: float) -> None:
    """Every tensor below a limit of `relative`."""
    assert got.keys() == want.keys()
    for name in want:
        assert relative(got[name], want[name]) < limit, name


def assert_equals_the_reference(
    p: Problem, backend: str, dtype: torch.dtype = torch.float32, limit: float | None = None
) -> tuple[Outcome, Outcome]:
    """A backend, outputs and gradients of one run, beside the reference in float64; both outcomes.

    Selections first. Within the dtype's tolerances, or a limit of `relative`.
    """
    want, want_grads = outputs_and_gradients(p, "reference")
    got, grads = outputs_and_gradients(p.to(dtype), backend)
    assert torch.equal(got[3], want[3])
    if limit is not None:
        # The gradients of h and c have these names.
        outputs = [dict(zip(("y", "h_n", "c_n"), out, strict=False)) for out in (got, want)]
        assert_within(outputs[0] | grads, outputs[1] | want_grads, limit)
    else:
        for one, other, what in zip(got[:3], want, "yhc", strict=False):
            assert_close(one, other, TOL[dtype].value, what)
        assert_same_gradients(grads, want_grads, TOL[dtype].grad)
    return (got, grads), (want, want_grads)


def assert_equals_oracle(
    out: tuple[Tensor, Tensor, Tensor, Tensor], answer: dict[str, Tensor]
) -> None:
    """Selections first, then the numbers: a different cell would excuse any number."""
    assert torch.equal(out[3], answer["active"])
    for name, got in zip(("output", "h", "c"), out, strict=False):
        assert_close(got.detach(), answer[name], TOL[torch.float64].value, name)
