"""Rewards of tokens: the score of a response on its last token, less a KL penalty (`algorithm.use_kl_in_reward`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.kl import kl_per_token
from megarl.algorithms.ranks import AcrossRanks
from megarl.algorithms.tokens import select

_LARGEST_ERROR = 0.2
"""Bound of the relative error that the adaptive controller reacts to; arXiv:1909.08593's."""


def outcome_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Each row's score on its last valid token: [rows], [rows, time] → float32 [rows, time].

    A row without a valid token has nowhere to put its score, and gets 0 everywhere.
    """
    valid = mask.bool()
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if rewards.numel():
        # The first maximum of the mask read backwards.
        last = mask.shape[1] - 1 - valid.flip(1).byte().argmax(dim=1, keepdim=True)
        rewards.scatter_(1, last, scores.float().unsqueeze(1))
    return select(rewards, valid)


def token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float, estimator: str
) -> tuple[Tensor, Tensor]:
    """r_t = score on the last valid token − β·KL_t, with KL_t an estimate of KL(policy ‖ reference) at the token.

    Args:
        scores: [rows].
        logprobs: [rows, time], of the policy that sampled, before the update.
        ref_logprobs: [rows, time].
        mask: [rows, time], 1 on valid tokens.
        beta: the controller's coefficient.
        estimator: `algorithm.kl_penalty`, a name of `kl.kl_per_token`.

    Returns:
        (rewards, KL estimates), float32 [rows, time], 0 where the mask is 0.
    """
    kl = kl_per_token(logprobs.detach(), ref_logprobs, mask, estimator)
    return outcome_rewards(scores, mask) - beta * kl, kl


def mean_kl(kl: Tensor, mask: Tensor, ranks: AcrossRanks) -> float:
    """The batch's KL as the controller sees it: the mean over rows of a row's mean over valid tokens.

    Rows without a valid token do not count; without any row it is 0. Collective over `ranks`.

    Args:
        kl: [rows, time], of `token_rewards`.
        mask: [rows, time].
    """
    lengths = mask.bool().sum(dim=1)
    means = select(kl, mask).sum(dim=1, dtype=torch.float64) / lengths.clamp(min=1)
    total, rows = ranks.sum(torch.stack([means.sum(), (lengths > 0).sum().double()])).tolist()
    return float(total / max(rows, 1.0))


class KLController(Protocol):
    """The coefficient β of the penalty over a run (`algorithm.kl_ctrl`)."""

    beta: float

    def update(self, kl: float, samples: int) -> None:
        """Takes in a step in which β was used.

        Args:
            kl: `mean_kl` of the step.
            samples: of the step, over all ranks.
        """

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint saves."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where `state_dict` was taken."""


@dataclass(kw_only=True, slots=True)
class FixedKL:
    """A coefficient that stays."""

    beta: float

    def update(self, kl: float, samples: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        """Empty: the config is the state."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to load."""


@dataclass(kw_only=True, slots=True)
class AdaptiveKL:
    """β ← β·(1 + clip(KL / target − 1, ±0.2)·samples / horizon), after β was used in a step. arXiv:1909.08593.

    Raises:
        ValueError: target or horizon are not positive.
    """

    beta: float
    target: float
    """KL that β steers towards, in nats a token"""
    horizon: float
    """Samples in which β changes by the whole error"""

    def __post_init__(self) -> None:
        for key, value in (("target_kl", self.target), ("horizon", self.horizon)):
            if value <= 0:
                raise ValueError(f"algorithm.kl_ctrl.{key} is {value:g}, but it has to be above 0.")

    def update(self, kl: float, samples: int) -> None:
        """Raises β after a step with more KL than the target, lowers it after one with less."""
        error = max(-_LARGEST_ERROR, min(_LARGEST_ERROR, kl / self.target - 1))
        self.beta *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """β as it is now."""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on with the saved β; target and horizon are the config's. A fixed controller's state has none."""
        self.beta = state.get("beta", self.beta)
