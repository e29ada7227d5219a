"""Policy losses of each token alone."""

from __future__ import annotations

import torch

from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, Ratio, clipped_surrogate, policy_loss
from megarl.algorithms.tokens import TokenLoss, select

SAPO_GAIN = 4.0
"""Makes the slope of SAPO's gate 1 where the ratio is 1, as the unclipped surrogate's."""


@policy_loss("ppo")
def ppo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> TokenLoss:
    """max(−A·ρ, −A·clamp(ρ, 1 − ε_low, 1 + ε_high)), and for A < 0 at most −A·c; ρ = exp(log-prob − old log-prob).

    The clipped surrogate of PPO with two bounds (clip-higher) and with dual clip, without which a token of negative
    advantage that has become likely has an unbounded loss.

    Sums: `actor/ppo_kl` (old log-prob − log-prob, the k1 estimate of KL(old ‖ new)), `actor/pg_clipfrac` (tokens whose
    gradient the clamp stops), `actor/pg_clipfrac_lower` (tokens that dual clip stops; verl's name).

    PPO arXiv:1707.06347, dual clip arXiv:1912.09729, clip-higher arXiv:2503.14476.
    """
    ratio = Ratio.of(inputs)
    pessimistic, clipped = clipped_surrogate(ratio.advantages, ratio.log.exp(), options)
    ceiling = -ratio.advantages * options.clip_ratio_c
    stopped_by_dual_clip = (ratio.advantages < 0) & (pessimistic > ceiling)
    sums = {
        "actor/ppo_kl": ratio.kl,
        "actor/pg_clipfrac": clipped.sum().float(),
        "actor/pg_clipfrac_lower": stopped_by_dual_clip.sum().float(),
    }
    return TokenLoss(loss=torch.where(stopped_by_dual_clip, ceiling, pessimistic), sums=sums)


@policy_loss("cispo")
def cispo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> TokenLoss:
    """−sg(clamp(ρ, 1 − ε_low, 1 + ε_high))·A·log-prob: the clamp bounds a token's weight, never stops its gradient.

    Sums: `actor/ppo_kl`, and `actor/pg_clipfrac` (tokens whose weight the clamp changes).

    CISPO (MiniMax-M1), arXiv:2506.13585.
    """
    ratio = Ratio.of(inputs)
    plain = ratio.log.detach().exp()
    weight = plain.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    sums = {"actor/ppo_kl": ratio.kl, "actor/pg_clipfrac": (weight != plain).sum().float()}
    return TokenLoss(loss=-weight * ratio.advantages * select(inputs.logprobs, inputs.mask), sums=sums)


@policy_loss("sapo", loss_agg_mode="seq-mean-token-mean")
def sapo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> TokenLoss:
    """−(4/τ)·σ(τ·(ρ − 1))·A, with τ = `tau_pos` for A > 0 and `tau_neg` else: a soft gate in the place of a clip.

    Sums: `actor/ppo_kl`.

    SAPO, arXiv:2511.20347.
    """
    ratio = Ratio.of(inputs)
    tau = torch.where(ratio.advantages > 0, options.tau_pos, options.tau_neg)
    gate = torch.sigmoid(tau * (ratio.log.exp() - 1)) * (SAPO_GAIN / tau)
    return TokenLoss(loss=-gate * ratio.advantages, sums={"actor/ppo_kl": ratio.kl})


@policy_loss("reinforce")
def reinforce(inputs: PolicyLossInputs, options: PolicyLossOptions) -> TokenLoss:
    """−A·log-prob: the plain policy gradient, which is right only while the policy is the one that was sampled.

    Sums: `actor/ppo_kl`.

    Williams 1992, doi:10.1007/BF00992696.
    """
    ratio = Ratio.of(inputs)
    return TokenLoss(loss=-ratio.advantages * select(inputs.logprobs, inputs.mask), sums={"actor/ppo_kl": ratio.kl})
