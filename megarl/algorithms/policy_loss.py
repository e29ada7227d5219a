"""From log-probs and advantages to the loss of each token (`actor.policy_loss`): what a loss takes and gives.

The losses themselves: `token_losses` look at each token alone, `sequence_losses` at a whole response, and
`covariance_losses` treat some tokens of the mini-batch apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.registry import Registry
from megarl.algorithms.tokens import MAX_LOG_RATIO, Sequences, TokenLoss, log_ratio, select


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
    sequences: Sequences | None = None
    """Which response each token belongs to; None: padded [rows, time], a response a row"""
    selected: Tensor | None = None
    """1 on tokens that `covariance.covariance_selection` picked in the mini-batch, for losses that need it"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossOptions:
    """The keys of the config's `actor` section that policy losses read; documented there. Names and defaults are
    verl's."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    ppo_kl_coef: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossTraits:
    """What a policy loss needs, so that a run can make it, and refuse a config that does not."""

    loss_agg_mode: str | None = None
    """The only aggregation with which it is the paper's loss; None: any."""
    needs_sequences: bool = False
    """`PolicyLossInputs.sequences`, where tokens are packed."""
    needs_selection: bool = False
    """`PolicyLossInputs.selected`."""


PolicyLossFunction = Callable[[PolicyLossInputs, PolicyLossOptions], TokenLoss]

policy_loss: Registry[PolicyLossFunction, PolicyLossTraits] = Registry(
    "policy loss", "actor.policy_loss", PolicyLossTraits, ("inputs", "options")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """What most losses start with."""

    advantages: Tensor
    """float32, constant, 0 where the mask is 0"""
    log: Tensor
    """float32, log-prob − old log-prob within ±MAX_LOG_RATIO, 0 where the mask is 0"""

    @classmethod
    def of(cls, inputs: PolicyLossInputs) -> Ratio:
        log = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
        return cls(
            advantages=select(inputs.advantages.detach(), inputs.mask), log=log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        )

    @property
    def kl(self) -> Tensor:
        """Σ old log-prob − log-prob, the k1 estimate of KL(old ‖ new): the sum behind `actor/ppo_kl`."""
        return -self.log.detach().sum()


def clipped_surrogate(advantages: Tensor, ratio: Tensor, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    """max(−A·ρ, −A·clamp(ρ, 1 − ε_low, 1 + ε_high)), and where the clamp stops the gradient (boolean)."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    return torch.maximum(plain, clipped), clipped > plain
