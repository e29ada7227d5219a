"""The critic's loss, compared token by token with the formula in plain Python floats."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.value_loss import value_loss


def _tokens(count: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = (torch.randn(count, generator=generator) for _ in range(3))
    return values.requires_grad_(), old, returns


def test_loss_gradient_and_metrics_agree_with_the_formula() -> None:
    values, old, returns = _tokens()
    result = value_loss(values, old, returns, torch.ones(300), 0.5)
    result.loss.sum().backward()
    losses, gradients, clipped = [], [], 0
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        bounded = min(max(v, o - 0.5), o + 0.5)
        stops = (bounded - r) ** 2 > (v - r) ** 2
        losses.append(0.5 * max((v - r) ** 2, (bounded - r) ** 2))
        gradients.append(0.0 if stops else v - r)
        clipped += stops
    assert 20 < clipped < 280, "the case has to reach both branches"
    torch.testing.assert_close(result.loss.detach(), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values.grad, torch.tensor(gradients), rtol=1e-5, atol=1e-6)
    assert result.sums["critic/vf_clipfrac"] == clipped
    assert result.sums["critic/vf_loss"].item() == pytest.approx(sum(losses), rel=1e-5)
    assert result.sums["critic/vpred_mean"].item() == pytest.approx(sum(values.tolist()), rel=1e-4)
    assert not any(value.requires_grad for value in result.sums.values())


def test_what_is_under_the_mask_is_not_read() -> None:
    values, old, returns = (tensor.detach() for tensor in _tokens(20))
    mask = torch.arange(20) % 3 > 0
    expected = value_loss(values, old, returns, mask, 0.2)
    poisoned = [tensor.masked_fill(~mask, float("nan")) for tensor in (values, old, returns)]
    leaf = poisoned[0].requires_grad_()
    result = value_loss(leaf, poisoned[1], poisoned[2], mask, 0.2)
    result.loss.sum().backward()
    assert torch.equal(result.loss, expected.loss) and result.loss[~mask].eq(0).all()
    assert leaf.grad is not None and leaf.grad[~mask].eq(0).all() and leaf.grad.isfinite().all()


def test_old_values_and_returns_get_no_gradient() -> None:
    values, old, returns = _tokens(4)
    old.requires_grad_()
    value_loss(values, old, returns.requires_grad_(), torch.ones(4), 0.1).loss.sum().backward()
    assert old.grad is None and returns.grad is None
