"""Scores of packed sequences on the ranks of a context-parallel group, and their gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.config.layout import Layout
from megarl.data.packing import PackedBatch, pack_sequences
from megarl.models.scores import SCORED, scored_column, sequence_scores
from megarl.parallel.context import zigzag_positions

ROWS = (3, 0, 2, 1)


def pack(lengths: list[int], cp: int) -> PackedBatch:
    sequences = [torch.arange(length) + 1 for length in lengths]
    return pack_sequences(
        sequences,
        Layout(world_size=cp, cp=cp),
        rows=ROWS[: len(lengths)],
        columns={SCORED: [scored_column(sequence, None) for sequence in sequences]},
    )


def loss_of(scores: torch.Tensor) -> torch.Tensor:
    """Couples all scores, as a loss over pairs does."""
    return (scores[0] - scores[1]).exp() + scores.square().sum()


def scores_and_gradient(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Scores [sequences]; the gradient of the loss over the tokens of the whole pack; scored tokens of this rank."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    whole = pack(lengths, cp)
    values = torch.sin(torch.arange(whole.total_tokens).float())
    index = zigzag_positions(whole.bounds, cp, rank)
    mine = values[index].requires_grad_()
    shard = whole.shard(cp, rank)
    scores = sequence_scores(mine, shard, dist.group.WORLD)
    # Each rank gives its share of the loss.
    (loss_of(scores) / cp).backward()
    gradient = torch.zeros_like(values)
    gradient[index] = mine.grad
    dist.all_reduce(gradient)
    return scores.detach(), gradient, int(shard.columns[SCORED].sum())


def empty_pack() -> tuple[list[int], float]:
    """A pack of padding alone: no scores, and a gradient that is 0 and not missing."""
    layout = Layout(world_size=dist.get_world_size(), cp=dist.get_world_size())
    shard = pack_sequences([], layout, columns={SCORED: []}, num_tokens=8).shard(layout.cp, dist.get_rank())
    values = torch.ones(shard.input_ids.numel(), 2, requires_grad=True)
    scores = sequence_scores(values, shard, dist.group.WORLD)
    scores.sum().backward()
    return list(scores.shape), float(values.grad.abs().sum())
