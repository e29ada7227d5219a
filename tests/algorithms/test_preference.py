"""Losses of preference optimisation against loops in float64, and what they are for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.algorithms.plugins import load_plugins
from megarl.algorithms.preference import (
    LabelledInputs,
    PairInputs,
    PreferenceOptions,
    Responses,
    kto_baseline,
    preference_loss,
    win_rates,
)

ROWS = 7
BETA, SMOOTHING = 0.3, 0.1


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def some_responses(seed: int, *, grad: bool = False) -> Responses:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -20 * torch.rand(ROWS, generator=generator, dtype=torch.float64)
    reference = logprobs + torch.randn(ROWS, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, 9, (ROWS,), generator=generator)
    return Responses(logprobs=logprobs.requires_grad_(grad), reference_logprobs=reference, tokens=tokens)


def some_pairs(*, grad: bool = False) -> PairInputs:
    generator = torch.Generator().manual_seed(5)
    return PairInputs(
        chosen=some_responses(1, grad=grad),
        rejected=some_responses(2, grad=grad),
        chosen_win_rate=torch.rand(ROWS, generator=generator, dtype=torch.float64),
        rejected_win_rate=torch.rand(ROWS, generator=generator, dtype=torch.float64),
    )


def ratios(responses: Responses) -> list[float]:
    return [a - b for a, b in zip(responses.logprobs.tolist(), responses.reference_logprobs.tolist(), strict=True)]


def expected(name: str, pairs: PairInputs) -> list[float]:
    """The formulas of the papers, one pair after another."""
    losses = []
    for i, (w, r) in enumerate(zip(ratios(pairs.chosen), ratios(pairs.rejected), strict=True)):
        right = sigmoid(BETA * (w - r))
        if name == "dpo":
            losses.append(-(1 - SMOOTHING) * math.log(right) - SMOOTHING * math.log(1 - right))
        elif name == "spin":
            losses.append(math.log(1 + math.exp(-BETA * (w - r))))
        elif name == "ipo":
            means = w / pairs.chosen.tokens[i].item(), r / pairs.rejected.tokens[i].item()
            losses.append((means[0] - means[1] - 1 / (2 * BETA)) ** 2)
        else:
            eta = 1 / BETA
            win, lose = pairs.chosen_win_rate[i].item(), pairs.rejected_win_rate[i].item()
            losses.append((w - eta * (win - 0.5)) ** 2 + (r - eta * (lose - 0.5)) ** 2)
    return losses


@pytest.mark.parametrize("name", ["dpo", "ipo", "sppo", "spin"])
def test_a_loss_over_pairs_is_that_of_its_paper(name: str) -> None:
    found = preference_loss.get(name)(some_pairs(), PreferenceOptions(beta=BETA, label_smoothing=SMOOTHING))
    assert found.tolist() == pytest.approx(expected(name, some_pairs()), rel=1e-12)


def test_kto_is_that_of_its_paper() -> None:
    responses, desirable = some_responses(3), torch.arange(ROWS) % 3 == 0
    options = PreferenceOptions(beta=BETA, desirable_weight=1.3, undesirable_weight=0.8)
    kl = torch.tensor(0.4, dtype=torch.float64)
    found = preference_loss.get("kto")(LabelledInputs(responses=responses, desirable=desirable, kl=kl), options)
    losses = [
        1.3 * (1 - sigmoid(BETA * (ratio - 0.4))) if good else 0.8 * (1 - sigmoid(BETA * (0.4 - ratio)))
        for ratio, good in zip(ratios(responses), desirable.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(losses, rel=1e-12)


def test_ktos_baseline_is_a_divergence_and_so_never_negative_and_has_no_gradient() -> None:
    ratio = torch.tensor([1.0, -0.5, 2.0], requires_grad=True)
    assert kto_baseline(ratio).item() == pytest.approx(2.5 / 3)
    assert kto_baseline(-ratio).item() == 0
    assert not kto_baseline(ratio).requires_grad


@pytest.mark.parametrize("name", ["dpo", "ipo", "sppo", "spin"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    options, pairs = PreferenceOptions(beta=BETA, label_smoothing=SMOOTHING), some_pairs()

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        sides = [
            Responses(logprobs=logprobs, reference_logprobs=side.reference_logprobs, tokens=side.tokens)
            for logprobs, side in ((chosen, pairs.chosen), (rejected, pairs.rejected))
        ]
        inputs = PairInputs(
            chosen=sides[0],
            rejected=sides[1],
            chosen_win_rate=pairs.chosen_win_rate,
            rejected_win_rate=pairs.rejected_win_rate,
        )
        return preference_loss.get(name)(inputs, options)

    sides = [each.logprobs.clone().requires_grad_() for each in (pairs.chosen, pairs.rejected)]
    assert torch.autograd.gradcheck(loss, sides)


def test_where_policy_and_reference_are_one_dpo_is_chance_and_its_gradient_half_of_beta() -> None:
    """arXiv:2305.18290, section 4: the weight of a pair is sigma(rejected reward - chosen reward)."""
    logprobs = torch.tensor([-3.0, -8.0], requires_grad=True)
    same = Responses(logprobs=logprobs, reference_logprobs=logprobs.detach(), tokens=torch.tensor([2, 4]))
    other = Responses(logprobs=-torch.ones(2), reference_logprobs=-torch.ones(2), tokens=torch.tensor([1, 1]))
    inputs = PairInputs(chosen=same, rejected=other, chosen_win_rate=torch.ones(2), rejected_win_rate=torch.zeros(2))
    loss = preference_loss.get("dpo")(inputs, PreferenceOptions(beta=BETA))
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    assert grad.tolist() == pytest.approx([-BETA / 2] * 2)


def test_losses_stay_finite_where_log_ratios_are_huge() -> None:
    far = Responses(
        logprobs=torch.tensor([-1.0, -1e5]), reference_logprobs=torch.tensor([-1e5, -1.0]), tokens=torch.ones(2)
    )
    near = Responses(logprobs=torch.zeros(2), reference_logprobs=torch.zeros(2), tokens=torch.ones(2))
    inputs = PairInputs(chosen=far, rejected=near, chosen_win_rate=torch.ones(2), rejected_win_rate=torch.zeros(2))
    for name in ("dpo", "ipo", "sppo", "spin"):
        assert preference_loss.get(name)(inputs, PreferenceOptions()).isfinite().all(), name
    labelled = LabelledInputs(responses=far, desirable=torch.tensor([True, False]), kl=torch.tensor(0.0))
    assert preference_loss.get("kto")(labelled, PreferenceOptions()).tolist() == pytest.approx([0, 0])


def test_ipo_does_not_depend_on_length_where_tokens_are_alike() -> None:
    def loss(length: int) -> float:
        sides = [
            Responses(
                logprobs=torch.tensor([length * each]),
                reference_logprobs=torch.tensor([-2.0 * length]),
                tokens=torch.tensor([length]),
            )
            for each in (-1.0, -3.0)
        ]
        inputs = PairInputs(
            chosen=sides[0], rejected=sides[1], chosen_win_rate=torch.ones(1), rejected_win_rate=torch.zeros(1)
        )
        return preference_loss.get("ipo")(inputs, PreferenceOptions()).item()

    assert loss(3) == pytest.approx(loss(300))


def test_a_response_without_tokens_has_a_mean_of_0() -> None:
    empty = Responses(logprobs=torch.zeros(1), reference_logprobs=torch.zeros(1), tokens=torch.zeros(1))
    assert empty.mean_log_ratio.tolist() == [0.0]


def test_win_rates_are_means_over_all_answers_to_the_prompt() -> None:
    scores = torch.tensor([[1.0, 0.0, 1.0], [2.0, -1.0, 0.5]], dtype=torch.float64)
    soft = [[sum(sigmoid(a - b) for b in row) / 3 for a in row] for row in scores.tolist()]
    hard = [[sum((a > b) + (a == b) / 2 for b in row) / 3 for a in row] for row in scores.tolist()]
    for found, wanted in ((win_rates(scores, hard=False), soft), (win_rates(scores, hard=True), hard)):
        for row, expected_row in zip(found.tolist(), wanted, strict=True):
            assert row == pytest.approx(expected_row)
    assert win_rates(torch.tensor([0.3, 0.3]), hard=True).tolist() == [0.5, 0.5]


def test_a_persons_own_loss_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_loss, "_entries", dict(preference_loss._entries))
    file = tmp_path / "hinge.py"
    file.write_text(
        "from megarl.algorithms.preference import preference_loss\n"
        "@preference_loss('hinge')\n"
        "def hinge(inputs, options):\n"
        "    return (1 - options.beta * (inputs.chosen.log_ratio - inputs.rejected.log_ratio)).clamp(min=0)\n"
    )
    load_plugins([file], "algorithm.plugins")
    pairs = some_pairs()
    found = preference_loss.get("hinge")(pairs, PreferenceOptions(beta=BETA)).tolist()
    wanted = [max(0, 1 - BETA * (w - r)) for w, r in zip(ratios(pairs.chosen), ratios(pairs.rejected), strict=True)]
    assert found == pytest.approx(wanted)
    assert not preference_loss.traits("hinge").labelled


def test_an_unknown_loss_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="is 'sigmoid', but the preference losses are dpo, ipo"):
        preference_loss.get("sigmoid")
