"""The layer in graphs that others make of it: traces, exports, AOTInductor, ONNX of a model."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from helpers import close, kernels, python
from riglstm import BackendError, RigLSTM, RigLSTMCell

pytestmark = [
    # torch.jit is deprecated, and other parts of torch use it.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # Of torch's own, as it makes fake tensors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning"),
]
SRC = Path(__file__).parents[1] / "src"
OPEN = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
LAYERS: dict[str, dict[str, Any]] = {
    "one": {},
    "deep": {"num_layers": 2},
    "both ways": {"bidirectional": True},
    "batch first": {"batch_first": True},
    "all awake": {"num_cells": 2, "active_cells": 2},
    "soft": {"views": "soft", "peers": "soft"},
}


def build(hidden: int = 12, **options: Any) -> RigLSTM:
    torch.manual_seed(0)
    return RigLSTM(5, hidden, **options)


def exported(layer: nn.Module, *args: Tensor) -> Callable[..., Any]:
    return torch.export.export(layer, args, dynamic_shapes=(OPEN,)).module()


def traced(layer: Callable[..., Any], *args: Tensor) -> Callable[..., Any]:
    return torch.jit.trace(layer, args)  # type: ignore[no-any-return, no-untyped-call]


def outcome(run: Callable[..., Any], x: Tensor) -> tuple[Tensor, ...]:
    """Output, states, and the gradient of x."""
    x = x.clone().requires_grad_()
    y, (h, c) = run(x)
    (dx,) = torch.autograd.grad(y.square().sum() + h.sum() + c.square().sum(), x)
    return y.detach(), h.detach(), c.detach(), dx


def assert_same(run: Callable[..., Any], layer: nn.Module, x: Tensor, atol: float = 0.0) -> None:
    close(outcome(run, x), outcome(layer, x), atol=atol)


@pytest.mark.parametrize("make", [exported, traced])
@pytest.mark.parametrize("frozen", [False, True], ids=["no_grad", "frozen"])
@pytest.mark.parametrize("options", [{}, LAYERS["all awake"]], ids=["one", "all awake"])
def test_a_graph_made_without_gradients_has_those_of_the_layer(make, frozen, options):
    layer = build(**options).eval().requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        run = make(layer, torch.randn(7, 3, 5))
    assert_same(run, layer, torch.randn(9, 4, 5))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("make", "learns"), [(exported, False), (traced, False), (traced, True)])
def test_a_graph_of_the_kernels_made_with_or_without_gradients_has_those_of_the_layer(make, learns):
    kernels("forward")
    # Cells of 16, the smallest that the kernels take.
    layer = build(32, num_cells=2, backend="triton")
    with torch.set_grad_enabled(learns):
        run = make(layer, torch.randn(2, 2, 5))
    assert_same(run, layer, torch.randn(3, 3, 5))


def test_a_graph_made_without_gradients_saves_nothing_and_one_made_with_them_does():
    layer, x = build(), torch.randn(7, 3, 5)
    saves = []
    for learns in (False, True):
        with torch.set_grad_enabled(learns):
            graph = torch.export.export(layer, (x,)).graph
        (node,) = (n for n in graph.nodes if "batched_scan" in str(n.target))
        saves.append(node.args[-1])
    assert saves == [False, True]


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_trace_runs_at_another_batch_size_and_length_without_a_warning(options):
    layer = build(**options)
    assert_same(traced(layer, torch.randn(7, 3, 5)), layer, torch.randn(9, 4, 5))


def test_graphs_of_a_layer_that_draws_draw_anew_by_the_seed():
    layer, x = build(cells="random", num_layers=2, dropout=0.5), torch.randn(7, 3, 5)
    for run in (torch.jit.trace(layer, (x,), check_trace=False), exported(layer, x)):
        torch.manual_seed(1)
        got = run(x)[0]
        assert not torch.equal(run(x)[0], got)
        torch.manual_seed(1)
        assert torch.equal(layer(x)[0], got)


def test_a_trace_takes_states_resets_and_masks():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = build(num_layers=2)

        def forward(self, x: Tensor, h: Tensor, c: Tensor, reset: Tensor, mask: Tensor) -> Any:
            return self.rnn(x, (h, c), reset=reset, mask=mask)

    def arguments(T: int, B: int) -> tuple[Tensor, ...]:
        h, c = torch.randn(2, 2, B, 12)
        return torch.randn(T, B, 5), h, c, torch.rand(T, B) < 0.3, torch.rand(T, B) < 0.8

    model, cell = Whole(), RigLSTMCell(5, 12)
    args = arguments(9, 4)
    torch.testing.assert_close(traced(model, *arguments(7, 3))(*args), model(*args))
    x = torch.randn(4, 5)
    torch.testing.assert_close(traced(cell, x[:3])(x), cell(x))


@pytest.mark.parametrize("backend", ["reference", "compiled"])
def test_a_trace_of_a_loop_in_python_is_refused(backend):
    with pytest.raises(BackendError) as caught:
        traced(build(backend=backend), torch.randn(7, 3, 5))
    assert str(caught.value) == (
        f"torch.jit.trace would fix the length of sequences with backend={backend!r}; use "
        "backend='batched' or 'auto', or torch.export"
    )


def test_a_trace_of_a_packed_sequence_is_refused():
    rnn, lengths = build(), torch.tensor([7, 4, 2])
    message = (
        "torch.jit.trace needs padded sequences, got a PackedSequence, whose lengths the trace "
        "would fix; pass a padded Tensor with mask, True where a sequence has steps"
    )
    with pytest.raises(ValueError, match=message):
        traced(lambda x: rnn(pack_padded_sequence(x, lengths))[0].data, torch.randn(7, 3, 5))
    with pytest.raises(ValueError, match=r"must be input_size = 5, got an input of shape \(7, 3,"):
        traced(rnn, torch.randn(7, 3, 4))


REFERENCE = [
    {"backend": "reference"},
    {"backend": "reference", "bidirectional": True, "views": "soft"},
    {"backend": "reference", "batch_first": True, "active_cells": 6, "soft_update": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", [*LAYERS.values(), *REFERENCE], ids=str)
@pytest.mark.parametrize("learns", [True, False])
def test_an_export_with_open_sizes_runs_at_others(options, learns):
    layer = build(**options)
    with torch.set_grad_enabled(learns):
        run = exported(layer, torch.randn(7, 3, 5))
    assert_same(run, layer, torch.randn(9, 4, 5), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_an_export_whose_length_was_not_opened_refuses_another(backend):
    run = torch.export.export(build(backend=backend), (torch.randn(7, 3, 5),)).module()
    with pytest.raises(AssertionError, match="Guard failed"):
        run(torch.randn(9, 3, 5))


@pytest.mark.slow
def test_an_export_does_not_keep_the_sizes_of_an_earlier_one():
    layer, x = build(backend="reference"), torch.randn(7, 3, 5)
    torch.export.export(layer, (x,))
    torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert_same(exported(layer, x), layer, torch.randn(9, 4, 5), atol=1e-6)


class Model(nn.Module):
    """Symbols in, numbers out."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 5), build(**options)
        self.head = nn.Linear(12 * (1 + self.rnn.bidirectional), 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])  # type: ignore[no-any-return]


def ids(T: int, B: int) -> Tensor:
    return torch.randint(11, (T, B))


LOADED = """
import sys, torch
ids, want = torch.load(sys.argv[2])
got = torch.export.load(sys.argv[1]).module()(ids)
assert "riglstm" not in sys.modules
torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
print("the same")
"""


def load_elsewhere(folder: Path, backend: str) -> CompletedProcess[str]:
    """Save a model's export, and load it in a process that does not import riglstm."""
    model = Model(backend=backend).eval()
    program = torch.export.export(model, (ids(7, 3),), dynamic_shapes=(OPEN,))
    torch.export.save(program, folder / "model.pt2")
    x = ids(9, 4)
    torch.save((x, model(x).detach()), folder / "example.pt")
    return python("-c", LOADED, str(folder / "model.pt2"), str(folder / "example.pt"))


@pytest.mark.slow
def test_a_saved_export_says_what_to_import(tmp_path):
    said = load_elsewhere(tmp_path, "auto")
    assert said.returncode == 1
    assert "failed to resolve torch.ops.riglstm.batched_scan" in said.stderr
    assert "Please import the custom op" in said.stderr
    code = f"import riglstm\n{LOADED}".replace('assert "riglstm" not in sys.modules\n', "")
    files = [str(tmp_path / name) for name in ("model.pt2", "example.pt")]
    python("-c", code, *files, env={**os.environ, "PYTHONPATH": str(SRC)}, check=True)


@pytest.mark.slow
def test_a_saved_export_of_the_reference_needs_torch_alone(tmp_path):
    said = load_elsewhere(tmp_path, "reference")
    assert "the same" in said.stdout, said.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_aotinductor_runs_a_model_at_another_batch_size_and_length(backend, tmp_path):
    model = Model(backend=backend).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler about itself
        program = torch.export.export(model, (ids(7, 3),), dynamic_shapes=(OPEN,))
        path = str(tmp_path / "model.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        run = torch._inductor.aoti_load_package(path)
        x = ids(9, 4)
        close(run(x), model(x), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"backend": "reference"}],
)
def test_onnx_of_a_model_runs_at_another_batch_size_and_length(options, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, path = Model(**options).eval(), str(tmp_path / "model.onnx")
    sizes = ({0: "time", 1: "batch"},)
    torch.onnx.export(model, (ids(7, 3),), path, dynamic_shapes=sizes, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (given,) = session.get_inputs()
    assert given.shape == ["time", "batch"]
    for T, B in ((9, 4), (1, 1), (30, 2)):
        x = ids(T, B)
        (got,) = session.run(None, {given.name: x.numpy()})
        close(torch.from_numpy(got), model(x).detach(), atol=1e-5)


@pytest.mark.slow
def test_onnx_of_a_model_takes_the_state_of_several_layers(tmp_path):
    """Their states are parts of one tensor; what ONNX's `Scan` carries must not share memory."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = build(num_layers=2)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
            return self.rnn(x, (h, c))

    def arguments(T: int, B: int) -> tuple[Tensor, ...]:
        return torch.randn(T, B, 5), *torch.randn(2, 2, B, 12)

    model, path = Stream().eval(), str(tmp_path / "model.onnx")
    sizes = ({0: "time", 1: "batch"}, {1: "batch"}, {1: "batch"})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "# The axis name", UserWarning)
        torch.onnx.export(model, arguments(7, 3), path, dynamic_shapes=sizes, verbose=False)
    session, args = onnxruntime.InferenceSession(path), arguments(9, 4)
    names = [given.name for given in session.get_inputs()]
    got = session.run(None, {n: a.numpy() for n, a in zip(names, args, strict=True)})
    y, (h, c) = model(*args)
    close([torch.from_numpy(v) for v in got], [v.detach() for v in (y, h, c)], atol=1e-5)


@pytest.mark.slow
def test_onnx_of_a_model_that_cannot_be_open_is_refused_by_name(tmp_path):
    pytest.importorskip("onnxscript")
    path = str(tmp_path / "model.onnx")
    graph = torch.export.export(Model().eval(), (ids(7, 3),))
    with pytest.raises(Exception, match=r"riglstm.batched_scan"):
        torch.onnx.export(graph, (), path, verbose=False)
    for backend in ("auto", "reference"):
        with pytest.raises(BackendError) as caught:
            torch.onnx.export(Model(backend=backend).eval(), (ids(7, 3),), path, dynamo=False)
        assert str(caught.value) == (
            "torch.onnx.export(..., dynamo=False) would fix the length of sequences, got a "
            "model with a RigLSTM; use dynamo=True, or riglstm.onnx.export for the layer alone"
        )
    needs = (
        "torch.onnx.export needs backend='auto' or 'reference', got 'batched', which is "
        "no operator of ONNX; set layer.backend = 'auto'"
    )
    with pytest.raises(Exception, match=re.escape(needs)):
        torch.onnx.export(Model(backend="batched").eval(), (ids(7, 3),), path, verbose=False)
    assert not Path(path).exists()


@pytest.mark.slow
def test_tensorboard_draws_a_model(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:  # type: ignore[no-untyped-call]
        writer.add_graph(Model(), ids(7, 3))  # type: ignore[no-untyped-call]
    (file,) = tmp_path.iterdir()
    assert b"riglstm::batched_scan" in file.read_bytes()
