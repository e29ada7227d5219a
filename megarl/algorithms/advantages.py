"""From rewards to advantages (`algorithm.adv_estimator`): what an estimator takes and gives, and where names lead.

The estimators themselves: `group_advantages` compare a response with others to the same prompt, `token_advantages` look
along the response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algorithms.ranks import ONE_RANK, AcrossRanks
from megarl.algorithms.registry import Registry
from megarl.algorithms.tokens import row_chunks, select


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """One rank's samples of a step.

    Estimators that are `row_level` need only what a whole response got: they may be given a single column, [rows, 1],
    of row totals with the `lengths` of the responses.
    """

    rewards: Tensor
    """[rows, time], at each response token; a reward of the whole response stands on its last valid token"""
    mask: Tensor
    """[rows, time], 1 on tokens that the model chose; what stands under 0 is not read"""
    groups: Tensor
    """int64 [rows], any numbers: rows with the same one answer the same prompt, on whichever rank they are"""
    lengths: Tensor | None = None
    """int64 [rows], valid tokens of the whole response; None: those of the mask"""
    values: Tensor | None = None
    """[rows, time], the critic's value before each token (gae)"""
    baseline: Tensor | None = None
    """[rows], reward of the greedy response to the same prompt (remax)"""
    rewards_by_name: Mapping[str, Tensor] = field(default_factory=dict)
    """[rows] each: the parts that the reward consists of (gdpo)"""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """A weight for each of those names; empty: 1 for all"""
    ranks: AcrossRanks = ONE_RANK
    """The ranks that hold the other samples of the step"""

    @property
    def row_lengths(self) -> Tensor:
        """Valid tokens of each whole response, int64 [rows]."""
        return self.mask.bool().sum(dim=1) if self.lengths is None else self.lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageOptions:
    """The keys of the config's `algorithm` section that estimators read; documented there."""

    norm_adv_by_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    normalize_advantages: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """What an estimator gives."""

    advantages: Tensor
    """float32 [rows, time], 0 where the mask is 0"""
    returns: Tensor
    """float32 [rows, time], 0 where the mask is 0; what a critic would be trained on"""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """Metrics as scalar counts over the samples of all ranks, the same on each"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorTraits:
    """What an estimator needs, so that a run can make it, and refuse a config that does not."""

    row_level: bool = False
    """One advantage for a whole row, from its total reward: a column of totals is enough."""
    needs_groups: bool = False
    """Compares samples of one prompt: `rollout.n` is at least 2."""
    needs_values: bool = False
    """`AdvantageInputs.values`: there is a critic."""
    needs_baseline: bool = False
    """`AdvantageInputs.baseline`: each prompt is also answered greedily."""
    needs_rewards_by_name: bool = False
    """`AdvantageInputs.rewards_by_name`: the reward function returns its parts."""


AdvantageEstimator = Callable[[AdvantageInputs, AdvantageOptions], Advantages]

advantage_estimator: Registry[AdvantageEstimator, EstimatorTraits] = Registry(
    "advantage estimator", "algorithm.adv_estimator", EstimatorTraits, ("inputs", "options")
)


def row_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """R_b, the sum of a row's valid rewards: [rows, time] → float32 [rows].

    Summed in float64 and rounded once, so that neither padding nor the place of a reward shows in the last digit:
    equal rewards stay equal.
    """
    chunks = row_chunks(rewards, mask)
    return torch.cat([select(*chunk).sum(dim=1, dtype=torch.float64) for chunk in chunks]).float()


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """A number a row at each of its valid tokens: [rows], [rows, time] → float32 [rows, time]."""
    return select(values.float().unsqueeze(1).expand(mask.shape), mask)
