"""Policy losses, compared with the paper's formula in plain Python floats, and their gradient with a closed form."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss
from megarl.algorithms.tokens import TokenLoss
from megarl.config.fields import config_keys
from megarl.config.schema import RunConfig

OPTIONS = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)


def _ppo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None = None
) -> TokenLoss:
    mask = torch.ones_like(logprobs) if mask is None else mask
    inputs = PolicyLossInputs(logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask)
    return policy_loss.get("ppo")(inputs, OPTIONS)


def _expected(logprob: float, old: float, advantage: float) -> tuple[float, float, bool, bool]:
    """(loss, its derivative in the log-prob, clipped, stopped by dual clip) of one token, case by case."""
    ratio = math.exp(max(-20.0, min(20.0, logprob - old)))
    derivative = -advantage * ratio
    if advantage > 0 and ratio > 1.28:
        return -advantage * 1.28, 0.0, True, False
    if advantage < 0 and ratio < 0.8:
        return -advantage * 0.8, 0.0, True, False
    if advantage < 0 and ratio > 3.0:
        return -advantage * 3.0, 0.0, False, True
    return -advantage * ratio, derivative, False, False


def _random_tokens(count: int = 4000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    logprobs = -torch.rand(count, generator=generator) * 5
    old = logprobs - torch.randn(count, generator=generator) * 1.5
    advantages = torch.randn(count, generator=generator)
    return logprobs.requires_grad_(), old, advantages


def test_loss_gradient_and_metrics_agree_with_the_formula_token_by_token() -> None:
    logprobs, old, advantages = _random_tokens()
    result = _ppo(logprobs, old, advantages)
    result.loss.sum().backward()
    tokens = zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)
    expected = [_expected(*token) for token in tokens]
    losses, gradients, clipped, stopped = (torch.tensor(column) for column in zip(*expected, strict=True))
    assert clipped.sum() > 100 and stopped.sum() > 100, "the case has to reach every branch"
    torch.testing.assert_close(result.loss.detach(), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logprobs.grad, gradients, rtol=1e-5, atol=1e-6)
    assert result.sums["actor/pg_clipfrac"] == clipped.sum()
    assert result.sums["actor/pg_clipfrac_lower"] == stopped.sum()
    torch.testing.assert_close(result.sums["actor/ppo_kl"], (old - logprobs.detach()).sum(), rtol=1e-5, atol=1e-3)
    assert not any(value.requires_grad for value in result.sums.values())


def test_on_policy_the_ratio_is_one_and_the_gradient_the_plain_policy_gradient() -> None:
    logprobs, _, advantages = _random_tokens()
    result = _ppo(logprobs, logprobs.detach().clone(), advantages)
    result.loss.sum().backward()
    assert torch.equal(result.loss, -advantages)  # exactly: exp(0) is 1
    assert torch.equal(logprobs.grad, -advantages)  # type: ignore[arg-type]
    assert all(value == 0 for value in result.sums.values())


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -500.0, 0.0, -500.0], requires_grad=True)
    result = _ppo(logprobs, torch.tensor([-500.0, 0.0, -500.0, 0.0]), torch.tensor([1.0, 1.0, -1.0, -1.0]))
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([-1.28, 0.0, 3.0, 0.8], abs=1e-6)
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_what_is_under_the_mask_is_not_read() -> None:
    logprobs, old, advantages = _random_tokens(60)
    mask = torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.5
    kept = [values.detach()[mask].clone() for values in (logprobs, old, advantages)]
    kept[0].requires_grad_()
    for poison in (float("nan"), float("inf"), -float("inf")):
        poisoned = [values.detach().masked_fill(~mask, poison) for values in (logprobs, old, advantages)]
        poisoned[0].requires_grad_()
        result, expected = _ppo(poisoned[0], poisoned[1], poisoned[2], mask), _ppo(*kept)
        (gradient,) = torch.autograd.grad(result.loss.sum(), poisoned[0])
        (expected_gradient,) = torch.autograd.grad(expected.loss.sum(), kept[0])
        assert torch.equal(result.loss[mask], expected.loss) and result.loss[~mask].eq(0).all()
        assert torch.equal(gradient[mask], expected_gradient) and gradient[~mask].eq(0).all()
        for name, value in expected.sums.items():
            torch.testing.assert_close(result.sums[name], value)


def test_bfloat16_log_probs_are_computed_in_float32() -> None:
    logprobs, old, advantages = (values.detach().bfloat16() for values in _random_tokens(100))
    assert torch.equal(
        _ppo(logprobs, old, advantages).loss, _ppo(logprobs.float(), old.float(), advantages.float()).loss
    )


def test_the_config_offers_exactly_the_registered_losses() -> None:
    (key,) = (key for key in config_keys(RunConfig) if key.name == "actor.policy_loss")
    assert set(key.rules.choices) == set(policy_loss.names)
