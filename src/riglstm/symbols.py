"""`run_symbols`: a layer on a sequence of few symbols, such as pixels that are black or white."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from riglstm import checks
from riglstm.layer import RigLSTM
from riglstm.scan import resolve
from riglstm.sequence import State

LARGEST = 2**25
"""Bytes of the table of gates up to which it pays: it has to stay in a GPU's cache."""


def run_symbols(
    layer: RigLSTM, ids: Tensor, table: Tensor, hx: State | None = None
) -> tuple[Tensor, State]:
    """`layer(F.embedding(ids, table), hx)`, by a shorter way where there is one.

    What a symbol adds to the gates of a cell does not depend on the step. On a GPU, without
    gradients, for one layer in one direction and few symbols, it is computed once for each of them;
    elsewhere the layer runs as ever. No dropout may come between the table and the layer.

    Args:
        layer: the layer.
        ids: whole numbers (T, B), or (B, T) with `batch_first`; each below V.
        table: (V, input_size), the weight of an `nn.Embedding`.
        hx: as in `RigLSTM`.
    """
    checks.check_tensor("ids", ids)
    checks.check_tensor("table", table)
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            "ids must be whole numbers, (T, B) or (B, T) with batch_first, "
            f"got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    if table.dim() != 2 or table.shape[1] != layer.input_size:
        raise ValueError(
            f"table must have shape (V, input_size = {layer.input_size}), "
            f"got {tuple(table.shape)}; it is the weight of the nn.Embedding before the layer"
        )
    if not _shorter(layer, ids, table, hx):
        output, state = layer(F.embedding(ids.long(), table), hx)
        return output, state
    from riglstm.scan import triton

    # Without waiting for the GPU: an error of the next call of CUDA.
    torch._assert_async(((ids >= 0) & (ids < table.shape[0])).all())
    ids = ids.t() if layer.batch_first else ids
    cells = (layer.num_cells, layer.cell_size)
    if hx is None:
        h = c = table.new_zeros(ids.shape[1], *cells)
    else:
        checks.check_pair(hx)
        like = layer.weights().W
        shape = (1, ids.shape[1], layer.hidden_size)
        for name, given in zip(("h_0", "c_0"), hx, strict=True):
            checks.check_state(name, given, shape, "1, batch, hidden_size", like)
        h, c = (s[0].unflatten(1, cells) for s in hx)
    y, state = triton.scan_symbols(ids, table, h, c, layer.weights(), layer.selection)
    output = y.flatten(2)
    h_n, c_n = (s.flatten(1).unsqueeze(0) for s in state)
    return output.transpose(0, 1) if layer.batch_first else output, (h_n.clone(), c_n)


def _shorter(layer: RigLSTM, ids: Tensor, table: Tensor, hx: State | None) -> bool:
    """Whether the kernel for symbols runs this."""
    W = layer.weights().W
    tensors = (table, *layer.parameters(), *(hx or ()))
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    plain = layer.num_layers == 1 and not layer.bidirectional and layer.input_views == "linear"
    same = ids.device == table.device == W.device and table.dtype == W.dtype and 0 not in ids.shape
    if learns or not plain or not same or torch.compiler.is_compiling():
        return False
    # Tiles round the columns of a cell up, at most to one and a half times as many here.
    N, K, d = layer.num_cells, layer.num_views, layer.cell_size
    if table.shape[0] * N * K * 8 * d * W.element_size() > LARGEST:
        return False
    return resolve(layer.backend, W.device, layer.selection, d, W.dtype) == "triton"
