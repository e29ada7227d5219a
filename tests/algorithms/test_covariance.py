"""Which tokens kl_cov and clip_cov hold back, compared with sorting all tokens of the mini-batch."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from megarl.algorithms.covariance import CovarianceOptions, covariance_selection
from tests.algorithms.batches import NAN, on_ranks, splits

ROWS, TIME = 30, 40
OPTIONS = CovarianceOptions(kl_cov_ratio=0.02, clip_cov_ratio=0.03, clip_cov_lb=0.5, clip_cov_ub=2.0)
LOSSES = ("kl_cov", "clip_cov")


def _tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(old log-probs, advantages, mask, ids); NaN under the mask."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(ROWS, TIME, generator=generator) < 0.8
    logprobs = -torch.rand(ROWS, TIME, generator=generator) * 4
    advantages = torch.randn(ROWS, 1, generator=generator).expand(ROWS, TIME)
    ids = torch.arange(ROWS).unsqueeze(1) * 4096 + torch.arange(TIME)
    return logprobs.masked_fill(~mask, NAN), advantages.masked_fill(~mask, NAN), mask, ids


def _covariances() -> tuple[list[tuple[int, int]], list[float]]:
    """(places, covariances) of the valid tokens."""
    logprobs, advantages, mask, _ = _tokens()
    mean_logprob, mean_advantage = (statistics.fmean(values[mask].tolist()) for values in (logprobs, advantages))
    places = [(row, t) for row, t in mask.nonzero().tolist()]
    return places, [
        (advantages[place].item() - mean_advantage) * (logprobs[place].item() - mean_logprob) for place in places
    ]


def _selected(selection: Tensor) -> set[tuple[int, int]]:
    return {(row, t) for row, t in selection.nonzero().tolist()}


def test_kl_cov_takes_the_tokens_of_largest_covariance() -> None:
    places, covariances = _covariances()
    count = int(len(places) * 0.02)
    order = sorted(range(len(places)), key=covariances.__getitem__, reverse=True)
    assert _selected(covariance_selection("kl_cov", *_tokens(), OPTIONS)) == {places[i] for i in order[:count]}


def test_clip_cov_takes_tokens_between_the_bounds_by_chance() -> None:
    places, covariances = _covariances()
    between = {place for place, value in zip(places, covariances, strict=True) if 0.5 < value < 2.0}
    count = int(len(places) * 0.03)
    drawn = [_selected(covariance_selection("clip_cov", *_tokens(), OPTIONS, seed=seed)) for seed in range(40)]
    assert all(len(one) == count and one <= between for one in drawn)
    assert drawn[0] != drawn[1]
    # Over many seeds every candidate gets its turn, about as often as the others.
    times = [sum(place in one for one in drawn) for place in between]
    assert min(times) > 0 and max(times) < 4 * count * 40 / len(between)


def test_all_candidates_are_taken_where_they_are_fewer_than_wanted() -> None:
    places, covariances = _covariances()
    between = {place for place, value in zip(places, covariances, strict=True) if 0.5 < value < 2.0}
    greedy = CovarianceOptions(clip_cov_ratio=1.0, clip_cov_lb=0.5, clip_cov_ub=2.0)
    assert _selected(covariance_selection("clip_cov", *_tokens(), greedy)) == between
    nothing = CovarianceOptions(clip_cov_lb=1e6, clip_cov_ub=2e6)
    assert not covariance_selection("clip_cov", *_tokens(), nothing).any()


def test_at_least_one_token_is_taken_of_a_small_mini_batch() -> None:
    assert covariance_selection("kl_cov", *_tokens(), CovarianceOptions(kl_cov_ratio=1e-9)).sum() == 1


@pytest.mark.parametrize("name", LOSSES)
def test_the_selection_is_the_same_however_tokens_are_shared_out(name: str) -> None:
    tokens = _tokens()
    whole = covariance_selection(name, *tokens, OPTIONS, seed=5)
    for parts in splits(ROWS):
        shares = on_ranks(
            parts,
            lambda rows, ranks: covariance_selection(
                name, *(column[rows].flatten() for column in tokens), OPTIONS, seed=5, ranks=ranks
            ),
        )
        for rows, share in zip(parts, shares, strict=True):
            assert torch.equal(share.view(-1, TIME), whole[rows])


def test_equal_covariances_do_not_select_more_than_the_share() -> None:
    _, _, mask, ids = _tokens()
    zeros = torch.zeros(ROWS, TIME)
    selection = covariance_selection("kl_cov", zeros, zeros, mask, ids, OPTIONS)
    assert selection.sum() == int(int(mask.sum()) * 0.02)
    again = covariance_selection("kl_cov", zeros, zeros, mask, ids, OPTIONS, seed=1)
    assert not torch.equal(selection, again)


@pytest.mark.parametrize("name", LOSSES)
def test_a_mini_batch_without_a_valid_token_selects_none(name: str) -> None:
    logprobs, advantages, mask, ids = _tokens()
    nothing = torch.zeros_like(mask)
    assert not covariance_selection(name, logprobs, advantages, nothing, ids, OPTIONS).any()


def test_other_losses_select_nothing() -> None:
    with pytest.raises(ValueError, match="policy loss 'ppo' selects no tokens; kl_cov and clip_cov do"):
        covariance_selection("ppo", *_tokens(), OPTIONS)
