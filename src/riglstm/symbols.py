"""`run_symbols`: a layer on a sequence of few symbols, such as pixels that are black or white."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from riglstm import checks
from riglstm.inputs import State, join
from riglstm.layer import RigLSTM
from riglstm.scan import resolve

LARGEST = 2**25
"""Bytes of the table of gates up to which it pays: it should stay in a GPU's cache."""


def run_symbols(
    layer: RigLSTM, ids: Tensor, table: Tensor, hx: State | None = None
) -> tuple[Tensor, State]:
    """`layer(F.embedding(ids, table), hx)`, by a shorter way where there is one.

    What a symbol adds to the gates of a cell does not depend on the step. On a GPU, without
    gradients, for one layer in one direction, up to 64 sequences and far fewer symbols than steps,
    it is computed once for each symbol; elsewhere the layer runs as ever. Shorter is not always
    quicker: docs/kernels.md has the times. No dropout may come between the table and the layer.

    Args:
        layer: the layer.
        ids: whole numbers (T, B), or (B, T) with `batch_first`, from 0 to V - 1.
        table: (V, input_size), the weight of an `nn.Embedding`.
        hx: as in `RigLSTM`.
    """
    checks.check_tensor("ids", ids)
    checks.check_tensor("table", table)
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            "ids must be whole numbers, (T, B) or (B, T) with batch_first, "
            f"got {ids.dtype} of shape {tuple(ids.shape)}; "
            "convert them by .long(), give a single sequence a batch of one"
        )
    if table.dim() != 2 or table.shape[1] != layer.input_size:
        raise ValueError(
            f"table must have shape (V, input_size = {layer.input_size}), "
            f"got {tuple(table.shape)}; it is the weight of the nn.Embedding before the layer"
        )
    if hx is not None:
        checks.check_pair(hx)
    # Narrow types cannot hold V, by which they are judged.
    ids = ids.long()
    if not _shorter(layer, ids, table, hx):
        output, state = layer(F.embedding(ids, table), hx)
        return output, state
    from riglstm.scan import triton

    V, weights = table.shape[0], layer.weights()
    # As F.embedding does, without waiting for the GPU: torch has no public name for it.
    inside = ((ids >= 0) & (ids < V)).all()
    torch._assert_async(inside, f"ids must be from 0 to V - 1 = {V - 1}, got others; enlarge table")
    ids = ids.t() if layer.batch_first else ids
    cells = (layer.num_cells, layer.cell_size)
    if hx is None:
        h = c = weights.W.new_zeros(ids.shape[1], *cells)
    else:
        shape = (1, ids.shape[1], layer.hidden_size)
        for name, given in zip(("h_0", "c_0"), hx, strict=True):
            checks.check_state(name, given, shape, "1, batch, hidden_size", weights.W)
        h, c = (s[0].to(weights.W.dtype).unflatten(1, cells) for s in hx)
    y, state = triton.scan_symbols(ids, table, h, c, weights, layer.selection)
    output = y.flatten(2)
    h_n, c_n = (join((s,), layer.hidden_size) for s in state)
    return output.transpose(0, 1) if layer.batch_first else output, (h_n, c_n)


def _shorter(layer: RigLSTM, ids: Tensor, table: Tensor, hx: State | None) -> bool:
    """Whether the kernel for symbols runs this, and soon pays for its table."""
    # What hooks do to a layer, and what others made of it, is theirs to run.
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if hooked or type(layer).forward is not RigLSTM.forward or torch.compiler.is_compiling():
        return False
    tensors = (table, *layer.parameters(), *(() if hx is None else hx))
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    plain = layer.num_layers == 1 and not layer.bidirectional and layer.input_views == "linear"
    W = layer.weights().W
    same = ids.device == table.device == W.device and table.dtype == W.dtype and 0 not in ids.shape
    if learns or not plain or not same or 4 * table.shape[0] > ids.numel():
        return False
    N, K, d = layer.num_cells, layer.num_views, layer.cell_size
    # Tiles round the columns of a cell's gates up, and those of its query.
    columns = (-(-4 * d // 128) + -(-d // 128)) * 128
    if table.shape[0] * N * K * columns * W.element_size() > LARGEST:
        return False
    if resolve(layer.backend, W.device, layer.selection, d, W.dtype) != "triton":
        return False
    from riglstm.scan.fused.symbols import fits

    B = ids.shape[0 if layer.batch_first else 1]
    return fits(B, d, layer.selection, W, layer.soft_update)
