"""Advantages of a response over the others to the same prompt. A group's samples may be spread over ranks.

Each rank computes every group from the gathered totals of all rows, and keeps its own rows. So the advantages are the
same, to the last bit, however rows are shared out over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import (
    AdvantageInputs,
    AdvantageOptions,
    Advantages,
    advantage_estimator,
    row_rewards,
    spread,
)
from megarl.algorithms.whitening import whiten_rows

GRPO_EPSILON = 1e-6
"""Added to a group's standard deviation; TRL has 1e-4, verl 1e-6."""


@advantage_estimator("grpo", row_level=True, needs_groups=True)
def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """A_b = (R_b − mean_g) / (std_g + 1e-6) at every valid token of row b, with R_b the sum of its rewards.

    std is the unbiased one. Without `norm_adv_by_std`, R_b − mean_g: Dr.GRPO. A group whose rewards are all equal gives
    exactly 0, and so does a group of a single sample, where there is nothing to compare with.

    Counts, here and below: `group/count`, `group/singleton` (groups of one sample), and `group/equal_rewards` (larger
    groups that teach nothing).

    GRPO arXiv:2402.03300; Dr.GRPO arXiv:2503.20783.
    """
    rows = _AllRows.of(inputs)
    return _of_rows(inputs, rows, _grpo(rows.groups, rows.scores, options))


@advantage_estimator("rloo", row_level=True, needs_groups=True)
def rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """A_b = R_b − the mean of the other samples of its group = n/(n − 1) · (R_b − mean_g). arXiv:2402.14740.

    A group of one sample gives 0.
    """
    rows = _AllRows.of(inputs)
    sizes = rows.groups.sizes
    factors = sizes / (sizes - 1).clamp(min=1)
    return _of_rows(inputs, rows, rows.groups.centred(rows.scores) * factors[rows.groups.of_row])


@advantage_estimator("opo", row_level=True, needs_groups=True)
def opo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """A_b = R_b − Σ L_i·R_i / Σ L_i over the group, with L_i the response's valid tokens. arXiv:2505.23585.

    The baseline of least variance when a gradient's squared norm grows with length. Groups without a valid token, and
    groups of one sample, give 0.
    """
    rows = _AllRows.of(inputs)
    groups, lengths = rows.groups, inputs.ranks.gather(inputs.row_lengths).double()
    baseline = groups.sum(lengths * rows.scores) / groups.sum(lengths).clamp(min=1)
    advantages = torch.where(groups.equal(rows.scores)[groups.of_row], 0.0, rows.scores - baseline[groups.of_row])
    return _of_rows(inputs, rows, advantages)


@advantage_estimator("gpg", row_level=True, needs_groups=True)
def gpg(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """A_b = (B / number of rows with R ≠ 0) · (R_b − mean_g), with B the rows of the global batch. arXiv:2504.02546.

    The factor makes up for samples without a gradient. Without any reward all advantages are 0.
    """
    rows = _AllRows.of(inputs)
    factor = len(rows.scores) / rows.scores.count_nonzero().clamp(min=1)
    return _of_rows(inputs, rows, rows.groups.centred(rows.scores) * factor)


@advantage_estimator("grpo_passk", row_level=True, needs_groups=True)
def grpo_passk(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """The best sample of a group gets (best − second best) / (std_g + 1e-6), the others 0. arXiv:2503.19595.

    Two samples that are equally good give 0. Without `norm_adv_by_std`, best − second best.
    """
    rows = _AllRows.of(inputs)
    groups, scores = rows.groups, rows.scores
    best = groups.max(scores)
    is_best = scores == best[groups.of_row]
    single_best = (groups.sum(is_best.double()) == 1) & (groups.sizes > 1)
    second = groups.max(scores.masked_fill(is_best, -torch.inf))
    lead = torch.where(single_best, best - second, 0.0)
    if options.norm_adv_by_std:
        lead = lead / (groups.std(groups.centred(scores)) + GRPO_EPSILON)
    return _of_rows(inputs, rows, torch.where(is_best, lead[groups.of_row], 0.0))


@advantage_estimator("gdpo", row_level=True, needs_groups=True, needs_rewards_by_name=True)
def gdpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """whiten(Σ_k w_k · GRPO(reward k)): each part of the reward is normalised alone, so none drowns another.

    The sum is whitened over the valid tokens of the global batch. arXiv:2601.05242.

    Raises:
        ValueError: there are no rewards by name, or the weights are of other names.
    """
    parts, weights = inputs.rewards_by_name, inputs.reward_weights
    if not parts:
        raise ValueError("algorithm.adv_estimator gdpo needs a reward function that returns the reward's parts by name")
    if weights and set(weights) != set(parts):
        raise ValueError(
            f"the reward weights of gdpo are of {', '.join(sorted(weights))}, the rewards of {', '.join(sorted(parts))}"
        )
    rows = _AllRows.of(inputs)
    total = torch.zeros_like(rows.scores)
    for name in sorted(parts):  # one order on all ranks, which meet in gather
        scores = inputs.ranks.gather(parts[name].float()).double()
        total += weights.get(name, 1.0) * _grpo(rows.groups, scores, options)
    return _of_rows(inputs, rows, whiten_rows(total, inputs.ranks.gather(inputs.row_lengths)))


@advantage_estimator("reinforce_plus_plus_baseline", row_level=True, needs_groups=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """whiten(R_b − mean_g), over the valid tokens of the global batch. REINFORCE++-baseline, arXiv:2501.03262."""
    rows = _AllRows.of(inputs)
    centred = rows.groups.centred(rows.scores)
    return _of_rows(inputs, rows, whiten_rows(centred, inputs.ranks.gather(inputs.row_lengths)))


def _grpo(groups: _Groups, scores: Tensor, options: AdvantageOptions) -> Tensor:
    centred = groups.centred(scores)
    if not options.norm_adv_by_std:
        return centred
    return centred / (groups.std(centred) + GRPO_EPSILON)[groups.of_row]


@dataclass(frozen=True, slots=True)
class _AllRows:
    """The rows of all ranks."""

    scores: Tensor
    """float64 [all rows], R_b"""
    groups: _Groups

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> _AllRows:
        scores = row_rewards(inputs.rewards, inputs.mask)
        return cls(inputs.ranks.gather(scores).double(), _Groups(inputs.ranks.gather(inputs.groups)))


def _of_rows(inputs: AdvantageInputs, rows: _AllRows, of_all_rows: Tensor) -> Advantages:
    """An advantage for each row of all ranks as those of this rank's tokens."""
    advantages = spread(inputs.ranks.take(of_all_rows), inputs.mask.bool())
    groups = rows.groups
    singleton = groups.sizes == 1
    counts = {
        "group/count": groups.sizes.new_tensor(len(groups.sizes)),
        "group/singleton": singleton.sum(),
        "group/equal_rewards": (groups.equal(rows.scores) & ~singleton).sum(),
    }
    return Advantages(advantages=advantages, returns=advantages, counts=counts)


class _Groups:
    """Statistics of values [rows] by group [groups], in the values' own precision."""

    def __init__(self, groups: Tensor) -> None:
        _, self.of_row, self.sizes = torch.unique(groups, return_inverse=True, return_counts=True)

    def sum(self, values: Tensor) -> Tensor:
        # In the order of the values: the order of rows, which depends on the ranks, must not show in the last bit.
        order = values.argsort()
        return values.new_zeros(len(self.sizes)).index_add_(0, self.of_row[order], values[order])

    def centred(self, values: Tensor) -> Tensor:
        """Each row's value less its group's mean [rows]; exactly 0 in groups of equal values.

        Rewards such as 0.1 have no exact mean, and what is left would be divided by 1e-6: equal is decided on the
        values themselves.
        """
        mean = self.sum(values) / self.sizes
        return torch.where(self.equal(values)[self.of_row], 0.0, values - mean[self.of_row])

    def std(self, centred: Tensor) -> Tensor:
        """Unbiased; 0 for a group of one."""
        return (self.sum(centred.square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def equal(self, values: Tensor) -> Tensor:
        """Whether a group's values are all the same."""
        return self._extreme(values, "amin") == self.max(values)

    def max(self, values: Tensor) -> Tensor:
        return self._extreme(values, "amax")

    def _extreme(self, values: Tensor, reduce: str) -> Tensor:
        return values.new_empty(len(self.sizes)).scatter_reduce_(0, self.of_row, values, reduce, include_self=False)
