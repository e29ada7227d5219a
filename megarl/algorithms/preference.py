"""Losses of preference optimisation (`preference.loss_type`): from log-probs of whole responses to a loss each.

A response's implicit reward is β·(log π(y|x) − log π_ref(y|x)) (arXiv:2305.18290, equation 5); `Responses.log_ratio` is
what β multiplies. Losses are over pairs (`PairInputs`), or over single responses with a label (`LabelledInputs`).
A person's own file adds a loss in the same way (`plugins`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """Log-probs of some responses, each to its own prompt. All are [responses]."""

    logprobs: Tensor
    """Σ of the tokens' log-probs under the policy; gets the gradient"""
    reference_logprobs: Tensor
    """the same under the reference model, constant"""
    tokens: Tensor
    """how many tokens the sums are over"""

    @property
    def log_ratio(self) -> Tensor:
        """log π(y|x) − log π_ref(y|x)."""
        return self.logprobs - self.reference_logprobs

    @property
    def mean_log_ratio(self) -> Tensor:
        """The mean over the response's tokens instead of the sum; 0 for a response without any."""
        return self.log_ratio / self.tokens.clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairInputs:
    """Pairs of responses to one prompt each. All are [pairs]."""

    chosen: Responses
    rejected: Responses
    chosen_win_rate: Tensor
    """the chance that the chosen response is preferred to one of the policy's own, from 0 to 1; 1 where unknown"""
    rejected_win_rate: Tensor
    """the same of the rejected one; 0 where unknown"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledInputs:
    """Single responses, each good or bad. All are [responses] but `kl`."""

    responses: Responses
    desirable: Tensor
    """true where the response is a good one"""
    kl: Tensor
    """0-dim, constant: the KL divergence of the policy from the reference in nats (`kto_baseline`)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceOptions:
    """The keys of the config's `preference` section that losses read; documented there. TRL's names and defaults."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceTraits:
    """What a loss needs, so that a run can make it, and refuse a config that does not."""

    labelled: bool = False
    """It takes `LabelledInputs` instead of `PairInputs`."""
    imitates: bool = False
    """Its chosen responses are the data's and its rejected ones the policy's own, so each round generates."""


PreferenceLossFunction = Callable[[Any, PreferenceOptions], Tensor]
"""From `PairInputs` or `LabelledInputs` to the loss of each pair or response, float32 [pairs] or [responses]."""

preference_loss: Registry[PreferenceLossFunction, PreferenceTraits] = Registry(
    "preference loss", "preference.loss_type", PreferenceTraits, ("inputs", "options")
)


@preference_loss("dpo")
def dpo(inputs: PairInputs, options: PreferenceOptions) -> Tensor:
    """−(1 − ε)·log σ(β·Δ) − ε·log σ(−β·Δ), where Δ is the chosen log-ratio less the rejected one.

    arXiv:2305.18290, equation 7; ε (`label_smoothing`) is the chance that the label is wrong, as in conservative DPO
    (E. Mitchell, "A note on DPO with noisy preferences", equation 3). TRL's `sigmoid` is this with ε = 0; its `robust`
    is the unbiased estimator of arXiv:2403.00409 instead.
    """
    margin = options.beta * (inputs.chosen.log_ratio - inputs.rejected.log_ratio)
    epsilon = options.label_smoothing
    return -(1 - epsilon) * F.logsigmoid(margin) - epsilon * F.logsigmoid(-margin)


@preference_loss("ipo")
def ipo(inputs: PairInputs, options: PreferenceOptions) -> Tensor:
    """(Δ − 1/(2β))², where Δ is the difference of the *mean* log-ratios of tokens; β is the paper's τ.

    arXiv:2310.12036, equation 17. The paper's log-ratio is a sum; its authors take the mean, since the target is one
    number whatever the length, and so does TRL.
    """
    return (inputs.chosen.mean_log_ratio - inputs.rejected.mean_log_ratio - 1 / (2 * options.beta)).square()


@preference_loss("kto", labelled=True)
def kto(inputs: LabelledInputs, options: PreferenceOptions) -> Tensor:
    """λ_D·(1 − σ(β·(r − z))) for a desirable response and λ_U·(1 − σ(β·(z − r))) for an undesirable one.

    arXiv:2402.01306, equations 7 and 8: r is the log-ratio and z the KL divergence; no gradient goes through z. In TRL
    z is a mean over the responses of one device's batch; here it is over the global batch.
    """
    distance = options.beta * (inputs.responses.log_ratio - inputs.kl.detach())
    return torch.where(
        inputs.desirable,
        options.desirable_weight * (1 - torch.sigmoid(distance)),
        options.undesirable_weight * (1 - torch.sigmoid(-distance)),
    )


def kto_baseline(mismatched_log_ratios: Tensor) -> Tensor:
    """max(0, mean log-ratio) over responses that answer other prompts than they are put behind, as a 0-dim constant.

    KTO's estimate of the KL divergence between policy and reference (arXiv:2402.01306, section 4.1). It has to be a
    mean over the global batch.
    """
    return mismatched_log_ratios.detach().mean().clamp(min=0)


@preference_loss("sppo")
def sppo(inputs: PairInputs, options: PreferenceOptions) -> Tensor:
    """(r_w − (p_w − ½)/β)² + (r_l − (p_l − ½)/β)², with log-ratios r and win rates p; 1/β is the paper's η.

    arXiv:2405.00675, equation 4.7 over a pair. With p_w = 1 and p_l = 0 it is TRL's `sppo_hard`.
    """
    chosen = inputs.chosen.log_ratio - (inputs.chosen_win_rate - 0.5) / options.beta
    rejected = inputs.rejected.log_ratio - (inputs.rejected_win_rate - 0.5) / options.beta
    return chosen.square() + rejected.square()


@preference_loss("spin", imitates=True)
def spin(inputs: PairInputs, options: PreferenceOptions) -> Tensor:
    """log(1 + exp(−β·Δ)), where Δ is the log-ratio of the data's response less that of the policy's own.

    arXiv:2401.01335, equation 4.7 with the logistic loss; β is the paper's λ. The reference is the policy at the start
    of the round.
    """
    return F.softplus(-options.beta * (inputs.chosen.log_ratio - inputs.rejected.log_ratio))


def win_rates(scores: Tensor, *, hard: bool) -> Tensor:
    """The chance of each response of being preferred to one of the same prompt's, itself included: [..., n] → [..., n].

    SPPO's estimate of P(y ≻ π | x) from n responses (arXiv:2405.00675, algorithm 1).

    Args:
        scores: of the responses of each prompt.
        hard: a higher score is preferred always, and equal ones half the time; if not, by Bradley and Terry, with
            probability σ(score − other score), as the scores of a reward model mean it.
    """
    differences = scores.unsqueeze(-1) - scores.unsqueeze(-2)
    preferred = (differences.sign() + 1) / 2 if hard else torch.sigmoid(differences)
    return preferred.mean(dim=-1)
