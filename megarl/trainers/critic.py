"""Passes of the critic over a mini-batch: values before the update, and the update itself."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms.aggregate import aggregate
from megarl.algorithms.value_loss import value_loss
from megarl.config.schema_learning import CriticConfig
from megarl.data.packing import PackedBatch
from megarl.models.outputs import token_values
from megarl.models.pipeline import run_pipeline
from megarl.models.train import StepResult, TrainableModel, Veto
from megarl.trainers.minibatch import MiniBatch

VALUES, RETURNS, WEIGHTS_OF_VALUES = "values", "returns", "critic_weights"
"""Columns: the critic's values before the update, what it is to predict, and each token's weight in its loss."""


def add_values(critic: TrainableModel, mini_batch: MiniBatch) -> None:
    """Adds the value before each response token, on the last stage. Collective over the model's ranks.

    As all columns, it stands where the token is predicted: the value of the state in which the token is chosen.
    """

    def hand_back(values: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        values = token_values(values)
        return values.sum(), {VALUES: values}

    with torch.no_grad():
        outputs = run_pipeline(critic.model, mini_batch.batches, hand_back, forward_only=True)
    mini_batch.add_columns(outputs)


def update_critic(
    critic: TrainableModel, mini_batch: MiniBatch, config: CriticConfig, *, veto: Veto | None = None
) -> StepResult:
    """One optimizer step on a mini-batch, whose columns have `returns`. Collective over the world.

    Returns:
        The step, with sums over this rank's tokens (0-dim float32) under metric names for each micro-batch.
    """

    def loss(values: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        columns = shard.columns
        # Not the policy's mask, out of which a correction may have taken tokens that have a value all the same.
        mask = columns[WEIGHTS_OF_VALUES] != 0
        tokens = value_loss(token_values(values), columns[VALUES], columns[RETURNS], mask, config.cliprange_value)
        return aggregate(tokens.loss, columns[WEIGHTS_OF_VALUES]), {"tokens": mask.sum(), "sums": tokens.sums}

    return critic.step(mini_batch.batches, loss, veto=veto)
