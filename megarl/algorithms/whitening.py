"""Advantages with mean 0 and variance 1 over the valid tokens of the global batch."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from megarl.algorithms.ranks import AcrossRanks
from megarl.algorithms.tokens import row_chunks, select

WHITENING_EPSILON = 1e-8
"""Added to the variance; verl's."""


def whiten(values: Tensor, mask: Tensor, ranks: AcrossRanks) -> Tensor:
    """(value − mean) / sqrt(variance + 1e-8), 0 where the mask is 0; statistics over the valid tokens of all ranks.

    The variance is the unbiased one, in a second pass over the deviations: E[x²] − mean² loses every digit once the
    mean is large beside the spread. With fewer than two valid tokens there is no variance: values are only centred,
    with a warning. Collective over `ranks`.

    Args:
        values: [rows, time]; what stands under 0 is not read.
        mask: [rows, time].

    Returns:
        float32 [rows, time].
    """
    sum_and_count = torch.zeros(2, dtype=torch.float64, device=values.device)
    for chunk, valid in row_chunks(values, mask):
        sum_and_count[0] += select(chunk, valid).sum(dtype=torch.float64)
        sum_and_count[1] += valid.sum()
    total, count = ranks.sum(sum_and_count)
    mean = total / count.clamp(min=1)
    squares = torch.zeros_like(sum_and_count[:1])
    for chunk, valid in row_chunks(values, mask):
        squares += _deviations(chunk, valid, mean).square().sum()
    scale = _scale(ranks.sum(squares)[0], count)
    out = torch.empty_like(values, dtype=torch.float32)
    for target, chunk, valid in row_chunks(out, values, mask):
        target.copy_(_deviations(chunk, valid, mean) * scale)
    return out


def whiten_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """`whiten` of numbers that all valid tokens of a row share, when all rows are here.

    Args:
        values: [all rows].
        lengths: int64 [all rows], valid tokens of each: how often a row's value counts.

    Returns:
        float64 [all rows].
    """
    values, weights = values.double(), lengths.double()
    count = weights.sum()
    mean = _ordered_sum(weights * values) / count.clamp(min=1)
    centred = values - mean
    return centred * _scale(_ordered_sum(weights * centred.square()), count)


def _deviations(values: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    """In float64: a mean that is large beside the spread would round it away."""
    return torch.where(mask.bool(), values.double() - mean, 0.0)


def _scale(squares: Tensor, count: Tensor) -> Tensor:
    if count < 2:
        warnings.warn(
            f"advantages of {int(count)} tokens cannot be divided by their standard deviation; they are only centred",
            stacklevel=3,
        )
        return torch.ones_like(squares)
    return (squares / (count - 1) + WHITENING_EPSILON).rsqrt()


def _ordered_sum(values: Tensor) -> Tensor:
    """Independent of the order of rows, which depends on the ranks, to the last bit."""
    return values.sort().values.sum()
