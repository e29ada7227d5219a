"""The critic's loss of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.tokens import TokenLoss, select


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float) -> TokenLoss:
    """½·max((v − return)², (clamp(v, v_old − c, v_old + c) − return)²): no gain from leaving v_old by more than c.

    Sums: `critic/vf_loss`, `critic/vf_clipfrac` (tokens whose gradient the clamp stops), `critic/vpred_mean`.

    PPO's implementation (github.com/openai/baselines, ppo2); arXiv:2005.12729 studies it.

    Args:
        values: of the critic that is trained, which gets the gradient; any shape.
        old_values: of the critic before the update, same shape.
        returns: same shape.
        mask: same shape, 1 on tokens that count; the others are not read.
        cliprange_value: c, in units of the return.
    """
    predicted = select(values, mask)
    old, target = select(old_values.detach(), mask), select(returns.detach(), mask)
    bounded = torch.minimum(torch.maximum(predicted, old - cliprange_value), old + cliprange_value)
    plain, clipped = (predicted - target).square(), (bounded - target).square()
    loss = torch.maximum(plain, clipped) / 2
    sums = {
        "critic/vf_loss": loss.detach().sum(),
        "critic/vf_clipfrac": (clipped > plain).sum().float(),
        "critic/vpred_mean": predicted.detach().sum(),
    }
    return TokenLoss(loss=loss, sums=sums)
