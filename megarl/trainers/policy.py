"""Passes of the policy over a mini-batch: log-probs before the update, and the update itself."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms.aggregate import aggregate
from megarl.algorithms.kl import kl_per_token
from megarl.algorithms.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss
from megarl.algorithms.tokens import select
from megarl.config.schema_learning import ActorConfig
from megarl.data.packing import PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.outputs import token_logprobs
from megarl.models.pipeline import run_pipeline
from megarl.models.train import StepResult, TrainableModel
from megarl.trainers.minibatch import MiniBatch

COLUMNS = ("mask", "weights", "advantages", "rollout_logprobs")
"""What a micro-batch of the policy brings along: whether the model chose the token, the token's weight in the loss,
its advantage, and the engine's log-prob of it."""

OLD, REFERENCE = "old_logprobs", "reference_logprobs"
"""Columns that passes add."""


def add_logprobs(model: MegatronModel, mini_batch: MiniBatch, column: str, temperature: float) -> None:
    """Adds `model`'s log-prob of each token to the micro-batches, on the last stage. Collective over the model's ranks.

    The packs are those of the update, so that with equal weights the update finds a ratio of exactly 1.
    """

    def hand_back(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        logprobs, _ = token_logprobs(model, logits, shard, temperature=temperature)
        return logprobs.sum(), {column: logprobs}

    with torch.no_grad():
        outputs = run_pipeline(model, mini_batch.batches, hand_back, forward_only=True)
    if outputs:
        mini_batch.batches = [
            batch.with_columns(**output) for batch, output in zip(mini_batch.batches, outputs, strict=True)
        ]


def update_policy(actor: TrainableModel, mini_batch: MiniBatch, config: ActorConfig, temperature: float) -> StepResult:
    """One optimizer step on a mini-batch. Collective over the world.

    Without a column of old log-probs the step is on-policy: they are the log-probs of this very pass, whose ratio is 1.

    Returns:
        The step, with sums over this rank's tokens (0-dim float32) under metric names for each micro-batch.
    """
    options = PolicyLossOptions(
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )

    def loss(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        columns = shard.columns
        mask = columns["mask"]
        logprobs, entropy = token_logprobs(actor.model, logits, shard, temperature=temperature, entropy=True)
        assert entropy is not None
        old = columns.get(OLD, logprobs.detach())
        policy = policy_loss.get(config.policy_loss)(
            PolicyLossInputs(logprobs=logprobs, old_logprobs=old, advantages=columns["advantages"], mask=mask), options
        )
        pg_loss = aggregate(policy.loss, columns["weights"])
        entropy_loss = aggregate(entropy, columns["weights"])
        total = pg_loss - config.entropy_coeff * entropy_loss
        sums = {**policy.sums, "actor/pg_loss": pg_loss.detach(), "actor/entropy": select(entropy.detach(), mask).sum()}
        if config.use_kl_loss:
            kl = kl_per_token(logprobs, columns[REFERENCE], mask, config.kl_loss_type)
            kl_loss = aggregate(kl, columns["weights"])
            total = total + config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        gap = mismatch(old, columns["rollout_logprobs"], mask)
        return total, {"tokens": mask.sum(), "sums": sums, "gap": gap}

    return actor.step(mini_batch.batches, loss)


def mismatch(trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far trainer and engine disagree about the probability of the tokens that were sampled.

    Returns:
        Sum and maximum of |p_trainer − p_engine| (verl's `rollout_probs_diff`), and the sum of k3 estimates of
        KL(engine ‖ trainer), over this rank's tokens.
    """
    trainer, engine = trainer.detach(), engine.detach()
    difference = (select(trainer.exp(), mask) - select(engine.exp(), mask)).abs()
    return {
        "probs_diff_sum": difference.sum(),
        "probs_diff_max": difference.max() if difference.numel() else difference.new_zeros(()),
        "k3_sum": kl_per_token(engine, trainer, mask, "k3").sum(),
    }
