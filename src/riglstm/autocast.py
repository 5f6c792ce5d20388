"""What torch.autocast asks for, on devices that know it and on those that do not."""

from __future__ import annotations

import torch


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products between tensors of `dtype`; autocast leaves float64 alone."""
    return product_on(device.type, dtype)


def product_on(kind: str, dtype: torch.dtype) -> torch.dtype:
    """`product_dtype` on a kind of device; torch takes its time to spell that out."""
    known = kind in ("cuda", "cpu") or torch.amp.is_autocast_available(kind)
    if dtype == torch.float64 or not known:
        return dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
