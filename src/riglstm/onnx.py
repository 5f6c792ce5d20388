"""`export`: a RigLSTM as an ONNX file in which batch and time stay open.

torch.onnx.export makes an ONNX `Scan` over `cell.step` of every layer and direction, as it does of
whole models. Here it gets the names of the layer's call, and a state that need not be fed.
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from riglstm.layer import RigLSTM

if TYPE_CHECKING:
    import onnx

DTYPES = (torch.float32, torch.float64)
"""What onnxruntime has all operators for on a CPU."""


def export(layer: RigLSTM, path: str | os.PathLike[str]) -> None:
    """Write a layer to an ONNX file that runs at any batch size and any length.

    The graph has the call of the layer: `input` is (T, B, D), or (B, T, D) if the layer is
    `batch_first`; `h_0` and `c_0` are (layers · directions, B, hidden_size), zero if not fed;
    `output`, `h_n` and `c_n` come back. Dropout is off, as in `layer.eval()`; `reset` and `mask`
    are not part of the graph. Layers that select at random cannot be exported.

    >>> import onnxruntime
    >>> import torch
    >>> from riglstm import RigLSTM
    >>> from riglstm.onnx import export
    >>> export(RigLSTM(20, 60, num_layers=2), "rig.onnx")
    >>> session = onnxruntime.InferenceSession("rig.onnx")
    >>> x = torch.randn(50, 8, 20).numpy()
    >>> output, h_n, c_n = session.run(None, {"input": x})
    >>> output, h_n, c_n = session.run(None, {"input": x, "h_0": h_n, "c_0": c_n})

    When it loads the file, onnxruntime remarks that h_0 and c_0 are not constants: they are
    default values, there to be replaced.
    """
    _check(layer)
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise ImportError(
            f"ONNX export needs the packages onnx and onnxscript, got: {error}; "
            "install them with: pip install 'riglstm[onnx]'"
        ) from error
    model = _in_onnx(layer)
    _default_to_zero(model.graph, layer)
    _forget_paths(model.graph)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, os.fspath(path))


def _check(layer: RigLSTM) -> None:
    """The layer is one that ONNX can express."""
    if not isinstance(layer, RigLSTM):
        raise TypeError(
            f"export expects a RigLSTM, got {type(layer).__name__}; "
            "of a RigLSTMCell export its .layer, of a larger model the RigLSTM inside it"
        )
    rules = {name: getattr(layer.selection, name) for name in ("cells", "views", "peers")}
    drawn = [f"{name}='random'" for name, rule in rules.items() if rule == "random"]
    if drawn:
        raise ValueError(
            "export expects rules that choose by score, the same in every run, "
            f"got {', '.join(drawn)}; use 'top' or 'all'"
        )
    dtype = layer.weights().W.dtype
    if dtype not in DTYPES:
        raise ValueError(
            f"export expects a layer in float32 or float64, got {dtype}; "
            "export copy.deepcopy(layer).float()"
        )


class _Call(nn.Module):
    """A copy of a layer with tensors alone as arguments and results."""

    def __init__(self, layer: RigLSTM) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer).cpu()
        self.layer.backend = "reference"  # whatever runs it in torch

    def forward(self, input: Tensor, h_0: Tensor, c_0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output and final state."""
        output, (h_n, c_n) = self.layer(input, (h_0, c_0))
        return output, h_n, c_n


def _in_onnx(layer: RigLSTM) -> onnx.ModelProto:
    """The layer's call in ONNX; its state comes in as `h_all` and `c_all`, for all sequences."""
    T, B, rows = 7, 3, layer.num_layers * (1 + layer.bidirectional)
    axes = {"batch": B, "time": T} if layer.batch_first else {"time": T, "batch": B}
    call = _Call(layer).eval()
    x = call.layer.weights().W.new_zeros(*axes.values(), layer.input_size)
    state = x.new_zeros(rows, B, layer.hidden_size)
    with warnings.catch_warnings(), torch.no_grad():
        # torch's exporter about its own insides, and about axes that share a name, as they should.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        warnings.filterwarnings("ignore", "# The axis name", UserWarning)
        program = torch.onnx.export(
            call,
            (x, state, state.clone()),
            dynamic_shapes=(dict(enumerate(axes)), {1: "batch"}, {1: "batch"}),
            input_names=["input", "h_all", "c_all"],
            output_names=["output", "h_n", "c_n"],
            custom_translation_table={torch.ops.aten.sum.dim_IntList: _sum},
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def _sum(x: Any, dim: list[int], keepdim: bool = False) -> Any:
    """`torch.sum` over one dimension in ONNX, such that equal rows have equal sums (P4).

    The order in which onnxruntime's `ReduceSum` adds up a row depends on where the row lies in
    memory, and with it the last bit of a score, and so which of two equal cells wakes. A product
    with ones treats all rows alike.
    """
    from onnxscript import ir
    from onnxscript import opset18 as op

    axis: Any = op.Constant(value_ints=dim)
    if keepdim or dim[0] not in (-1, len(x.shape) - 1) or not x.dtype.is_floating_point():
        return op.ReduceSum(x, axis, keepdims=keepdim)
    ones: Any = ir.tensor([[1.0]] * x.shape[-1], x.dtype)
    return op.Squeeze(op.MatMul(x, op.Constant(value=ones)), axis)


def _default_to_zero(graph: onnx.GraphProto, layer: RigLSTM) -> None:
    """Take `h_0` and `c_0` in place of `h_all` and `c_all`: zero where they are not fed."""
    from onnx import helper, numpy_helper

    batch = 0 if layer.batch_first else 1
    nodes = [
        helper.make_node("Shape", ["input"], ["B"], start=batch, end=batch + 1),
        helper.make_node("Concat", ["one", "B", "one"], ["one_B_one"], axis=0),
    ]
    graph.initializer.append(numpy_helper.from_array(torch.tensor([1]).numpy(), "one"))
    for state, given in zip("hc", graph.input[1:], strict=True):
        rows, _, hidden = (size.dim_value for size in given.type.tensor_type.shape.dim)
        zero = layer.weights().W.new_zeros(rows, 1, hidden, device="cpu").numpy()
        given.name = f"{state}_0"
        graph.initializer.append(numpy_helper.from_array(zero, given.name))
        nodes.append(helper.make_node("Expand", [given.name, "one_B_one"], [f"{state}_all"]))
    nodes.extend(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)


def _forget_paths(graph: onnx.GraphProto) -> None:
    """Drop torch's notes on the folders of whoever exports, which do not belong in the file."""
    for node in graph.node:
        node.ClearField("metadata_props")
        for attribute in node.attribute:
            _forget_paths(attribute.g)
