"""Estimators of the KL divergence between two policies from the log-probs of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.tokens import MAX_LOG_RATIO, log_ratio

MAX_K3 = 10.0
"""Bound of k3's value, so that one token cannot outweigh a batch; verl's."""

UNBIASED_SUFFIX = "+"


def kl_per_token(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy ‖ other) at each token, 0 where `mask` is 0.

    With d = log-prob − other log-prob (http://joschu.net/blog/kl-approx.html):

        k1          d             unbiased; its gradient is that of a sum of log-probs, 0 in expectation
        k2          d²/2          biased, but its gradient is the one of the KL divergence
        k3          e^−d + d − 1  unbiased and never negative; d within ±MAX_LOG_RATIO, the result within ±MAX_K3
        low_var_kl  k3's other name
        abs         |d|

    A `+` after a name keeps the value and takes k2's gradient, the unbiased one.

    Args:
        logprobs: of the policy, which gets the gradient; any shape.
        other_logprobs: of the reference (or old) policy, same shape; treated as constant.
        mask: same shape, 1 on tokens that count.

    Returns:
        float32, the shape of `logprobs`.

    Raises:
        ValueError: an estimator that does not exist; shapes that differ.
    """
    name, plus = (estimator[:-1], True) if estimator.endswith(UNBIASED_SUFFIX) else (estimator, False)
    if name not in _ESTIMATORS:
        raise ValueError(f"KL estimator '{estimator}' does not exist: choose {', '.join(_ESTIMATORS)}, or one with +.")
    d = log_ratio(logprobs, other_logprobs, mask)
    value = _ESTIMATORS[name](d)
    if not plus:
        return value
    slope = _k2(d)
    return value.detach() + (slope - slope.detach())


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    bounded = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1: e^−d − 1 has no correct digit left where d is small, which is where policies usually are.
    return (torch.expm1(-bounded) + bounded).clamp(-MAX_K3, MAX_K3)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
    "abs": torch.abs,
}
