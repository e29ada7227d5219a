"""What the formulas over tokens share: reading only what a mask keeps, and log-ratios of two policies."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio, in both directions, before exp is taken of it; verl's. Sums of larger powers overflow."""


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in float32 where `mask` is true, 0 elsewhere; same shape.

    Selected, never multiplied by the mask: 0 · NaN is NaN. The gradient is 0 outside the mask as long as what follows
    has a finite derivative at 0, so select the inputs of a formula and not only its result.

    Args:
        mask: the shape of `values`; boolean or 0/1.

    Raises:
        ValueError: the shapes differ. Broadcasting would hide a mask of another batch.
    """
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {list(mask.shape)}, values {list(values.shape)}")
    return torch.where(mask.bool(), values.float(), 0.0)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log-prob − other log-prob in float32 where `mask` is true, 0 elsewhere. The other policy gets no gradient."""
    return select(logprobs, mask) - select(other_logprobs.detach(), mask)
