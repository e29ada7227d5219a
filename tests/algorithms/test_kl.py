"""KL estimators, compared with the exact divergence of small distributions and with autograd."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.kl import kl_per_token
from megarl.config.schema_learning import KL_ESTIMATORS


def _policies(vocabulary: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy (a leaf) and log-probs of another over a small vocabulary."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
    other = torch.randn(vocabulary, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, other


def _expectation(estimator: str) -> tuple[float, torch.Tensor]:
    """Mean of the estimate over the policy's own samples, and of its gradient, both summed over the vocabulary."""
    logits, other = _policies()
    logprobs = logits.log_softmax(0)
    estimate = kl_per_token(logprobs, other, torch.ones(6), estimator)
    # Samples are drawn, not differentiated: the probabilities are constants.
    (logprobs.detach().exp() * estimate).sum().backward()
    assert logits.grad is not None
    return (logprobs.exp() * estimate).sum().item(), logits.grad


def _exact() -> tuple[float, torch.Tensor]:
    logits, other = _policies()
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - other)).sum()
    divergence.backward()
    assert logits.grad is not None
    return divergence.item(), logits.grad


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_var_kl", "k1+", "k3+", "low_var_kl+"])
def test_the_mean_of_an_unbiased_estimate_is_the_divergence(estimator: str) -> None:
    assert math.isclose(_expectation(estimator)[0], _exact()[0], rel_tol=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+", "low_var_kl+", "abs+"])
def test_k2_and_plus_have_the_gradient_of_the_divergence(estimator: str) -> None:
    torch.testing.assert_close(_expectation(estimator)[1], _exact()[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3", "abs"])
def test_without_plus_the_gradient_is_another(estimator: str) -> None:
    assert (_expectation(estimator)[1] - _exact()[1]).abs().max() > 1e-2


def test_plus_keeps_the_value() -> None:
    d = torch.linspace(-30, 30, 61)
    for name in ("k1", "k3", "low_var_kl", "abs"):
        plain, plus = (kl_per_token(d, torch.zeros(61), torch.ones(61), estimator) for estimator in (name, f"{name}+"))
        assert torch.equal(plain, plus)


def test_k3_keeps_its_digits_for_tiny_ratios_and_is_bounded_for_huge_ones() -> None:
    tiny = torch.tensor([1e-4, -1e-4, 1e-2])
    exact = [math.expm1(-d) + d for d in tiny.double().tolist()]
    zero, one = torch.zeros(3), torch.ones(3)
    torch.testing.assert_close(
        kl_per_token(tiny, zero, one, "k3").double(), torch.tensor(exact).double(), rtol=2e-3, atol=0
    )
    huge = kl_per_token(torch.tensor([-1000.0, 1000.0, -21.0]), zero, one, "k3")
    assert huge.tolist() == [10.0, 10.0, 10.0]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_what_is_under_the_mask_is_not_read(estimator: str) -> None:
    poison = torch.tensor([float("nan"), float("inf"), -float("inf")])
    logprobs = torch.cat([torch.tensor([-1.0, -2.0]), poison]).requires_grad_()
    other = torch.cat([torch.tensor([-1.5, -1.0]), poison.flip(0)])
    mask = torch.tensor([1, 1, 0, 0, 0])
    estimate = kl_per_token(logprobs, other, mask, estimator)
    alone = logprobs.detach()[:2].clone().requires_grad_()
    expected = kl_per_token(alone, other[:2], mask[:2], estimator)
    estimate.sum().backward()
    expected.sum().backward()
    assert torch.equal(estimate, torch.cat([expected, torch.zeros(3)]))
    assert logprobs.grad is not None and alone.grad is not None
    assert torch.equal(logprobs.grad, torch.cat([alone.grad, torch.zeros(3)]))


def test_the_reference_gets_no_gradient() -> None:
    reference = torch.zeros(2, requires_grad=True)
    assert not kl_per_token(torch.ones(2), reference, torch.ones(2), "k3").requires_grad


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'k4' does not exist: choose k1, k2, k3, low_var_kl, abs"):
        kl_per_token(torch.zeros(1), torch.zeros(1), torch.ones(1), "k4")
