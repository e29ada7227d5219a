"""Group estimators, compared with loops over groups in plain Python, and the same however rows are shared out."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, Advantages, advantage_estimator
from megarl.algorithms.ranks import AcrossRanks
from tests.algorithms.batches import Batch, make_batch, on_ranks, splits

ROW_LEVEL = ("grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline")
EPSILON = 1e-6


def _inputs(batch: Batch, ranks: AcrossRanks | None = None) -> AdvantageInputs:
    """Rewards by name for gdpo: two numbers that depend on a row alone."""
    totals = torch.where(batch.mask.bool(), batch.rewards, 0.0).sum(1, dtype=torch.float64).float()
    return AdvantageInputs(
        rewards=batch.rewards,
        mask=batch.mask,
        groups=batch.groups,
        rewards_by_name={"format": (totals > 0).float(), "answer": totals},
        reward_weights={"format": 0.5, "answer": 2.0},
        ranks=ranks or AcrossRanks(),
    )


def _estimate(name: str, inputs: AdvantageInputs, **options: bool) -> Advantages:
    return advantage_estimator.get(name)(inputs, AdvantageOptions(**options))


def _scores(scores: list[float], groups: list[int], lengths: list[int] | None = None) -> AdvantageInputs:
    """A column of row totals."""
    return AdvantageInputs(
        rewards=torch.tensor(scores).unsqueeze(1),
        mask=torch.ones(len(scores), 1),
        groups=torch.tensor(groups),
        lengths=None if lengths is None else torch.tensor(lengths),
        rewards_by_name={"score": torch.tensor(scores)},
    )


def _normalised(scores: list[float], groups: list[int], by_std: bool) -> list[float]:
    """GRPO, group by group."""
    found = []
    for score, group in zip(scores, groups, strict=True):
        same = [other for other, its in zip(scores, groups, strict=True) if its == group]
        if len(same) == 1:
            found.append(0.0)
            continue
        centred = score - statistics.fmean(same)
        found.append(centred / (statistics.stdev(same) + EPSILON) if by_std else centred)
    return found


def _whitened(values: list[float], lengths: list[int]) -> list[float]:
    tokens = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(value - mean) / (variance + 1e-8) ** 0.5 for value in values]


def _expected(name: str, scores: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    rows = list(zip(scores, groups, lengths, range(len(scores)), strict=True))
    others = lambda group, row: [score for score, its, _, place in rows if its == group and place != row]
    match name:
        case "rloo":
            return [s - statistics.fmean(others(g, r)) if others(g, r) else 0.0 for s, g, _, r in rows]
        case "opo":
            total = lambda g: sum(length for _, its, length, _ in rows if its == g)
            weighted = lambda g: sum(length * score for score, its, length, _ in rows if its == g)
            return [s - weighted(g) / max(total(g), 1) if others(g, r) else 0.0 for s, g, _, r in rows]
        case "gpg":
            factor = len(rows) / sum(score != 0 for score in scores)
            return [factor * centred for centred in _normalised(scores, groups, False)]
        case "grpo_passk":
            found = []
            for score, group, _, row in rows:
                rest = others(group, row)
                best = bool(rest) and score > max(rest)
                found.append((score - max(rest)) / (statistics.stdev([score, *rest]) + EPSILON) if best else 0.0)
            return found
        case "gdpo":
            parts = {"format": [float(score > 0) for score in scores], "answer": scores}
            by_name = {key: _normalised(values, groups, True) for key, values in parts.items()}
            return _whitened(
                [0.5 * f + 2.0 * a for f, a in zip(by_name["format"], by_name["answer"], strict=True)], lengths
            )
        case "reinforce_plus_plus_baseline":
            return _whitened(_normalised(scores, groups, False), lengths)
    return _normalised(scores, groups, True)


@pytest.mark.parametrize("name", ROW_LEVEL)
def test_each_estimator_agrees_with_its_formula_group_by_group(name: str) -> None:
    batch = make_batch(60)
    valid = batch.mask.bool()
    scores = torch.where(valid, batch.rewards, 0.0).double().sum(1).float().tolist()
    expected = _expected(name, scores, batch.groups.tolist(), valid.sum(1).tolist())
    result = _estimate(name, _inputs(batch))
    of_tokens = torch.where(valid, torch.tensor(expected).unsqueeze(1), 0.0)
    torch.testing.assert_close(result.advantages, of_tokens, rtol=2e-5, atol=2e-6)
    assert torch.equal(result.returns, result.advantages)


@pytest.mark.parametrize("name", ROW_LEVEL)
def test_groups_spread_over_ranks_give_the_same_to_the_last_bit(name: str) -> None:
    batch = make_batch(60)
    whole = _estimate(name, _inputs(batch))
    for parts in splits(60):
        shares = on_ranks(parts, lambda rows, ranks: _estimate(name, _inputs(batch.take(rows), ranks)))
        for part, share in zip(parts, shares, strict=True):
            assert torch.equal(share.advantages, whole.advantages[part])
            assert {key: int(value) for key, value in share.counts.items()} == {
                key: int(value) for key, value in whole.counts.items()
            }


def test_rewards_that_cancel_give_the_same_in_whatever_order_they_are_added() -> None:
    scores = torch.tensor([1e20, 1.0, -1e20, 3.0])
    found = {
        order: _estimate("grpo", _scores(scores[list(order)].tolist(), [0] * 4), norm_adv_by_std=False)
        .advantages.squeeze(1)[list(order).index(1)]
        .item()
        for order in itertools.permutations(range(4))
    }
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("name", ROW_LEVEL)
def test_row_totals_with_lengths_are_enough(name: str) -> None:
    assert advantage_estimator.traits(name).row_level
    batch = make_batch(60)
    valid = batch.mask.bool()
    inputs = _inputs(batch)
    totals = torch.where(valid, batch.rewards, 0.0).sum(1, dtype=torch.float64).float()
    column = AdvantageInputs(
        rewards=totals.unsqueeze(1),
        mask=valid.any(1, keepdim=True),
        groups=batch.groups,
        lengths=valid.sum(1),
        rewards_by_name=inputs.rewards_by_name,
        reward_weights=inputs.reward_weights,
    )
    whole = _estimate(name, inputs).advantages
    assert torch.equal(torch.where(valid, _estimate(name, column).advantages, 0.0), whole)


@pytest.mark.parametrize("name", ROW_LEVEL)
def test_padding_and_what_is_under_the_mask_change_nothing_to_the_last_bit(name: str) -> None:
    batch = make_batch(40)
    narrow = _estimate(name, _inputs(batch)).advantages
    wide = _estimate(name, _inputs(batch.padded(300))).advantages
    assert torch.equal(narrow, wide[:, :23]) and wide[:, 23:].eq(0).all()


@pytest.mark.parametrize("name", ROW_LEVEL)
@pytest.mark.parametrize("score", [0.1, 1 / 3, 0.7, -1e-3, 1e8])
def test_equal_rewards_give_exactly_zero(name: str, score: float) -> None:
    for size in (1, 2, 3, 7, 8):
        inputs = _scores([score] * size, [0] * size, [3, 1, 4, 1, 5, 9, 2, 6][:size])
        assert _estimate(name, inputs).advantages.eq(0).all()


@pytest.mark.parametrize("name", ROW_LEVEL)
@pytest.mark.filterwarnings("ignore:advantages of")
def test_one_valid_token_and_none_are_no_error(name: str) -> None:
    for valid in (0, 1):
        mask = torch.zeros(4, 3)
        mask[0, :valid] = 1
        inputs = AdvantageInputs(
            rewards=torch.full((4, 3), float("nan")).masked_fill(mask.bool(), 1.0),
            mask=mask,
            groups=torch.tensor([0, 0, 1, 1]),
            rewards_by_name={"score": torch.tensor([1.0, 0, 0, 0])},
        )
        result = _estimate(name, inputs).advantages
        assert result.isfinite().all() and result[~mask.bool()].eq(0).all()
    nothing = AdvantageInputs(
        rewards=torch.zeros(0, 3),
        mask=torch.zeros(0, 3),
        groups=torch.zeros(0).long(),
        rewards_by_name={"score": torch.zeros(0)},
    )
    assert _estimate(name, nothing).advantages.shape == (0, 3)


def test_opo_weighs_samples_by_their_length() -> None:
    result = _estimate("opo", _scores([1.0, 0.0], [5, 5], [30, 10]))
    assert result.advantages.squeeze(1).tolist() == [0.25, -0.75]


def test_gpg_makes_up_for_rows_without_reward() -> None:
    result = _estimate("gpg", _scores([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1]))
    assert result.advantages.squeeze(1).tolist() == [2.0, -2.0, 0.0, 0.0]
    assert _estimate("gpg", _scores([0.0] * 4, [0, 0, 1, 1])).advantages.eq(0).all()


def test_passk_gives_nothing_when_two_samples_are_equally_good() -> None:
    result = _estimate("grpo_passk", _scores([1.0, 1.0, 0.0, 3.0, 1.0, 0.0], [0, 0, 0, 1, 1, 1]), norm_adv_by_std=False)
    assert result.advantages.squeeze(1).tolist() == [0, 0, 0, 2.0, 0, 0]


def test_gdpo_lets_no_reward_drown_another() -> None:
    scores = [0.0, 1.0, 0.0, 1.0]
    by_name = {"small": torch.tensor([1e-3, 0.0, 1e-3, 0.0]), "large": torch.tensor([0.0, 1e3, 0.0, 1e3])}
    inputs = AdvantageInputs(
        rewards=torch.tensor(scores).unsqueeze(1),
        mask=torch.ones(4, 1),
        groups=torch.tensor([0, 0, 1, 1]),
        rewards_by_name=by_name,
    )
    # The small reward's standard deviation is 7e-4, beside which 1e-6 shows.
    assert _estimate("gdpo", inputs, norm_adv_by_std=True).advantages.abs().max() < 2
    inverse = AdvantageInputs(
        rewards=inputs.rewards,
        mask=inputs.mask,
        groups=inputs.groups,
        rewards_by_name={"small": by_name["small"]},
    )
    assert _estimate("gdpo", inverse).advantages.squeeze(1).tolist() == pytest.approx(
        [0.75**0.5, -(0.75**0.5)] * 2, rel=1e-5
    )


def test_gdpo_without_rewards_by_name_or_with_other_weights_is_refused() -> None:
    plain = _scores([1.0, 0.0], [0, 0])
    nameless = AdvantageInputs(rewards=plain.rewards, mask=plain.mask, groups=plain.groups)
    with pytest.raises(ValueError, match="returns the reward's parts by name"):
        _estimate("gdpo", nameless)
    other = AdvantageInputs(
        rewards=plain.rewards,
        mask=plain.mask,
        groups=plain.groups,
        rewards_by_name=plain.rewards_by_name,
        reward_weights={"format": 1.0},
    )
    with pytest.raises(ValueError, match="weights of gdpo are of format, the rewards of score"):
        _estimate("gdpo", other)
