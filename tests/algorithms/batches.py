"""Batches that tests of the mathematics share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megarl.algorithms.ranks import AcrossRanks

NAN = float("nan")

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Rows of uneven length, some with masked spans, one with a single token and one with none; NaN under the mask."""

    mask: Tensor
    rewards: Tensor
    values: Tensor
    groups: Tensor

    def take(self, rows: Tensor) -> Batch:
        return Batch(self.mask[rows], self.rewards[rows], self.values[rows], self.groups[rows])

    def padded(self, width: int) -> Batch:
        """With further columns of padding."""
        extra = width - self.mask.shape[1]
        grow = lambda values, fill: torch.nn.functional.pad(values, (0, extra), value=fill)
        return Batch(grow(self.mask, 0), grow(self.rewards, NAN), grow(self.values, NAN), self.groups)


def make_batch(rows: int = 40, time: int = 23, seed: int = 3, holes: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, time + 1, (rows, 1), generator=generator)
    mask = torch.arange(time) < lengths
    if holes:
        spans = torch.rand(rows, time, generator=generator) < 0.3
        mask &= ~spans
    mask[0], mask[1] = False, torch.arange(time) == 0
    rewards, values = (torch.randn(rows, time, generator=generator).masked_fill(~mask, NAN) for _ in range(2))
    groups = torch.randint(0, rows // 4, (rows,), generator=generator) * 1000
    return Batch(mask.long(), rewards, values, groups)


def on_ranks(parts: Sequence[Tensor], run: Callable[[Tensor, AcrossRanks], T]) -> list[T]:
    """Runs one thread for each rank, whose collectives meet.

    Args:
        parts: int64, the rows that each rank has; together every row once.
        run: gets a rank's rows and its collectives.
    """
    size = len(parts)
    barrier = threading.Barrier(size, timeout=60)
    slots: list[Tensor | None] = [None] * size
    # What a rank gathers is in the order of ranks, so a row's place is not its number.
    starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)

    def exchange(rank: int, tensor: Tensor) -> list[Tensor]:
        slots[rank] = tensor
        barrier.wait()
        everyones = [slot for slot in slots if slot is not None]
        barrier.wait()
        return everyones

    def ranks_of(rank: int) -> AcrossRanks:
        return AcrossRanks(
            sum=lambda tensor: torch.stack(exchange(rank, tensor)).sum(0),
            gather=lambda rows: torch.cat(exchange(rank, rows)),
            mine=torch.arange(len(parts[rank])) + starts[rank],
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: run(parts[rank], ranks_of(rank)), range(size)))


def splits(rows: int) -> list[list[Tensor]]:
    """Ways to share out rows: uneven, shuffled, and with a rank that has none."""
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    everything = torch.arange(rows)
    return [
        list(everything.split([rows // 3, rows - rows // 3])),
        [everything[0::2], everything[1::2]],
        [shuffled[:5], shuffled[5:5], shuffled[5:]],
    ]
