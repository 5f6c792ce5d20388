"""`export`: a RigLSTM as an ONNX file in which batch and time stay open.

A loop over time in Python would freeze T. Here one step, `cell.step`, is exported once, with the
weights as its inputs, and every layer and direction is an ONNX `Scan` over that step.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from riglstm.cell import Weights, step
from riglstm.layer import RigLSTM
from riglstm.selection import Selection

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
    one_step = _export_step(layer)
    model = onnx.helper.make_model(
        _graph(layer, one_step.graph),
        ir_version=one_step.ir_version,
        opset_imports=one_step.opset_import,
        producer_name="riglstm",
    )
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


class _Step(nn.Module):
    """`cell.step` as a module with its weights as inputs."""

    def __init__(self, sel: Selection) -> None:
        super().__init__()
        self.sel = sel

    def forward(
        self, h: Tensor, c: Tensor, x: Tensor, weights: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The new state, and h once more: ONNX keeps what is carried and what is put out apart."""
        absent = dict.fromkeys(Weights._fields)
        h, c, _ = step(x, h, c, Weights(**{**absent, **weights}), self.sel)
        return h, c, h.clone()


def _named(weights: Weights) -> dict[str, Tensor]:
    """The weights that a layer has, on the CPU."""
    return {n: w.detach().cpu() for n, w in weights._asdict().items() if w is not None}


def _export_step(layer: RigLSTM) -> onnx.ModelProto:
    """One step in ONNX, open in batch and input features, so that it serves every layer."""
    weights = _named(layer.weights())
    batch, features = torch.export.Dim("batch"), torch.export.Dim("features")
    sizes: dict[str, Any] = {"h": {0: batch}, "c": {0: batch}, "x": {0: batch}}
    sizes["weights"] = dict.fromkeys(weights)
    # Open sizes are 2 in the example: torch.export takes a 1 for a constant.
    B, D = 2, layer.input_size
    if "W_in" in weights:
        D = 2
        weights["W_in"] = weights["W_in"][:1].repeat(D, 1)
        sizes["x"][1], sizes["weights"]["W_in"] = features, {0: features}
    h, c = weights["W"].new_zeros(2, B, layer.num_cells, layer.cell_size)
    with warnings.catch_warnings(), torch.no_grad():
        # torch's exporter about its own insides, and about axes that share a name, as they should.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        warnings.filterwarnings("ignore", "# The axis name", UserWarning)
        program = torch.onnx.export(
            _Step(layer.selection).eval(),
            kwargs={"h": h, "c": c, "x": h.new_zeros(B, D), "weights": weights},
            dynamic_shapes=sizes,
            input_names=["h", "c", "x", *weights],
            output_names=["h_new", "c_new", "y"],
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


def _graph(layer: RigLSTM, one_step: onnx.GraphProto) -> onnx.GraphProto:
    """All layers and directions around the step, with the names and shapes of the layer's call."""
    from onnx import helper, numpy_helper

    N, d, H = layer.num_cells, layer.cell_size, layer.hidden_size
    both = (False, True)[: 1 + layer.bidirectional]
    rows = [f"l{k}{'_reverse' * reverse}" for k in range(layer.num_layers) for reverse in both]
    zero = layer.weights().W.new_zeros(len(rows), 1, H)
    tensors = {
        "h_0": zero,
        "c_0": zero,
        "one": torch.tensor([1]),
        "state_shape": torch.tensor([-1, N, d]),
        "row_shape": torch.tensor([1, -1, H]),
        "output_shape": torch.tensor([0, 0, H]),  # 0: as it was
    }
    nodes: list[onnx.NodeProto] = []

    def add(op: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, outputs, **attributes))
        return outputs[0]

    perm = [1, 0, 2] if layer.batch_first else [0, 1, 2]
    x = add("Transpose", ["input"], "time_first", perm=perm)
    add("Shape", [x], "B", start=1, end=2)
    add("Concat", ["one", "B", "one"], "one_B_one", axis=0)
    for s in "hc":
        every = add("Expand", [f"{s}_0", "one_B_one"], f"{s}_every_row")  # (rows, B, H)
        add("Split", [every], *(f"{s}_0_{row}" for row in rows), axis=0, num_outputs=len(rows))
        for row in rows:
            add("Reshape", [f"{s}_0_{row}", "state_shape"], f"{s}_start_{row}")  # (B, N, d)
    for k in range(layer.num_layers):
        outputs = []
        for reverse in both:
            row = f"l{k}{'_reverse' * reverse}"
            weights = _named(layer.weights(k, reverse))
            tensors |= {f"{name}_{row}": w for name, w in weights.items()}
            add(
                "Scan",
                [f"h_start_{row}", f"c_start_{row}", x],
                *(f"h_end_{row}", f"c_end_{row}", f"y_{row}"),
                body=_body(one_step, {name: f"{name}_{row}" for name in weights}),
                num_scan_inputs=1,
                scan_input_directions=[int(reverse)],
                scan_output_directions=[int(reverse)],
            )
            outputs.append(add("Reshape", [f"y_{row}", "output_shape"], f"output_{row}"))
        x = add("Concat", outputs, f"output_l{k}_all", axis=2)  # (T, B, directions·H)
    for s in "hc":
        ends = [add("Reshape", [f"{s}_end_{r}", "row_shape"], f"{s}_n_{r}") for r in rows]
        add("Concat", ends, f"{s}_n", axis=0)
    add("Transpose", [x], "output", perm=perm)

    dtype = helper.np_dtype_to_tensor_dtype(zero.cpu().numpy().dtype)
    axes = ["batch", "time"] if layer.batch_first else ["time", "batch"]

    def value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    state = (len(rows), "batch", H)
    return helper.make_graph(
        nodes,
        "RigLSTM",
        [value("input", *axes, layer.input_size), value("h_0", *state), value("c_0", *state)],
        [value("output", *axes, len(both) * H), value("h_n", *state), value("c_n", *state)],
        [numpy_helper.from_array(t.cpu().numpy(), name) for name, t in tensors.items()],
    )


def _body(one_step: onnx.GraphProto, weights: dict[str, str]) -> onnx.GraphProto:
    """The step as the body of a Scan: its weights are looked up, by name, in the graph around."""
    from onnx import helper

    nodes = []
    for node in one_step.node:
        copy = type(node)()
        copy.CopyFrom(node)
        copy.input[:] = [weights.get(name, name) for name in node.input]
        # torch notes the folders of whoever exports; they do not belong in the file.
        copy.ClearField("metadata_props")
        nodes.append(copy)
    used = {name for node in nodes for name in node.input}
    return helper.make_graph(
        nodes,
        "step",
        [value for value in one_step.input if value.name not in weights],
        one_step.output,
        [tensor for tensor in one_step.initializer if tensor.name in used],
    )
