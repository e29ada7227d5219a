"""One mini-batch as this rank trains on it: packed micro-batches with what the loss needs of each token.

Values of a token stand at the position that predicts it: response token j of a sample with P prompt tokens is predicted
at position P − 1 + j. `PackedBatch.targets` has it there, and so have all columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config.layout import Layout
from megarl.data.packing import (
    PackedBatch,
    pack_multiple,
    pack_sequences,
    padded_length,
    sequence_multiple,
)
from megarl.models.router_replay import for_routers
from megarl.parallel.balance import pack
from megarl.parallel.groups import Groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sequence and its per-token values."""

    token_ids: torch.Tensor
    """int64 [length]"""
    first_target: int
    """The index of the first token whose log-prob is wanted: the number of prompt tokens"""
    columns: Mapping[str, torch.Tensor]
    """float32 [length] each, aligned with the predicting position"""
    routed_experts: torch.Tensor | None = None
    """int16 [length, this rank's mixtures, top-k]: experts to be replayed; all rows have them, or none"""


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
    rows: Sequence[Row]
    """The sequences of this data-parallel rank."""
    column_names: Sequence[str]
    """What they bring along; a rank without sequences has these columns too."""
    places: Sequence[int]
    """Of each of them: where its sample stands in the step; empty outside of RL."""
    max_tokens: int
    """Of a micro-batch."""

    def add_columns(self, outputs: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Takes what a pass handed back for each micro-batch as columns; nothing on stages before the last."""
        if outputs:
            self.batches = [batch.with_columns(**output) for batch, output in zip(self.batches, outputs, strict=True)]


def at_predicting_positions(values: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """[response] → [prompt + response]: each token's value where that token is predicted, 0 elsewhere."""
    out = values.new_zeros(prompt_length + values.numel())
    out[prompt_length - 1 : prompt_length - 1 + values.numel()] = values
    return out


def packed_again(mini_batch: MiniBatch, groups: Groups, *, max_tokens: int) -> MiniBatch:
    """The same sequences, without what passes added, in micro-batches of another size; itself where it is the same.

    For another model, which routes for itself: no experts to be replayed come along. Collective over the data-parallel
    group.
    """
    if max_tokens == mini_batch.max_tokens:
        return mini_batch
    return make_mini_batch(
        [dataclasses.replace(row, routed_experts=None) for row in mini_batch.rows],
        mini_batch.column_names,
        groups,
        max_tokens=max_tokens,
        work=mini_batch.work,
        places=mini_batch.places,
    )


def plan_packs(
    lengths: Sequence[int], layout: Layout, *, max_tokens: int, at_least: int = 1
) -> tuple[list[list[int]], list[int]]:
    """Shares the sequences of one rank out to packs: (indices of the sequences of each pack, its padded tokens).

    Args:
        lengths: tokens of each sequence; none make packs of padding alone.
        at_least: packs, as many as the rank with the most has.
    """
    inner, outer = sequence_multiple(layout), pack_multiple(layout)
    padded = [padded_length(length, inner) for length in lengths]
    multiple = layout.pp if layout.vpp > 1 else 1
    if padded:
        parts = pack(padded, max_tokens // outer * outer, multiple_of=multiple, at_least=at_least)
    else:
        parts = [[]] * padded_length(at_least, multiple)
    # Sequences of one length side by side are one call in attention.
    parts = [sorted(part, key=padded.__getitem__) for part in parts]
    # A pack of padding alone still has to be a pack.
    sizes = [max(padded_length(sum(padded[i] for i in part), outer), outer) for part in parts]
    return parts, [max(sizes)] * len(sizes) if layout.pp > 1 else sizes


def make_mini_batch(
    rows: Sequence[Row],
    column_names: Sequence[str],
    groups: Groups,
    *,
    max_tokens: int,
    work: list[int],
    together: int = 1,
    places: Sequence[int] = (),
) -> MiniBatch:
    """Packs `rows` into micro-batches of at most `max_tokens` tokens. Collective over the data-parallel group.

    `rows` may be empty, where there are fewer samples than ranks: such a rank runs packs of padding.

    Every data-parallel rank makes the same number of micro-batches, since expert parallelism makes them meet in each
    layer. With pipeline parallelism all packs of a rank have one length.

    Args:
        together: consecutive rows that stay in one pack, such as the two sequences of a pair that a loss compares.
        places: of the rows, where their samples stand in the step.
    """
    layout = groups.layout
    inner = sequence_multiple(layout)
    padded = [padded_length(row.token_ids.numel(), inner) for row in rows]
    lengths = [sum(padded[start : start + together]) for start in range(0, len(rows), together)]
    parts, sizes = plan_packs(lengths, layout, max_tokens=max_tokens)
    count = torch.tensor(len(parts), device=platform.current().device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=groups.dp)
    if int(count) > len(parts):
        parts, sizes = plan_packs(lengths, layout, max_tokens=max_tokens, at_least=int(count))
    parts = [[start * together + offset for start in part for offset in range(together)] for part in parts]
    packs = [
        pack_sequences(
            [rows[i].token_ids for i in part],
            layout,
            rows=part,
            first_targets=[rows[i].first_target for i in part],
            columns={name: [rows[i].columns[name] for i in part] for name in column_names},
            num_tokens=size,
            routed_experts=[e for i in part if (e := rows[i].routed_experts) is not None],
        )
        for part, size in zip(parts, sizes, strict=True)
    ]
    device = platform.current().device
    return MiniBatch(
        batches=[for_routers(batch.shard(groups.cp.size(), groups.cp.rank()), groups).to(device) for batch in packs],
        real_tokens=sum(row.token_ids.numel() for row in rows),
        padded_tokens=sum(sizes),
        work=work,
        rows=rows,
        column_names=column_names,
        places=places,
        max_tokens=max_tokens,
    )
