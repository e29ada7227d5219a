"""Engine and trainer give one token two probabilities: how far apart they are, and what to do about it.

The engine samples with other kernels, another precision, and perhaps older weights than the trainer computes gradients
with. `correct` measures that, weights tokens by importance (`rollout_is`), and rejects tokens or responses that are too
far off (`rollout_rs`). Names of settings and metrics are verl's. arXiv:2505.24298, fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.tokens import MAX_LOG_RATIO, Sequences, select

CORRECTION_LEVELS = ("none", "token", "sequence")

REJECTION_RULES = ("none", *(f"{level}_{name}" for level in ("token", "sequence") for name in ("k1", "k2", "k3")))


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCorrectionOptions:
    """The keys of the config's `algorithm.rollout_correction` section; documented there.

    Raises:
        ValueError: a level or a rule that does not exist; for k1, a threshold below 1.
    """

    rollout_is: str = "none"
    rollout_is_threshold: float = 2.0
    rollout_is_lower: float | None = None
    rollout_rs: str = "none"
    rollout_rs_threshold: float = 2.0

    def __post_init__(self) -> None:
        for key, value, known in (
            ("rollout_is", self.rollout_is, CORRECTION_LEVELS),
            ("rollout_rs", self.rollout_rs, REJECTION_RULES),
        ):
            if value not in known:
                raise ValueError(
                    f"algorithm.rollout_correction.{key} is '{value}', but it has to be one of {', '.join(known)}."
                )
        if self.rollout_rs.endswith("k1") and self.rollout_rs_threshold < 1:
            raise ValueError(
                f"algorithm.rollout_correction.rollout_rs_threshold is {self.rollout_rs_threshold:g}, but for "
                f"{self.rollout_rs} it is a ratio, whose lower bound is the reciprocal: set it above 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCorrection:
    """What is to be done with a micro-batch's tokens, and how far engine and trainer are apart on them."""

    weights: Tensor
    """float32, the shape of the inputs, without gradient: factor of each token's loss, 0 where the mask is 0"""
    mask: Tensor
    """boolean, the shape of the inputs: the mask without rejected tokens"""
    sums: dict[str, Tensor]
    """float64 scalars over these tokens: their sums over micro-batches, data- and context-parallel ranks are what
    `finish` takes"""
    maxima: dict[str, Tensor]
    """float32 scalars over these tokens, to be reduced by the maximum"""


def correct(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None,
    mask: Tensor,
    options: RolloutCorrectionOptions,
    sequences: Sequences | None = None,
) -> RolloutCorrection:
    """Compares the trainer's and the engine's log-probs of the tokens that were sampled.

    With d = old log-prob − rollout log-prob, within ±MAX_LOG_RATIO: a token's weight is e^d (`token`), or e^(Σ d) over
    its response (`sequence`). A weight above `rollout_is_threshold` is cut to it (truncated importance sampling); with
    `rollout_is_lower`, a weight outside of the two becomes 0 (IcePop). Without `rollout_is` weights are 1.

    `rollout_rs` rejects tokens by an estimate of KL(engine ‖ trainer), or whole responses by its mean over tokens, that
    is above `rollout_rs_threshold`: k1 = −d, k2 = d²/2, k3 = e^d − 1 − d. For k1, the threshold and its reciprocal are
    bounds of e^k1.

    Collective over context-parallel ranks.

    Args:
        old_logprobs: of the trainer before the update, over the distribution that was sampled from; any shape.
        rollout_logprobs: the engine's, same shape.
        mask: same shape, 1 on response tokens; the others are not read.
        options: with nothing set, only measured.
        sequences: which response each token belongs to; None: inputs are [rows, time].

    Raises:
        ValueError: a token under the mask has no rollout log-prob: it is None, NaN or infinite. Never taken as 0.
    """
    valid = mask.bool()
    engine = _present(rollout_logprobs, valid)
    trainer = select(old_logprobs.detach(), valid)
    sequences = Sequences.of(old_logprobs, valid, sequences)
    d = trainer - engine
    (row_sums,) = sequences.token_sums(d)
    token_ratio, row_ratio = _bounded_exp(d), _bounded_exp(row_sums)
    if options.rollout_is == "none":
        weights, outside = torch.ones_like(d), torch.zeros_like(valid)
    else:
        weights, outside = _limited(token_ratio if options.rollout_is == "token" else row_ratio, options)
    measured = token_ratio if options.rollout_is == "none" else weights
    kept = valid & _passes(options, d, sequences)
    # A response counts once in sums over its tokens, which may be on several ranks.
    once = torch.where(valid, 1.0 / sequences.lengths.clamp(min=1)[sequences.of_token].double(), 0.0)
    total = lambda values: select(values, valid).sum(dtype=torch.float64)
    sums = {
        "tokens": valid.sum().double(),
        "rows": once.sum(),
        "logprob_diff": total(d.abs()),
        "kl": total(-d),
        "k3_kl": total(_k3(d)),
        "training_nll": total(-trainer),
        "rollout_nll": total(-engine),
        "token_ratio_squared": torch.where(valid, token_ratio, 0.0).double().square().sum(),
        "row_ratio_squared": (row_ratio.double().square() * once).sum(),
        "weight": total(measured),
        "weight_squared": torch.where(valid, measured, 0.0).double().square().sum(),
        "outside": (outside & valid).sum().double(),
        "rejected": (valid & ~kept).sum().double(),
    }
    largest = select(d.abs(), valid).max() if d.numel() else d.new_zeros(())
    return RolloutCorrection(
        weights=select(weights, valid), mask=kept, sums=sums, maxima={"logprob_diff_max": largest.float()}
    )


def finish(sums: dict[str, float], maxima: dict[str, float], options: RolloutCorrectionOptions) -> dict[str, float]:
    """Metrics `rollout_corr/…` from the sums and maxima of all tokens of a step; none where there was no token.

    - `logprob_diff_mean`, `logprob_diff_max`: |old log-prob − rollout log-prob|, in nats;
    - `kl`, `k3_kl`: KL(engine ‖ trainer) by token, as k1 and k3 estimate it;
    - `training_ppl`, `rollout_ppl`: perplexity, from the mean over all tokens;
    - `chi2_token`, `chi2_seq`: χ² divergence E[ρ²] − 1 of tokens and of responses;
    - `rollout_is_eff_sample_size`: (Σ w)² / (N·Σ w²) of the weights that are applied, or, where none are, of the ratios
      of tokens; 1 is best;
    - with `rollout_is`: `rollout_is_mean`, and `rollout_is_oob_ratio`, the share of tokens that truncation or the band
      changed;
    - with `rollout_rs`: `rollout_rs_masked_fraction`, the share of tokens that are rejected.
    """
    tokens = sums["tokens"]
    if tokens == 0:
        return {}
    values = {
        "logprob_diff_mean": sums["logprob_diff"] / tokens,
        "logprob_diff_max": maxima["logprob_diff_max"],
        "kl": sums["kl"] / tokens,
        "k3_kl": sums["k3_kl"] / tokens,
        "training_ppl": math.exp(sums["training_nll"] / tokens),
        "rollout_ppl": math.exp(sums["rollout_nll"] / tokens),
        "chi2_token": sums["token_ratio_squared"] / tokens - 1,
        "chi2_seq": sums["row_ratio_squared"] / sums["rows"] - 1,
    }
    # Every weight can be outside of the band, and then no sample is effective.
    squares = sums["weight_squared"]
    values["rollout_is_eff_sample_size"] = sums["weight"] ** 2 / (tokens * squares) if squares else 0.0
    if options.rollout_is != "none":
        values["rollout_is_mean"] = sums["weight"] / tokens
        values["rollout_is_oob_ratio"] = sums["outside"] / tokens
    if options.rollout_rs != "none":
        values["rollout_rs_masked_fraction"] = sums["rejected"] / tokens
    return {f"rollout_corr/{name}": value for name, value in values.items()}


def _present(rollout_logprobs: Tensor | None, valid: Tensor) -> Tensor:
    """Float32 rollout log-probs, 0 where not valid."""
    if rollout_logprobs is None:
        raise ValueError(
            "the engine returned no log-probs of the tokens that it sampled, and rollout correction needs them"
        )
    engine = select(rollout_logprobs.detach(), valid)
    missing = int((~engine.isfinite()).sum())
    if missing:
        raise ValueError(f"{missing} of {int(valid.sum())} response tokens have no rollout log-prob (NaN or infinite)")
    return engine


def _bounded_exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _limited(weights: Tensor, options: RolloutCorrectionOptions) -> tuple[Tensor, Tensor]:
    """(weights, whether each was out of bounds): truncated, or 0 outside of a band."""
    if options.rollout_is_lower is None:
        return weights.clamp(max=options.rollout_is_threshold), weights > options.rollout_is_threshold
    outside = (weights < options.rollout_is_lower) | (weights > options.rollout_is_threshold)
    return torch.where(outside, 0.0, weights), outside


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1: e^d − 1 has no correct digit left where d is small, which is where it should be.
    return torch.expm1(d) - d


def _passes(options: RolloutCorrectionOptions, d: Tensor, sequences: Sequences) -> Tensor:
    """Whether each token is kept by `rollout_rs`."""
    if options.rollout_rs == "none":
        return torch.ones_like(d, dtype=torch.bool)
    level, estimator = options.rollout_rs.split("_")
    estimate = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: _k3(d)}[estimator]()
    if level == "sequence":
        (estimate,) = sequences.token_means(estimate)
    if estimator == "k1":
        return estimate.abs() <= math.log(options.rollout_rs_threshold)
    return estimate <= options.rollout_rs_threshold
