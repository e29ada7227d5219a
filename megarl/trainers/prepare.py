"""From what the passes before the update gave to what the update needs: rewards and advantages of tokens, corrections.

Done on the ranks of the last pipeline stage, where the columns are; each data-parallel rank has its own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, Advantages, advantage_estimator
from megarl.algorithms.aggregate import Denominators, row_weights, token_weights
from megarl.algorithms.covariance import CovarianceOptions, covariance_selection
from megarl.algorithms.kl_reward import KLController, mean_kl, outcome_rewards, token_rewards
from megarl.algorithms.rollout_correction import RolloutCorrectionOptions, correct
from megarl.config import ConfigError, RunConfig
from megarl.config.schema_algorithm import RolloutCorrectionConfig
from megarl.parallel.groups import Groups
from megarl.parallel.reductions import global_mean_std, global_sum
from megarl.trainers.collect import BASELINE
from megarl.trainers.critic import RETURNS, VALUES
from megarl.trainers.exchange import SampleTable
from megarl.trainers.minibatch import MiniBatch
from megarl.trainers.policy import ADVANTAGES, IMPORTANCE, MASK, OLD, REFERENCE, ROLLOUT, SELECTED, UNREJECTED, WEIGHTS
from megarl.trainers.token_rows import TokenRows, across_data_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    """Advantages of this data-parallel rank's tokens, and what metrics are made of. All [rows, time]."""

    mask: Tensor
    advantages: Tensor
    returns: Tensor
    rewards: Tensor
    """Of tokens, less the KL penalty"""
    values: Tensor | None
    kl: float | None
    """Mean over all samples of the step; None without `algorithm.use_kl_in_reward`"""
    counts: dict[str, Tensor] = field(default_factory=dict)


def advantage_options(config: RunConfig) -> AdvantageOptions:
    """What estimators read of the config."""
    algorithm = config.algorithm
    return AdvantageOptions(
        norm_adv_by_std=algorithm.norm_adv_by_std,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        normalize_advantages=algorithm.normalize_advantages,
    )


def row_advantages(config: RunConfig, table: SampleTable) -> Advantages:
    """One number for each sample [samples, 1], from the scores of all ranks: for estimators that need no more."""
    inputs = AdvantageInputs(
        rewards=torch.from_numpy(table.score).unsqueeze(1),
        mask=torch.from_numpy(table.response_tokens > 0).unsqueeze(1),
        groups=torch.from_numpy(table.group),
        lengths=torch.from_numpy(table.response_tokens),
        **_further_rewards(config, table, torch.from_numpy),
    )
    return _estimate(config, inputs)


def _estimate(config: RunConfig, inputs: AdvantageInputs) -> Advantages:
    """What the config's estimator gives.

    Raises:
        ConfigError: it gives something that no estimator may, which those of a person's own file can.
    """
    name = config.algorithm.adv_estimator
    found = advantage_estimator.get(name)(inputs, advantage_options(config))
    where = f"algorithm.adv_estimator {name}"
    if not isinstance(found, Advantages):
        raise ConfigError(f"{where} returned {type(found).__name__}, but must return Advantages (docs/algorithms.md).")
    for column in ("advantages", "returns"):
        values = getattr(found, column)
        if not isinstance(values, Tensor) or values.shape != inputs.mask.shape:
            given = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(
                f"{where} returned {column} of shape {given}, but must return them as the rewards are, "
                f"{list(inputs.mask.shape)}."
            )
        if not values.isfinite().all():
            raise ConfigError(f"{where} returned {column} that are NaN or infinite, where all must be finite.")
    return found


def _further_rewards(config: RunConfig, table: SampleTable, take: Callable[[numpy.ndarray], Tensor]) -> dict[str, Any]:
    """What `AdvantageInputs` has of rewards beside the score, which is what the estimator asked for.

    Args:
        take: gives the wanted samples of a column of the table.
    """
    algorithm = config.algorithm
    columns = {name: take(column) for name, column in table.parts.items()}
    return {
        "baseline": columns.pop(BASELINE, None),
        "rewards_by_name": columns,
        "reward_weights": dict(zip(algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, strict=False)),
    }


def add_advantages(
    config: RunConfig,
    table: SampleTable,
    mini_batches: Sequence[MiniBatch],
    critic_batches: Sequence[MiniBatch],
    groups: Groups,
    controller: KLController | None,
) -> TokenAdvantages:
    """Adds advantages to the policy's micro-batches, and returns to the critic's. Collective over data-parallel ranks.

    Args:
        critic_batches: the same samples as the critic packs them; none where there is no critic.
        controller: of the KL penalty, where there is one.
    """
    algorithm = config.algorithm
    rows = TokenRows(mini_batches, groups)
    mask = rows.get(MASK)
    places = torch.tensor([place for batch in mini_batches for place in batch.places], dtype=torch.int64)
    take = lambda column: torch.from_numpy(column[places.numpy()]).to(mask.device)
    ranks = across_data_parallel(groups, places.to(mask.device), table.size)
    if controller is None:
        rewards, kl = outcome_rewards(take(table.score), mask), None
    else:
        rewards, kls = token_rewards(
            take(table.score), rows.get(OLD), rows.get(REFERENCE), mask, controller.beta, algorithm.kl_penalty
        )
        kl = mean_kl(kls, mask, ranks)
    critic_rows = TokenRows(critic_batches, groups) if critic_batches else None
    values = None if critic_rows is None else critic_rows.get(VALUES)
    if values is not None and not values[mask.bool()].isfinite().all():
        raise ConfigError(
            f"the critic of {config.critic.path or config.model.path} gives values that are NaN or infinite, so its "
            "weights are broken: start from others."
        )
    found = _estimate(
        config,
        AdvantageInputs(
            rewards=rewards,
            mask=mask,
            groups=take(table.group),
            values=values,
            ranks=ranks,
            **_further_rewards(config, table, take),
        ),
    )
    rows.put(**{ADVANTAGES: found.advantages})
    if critic_rows is not None:
        critic_rows.put(**{RETURNS: found.returns})
    return TokenAdvantages(
        mask=mask,
        advantages=found.advantages,
        returns=found.returns,
        rewards=rewards,
        values=values,
        kl=kl,
        counts=found.counts,
    )


def correction_options(config: RolloutCorrectionConfig) -> RolloutCorrectionOptions:
    """What the config asks for."""
    return RolloutCorrectionOptions(
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_lower=config.rollout_is_lower,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )


def apply_correction(
    config: RunConfig, options: RolloutCorrectionOptions, mini_batch: MiniBatch, groups: Groups
) -> None:
    """Adds importance weights to the policy's micro-batches, and takes rejected tokens out of mask and weights.

    The mask as it was stays beside: how far engine and trainer are apart is measured on all tokens. Collective over
    data-parallel ranks.

    Raises:
        ConfigError: a response token has no log-prob of the engine.
    """
    rows = TokenRows([mini_batch], groups)
    whole = rows.get(MASK)
    try:
        found = correct(rows.get(OLD), rows.get(ROLLOUT), whole, options)
    except ValueError as error:
        raise ConfigError(
            f"algorithm.rollout_correction: {error}: train on rollouts that have them, or set rollout_is and "
            "rollout_rs to none."
        ) from None
    columns = {IMPORTANCE: found.weights}
    if options.rollout_rs != "none":
        mask = found.mask.float()
        lengths = found.mask.sum(dim=1)
        weights = row_weights(
            config.actor.aggregation,
            lengths,
            Denominators.of(lengths, reduce=lambda tensor: global_sum(tensor, groups.dp)),
            loss_scale_factor=config.actor.loss_scale_factor or config.data.max_response_length,
        )
        of_token = torch.arange(len(weights), device=mask.device).unsqueeze(1).expand(mask.shape)
        columns |= {UNREJECTED: whole, MASK: mask, WEIGHTS: token_weights(weights, of_token, mask)}
    rows.put(**columns)


def add_selection(config: RunConfig, mini_batch: MiniBatch, groups: Groups, seed: int) -> None:
    """Adds the tokens that `kl_cov` or `clip_cov` treat apart. Collective over data-parallel ranks."""
    actor = config.actor
    rows = TokenRows([mini_batch], groups)
    mask = rows.get(MASK)
    places = torch.tensor(mini_batch.places, dtype=torch.int64, device=mask.device)
    time = torch.arange(mask.shape[1], device=mask.device)
    selected = covariance_selection(
        actor.policy_loss,
        rows.get(OLD),
        rows.get(ADVANTAGES),
        mask,
        places.unsqueeze(1) * config.data.max_response_length + time,
        CovarianceOptions(
            kl_cov_ratio=actor.kl_cov_ratio,
            clip_cov_ratio=actor.clip_cov_ratio,
            clip_cov_lb=actor.clip_cov_lb,
            clip_cov_ub=actor.clip_cov_ub,
        ),
        seed=seed,
        ranks=across_data_parallel(groups, places, 0),
    )
    rows.put(**{SELECTED: selected.float()})


def explained_variance(found: TokenAdvantages, groups: Groups) -> float:
    """1 − var(return − value) / var(return) over all tokens: 1 where the critic knew. Collective over data-parallel
    ranks."""
    assert found.values is not None
    _, rest, _ = global_mean_std(found.returns - found.values, found.mask, groups.dp)
    _, whole, _ = global_mean_std(found.returns, found.mask, groups.dp)
    return 1 - float(rest / whole) ** 2 if whole > 0 else 0.0
