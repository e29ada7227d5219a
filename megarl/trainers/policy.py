"""Passes of the policy over a mini-batch: log-probs before the update, and the update itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.aggregate import aggregate
from megarl.algorithms.kl import kl_per_token
from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss
from megarl.algorithms.tokens import Sequences, TokenLoss, select
from megarl.config import ConfigError
from megarl.config.schema_learning import ActorConfig
from megarl.data.packing import PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.outputs import token_logprobs
from megarl.models.pipeline import run_pipeline
from megarl.models.router_replay import RouterPass
from megarl.models.train import StepResult, TrainableModel, Veto
from megarl.parallel.groups import Groups
from megarl.trainers.minibatch import MiniBatch

MASK, WEIGHTS, ADVANTAGES, ROLLOUT = "mask", "weights", "advantages", "rollout_logprobs"
"""Columns that a micro-batch of the policy brings along: whether the model chose the token, the token's weight in the
loss, its advantage, and the engine's log-prob of it."""

OLD, REFERENCE = "old_logprobs", "reference_logprobs"
"""Columns that passes add."""

POLICY_METRICS = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/selected_fraction")
"""What the `sums` of a policy loss may be named: shares of tokens and means over them."""

IMPORTANCE, UNREJECTED, SELECTED = "importance", "unrejected_mask", "selected"
"""Columns that only some runs have: the weight of `algorithm.rollout_correction`, the mask with the tokens that it
rejected, and the tokens that a policy loss treats apart."""


def add_logprobs(
    model: MegatronModel, mini_batch: MiniBatch, column: str, temperature: float, *, replay_mode: str = "disabled"
) -> None:
    """Adds `model`'s log-prob of each token to the micro-batches, on the last stage. Collective over the model's ranks.

    The packs are those of the update, so that with equal weights the update finds a ratio of exactly 1.

    Args:
        replay_mode: `actor.router_replay.mode`; with R2 the experts that routers choose here join the micro-batches.
    """
    routers = RouterPass(model, replay=replay_mode == "R3", record=replay_mode == "R2")

    def hand_back(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        logprobs, _ = token_logprobs(model, logits, shard, temperature=temperature)
        return logprobs.sum(), {column: logprobs}

    with torch.no_grad():
        outputs = run_pipeline(model, mini_batch.batches, hand_back, forward_only=True, routers=routers)
    if replay_mode == "R2":
        mini_batch.batches = routers.recorded(mini_batch.batches)
    mini_batch.add_columns(outputs)


def loss_options(config: ActorConfig) -> PolicyLossOptions:
    """What policy losses read of the config."""
    return PolicyLossOptions(
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
        tau_pos=config.tau_pos,
        tau_neg=config.tau_neg,
        ppo_kl_coef=config.ppo_kl_coef,
    )


def update_policy(
    actor: TrainableModel,
    mini_batch: MiniBatch,
    config: ActorConfig,
    temperature: float,
    *,
    veto: Veto | None = None,
) -> StepResult:
    """One optimizer step on a mini-batch. Collective over the world.

    Without a column of old log-probs the step is on-policy: they are the log-probs of this very pass, whose ratio is 1,
    and become the column.

    Returns:
        The step, with sums over this rank's tokens (0-dim float32) under metric names for each micro-batch.
    """
    options = loss_options(config)
    groups = actor.model.groups
    needs_sequences = policy_loss.traits(config.policy_loss).needs_sequences

    def loss(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        columns = shard.columns
        mask = columns[MASK]
        logprobs, entropy = token_logprobs(actor.model, logits, shard, temperature=temperature, entropy=True)
        assert entropy is not None
        old = columns.get(OLD, logprobs.detach())
        policy = policy_loss.get(config.policy_loss)(
            PolicyLossInputs(
                logprobs=logprobs,
                old_logprobs=old,
                advantages=columns[ADVANTAGES],
                mask=mask,
                sequences=_sequences(shard, groups) if needs_sequences else None,
                selected=columns.get(SELECTED),
            ),
            options,
        )
        _check_loss(policy, logprobs, config.policy_loss)
        weighted = policy.loss * columns[IMPORTANCE] if IMPORTANCE in columns else policy.loss
        pg_loss = aggregate(weighted, columns[WEIGHTS])
        entropy_loss = aggregate(entropy, columns[WEIGHTS])
        total = pg_loss - config.entropy_coeff * entropy_loss
        sums = {**policy.sums, "actor/pg_loss": pg_loss.detach(), "actor/entropy": select(entropy.detach(), mask).sum()}
        if config.use_kl_loss:
            kl = kl_per_token(logprobs, columns[REFERENCE], mask, config.kl_loss_type)
            kl_loss = aggregate(kl, columns[WEIGHTS])
            total = total + config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        return total, {"tokens": mask.sum(), "sums": sums, OLD: old}

    # With R2 and a single update nothing was recorded: its own choice is the one that would be replayed.
    result = actor.step(mini_batch.batches, loss, replay_experts=config.router_replay.mode != "disabled", veto=veto)
    mini_batch.add_columns([{OLD: output[OLD]} for output in result.outputs])
    return result


def _check_loss(policy: Any, logprobs: torch.Tensor, name: str) -> None:
    """Whether a policy loss, which may be of a person's own file, gave what one has to."""
    where = f"actor.policy_loss {name}"
    if not isinstance(policy, TokenLoss):
        raise ConfigError(f"{where} returned {type(policy).__name__}, but must return TokenLoss (docs/algorithms.md).")
    if policy.loss.shape != logprobs.shape:
        raise ConfigError(
            f"{where} returned a loss of shape {list(policy.loss.shape)}, but must return one for each token, "
            f"{list(logprobs.shape)}."
        )
    if not policy.loss.requires_grad:
        raise ConfigError(f"{where} returned a loss without a gradient: it must be computed from inputs.logprobs.")
    unknown = [metric for metric in policy.sums if metric not in POLICY_METRICS]
    if unknown:
        raise ConfigError(
            f"{where} returned the metric {unknown[0]}, but metrics of policy losses are {', '.join(POLICY_METRICS)}."
        )


def _sequences(shard: PackedBatch, groups: Groups) -> Sequences:
    """Which sequence of the pack each of this rank's tokens belongs to. Collective over context-parallel ranks."""
    cp = groups.cp
    of_token = shard.sequence_of_token(cp.size(), cp.rank()).to(shard.input_ids.device)

    def over_context(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        if cp.size() > 1:
            dist.all_reduce(total, group=cp)
        return total

    mask = shard.columns[MASK]
    lengths = mask.new_zeros(len(shard.bounds) - 1, dtype=torch.int64).index_add_(0, of_token, mask.long())
    return Sequences(of_token=of_token, lengths=over_context(lengths), sum=over_context)
