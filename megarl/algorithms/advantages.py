"""From token rewards to advantages (`algorithm.adv_estimator`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algorithms.registry import Registry
from megarl.algorithms.tokens import select

GRPO_EPSILON = 1e-6
"""Added to a group's standard deviation; TRL has 1e-4, verl 1e-6."""


_CACHE_SIZED_CHUNK = 1 << 17
"""Elements that fit a CPU's cache in float32 and float64 together: summing chunk by chunk is seven times faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """Samples of one step. All samples of a group are on the same rank."""

    rewards: Tensor
    """[rows, time], at each response token; a reward of the whole response stands on its last valid token"""
    mask: Tensor
    """[rows, time], 1 on tokens that the model chose; `rewards` under 0 are not read"""
    groups: Tensor
    """int64 [rows], any numbers: rows with the same one answer the same prompt"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageOptions:
    """The keys of the config's `algorithm` section that estimators read; documented there."""

    norm_adv_by_std: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """What an estimator gives."""

    advantages: Tensor
    """float32 [rows, time], 0 where the mask is 0"""
    returns: Tensor
    """float32 [rows, time], 0 where the mask is 0; what a critic would be trained on"""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """Metrics as counts on this rank, scalars: their sums over ranks are the global ones"""


AdvantageEstimator = Callable[[AdvantageInputs, AdvantageOptions], Advantages]

advantage_estimator: Registry[AdvantageEstimator] = Registry("advantage estimator", "algorithm.adv_estimator")


@advantage_estimator("grpo")
def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """A_b = (R_b − mean_g) / (std_g + 1e-6) at every valid token of row b, with R_b the sum of its rewards.

    std is the unbiased one. Without `norm_adv_by_std`, R_b − mean_g: Dr.GRPO. A group whose rewards are all equal gives
    exactly 0, and so does a group of a single sample, where there is nothing to compare with.

    Counts: `group/count`, `group/singleton` (groups of one sample), and `group/equal_rewards` (larger groups that
    teach nothing).

    GRPO arXiv:2402.03300; Dr.GRPO arXiv:2503.20783.
    """
    mask = inputs.mask.bool()
    groups = _Groups(inputs.groups)
    scores = row_rewards(inputs.rewards, mask).double()
    centred = scores - groups.mean(scores)[groups.of_row]
    # Rewards such as 0.1 have no exact mean, and the rest would be divided by 1e-6: equal is decided on the rewards.
    equal = groups.min(scores) == groups.max(scores)
    centred = torch.where(equal[groups.of_row], 0.0, centred)
    if options.norm_adv_by_std:
        variance = groups.sum(centred.square()) / (groups.sizes - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + GRPO_EPSILON)[groups.of_row]
    advantages = spread(centred, mask)
    singleton = groups.sizes == 1
    counts = {
        "group/count": groups.sizes.new_tensor(len(groups.sizes)),
        "group/singleton": singleton.sum(),
        "group/equal_rewards": (equal & ~singleton).sum(),
    }
    return Advantages(advantages=advantages, returns=advantages, counts=counts)


def row_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """R_b, the sum of a row's valid rewards: [rows, time] → float32 [rows].

    Summed in float64 and rounded once, so that neither padding nor the place of a reward shows in the last digit:
    equal rewards stay equal.
    """
    rows = max(1, _CACHE_SIZED_CHUNK // max(rewards.shape[1], 1))
    chunks = zip(rewards.split(rows), mask.split(rows), strict=True)
    return torch.cat([select(*chunk).sum(dim=1, dtype=torch.float64) for chunk in chunks]).float()


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """A number a row at each of its valid tokens: [rows], [rows, time] → float32 [rows, time]."""
    return select(values.float().unsqueeze(1).expand(mask.shape), mask)


class _Groups:
    """Statistics of values [rows] by group [groups], in the values' own precision."""

    def __init__(self, groups: Tensor) -> None:
        _, self.of_row, self.sizes = torch.unique(groups, return_inverse=True, return_counts=True)

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(self.sizes)).index_add_(0, self.of_row, values)

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.sizes

    def min(self, values: Tensor) -> Tensor:
        return values.new_empty(len(self.sizes)).scatter_reduce_(0, self.of_row, values, "amin", include_self=False)

    def max(self, values: Tensor) -> Tensor:
        return values.new_empty(len(self.sizes)).scatter_reduce_(0, self.of_row, values, "amax", include_self=False)
