"""Preference losses and measures against their definitions in float64."""

import itertools
import math

import pytest
import torch

from megarl.algorithms.pairwise import bradley_terry_loss, centering_loss, kendall_tau, preference_kl

CHOSEN = torch.tensor([2.0, -1.0, 0.5, 30.0], dtype=torch.float64, requires_grad=True)
REJECTED = torch.tensor([1.0, 2.0, 0.5, -70.0], dtype=torch.float64)
MARGIN = torch.tensor([0.0, 0.5, 1.0, 0.0], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_bradley_terry_is_the_negative_log_likelihood_of_the_preference() -> None:
    expected = [
        -math.log(sigmoid(w - r - m))
        for w, r, m in zip(CHOSEN.tolist(), REJECTED.tolist(), MARGIN.tolist(), strict=True)
    ]
    assert bradley_terry_loss(CHOSEN, REJECTED, MARGIN).tolist() == pytest.approx(expected)
    assert bradley_terry_loss(CHOSEN, REJECTED)[2].item() == pytest.approx(math.log(2))


def test_its_gradient_is_the_probability_of_the_wrong_preference() -> None:
    (grad,) = torch.autograd.grad(bradley_terry_loss(CHOSEN, REJECTED, MARGIN).sum(), CHOSEN)
    wrong = [
        -sigmoid(-(w - r - m)) for w, r, m in zip(CHOSEN.tolist(), REJECTED.tolist(), MARGIN.tolist(), strict=True)
    ]
    assert grad.tolist() == pytest.approx(wrong, abs=1e-12)


def test_a_preference_that_is_very_wrong_has_a_finite_loss() -> None:
    assert bradley_terry_loss(torch.tensor(-500.0), torch.tensor(500.0)).item() == pytest.approx(1000.0)


def test_centering_is_least_where_the_scores_are_opposite() -> None:
    assert centering_loss(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 1.0])).tolist() == [0.0, 9.0]


def test_preference_kl_is_that_of_two_coins() -> None:
    for teacher, student in itertools.product((-3.0, -0.2, 0.0, 1.5), repeat=2):
        p, q = sigmoid(teacher), sigmoid(student)
        expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        found = preference_kl(*torch.tensor([teacher, student], dtype=torch.float64))
        assert found.item() == pytest.approx(expected, abs=1e-12)
    assert preference_kl(torch.tensor(200.0), torch.tensor(-200.0)).item() == pytest.approx(200.0)


def brute_force_tau_b(a: list[int], b: list[int]) -> float:
    concordant = discordant = tied_a = tied_b = 0
    pairs = list(itertools.combinations(range(len(a)), 2))
    for i, j in pairs:
        x, y = a[i] - a[j], b[i] - b[j]
        concordant += x * y > 0
        discordant += x * y < 0
        tied_a += x == 0
        tied_b += y == 0
    untied = math.sqrt((len(pairs) - tied_a) * (len(pairs) - tied_b))
    return (concordant - discordant) / untied if untied else 0.0


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_kendalls_tau_is_that_of_all_pairs_with_and_without_ties(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    for size in (0, 1, 2, 7, 40):
        a, b = (torch.randint(0, levels, (size,), generator=generator).tolist() for _ in range(2))
        assert kendall_tau(a, b) == pytest.approx(brute_force_tau_b(a, b)), (a, b)


def test_kendalls_tau_of_the_same_and_of_the_opposite_order() -> None:
    scores = [0.3, -1.0, 7.5, 2.0]
    assert kendall_tau(scores, [score * 3 + 1 for score in scores]) == 1
    assert kendall_tau(scores, [-score for score in scores]) == -1


def test_lists_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 scores cannot be compared with 1"):
        kendall_tau([1.0, 2.0], [1.0])
