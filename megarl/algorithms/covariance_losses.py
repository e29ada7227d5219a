"""Policy losses that hold back the tokens of `covariance.covariance_selection`, to keep entropy (arXiv:2505.22617)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, Ratio, clipped_surrogate, policy_loss
from megarl.algorithms.tokens import TokenLoss


@policy_loss("kl_cov", needs_selection=True)
def kl_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> TokenLoss:
    """−A·ρ, and on selected tokens + `ppo_kl_coef`·|log-prob − old log-prob|; there is no clip.

    Sums: `actor/ppo_kl`, and `actor/selected_fraction` (selected tokens).

    Raises:
        ValueError: no selection was made.
    """
    ratio, selected = Ratio.of(inputs), _selected(inputs)
    penalty = torch.where(selected, options.ppo_kl_coef * ratio.log.abs(), 0.0)
    return TokenLoss(loss=-ratio.advantages * ratio.log.exp() + penalty, sums=_sums(ratio, selected))


@policy_loss("clip_cov", needs_selection=True)
def clip_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> TokenLoss:
    """The clipped surrogate max(−A·ρ, −A·clamp(ρ, 1 − ε_low, 1 + ε_high)), and 0 on selected tokens.

    Sums: `actor/ppo_kl`, `actor/selected_fraction` (selected tokens), and `actor/pg_clipfrac` (others whose gradient
    the clamp stops).

    Raises:
        ValueError: no selection was made.
    """
    ratio, selected = Ratio.of(inputs), _selected(inputs)
    loss, clipped = clipped_surrogate(ratio.advantages, ratio.log.exp(), options)
    sums = {**_sums(ratio, selected), "actor/pg_clipfrac": (clipped & ~selected).sum().float()}
    return TokenLoss(loss=torch.where(selected, 0.0, loss), sums=sums)


def _selected(inputs: PolicyLossInputs) -> Tensor:
    if inputs.selected is None:
        raise ValueError("this policy loss needs the tokens that covariance_selection picked in the mini-batch")
    return inputs.selected.bool() & inputs.mask.bool()


def _sums(ratio: Ratio, selected: Tensor) -> dict[str, Tensor]:
    return {"actor/ppo_kl": ratio.kl, "actor/selected_fraction": selected.sum().float()}
