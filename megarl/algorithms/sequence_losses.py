"""Policy losses whose ratio is that of a whole response.

A token's gradient needs the sum over its whole response, parts of which may be on other context-parallel ranks. Each
loss is written so that this sum is a constant and the gradient still that of the formula: exp(sg(s) + x − sg(x)) has
the value exp(s) and the derivative of exp(s) · x. So nothing has to be differentiated through a collective.
"""

from __future__ import annotations

import torch

from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, Ratio, clipped_surrogate, policy_loss
from megarl.algorithms.tokens import Sequences, TokenLoss, log_ratio, select

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Bound of GSPO's exponent from above; verl's."""


@policy_loss("gspo", loss_agg_mode="seq-mean-token-mean", needs_sequences=True)
def gspo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> TokenLoss:
    """The clipped surrogate with ρ = exp(sg(s) + log-prob − sg(log-prob)), s the row's mean of log-prob − old log-prob.

    The paper's GSPO-token: where a row's tokens share one advantage, its gradient is GSPO's, and with advantages that
    differ along the row each token is weighted by its own. s is at most 10; there is no dual clip.

    Sums: `actor/ppo_kl`, and `actor/pg_clipfrac` (tokens whose gradient the clamp stops: whole rows).

    arXiv:2507.18071.
    """
    sequences = Sequences.of(inputs.logprobs, inputs.mask, inputs.sequences)
    log_ratios = log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask).detach()
    (mean,) = sequences.token_means(log_ratios)
    logprobs = select(inputs.logprobs, inputs.mask)
    ratio = (mean + logprobs - logprobs.detach()).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    loss, clipped = clipped_surrogate(select(inputs.advantages.detach(), inputs.mask), ratio, options)
    sums = {"actor/ppo_kl": -log_ratios.sum(), "actor/pg_clipfrac": clipped.sum().float()}
    return TokenLoss(loss=select(loss, inputs.mask), sums=sums)


@policy_loss("gmpo", loss_agg_mode="seq-mean-token-mean", needs_sequences=True)
def gmpo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> TokenLoss:
    """−A·(Π_t ρ̃_t)^(1/L) for each row: the geometric mean of ratios, each clipped on one side in log space.

    log ρ̃ = min(d, ε_high) for A > 0 and max(d, −ε_low) for A < 0, with d = log-prob − old log-prob; A is the row's mean
    advantage, and L the row's valid tokens. Every token carries the row's loss, so that their mean is it.

    Sums: `actor/ppo_kl`, `actor/pg_clipfrac` (tokens of positive advantage whose gradient the clip stops) and
    `actor/pg_clipfrac_lower` (those of negative advantage; verl's name).

    arXiv:2507.20673, whose bounds are 0.4.
    """
    sequences = Sequences.of(inputs.logprobs, inputs.mask, inputs.sequences)
    ratio = Ratio.of(inputs)
    up, down = ratio.log.clamp(max=options.clip_ratio_high), ratio.log.clamp(min=-options.clip_ratio_low)
    positive, negative = ratio.advantages > 0, ratio.advantages < 0
    clipped = torch.where(positive, up, torch.where(negative, down, ratio.log))
    mean, advantage = sequences.token_means(clipped.detach(), ratio.advantages)
    loss = -advantage * (mean + clipped - clipped.detach()).exp()
    stopped = clipped != ratio.log
    sums = {
        "actor/ppo_kl": ratio.kl,
        "actor/pg_clipfrac": (stopped & positive).sum().float(),
        "actor/pg_clipfrac_lower": (stopped & negative).sum().float(),
    }
    return TokenLoss(loss=select(loss, inputs.mask), sums=sums)
