"""Exact statistics over the ranks of an explicit process group.

A mean of per-rank means is wrong as soon as ranks hold different counts, and E[x²] − mean² loses every digit once the
mean is large beside the spread (both have given absurd advantages in practice). So: sums and counts are reduced, in
float64, and the variance takes a second pass over the deviations.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


def global_sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of `tensor` over the ranks of `group`, elementwise, as a new tensor of the same shape and dtype.

    Without a group, a copy: one process is a world of one. Integers and float64 lose nothing; a float32 or bfloat16
    tensor is summed in float64 and rounded once, so that the number of ranks does not show.
    """
    rounded_once = tensor.is_floating_point() and tensor.dtype != torch.float64
    total = tensor.double() if rounded_once else tensor.clone()
    if group is not None:
        dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
    return total.to(tensor.dtype)


def global_mean_std(
    values: Tensor, mask: Tensor | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and unbiased standard deviation of the values of all ranks of `group` where `mask` is true.

    Values outside the mask may be NaN or infinite: they are not read. A rank may have no values at all. Two
    collectives.

    Args:
        values: any shape, any floating dtype.
        mask: the shape of `values`, boolean or 0/1; None takes every value.

    Returns:
        (mean, std, count): float64 scalars, the same on every rank. Without any value mean and std are 0, and with a
        single one the std is 0: look at `count` before dividing by the std.
    """
    valid = _select(values, mask).double()
    sum_and_count = torch.stack([valid.sum(), valid.new_tensor(valid.numel())])
    total, count = global_sum(sum_and_count, group)
    mean = total / count.clamp(min=1)
    squares = global_sum((valid - mean).square().sum(), group)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return mean, std, count


def global_min_max(values: Tensor, mask: Tensor | None, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest of the values of all ranks of `group` where `mask` is true, as float64 scalars.

    One collective. Without any value, (inf, −inf): the identity of the two operations. A NaN among the values gives
    NaN on every rank.
    """
    valid = _select(values, mask).double()
    # One MAX answers both. Backends disagree about NaN in a MAX, so it travels as a flag.
    bounds = valid.new_full((3,), -math.inf)
    if valid.numel():
        smallest, largest = torch.aminmax(valid)
        bounds = torch.stack([-smallest, largest, valid.isnan().any().double()])
    if group is not None:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    smallest, largest = -bounds[0], bounds[1]
    poisoned = bounds[2] > 0
    return smallest.masked_fill(poisoned, math.nan), largest.masked_fill(poisoned, math.nan)


def _select(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values under the mask, flat. Selected, never multiplied by the mask: 0 · NaN is NaN."""
    if mask is None:
        return values.detach().flatten()
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {list(mask.shape)}, values {list(values.shape)}")
    return values.detach()[mask.bool()]
