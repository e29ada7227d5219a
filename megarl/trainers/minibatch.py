"""One mini-batch as this rank trains on it: packed micro-batches with what the loss needs of each token.

Values of a token stand at the position that predicts it: response token j of a sample with P prompt tokens is predicted
at position P − 1 + j. `PackedBatch.targets` has it there, and so have all columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl import platform
from megarl.data.packing import (
    PackedBatch,
    pack_multiple,
    pack_sequences,
    padded_length,
    sequence_multiple,
)
from megarl.parallel.balance import pack
from megarl.parallel.groups import Groups


@dataclass(kw_only=True, slots=True)
class MiniBatch:
    """The samples of one optimizer step on this data-parallel rank."""

    batches: list[PackedBatch]
    """This context-parallel rank's shards, on the device; on the last stage they gain columns as passes are made."""
    real_tokens: int
    """Of all sequences of this data-parallel rank."""
    padded_tokens: int
    """Of all its packs."""
    work: list[int]
    """Estimated FLOPs of each data-parallel rank's sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence and its per-token values."""

    token_ids: torch.Tensor
    """int64 [length]"""
    first_target: int
    """The index of the first token whose log-prob is wanted: the number of prompt tokens"""
    columns: Mapping[str, torch.Tensor]
    """float32 [length] each, aligned with the predicting position"""


def at_predicting_positions(values: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """[response] → [prompt + response]: each token's value where that token is predicted, 0 elsewhere."""
    out = values.new_zeros(prompt_length + values.numel())
    out[prompt_length - 1 : prompt_length - 1 + values.numel()] = values
    return out


def make_mini_batch(
    rows: Sequence[Row], column_names: Sequence[str], groups: Groups, *, max_tokens: int, work: list[int]
) -> MiniBatch:
    """Packs `rows` into micro-batches of at most `max_tokens` tokens. Collective over the data-parallel group.

    `rows` may be empty, where there are fewer samples than ranks: such a rank runs packs of padding.

    Every data-parallel rank makes the same number of micro-batches, since expert parallelism makes them meet in each
    layer. With pipeline parallelism all packs of a rank have one length.
    """
    layout = groups.layout
    inner = sequence_multiple(layout)
    lengths = [padded_length(row.token_ids.numel(), inner) for row in rows]
    limit = max_tokens // pack_multiple(layout) * pack_multiple(layout)
    multiple = layout.pp if layout.vpp > 1 else 1
    parts = pack(lengths, limit, multiple_of=multiple) if rows else [[]] * multiple
    count = torch.tensor(len(parts), device=platform.current().device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=groups.dp)
    if int(count) > len(parts):
        parts = pack(lengths, limit, multiple_of=multiple, at_least=int(count)) if rows else [[]] * int(count)
    # Sequences of one length side by side are one call in attention.
    parts = [sorted(part, key=lengths.__getitem__) for part in parts]
    sizes = [padded_length(sum(lengths[i] for i in part), pack_multiple(layout)) for part in parts]
    # A pack of padding alone still has to be a pack.
    sizes = [max(size, pack_multiple(layout)) for size in sizes]
    if layout.pp > 1:
        sizes = [max(sizes)] * len(sizes)
    packs = [
        pack_sequences(
            [rows[i].token_ids for i in part],
            layout,
            rows=part,
            first_targets=[rows[i].first_target for i in part],
            columns={name: [rows[i].columns[name] for i in part] for name in column_names},
            num_tokens=size,
        )
        for part, size in zip(parts, sizes, strict=True)
    ]
    device = platform.current().device
    return MiniBatch(
        batches=[batch.shard(groups.cp.size(), groups.cp.rank()).to(device) for batch in packs],
        real_tokens=sum(row.token_ids.numel() for row in rows),
        padded_tokens=sum(sizes),
        work=work,
    )
