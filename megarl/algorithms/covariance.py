"""Which tokens drive the entropy down: those where log-prob and advantage vary together (arXiv:2505.22617).

The paper's code selects in each micro-batch, with its own means: which tokens are picked then depends on how tokens
were packed. Here they are picked once from the whole mini-batch, from the log-probs before the update, and the loss
reads the selection as an input. Layout and packing cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.ranks import ONE_RANK, AcrossRanks
from megarl.algorithms.tokens import select

_DIGIT_BITS = 8
_DIGITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CovarianceOptions:
    """The keys of the config's `actor` section that selection reads. Names and defaults are verl's."""

    kl_cov_ratio: float = 0.0002
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0


def covariance_selection(
    policy_loss: str,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    token_ids: Tensor,
    options: CovarianceOptions,
    *,
    seed: int = 0,
    ranks: AcrossRanks = ONE_RANK,
) -> Tensor:
    """The tokens of a mini-batch that `kl_cov` penalises or `clip_cov` detaches.

    A token's covariance is (A − mean A)·(old log-prob − mean old log-prob), with means over the valid tokens of all
    ranks. Of N valid tokens, `kl_cov` picks the N · `kl_cov_ratio` with the largest covariance; `clip_cov` picks
    N · `clip_cov_ratio` at random among those between `clip_cov_lb` and `clip_cov_ub`. Both pick at least one where
    there is one to pick. Chance, which also decides between equal covariances, is a function of `seed` and a token's
    number alone.

    Args:
        policy_loss: `kl_cov` or `clip_cov`.
        old_logprobs: any shape; so have the next three.
        advantages: constant numbers.
        mask: 1 on valid tokens; what stands under 0 is not read.
        token_ids: int64, a number of each token that no other token of the mini-batch has and that does not depend on
            which rank holds it, such as sample · longest response + index in the response.
        seed: another for each mini-batch, the same on all ranks.
        ranks: data- and context-parallel ranks, which hold different tokens. Only sums are taken, about ten of them.

    Returns:
        boolean, the shape of the inputs.

    Raises:
        ValueError: another policy loss.
    """
    choose = _CHOICES.get(policy_loss)
    if choose is None:
        raise ValueError(f"policy loss '{policy_loss}' selects no tokens; {' and '.join(_CHOICES)} do")
    valid = mask.bool()
    covariance, tokens = _covariance(old_logprobs, advantages, valid, ranks)
    keys, candidates, ratio = choose(covariance, _chance(token_ids, seed), options)
    count = max(1, int(tokens * ratio))
    return _largest(keys, valid & candidates, count, ranks)


def _covariance(old_logprobs: Tensor, advantages: Tensor, valid: Tensor, ranks: AcrossRanks) -> tuple[Tensor, int]:
    """(float32 covariance of each token, the number of valid tokens on all ranks)."""
    first, second = (select(values.detach(), valid).double() for values in (advantages, old_logprobs))
    total = ranks.sum(torch.stack([first.sum(), second.sum(), valid.sum().double()]))
    first_mean, second_mean = total[:2] / total[2].clamp(min=1)
    return ((first - first_mean) * (second - second_mean)).float(), int(total[2])


def _kl_cov(covariance: Tensor, chance: Tensor, options: CovarianceOptions) -> tuple[Tensor, Tensor, float]:
    # Covariance decides, chance only between equals.
    keys = (_ordered_bits(covariance) << 31) | (chance >> 1)
    return keys, torch.ones_like(covariance, dtype=torch.bool), options.kl_cov_ratio


def _clip_cov(covariance: Tensor, chance: Tensor, options: CovarianceOptions) -> tuple[Tensor, Tensor, float]:
    between = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub)
    return chance, between, options.clip_cov_ratio


_CHOICES: dict[str, Callable[[Tensor, Tensor, CovarianceOptions], tuple[Tensor, Tensor, float]]] = {
    "kl_cov": _kl_cov,
    "clip_cov": _clip_cov,
}


def _ordered_bits(values: Tensor) -> Tensor:
    """int64 in [0, 2³²) in the order of the float32 `values`."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: −0.0 and 0.0 are one number
    return torch.where(bits < 0, ~bits, bits | 1 << 31) & 0xFFFFFFFF


def _chance(token_ids: Tensor, seed: int) -> Tensor:
    """int64 in [0, 2³²) that looks random: the finaliser of MurmurHash3, on (number, seed)."""
    bits = (token_ids ^ (token_ids >> 32) ^ (seed * 0x9E3779B1)) & 0xFFFFFFFF
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        bits = _times(bits ^ (bits >> 16), multiplier)
    return bits ^ (bits >> 16)


def _times(bits: Tensor, multiplier: int) -> Tensor:
    """The product of two 32-bit numbers modulo 2³². In halves, so that int64 does not overflow."""
    low, high = bits & 0xFFFF, bits >> 16
    return (low * multiplier + ((high * multiplier & 0xFFFF) << 16)) & 0xFFFFFFFF


def _largest(keys: Tensor, candidates: Tensor, count: int, ranks: AcrossRanks) -> Tensor:
    """Whether a key is one of the `count` largest of the candidates of all ranks; equal keys stand or fall together.

    Radix selection: the smallest key that is still in is found digit by digit, from histograms summed over ranks. No
    rank ever sees another's keys.

    Args:
        keys: int64, not negative.
    """
    threshold = 0
    wanted = count
    open_keys = keys[candidates]
    for digit in reversed(range(_DIGITS)):
        digits = (open_keys >> (digit * _DIGIT_BITS)) & ((1 << _DIGIT_BITS) - 1)
        counts = ranks.sum(torch.bincount(digits, minlength=1 << _DIGIT_BITS))
        if digit == _DIGITS - 1 and int(counts.sum()) <= count:
            return candidates
        at_least = counts.flip(0).cumsum(0).flip(0)
        chosen = int((at_least >= wanted).nonzero().max())
        wanted -= int(at_least[chosen] - counts[chosen])
        open_keys = open_keys[digits == chosen]
        threshold |= chosen << (digit * _DIGIT_BITS)
    return candidates & (keys >= threshold)
