"""A number of each of many sequences, by a sharded model: its score, or its log-prob. Packed forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config import ModelShape
from megarl.data.packing import PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.outputs import token_logprobs, token_values
from megarl.models.pipeline import run_pipeline
from megarl.models.scores import SCORED, scored_column, sequence_scores, sequence_sums
from megarl.parallel.balance import partition, sequence_flops
from megarl.trainers.minibatch import Row, make_mini_batch

NumbersOf = Callable[[torch.Tensor, PackedBatch], torch.Tensor]
"""From the last stage's output and the micro-batch to a number of each of its sequences, by ascending row."""


def score_everywhere(
    model: MegatronModel,
    sequences: Sequence[torch.Tensor],
    shape: ModelShape,
    *,
    max_tokens: int,
    pad_token_id: int | None,
) -> torch.Tensor:
    """The score of each of the same sequences on every rank, shared out by estimated work. Collective over the world.

    Args:
        model: with a scalar head.
        sequences: int64 [length] each.
        shape: of the model.
        max_tokens: of one micro-batch on one data-parallel rank.
        pad_token_id: of the reward model (`models.scores.scoring_pad_token_id`).

    Returns:
        float32 [sequences] on the CPU, on every rank.
    """
    rows = [
        Row(token_ids=ids, first_target=ids.numel(), columns={SCORED: scored_column(ids, pad_token_id)})
        for ids in sequences
    ]
    scores = lambda values, shard: sequence_scores(token_values(values), shard, model.groups.cp)
    return _numbers_everywhere(model, rows, SCORED, scores, shape, max_tokens)


def logprob_sums_everywhere(
    model: MegatronModel, rows: Sequence[Row], mask: str, shape: ModelShape, *, max_tokens: int
) -> torch.Tensor:
    """The sum of each sequence's log-probs under a mask. Collective over the world.

    Args:
        model: a language model.
        rows: the same on every rank.
        mask: the column of the rows that says which predicted tokens count.
        shape: of the model.
        max_tokens: of one micro-batch on one data-parallel rank.

    Returns:
        float32 [rows] on the CPU, on every rank.
    """

    def sums(logits: torch.Tensor, shard: PackedBatch) -> torch.Tensor:
        logprobs, _ = token_logprobs(model, logits, shard)
        return sequence_sums(logprobs, shard.columns[mask], shard, model.groups.cp)

    return _numbers_everywhere(model, rows, mask, sums, shape, max_tokens)


def _numbers_everywhere(
    model: MegatronModel, rows: Sequence[Row], column: str, numbers_of: NumbersOf, shape: ModelShape, max_tokens: int
) -> torch.Tensor:
    """A number of each of the same rows, float32 [rows] on the CPU, on every rank; they are shared out by work."""
    groups = model.groups
    costs = [sequence_flops(row.token_ids.numel(), shape) for row in rows]
    mine = partition(costs, groups.layout.dp, equal_counts=False)[groups.dp.rank()]
    batches = make_mini_batch([rows[i] for i in mine], (column,), groups, max_tokens=max_tokens, work=[]).batches

    def hand_back(output: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        numbers = numbers_of(output, shard)
        return numbers.sum(), {"numbers": numbers}

    with torch.no_grad():
        outputs = run_pipeline(model, batches, hand_back, forward_only=True)
    everyones = torch.zeros(len(rows), device=platform.current().device)
    for batch, output in zip(batches, outputs, strict=bool(outputs)):
        everyones[[mine[place] for place in sorted(batch.rows)]] = output["numbers"]
    if groups.pp.size() > 1:
        # Only the last stage has numbers; the others hold zeros.
        dist.all_reduce(everyones, group=groups.pp)
    # Each data-parallel rank has its own, and 0 elsewhere.
    dist.all_reduce(everyones, group=groups.dp)
    return everyones.cpu()
