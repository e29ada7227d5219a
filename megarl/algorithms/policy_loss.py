"""From log-probs and advantages to the loss of each token (`actor.policy_loss`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algorithms.registry import Registry
from megarl.algorithms.tokens import MAX_LOG_RATIO, log_ratio, select


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """Tokens of one micro-batch, in any order and shape: packed [tokens], one context-parallel rank's part of it, or
    padded [rows, time]. All have the same shape."""

    logprobs: Tensor
    """of the policy that is trained; gets the gradient"""
    old_logprobs: Tensor
    """of the policy before the update"""
    advantages: Tensor
    mask: Tensor
    """1 on tokens that count; the others are not read"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossOptions:
    """The keys of the config's `actor` section that policy losses read; documented there."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """What a policy loss gives."""

    loss: Tensor
    """float32, the shape of the inputs: the loss of each token, 0 where the mask is 0; `aggregate` adds it up"""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Metrics as sums over these tokens, without gradient: summed over micro-batches and ranks and divided by the
    number of valid tokens, each is the mean over tokens that its name stands for"""


PolicyLossFunction = Callable[[PolicyLossInputs, PolicyLossOptions], PolicyLoss]

policy_loss: Registry[PolicyLossFunction] = Registry("policy loss", "actor.policy_loss")


@policy_loss("ppo")
def ppo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """max(−A·ρ, −A·clamp(ρ, 1 − ε_low, 1 + ε_high)), and for A < 0 at most −A·c; ρ = exp(log-prob − old log-prob).

    The clipped surrogate of PPO with two bounds (clip-higher) and with dual clip, without which a token of negative
    advantage that has become likely has an unbounded loss.

    Sums: `actor/ppo_kl` (old log-prob − log-prob, the k1 estimate of KL(old ‖ new)), `actor/pg_clipfrac` (tokens whose
    gradient the clamp stops), `actor/pg_clipfrac_lower` (tokens that dual clip stops; verl's name).

    PPO arXiv:1707.06347, dual clip arXiv:1912.09729, clip-higher arXiv:2503.14476.
    """
    advantages = select(inputs.advantages.detach(), inputs.mask)
    log_ratios = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratios.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    pessimistic = torch.maximum(plain, clipped)
    ceiling = -advantages * options.clip_ratio_c
    stopped_by_dual_clip = (advantages < 0) & (pessimistic > ceiling)
    loss = torch.where(stopped_by_dual_clip, ceiling, pessimistic)
    sums = {
        "actor/ppo_kl": -log_ratios.detach().sum(),
        "actor/pg_clipfrac": (clipped > plain).sum().float(),
        "actor/pg_clipfrac_lower": stopped_by_dual_clip.sum().float(),
    }
    return PolicyLoss(loss=loss, sums=sums)
