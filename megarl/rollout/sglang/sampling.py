"""How SGLang cuts distributions, and what its log-probs then need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.sglang_options import DEFAULT_MASK, MASK_HEADROOM, MASK_OPTION
from megarl.rollout.engine import NO_TOP_K, SamplingParams


def is_cut_off(sampling: SamplingParams) -> bool:
    """Whether log-probs have to be divided by the mass of what top-p and top-k left.

    SGLang's plain log-probs are of the whole softmax, which a greedy response is meant to have (`Response.logprobs`).
    """
    return not sampling.is_greedy and (sampling.top_p < 1 or sampling.top_k != NO_TOP_K)


def kept_tokens(sampling: SamplingParams, options: Mapping[str, Any]) -> int:
    """SGLang's top-k for a distribution that is cut: it wants a bound on what is left, also where only top-p cuts.

    Raises:
        ValueError: top-k is beyond what SGLang was started for.
    """
    most = options.get(MASK_OPTION, DEFAULT_MASK) - MASK_HEADROOM
    if sampling.top_k > most:
        raise ValueError(
            f"top_k {sampling.top_k} is above {most}: raise rollout.sglang.{MASK_OPTION} to at least "
            f"{sampling.top_k + MASK_HEADROOM}, or lower it"
        )
    return most if sampling.top_k == NO_TOP_K else sampling.top_k
