"""The ten ablations of the paper's table, by the paper's names."""

from __future__ import annotations

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "no_input_trans": {"input_views": "split"},
    "all_cells": {"cells": "all"},
    "rand_cells": {"cells": "random"},
    "all_inputs": {"views": "all"},
    "rand_inputs": {"views": "random"},
    "soft_inputs": {"views": "soft"},
    "all_h": {"peers": "all"},
    "rand_h": {"peers": "random"},
    "soft_h": {"peers": "soft"},
    "no_soft_state_updating": {"soft_update": False},
}
"""Keyword arguments of `RigLSTM`. `no_input_trans` needs input_size = num_views · cell size."""
