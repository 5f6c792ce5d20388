"""What torch.autocast asks for, on devices that know it and on those that do not."""

from __future__ import annotations

import torch


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products between tensors of `dtype`; autocast leaves float64 alone."""
    kind = device.type
    if dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
