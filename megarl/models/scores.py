"""Numbers of whole sequences, on every rank that needs them: sums over tokens, such as the log-prob of a response, and
scores, which are a reward model's value at each sequence's last token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from megarl.data.packing import PackedBatch
from megarl.parallel.context import zigzag_positions

SCORED = "scored"
"""The column that is 1 at the token of each sequence that is scored, 0 elsewhere."""


def scoring_pad_token_id(folder: str | Path) -> int | None:
    """The padding token of a reward model: transformers scores a sequence at its last token that is another one.

    That of config.json; where it has none, the tokenizer's, or else its end token, as is usual. Where padding and end
    are one token, a score is therefore read before the end tokens.

    Args:
        folder: of a Hugging Face model.

    Returns:
        None where neither config.json nor a tokenizer names one: the last token is scored.
    """
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    if config.get("pad_token_id") is not None:
        return int(config["pad_token_id"])
    if not Path(folder, "tokenizer_config.json").exists():
        return None
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def sequence_scores(values: torch.Tensor, shard: PackedBatch, group: dist.ProcessGroup) -> torch.Tensor:
    """The score of each sequence of a pack, the same on every context-parallel rank. Collective over `group`.

    A sequence's scored token is on one of the ranks that share the pack. A loss over scores is computed by all of them,
    each contributing its share 1/cp, and the gradient of a score is the sum of what all of them ask for.

    Args:
        values: float32 [tokens], or several numbers a token [tokens, n], of this rank's tokens.
        shard: the micro-batch of this rank, with the column `SCORED`.
        group: the context-parallel group.

    Returns:
        float32 [sequences] or [sequences, n], by ascending row.
    """
    return sequence_sums(values, shard.columns[SCORED], shard, group)


def sequence_sums(
    values: torch.Tensor, mask: torch.Tensor, shard: PackedBatch, group: dist.ProcessGroup
) -> torch.Tensor:
    """The sum over the tokens under `mask` of each sequence of a pack; of losses and gradients as `sequence_scores`.

    Collective over `group`.

    Args:
        values: float32 [tokens], or several numbers a token [tokens, n], of this rank's tokens.
        mask: [tokens], 0 on padding; values where it is 0 are not read.
        shard: the micro-batch of this rank.
        group: the context-parallel group.

    Returns:
        float32 [sequences] or [sequences, n], by ascending row; 0 where nothing is under the mask.
    """
    places = mask.nonzero().squeeze(1)
    in_pack = zigzag_positions(shard.bounds, group.size(), group.rank())[places.cpu()]
    sequence = torch.searchsorted(shard.cu_seqlens.long().cpu(), in_pack, right=True) - 1
    order = torch.tensor(shard.rows, dtype=torch.int64).argsort().argsort()
    sums = values.new_zeros(len(shard.rows), *values.shape[1:])
    sums = sums.index_add(0, order[sequence].to(values.device), values[places])
    return _SumOverContext.apply(sums, group) if group.size() > 1 and len(order) else sums


class _SumOverContext(torch.autograd.Function):
    """all-reduce, whose adjoint is all-reduce: each rank's output depends on each rank's input."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grads[0], ctx.group), None


def _sum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total


def scored_column(token_ids: torch.Tensor, pad_token_id: int | None) -> torch.Tensor:
    """`SCORED` of one sequence, float32 [length]."""
    column = torch.zeros(token_ids.numel())
    column[scored_position(token_ids, pad_token_id)] = 1.0
    return column


def scored_position(token_ids: torch.Tensor, pad_token_id: int | None) -> int:
    """The index of the token of [length] at which a sequence is scored: the last that is not padding.

    Where all are, the first, as in transformers.
    """
    if pad_token_id is None:
        return token_ids.numel() - 1
    others = (token_ids != pad_token_id).nonzero()
    return int(others[-1]) if len(others) else 0
