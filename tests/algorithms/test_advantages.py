"""Advantages, compared with the statistics module on one group after the other."""

from __future__ import annotations

import statistics

import pytest
import torch

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, Advantages, advantage_estimator
from megarl.config.fields import config_keys
from megarl.config.schema import RunConfig

EPSILON = 1e-6


def _outcomes(scores: list[float], groups: list[int], width: int = 5) -> AdvantageInputs:
    """Rows of 1 to `width` valid tokens whose score stands on the last one; NaN on padding."""
    rewards = torch.full((len(scores), width), float("nan"))
    mask = torch.zeros(len(scores), width, dtype=torch.int64)
    for row, score in enumerate(scores):
        length = row % 5 + 1
        mask[row, :length] = 1
        rewards[row, :length] = 0.0
        rewards[row, length - 1] = score
    return AdvantageInputs(rewards=rewards, mask=mask, groups=torch.tensor(groups))


def _grpo(inputs: AdvantageInputs, norm_adv_by_std: bool = True) -> Advantages:
    return advantage_estimator.get("grpo")(inputs, AdvantageOptions(norm_adv_by_std=norm_adv_by_std))


def _row_values(result: Advantages, inputs: AdvantageInputs) -> list[float]:
    """The advantage of each row, after checking that its valid tokens share it and the others have 0."""
    values = []
    for row, mask in zip(result.advantages, inputs.mask.bool(), strict=True):
        assert row[~mask].eq(0).all()
        assert row[mask].unique().numel() == 1
        values.append(row[mask][0].item())
    return values


@pytest.mark.parametrize("norm_adv_by_std", [True, False])
def test_grpo_agrees_with_the_formula_group_by_group(norm_adv_by_std: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    groups = torch.randint(0, 6, (40,), generator=generator).mul(1000).tolist()  # uneven, interleaved, large ids
    scores = torch.randn(40, generator=generator).tolist()
    inputs = _outcomes(scores, groups)
    expected = []
    for score, group in zip(scores, groups, strict=True):
        same = [other for other, its_group in zip(scores, groups, strict=True) if its_group == group]
        centred = score - statistics.fmean(same)
        expected.append(centred / (statistics.stdev(same) + EPSILON) if norm_adv_by_std else centred)
    result = _grpo(inputs, norm_adv_by_std)
    assert _row_values(result, inputs) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert torch.equal(result.returns, result.advantages)


def test_token_rewards_of_a_row_are_summed_over_its_valid_tokens() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.5, float("inf"), 0.25]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    inputs = AdvantageInputs(rewards=rewards, mask=mask, groups=torch.zeros(2, dtype=torch.int64))
    result = _grpo(inputs, norm_adv_by_std=False)
    assert result.advantages.tolist() == [[3.125] * 3, [-3.125, 0, -3.125]]


@pytest.mark.parametrize("norm_adv_by_std", [True, False])
@pytest.mark.parametrize("score", [0.1, 1 / 3, 0.7, -1e-3, 1e8])
def test_equal_rewards_give_exactly_zero(score: float, norm_adv_by_std: bool) -> None:
    for size in (2, 3, 7, 8):
        inputs = _outcomes([score] * size, [0] * size)
        assert _grpo(inputs, norm_adv_by_std).advantages.eq(0).all()


def test_float32_arithmetic_alone_would_not_give_zero() -> None:
    scores = torch.full((7,), 0.1)
    total = torch.zeros(())
    for score in scores:
        total += score
    assert abs((scores[0] - total / 7) / EPSILON) > 1e-3  # what the previous test guards against


def test_equal_sums_of_token_rewards_give_zero_wherever_the_rewards_stand() -> None:
    generator = torch.Generator().manual_seed(6)
    steps = torch.rand(50, generator=generator)
    rewards = torch.stack([steps[torch.randperm(50, generator=generator)] for _ in range(8)])
    assert rewards.sum(dim=1).unique().numel() > 1, "in float32 the order shows"
    inputs = AdvantageInputs(rewards=rewards, mask=torch.ones(8, 50), groups=torch.zeros(8, dtype=torch.int64))
    assert _grpo(inputs).advantages.eq(0).all()


def test_a_group_of_one_has_no_advantage_and_is_counted() -> None:
    inputs = _outcomes([5.0, 1.0, 0.0, 0.5, 0.5], [3, 8, 8, 9, 9])
    result = _grpo(inputs)
    values = _row_values(result, inputs)
    assert values[0] == 0 and values[1] > 0 > values[2] and values[3:] == [0, 0]
    counts = {name: count.item() for name, count in result.counts.items()}
    assert counts == {"group/count": 3, "group/singleton": 1, "group/equal_rewards": 1}


def test_padding_changes_nothing_to_the_last_bit() -> None:
    scores, groups = torch.rand(24, generator=torch.Generator().manual_seed(2)).tolist(), [0, 1, 2] * 8
    narrow, wide = _grpo(_outcomes(scores, groups, 5)), _grpo(_outcomes(scores, groups, 300))
    assert torch.equal(narrow.advantages, wide.advantages[:, :5]) and wide.advantages[:, 5:].eq(0).all()


def test_rows_without_a_valid_token_and_batches_without_rows_are_no_error() -> None:
    masked = AdvantageInputs(
        rewards=torch.full((4, 3), float("nan")), mask=torch.zeros(4, 3), groups=torch.tensor([0, 0, 1, 1])
    )
    assert _grpo(masked).advantages.eq(0).all()
    one_token = AdvantageInputs(
        rewards=torch.tensor([[1.0, float("nan")], [float("nan"), float("nan")]]),
        mask=torch.tensor([[1, 0], [0, 0]]),
        groups=torch.tensor([0, 0]),
    )
    assert _grpo(one_token, norm_adv_by_std=False).advantages.tolist() == [[0.5, 0], [0, 0]]
    nothing = AdvantageInputs(rewards=torch.zeros(0, 3), mask=torch.zeros(0, 3), groups=torch.zeros(0).long())
    assert _grpo(nothing).advantages.shape == (0, 3)


def test_a_mask_of_another_shape_is_refused() -> None:
    inputs = AdvantageInputs(rewards=torch.zeros(2, 3), mask=torch.ones(2, 1), groups=torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"mask has shape \[2, 1\], values \[2, 3\]"):
        _grpo(inputs)


def test_the_config_offers_exactly_the_registered_estimators() -> None:
    (key,) = (key for key in config_keys(RunConfig) if key.name == "algorithm.adv_estimator")
    assert set(key.rules.choices) == set(advantage_estimator.names)
