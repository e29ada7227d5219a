"""Estimators that look along a response, compared with loops over tokens in float64."""

from __future__ import annotations

import math
import statistics
import warnings

import pytest
import torch

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, Advantages, advantage_estimator
from megarl.algorithms.ranks import AcrossRanks
from tests.algorithms.batches import NAN, Batch, make_batch, on_ranks, splits

TOKEN_LEVEL = ("gae", "reinforce_plus_plus", "remax")
GAMMAS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)]


def _baseline(batch: Batch) -> torch.Tensor:
    """A function of the row alone, so that it can be made on any rank."""
    return batch.groups.float() / 7000


def _estimate(
    name: str,
    batch: Batch,
    gamma: float = 0.98,
    lam: float = 0.9,
    normalize: bool = True,
    ranks: AcrossRanks | None = None,
) -> Advantages:
    inputs = AdvantageInputs(
        rewards=batch.rewards,
        mask=batch.mask,
        groups=batch.groups,
        values=batch.values,
        baseline=_baseline(batch),
        ranks=ranks or AcrossRanks(),
    )
    options = AdvantageOptions(gamma=gamma, lam=lam, normalize_advantages=normalize)
    return advantage_estimator.get(name)(inputs, options)


def _loop(name: str, batch: Batch, gamma: float, lam: float) -> tuple[list[list[float]], list[list[float]]]:
    """(advantages before whitening, returns) of the valid tokens of each row."""
    advantages, returns = [], []
    for row, mask in enumerate(batch.mask.bool()):
        rewards = batch.rewards[row, mask].tolist()
        values = [*batch.values[row, mask].tolist(), 0.0]
        going_back: list[float] = []
        running = 0.0
        for t in reversed(range(len(rewards))):
            if name == "gae":
                running = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * running
            else:
                running = rewards[t] + (gamma if name == "reinforce_plus_plus" else 1.0) * running
            going_back.append(running)
        sums = going_back[::-1]
        baseline = float(_baseline(batch)[row])
        advantages.append([value - baseline for value in sums] if name == "remax" else sums)
        returns.append([s + v for s, v in zip(sums, values, strict=False)] if name == "gae" else sums)
    return advantages, returns


def _whitened(rows: list[list[float]]) -> list[list[float]]:
    tokens = [value for row in rows for value in row]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def _assert_rows(found: torch.Tensor, batch: Batch, expected: list[list[float]]) -> None:
    valid = batch.mask.bool()
    assert found.dtype == torch.float32 and found[~valid].eq(0).all()
    torch.testing.assert_close(
        found[valid].double(), torch.tensor([v for row in expected for v in row]).double(), rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), GAMMAS)
@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_each_estimator_agrees_with_a_loop_over_tokens(name: str, gamma: float, lam: float, holes: bool) -> None:
    batch = make_batch(holes=holes)
    advantages, returns = _loop(name, batch, gamma, lam)
    result = _estimate(name, batch, gamma, lam)
    _assert_rows(result.advantages, batch, advantages if name == "remax" else _whitened(advantages))
    _assert_rows(result.returns, batch, returns)


def test_gae_without_normalisation_gives_the_sums_themselves() -> None:
    batch = make_batch()
    _assert_rows(_estimate("gae", batch, normalize=False).advantages, batch, _loop("gae", batch, 0.98, 0.9)[0])


def test_thousands_of_tokens_keep_their_digits() -> None:
    batch = make_batch(rows=6, time=3000, holes=True)
    advantages, returns = _loop("gae", batch, 1.0, 1.0)
    result = _estimate("gae", batch, 1.0, 1.0, normalize=False)
    found = result.advantages[batch.mask.bool()].double()
    torch.testing.assert_close(
        found, torch.tensor([v for row in advantages for v in row]).double(), rtol=1e-6, atol=1e-6
    )
    _assert_rows(result.returns, batch, returns)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_sums_go_on_from_block_to_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.algorithms.backward_sums._BLOCK_ELEMENTS", 1)
    batch = make_batch(rows=9, time=150, holes=False)
    _assert_rows(_estimate(name, batch).returns, batch, _loop(name, batch, 0.98, 0.9)[1])


def test_gae_with_lambda_one_is_the_discounted_return_less_the_value() -> None:
    batch = make_batch()
    gae = _estimate("gae", batch, gamma=0.97, lam=1.0, normalize=False)
    returns = _estimate("reinforce_plus_plus", batch, gamma=0.97).returns
    torch.testing.assert_close(gae.returns, returns, rtol=1e-5, atol=1e-5)
    values = torch.where(batch.mask.bool(), batch.values, 0.0)
    torch.testing.assert_close(gae.advantages, returns - values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_a_tool_span_gives_what_the_sequence_without_it_gives(name: str) -> None:
    plain = make_batch(rows=12, time=20, holes=False)
    insert = lambda values, fill: torch.cat([values[:, :7], torch.full((12, 9), fill), values[:, 7:]], dim=1)
    spanned = Batch(insert(plain.mask, 0), insert(plain.rewards, NAN), insert(plain.values, float("inf")), plain.groups)
    expected, found = _estimate(name, plain), _estimate(name, spanned)
    for left, right in ((expected.advantages, found.advantages), (expected.returns, found.returns)):
        assert torch.equal(torch.cat([right[:, :7], right[:, 16:]], dim=1), left) and right[:, 7:16].eq(0).all()


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_padding_and_what_is_under_the_mask_change_nothing(name: str) -> None:
    batch = make_batch()
    narrow, wide = _estimate(name, batch), _estimate(name, batch.padded(700))
    for left, right in ((narrow.advantages, wide.advantages), (narrow.returns, wide.returns)):
        torch.testing.assert_close(right[:, :23], left, rtol=1e-6, atol=1e-7)
        assert right[:, 23:].eq(0).all()
    assert torch.equal(wide.returns[:, :23], narrow.returns)


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_rows_on_several_ranks_are_whitened_by_the_global_batch(name: str) -> None:
    batch = make_batch(60)
    whole = _estimate(name, batch)
    for parts in splits(60):
        shares = on_ranks(parts, lambda rows, ranks: _estimate(name, batch.take(rows), ranks=ranks))
        for part, share in zip(parts, shares, strict=True):
            torch.testing.assert_close(share.advantages, whole.advantages[part], rtol=1e-6, atol=1e-6)
            assert torch.equal(share.returns, whole.returns[part])


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_one_valid_token_is_centred_with_a_warning_and_none_is_no_error(name: str) -> None:
    for tokens in (0, 1):
        mask = torch.zeros(3, 4, dtype=torch.long)
        mask[1, :tokens] = 1
        batch = Batch(mask, torch.full((3, 4), NAN), torch.full((3, 4), NAN), torch.zeros(3).long())
        batch.rewards[1, 0], batch.values[1, 0] = 2.0, 0.5
        with pytest.warns(UserWarning, match=f"advantages of {tokens} tokens cannot be divided"):
            result = _estimate(name, batch)
        assert result.advantages.eq(0).all()
        assert result.returns.sum() == 2.0 * tokens


def test_equal_advantages_are_whitened_to_zero() -> None:
    batch = Batch(torch.ones(4, 5).long(), torch.zeros(4, 5), torch.zeros(4, 5), torch.zeros(4).long())
    batch.rewards[:, -1] = 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = _estimate("reinforce_plus_plus", batch, gamma=1.0)
    assert result.advantages.abs().max() < 1e-9


def test_whitening_survives_a_mean_that_is_large_beside_the_spread() -> None:
    batch = Batch(torch.ones(50, 4).long(), torch.zeros(50, 4), torch.zeros(50, 4), torch.zeros(50).long())
    batch.rewards[:, -1] = 1e4 + torch.arange(50) % 2
    result = _estimate("reinforce_plus_plus", batch, gamma=1.0)
    expected = math.sqrt(199 / 200)
    assert result.advantages.abs().allclose(torch.tensor(expected), rtol=1e-6)


def test_remax_subtracts_the_greedy_reward_on_valid_tokens_only() -> None:
    batch = Batch(
        torch.tensor([[1, 0, 1, 0]]), torch.tensor([[0.0, NAN, 1.0, NAN]]), torch.zeros(1, 4), torch.tensor([7000])
    )
    result = _estimate("remax", batch)
    assert result.advantages.tolist() == [[0.0, 0, 0.0, 0]] and result.returns.tolist() == [[1.0, 0, 1.0, 0]]


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_a_mask_of_another_shape_is_refused(name: str) -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match=r"mask has shape \[40, 22\], values \[40, 23\]"):
        _estimate(name, Batch(batch.mask[:, 1:], batch.rewards, batch.values, batch.groups))


def test_what_an_estimator_needs_is_asked_for_by_name() -> None:
    bare = AdvantageInputs(rewards=torch.zeros(1, 2), mask=torch.ones(1, 2), groups=torch.zeros(1).long())
    with pytest.raises(ValueError, match="gae needs the values of a critic"):
        advantage_estimator.get("gae")(bare, AdvantageOptions())
    with pytest.raises(ValueError, match="remax needs the reward of each prompt's greedy response"):
        advantage_estimator.get("remax")(bare, AdvantageOptions())
    assert advantage_estimator.traits("gae").needs_values and advantage_estimator.traits("remax").needs_baseline
    assert not any(advantage_estimator.traits(name).row_level for name in TOKEN_LEVEL)
