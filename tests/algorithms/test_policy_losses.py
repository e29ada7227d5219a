"""The policy losses beside ppo, compared in value and gradient with autograd through the papers' own formulas."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megarl.algorithms.aggregate import Denominators, aggregate, row_weights, token_weights
from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss
from megarl.algorithms.tokens import Sequences, TokenLoss

LOSSES = ("cispo", "sapo", "reinforce", "gspo", "gmpo", "kl_cov", "clip_cov")
OPTIONS = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28, ppo_kl_coef=0.7)
ROWS, TIME = 12, 9


def _inputs(spread: float = 0.5, row_advantages: bool = True, seed: int = 2) -> PolicyLossInputs:
    """Padded rows in float64, one without a valid token and one with a single token."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda: torch.randn(ROWS, TIME, generator=generator, dtype=torch.float64)
    logprobs = -random().abs()
    old = logprobs - random() * spread
    advantages = random()
    if row_advantages:
        advantages = advantages[:, :1].expand(ROWS, TIME).clone()
    mask = torch.rand(ROWS, TIME, generator=generator) < 0.7
    mask[0], mask[1] = False, torch.arange(TIME) == 4
    selected = torch.rand(ROWS, TIME, generator=generator) < 0.3
    return PolicyLossInputs(
        logprobs=logprobs.requires_grad_(), old_logprobs=old, advantages=advantages, mask=mask, selected=selected
    )


def _loss(name: str, inputs: PolicyLossInputs) -> TokenLoss:
    return policy_loss.get(name)(inputs, OPTIONS)


def _mini_batch_loss(inputs: PolicyLossInputs, loss: Tensor, mode: str) -> Tensor:
    lengths = inputs.mask.sum(1)
    rows = torch.arange(ROWS).unsqueeze(1).expand(ROWS, TIME)
    return aggregate(loss, token_weights(row_weights(mode, lengths, Denominators.of(lengths)), rows, inputs.mask))


def _token_formula(name: str, inputs: PolicyLossInputs) -> Tensor:
    """The token losses as the papers write them, in float64 with autograd."""
    d, advantages = inputs.logprobs - inputs.old_logprobs, inputs.advantages
    ratio = d.exp()
    clipped = ratio.clamp(0.8, 1.28)
    assert inputs.selected is not None
    match name:
        case "cispo":
            return -clipped.detach() * advantages * inputs.logprobs
        case "sapo":
            tau = torch.where(advantages > 0, 1.0, 1.05)
            return -(4 / tau) / (1 + (-tau * (ratio - 1)).exp()) * advantages
        case "reinforce":
            return -advantages * inputs.logprobs
        case "kl_cov":
            return -advantages * ratio + torch.where(inputs.selected, 0.7 * d.abs(), 0.0)
        case "clip_cov":
            return torch.where(inputs.selected, 0.0, -torch.minimum(advantages * ratio, advantages * clipped))
    raise AssertionError(name)


def _row_formula(name: str, inputs: PolicyLossInputs) -> Tensor:
    """GSPO and GMPO as their papers write them: a mean over rows, differentiated through the row's ratio."""
    losses = []
    for row, mask in enumerate(inputs.mask):
        if not mask.any():
            continue
        d = (inputs.logprobs[row] - inputs.old_logprobs[row])[mask]
        advantage = inputs.advantages[row][mask].mean()
        if name == "gspo":
            ratio = d.mean().exp()
            losses.append(-torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.28)))
        else:
            sign = advantage.sign()
            bounded = sign * torch.minimum(sign * d, sign * d.clamp(-0.2, 0.28))
            losses.append(-advantage * bounded.mean().exp())
    return torch.stack(losses).mean()


def _gradient(loss: Tensor, inputs: PolicyLossInputs) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return gradient


@pytest.mark.parametrize("name", ["cispo", "sapo", "reinforce", "kl_cov", "clip_cov"])
def test_value_and_gradient_of_each_token_are_the_papers(name: str) -> None:
    inputs = _inputs(row_advantages=False)
    mode = policy_loss.traits(name).loss_agg_mode or "token-mean"
    found = _loss(name, inputs).loss
    expected = torch.where(inputs.mask, _token_formula(name, inputs), 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    gradients = [_gradient(_mini_batch_loss(inputs, loss, mode), inputs) for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spread", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_value_and_gradient_of_sequence_losses_are_the_papers(name: str, spread: float) -> None:
    inputs = _inputs(spread)
    mode = policy_loss.traits(name).loss_agg_mode
    assert mode == "seq-mean-token-mean"
    found, expected = _mini_batch_loss(inputs, _loss(name, inputs).loss, mode), _row_formula(name, inputs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    gradient, expected_gradient = _gradient(found, inputs), _gradient(expected, inputs)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert expected_gradient.count_nonzero() > 5


def test_gspo_with_advantages_that_vary_along_the_row_weighs_each_token_by_its_own() -> None:
    inputs = _inputs(0.3, row_advantages=False)
    loss = _mini_batch_loss(inputs, _loss("gspo", inputs).loss, "seq-mean-token-mean")
    expected, rows = torch.zeros_like(inputs.logprobs), int(inputs.mask.any(1).sum())
    value = 0.0
    for row, mask in enumerate(inputs.mask):
        length = int(mask.sum())
        if not length:
            continue
        s = math.exp((inputs.logprobs[row] - inputs.old_logprobs[row])[mask].mean().item())
        for t in mask.nonzero().flatten().tolist():
            advantage = inputs.advantages[row, t].item()
            terms = (-advantage * s, -advantage * min(max(s, 0.8), 1.28))
            value += max(terms) / length / rows
            # GSPO-token: the derivative of s is s times the token's own score, unless clipped.
            expected[row, t] = terms[0] / length / rows if terms[0] >= terms[1] else 0.0
    assert loss.item() == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(_gradient(loss, inputs), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_packed_tokens_on_context_parallel_ranks_give_the_padded_loss(name: str) -> None:
    inputs = _inputs()
    whole = _loss(name, inputs)
    whole_gradient = _gradient(whole.loss.sum(), inputs)
    order = torch.randperm(ROWS * TIME, generator=torch.Generator().manual_seed(8))
    of_token = torch.arange(ROWS).repeat_interleave(TIME)[order]
    columns = [
        values.flatten()[order] for values in (inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask)
    ]
    shards = [slice(0, 40), slice(40, 61), slice(61, None)]

    def run(rank: int, summed: Callable[[Tensor], Tensor]) -> tuple[TokenLoss, Tensor]:
        logprobs, old, advantages, mask = (column[shards[rank]] for column in columns)
        leaf = logprobs.detach().clone().requires_grad_()
        sequences = Sequences(of_token=of_token[shards[rank]], lengths=inputs.mask.sum(1), sum=summed)
        result = _loss(
            name,
            PolicyLossInputs(logprobs=leaf, old_logprobs=old, advantages=advantages, mask=mask, sequences=sequences),
        )
        return result, torch.autograd.grad(result.loss.sum(), leaf)[0]

    results = _meeting_in_sums(3, run)
    loss = torch.cat([result.loss for result, _ in results])
    torch.testing.assert_close(loss, whole.loss.flatten()[order], rtol=1e-6, atol=1e-7)
    gradient = torch.cat([gradient for _, gradient in results])
    torch.testing.assert_close(gradient, whole_gradient.flatten()[order], rtol=1e-6, atol=1e-7)
    for key, value in whole.sums.items():
        torch.testing.assert_close(sum(result.sums[key] for result, _ in results), value, rtol=1e-5, atol=1e-5)


def _meeting_in_sums(
    size: int, run: Callable[[int, Callable[[Tensor], Tensor]], tuple[TokenLoss, Tensor]]
) -> list[tuple[TokenLoss, Tensor]]:
    """Runs a thread for each rank; a rank's sum waits for the others'."""
    barrier = threading.Barrier(size, timeout=60)
    slots: dict[int, Tensor] = {}

    def summed(rank: int, tensor: Tensor) -> Tensor:
        slots[rank] = tensor
        barrier.wait()
        total = torch.stack([slots[other] for other in range(size)]).sum(0)
        barrier.wait()
        return total

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: run(rank, lambda tensor: summed(rank, tensor)), range(size)))


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_under_the_mask_is_not_read_and_gets_no_gradient(name: str) -> None:
    plain = _inputs()
    expected = _loss(name, plain)
    expected_gradient = _gradient(expected.loss.sum(), plain)
    for poison in (float("nan"), float("inf"), -float("inf")):
        poisoned = [
            values.detach().masked_fill(~plain.mask, poison)
            for values in (plain.logprobs, plain.old_logprobs, plain.advantages)
        ]
        inputs = PolicyLossInputs(
            logprobs=poisoned[0].requires_grad_(),
            old_logprobs=poisoned[1],
            advantages=poisoned[2],
            mask=plain.mask,
            selected=plain.selected,
        )
        result = _loss(name, inputs)
        assert torch.equal(result.loss, expected.loss) and result.loss[~plain.mask].eq(0).all()
        assert torch.equal(_gradient(result.loss.sum(), inputs), torch.where(plain.mask, expected_gradient, 0.0))
        assert {key: value.item() for key, value in result.sums.items()} == {
            key: value.item() for key, value in expected.sums.items()
        }


@pytest.mark.parametrize("name", ["gspo", "sapo", "gmpo", "kl_cov", "clip_cov", "cispo", "ppo"])
def test_on_policy_every_loss_has_the_gradient_of_the_plain_policy_gradient(name: str) -> None:
    inputs = _inputs(0.0)
    assert inputs.selected is not None
    unselected = PolicyLossInputs(
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        mask=inputs.mask,
        selected=torch.zeros_like(inputs.selected),
    )
    mode = "seq-mean-token-mean"
    found, plain = (_mini_batch_loss(inputs, _loss(key, unselected).loss, mode) for key in (name, "reinforce"))
    torch.testing.assert_close(_gradient(found, inputs), _gradient(plain, inputs), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    logprobs = torch.tensor([[0.0, -500.0], [-500.0, 0.0]] * 2, requires_grad=True)
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-500.0, 0.0], [-500.0, -500.0]] * 2),
        advantages=torch.tensor([[1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]]),
        mask=torch.ones(4, 2),
        selected=torch.tensor([[1, 0]] * 4),
    )
    loss = _loss(name, inputs).loss
    assert loss.isfinite().all() and _gradient(loss.sum(), inputs).isfinite().all()


def test_cispo_counts_weights_that_the_clamp_changes_and_never_stops_a_gradient() -> None:
    inputs = _inputs()
    result = _loss("cispo", inputs)
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()[inputs.mask]
    assert result.sums["actor/pg_clipfrac"] == ((ratio < 0.8) | (ratio > 1.28)).sum()
    assert _gradient(result.loss.sum(), inputs)[inputs.mask].ne(0).all()


def test_gmpo_counts_the_tokens_whose_gradient_it_stops() -> None:
    inputs = _inputs()
    result = _loss("gmpo", inputs)
    gradient = _gradient(result.loss.sum(), inputs)
    stopped = gradient.eq(0) & inputs.mask
    assert result.sums["actor/pg_clipfrac"] == (stopped & (inputs.advantages > 0)).sum() > 0
    assert result.sums["actor/pg_clipfrac_lower"] == (stopped & (inputs.advantages < 0)).sum() > 0


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_losses_that_need_a_selection_say_so(name: str) -> None:
    plain = _inputs()
    inputs = PolicyLossInputs(
        logprobs=plain.logprobs, old_logprobs=plain.old_logprobs, advantages=plain.advantages, mask=plain.mask
    )
    assert policy_loss.traits(name).needs_selection
    with pytest.raises(ValueError, match="needs the tokens that covariance_selection picked"):
        _loss(name, inputs)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_packed_tokens_without_their_sequences_are_refused(name: str) -> None:
    tokens = torch.zeros(5, requires_grad=True)
    inputs = PolicyLossInputs(logprobs=tokens, old_logprobs=tokens, advantages=tokens, mask=torch.ones(5))
    assert policy_loss.traits(name).needs_sequences
    with pytest.raises(ValueError, match=r"tokens of shape \[5\] are not rows"):
        _loss(name, inputs)
