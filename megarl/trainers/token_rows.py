"""Between packed columns, which models work on, and padded rows [rows, time], which the mathematics works on.

Only ranks of the last pipeline stage have the columns that passes add, so only they come here. Rows are the samples of
this data-parallel rank over all mini-batches of the step; time counts response tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megarl import platform
from megarl.algorithms.ranks import AcrossRanks
from megarl.data.packing import PackedBatch
from megarl.parallel.context import zigzag_positions
from megarl.parallel.groups import Groups
from megarl.parallel.reductions import global_sum
from megarl.trainers.minibatch import MiniBatch, Row


class TokenRows:
    """The rows of some mini-batches."""

    def __init__(self, mini_batches: Sequence[MiniBatch], groups: Groups) -> None:
        self._mini_batches = mini_batches
        self._groups = groups
        rows = [row for mini_batch in mini_batches for row in mini_batch.rows]
        self.shape = (len(rows), max((row.token_ids.numel() - row.first_target for row in rows), default=0))
        self._first_rows = list(itertools.accumulate((len(m.rows) for m in mini_batches), initial=0))

    def get(self, name: str) -> torch.Tensor:
        """A column of every micro-batch as float32 [rows, time], 0 behind a response. Collective over the CP group."""
        rows = torch.zeros(self.shape, device=platform.current().device)
        for first_row, mini_batch in zip(self._first_rows, self._mini_batches, strict=False):
            for batch in mini_batch.batches:
                whole = self._whole(batch.columns[name], batch)
                for row, tokens in _places(batch, mini_batch.rows):
                    values = whole[tokens]
                    rows[first_row + row, : values.numel()] = values
        return rows

    def put(self, **columns: torch.Tensor) -> None:
        """Gives every micro-batch the columns that these [rows, time] hold."""
        for first_row, mini_batch in zip(self._first_rows, self._mini_batches, strict=False):
            mini_batch.batches = [
                batch.with_columns(
                    **{name: self._column(values[first_row:], batch, mini_batch) for name, values in columns.items()}
                )
                for batch in mini_batch.batches
            ]

    def _column(self, rows: torch.Tensor, batch: PackedBatch, mini_batch: MiniBatch) -> torch.Tensor:
        whole = rows.new_zeros(batch.total_tokens)
        for row, tokens in _places(batch, mini_batch.rows):
            whole[tokens] = rows[row, : tokens.stop - tokens.start]
        cp = self._groups.cp
        if cp.size() == 1:
            return whole
        return whole[zigzag_positions(batch.bounds, cp.size(), cp.rank()).to(whole.device)]

    def _whole(self, shard: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """The column of the whole pack, from the shards of all context-parallel ranks."""
        cp = self._groups.cp
        if cp.size() == 1:
            return shard
        shards = [torch.empty_like(shard) for _ in range(cp.size())]
        dist.all_gather(shards, shard.contiguous(), group=cp)
        whole = shard.new_zeros(batch.total_tokens)
        for rank, part in enumerate(shards):
            whole[zigzag_positions(batch.bounds, cp.size(), rank).to(whole.device)] = part
        return whole


def _places(batch: PackedBatch, rows: Sequence[Row]) -> list[tuple[int, slice]]:
    """Of each sequence of the pack: its row, and the positions that predict its response tokens."""
    return [
        (row, slice(start + rows[row].first_target - 1, start + rows[row].token_ids.numel() - 1))
        for row, start in zip(batch.rows, batch.bounds, strict=False)
    ]


def across_data_parallel(groups: Groups, places: torch.Tensor, size: int) -> AcrossRanks:
    """The data-parallel ranks that share `size` samples.

    Args:
        places: int64 [rows], where in the step this rank's samples stand; every place is some rank's.
    """

    def gather(values: torch.Tensor) -> torch.Tensor:
        everyones = values.new_zeros(size)
        everyones[places] = values
        # Each place is one rank's and 0 elsewhere, so the sum is exact.
        return global_sum(everyones, groups.dp)

    return AcrossRanks(sum=lambda tensor: global_sum(tensor, groups.dp), gather=gather, mine=places)
