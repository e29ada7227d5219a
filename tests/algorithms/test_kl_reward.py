"""The KL penalty in the reward, and how its coefficient follows a target."""

from __future__ import annotations

import json

import pytest
import torch

from megarl.algorithms.kl_reward import AdaptiveKL, FixedKL, KLController, mean_kl, outcome_rewards, token_rewards
from megarl.algorithms.ranks import ONE_RANK
from tests.algorithms.batches import NAN, on_ranks

MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
SCORES = torch.tensor([2.0, 9.0, -1.0, 0.5])


def test_a_score_stands_on_the_last_valid_token() -> None:
    expected = torch.zeros(4, 5)
    expected[0, 3], expected[2, 0], expected[3, 4] = 2.0, -1.0, 0.5
    assert torch.equal(outcome_rewards(SCORES, MASK), expected)
    assert outcome_rewards(torch.zeros(0), torch.zeros(0, 3)).shape == (0, 3)
    assert outcome_rewards(SCORES, torch.zeros(4, 0)).shape == (4, 0)


def test_each_valid_token_pays_for_its_kl_and_nothing_else_is_read() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = (-torch.rand(4, 5, generator=generator).masked_fill(MASK == 0, NAN) for _ in range(2))
    rewards, kl = token_rewards(SCORES, logprobs, reference, MASK, 0.25, "k1")
    last = {0: 3, 2: 0, 3: 4}
    for row in range(4):
        for t in range(5):
            if not MASK[row, t]:
                assert rewards[row, t] == 0 and kl[row, t] == 0
                continue
            difference = (logprobs[row, t] - reference[row, t]).item()
            score = SCORES[row].item() if last[row] == t else 0.0
            assert kl[row, t].item() == pytest.approx(difference)
            assert rewards[row, t].item() == pytest.approx(score - 0.25 * difference, rel=1e-5)


def test_the_controller_sees_the_mean_over_rows_of_their_means() -> None:
    kl = torch.tensor([[1.0, 2.0, NAN, 3.0, NAN], [NAN] * 5, [4.0, NAN, NAN, NAN, NAN], [1.0] * 5])
    assert mean_kl(kl, MASK, ONE_RANK) == pytest.approx((2 + 4 + 1) / 3)
    parts = [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([0, 3])]
    found = on_ranks(parts, lambda rows, ranks: mean_kl(kl[rows], MASK[rows], ranks))
    assert found == pytest.approx([7 / 3] * 3)
    assert mean_kl(kl[1:2], MASK[1:2], ONE_RANK) == 0


def test_the_adaptive_coefficient_moves_by_the_clipped_relative_error() -> None:
    control = AdaptiveKL(beta=0.1, target=2.0, horizon=1000)
    control.update(2.2, samples=100)
    assert control.beta == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    control.update(50.0, samples=100)
    control.update(0.0, samples=500)
    assert control.beta == pytest.approx(0.101 * (1 + 0.2 * 0.1) * (1 - 0.2 * 0.5))


def test_a_saved_coefficient_goes_on_where_it_was() -> None:
    control = AdaptiveKL(beta=0.1, target=1.0, horizon=10)
    control.update(3.0, samples=4)
    again = AdaptiveKL(beta=0.1, target=1.0, horizon=10)
    again.load_state_dict(json.loads(json.dumps(control.state_dict())))
    assert again.beta == control.beta != 0.1


def test_a_fixed_coefficient_stays() -> None:
    control: KLController = FixedKL(beta=0.3)
    control.update(100.0, samples=100)
    control.load_state_dict(control.state_dict())
    assert control.beta == 0.3


@pytest.mark.parametrize("key", ["target", "horizon"])
def test_a_target_or_a_horizon_that_is_not_positive_is_refused(key: str) -> None:
    for value in (0.0, -1.0):
        with pytest.raises(ValueError, match=rf"algorithm.kl_ctrl.\w+ is {value:g}, but it has to be above 0"):
            AdaptiveKL(**{"beta": 0.1, "target": 1.0, "horizon": 1.0, key: value})
