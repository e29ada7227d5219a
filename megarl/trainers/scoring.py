"""Scores of sequences by a sharded reward model: packed forward passes through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config import ModelShape
from megarl.data.packing import PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.outputs import token_values
from megarl.models.pipeline import run_pipeline
from megarl.models.scores import SCORED, scored_column, sequence_scores
from megarl.parallel.balance import partition, sequence_flops
from megarl.trainers.minibatch import Row, make_mini_batch


def score_sequences(
    model: MegatronModel, sequences: Sequence[torch.Tensor], *, max_tokens: int, pad_token_id: int | None
) -> torch.Tensor:
    """The score of each sequence of this data-parallel rank. Collective over the world.

    Args:
        model: with a scalar head.
        sequences: int64 [length] each; the same on every rank of the model-parallel group, and none where there are
            fewer sequences than data-parallel ranks.
        max_tokens: of one micro-batch on one data-parallel rank.
        pad_token_id: of the reward model (`models.scores.scoring_pad_token_id`).

    Returns:
        float32 [sequences] on the CPU, on every rank of the model-parallel group.
    """
    groups = model.groups
    rows = [
        Row(token_ids=ids, first_target=ids.numel(), columns={SCORED: scored_column(ids, pad_token_id)})
        for ids in sequences
    ]
    batches = make_mini_batch(rows, (SCORED,), groups, max_tokens=max_tokens, work=[]).batches

    def hand_back(values: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        scores = sequence_scores(token_values(values), shard, groups.cp)
        return scores.sum(), {"scores": scores}

    with torch.no_grad():
        outputs = run_pipeline(model, batches, hand_back, forward_only=True)
    scores = torch.zeros(len(rows), device=platform.current().device)
    for batch, output in zip(batches, outputs, strict=bool(outputs)):
        scores[sorted(batch.rows)] = output["scores"]
    if groups.pp.size() > 1:
        # Only the last stage has values; the others hold zeros.
        dist.all_reduce(scores, group=groups.pp)
    return scores.cpu()


def score_everywhere(
    model: MegatronModel,
    sequences: Sequence[torch.Tensor],
    shape: ModelShape,
    *,
    max_tokens: int,
    pad_token_id: int | None,
) -> torch.Tensor:
    """The score of each of the same sequences on every rank, shared out by estimated work. Collective over the world.

    Returns:
        float32 [sequences] on the CPU, on every rank.
    """
    groups = model.groups
    costs = [sequence_flops(ids.numel(), shape) for ids in sequences]
    mine = partition(costs, groups.layout.dp, equal_counts=False)[groups.dp.rank()]
    scores = torch.zeros(len(sequences))
    scores[mine] = score_sequences(
        model, [sequences[i] for i in mine], max_tokens=max_tokens, pad_token_id=pad_token_id
    )
    scores = scores.to(platform.current().device)
    # Each data-parallel rank has its own, and 0 elsewhere.
    dist.all_reduce(scores, group=groups.dp)
    return scores.cpu()
