"""The executor of a weight plan: fills this rank's buckets from its own parameters and by messages of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl import platform
from megarl.platform.usage import synchronize
from megarl.weights.boxes import Box, box_index
from megarl.weights.bucket import Bucket
from megarl.weights.bucket_memory import BucketMemory
from megarl.weights.checksum import box_checksum
from megarl.weights.plan import Item, Message, Step, WeightPlan

HeldBoxes = Mapping[tuple[str, Box], torch.Tensor]
"""This rank's boxes of tensors, by tensor and box: views of its parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a rank moves in one sync, in bytes but for `buckets`."""

    taken: int
    """By the rank's engine."""
    received: int
    """From other ranks."""
    sent: int
    """To other ranks; what goes to several counts for each."""
    buckets: int
    bucket_bytes: int
    """Of the largest bucket; memory that a sync takes."""
    staging_bytes: int
    """Of the largest set of messages of one bucket; memory that a sync takes besides."""


class BucketStream:
    """Fills the buckets of one rank.

    Memory, during a sync and on a CPU afterwards too: one bucket and the messages that fill the next, neither larger
    than the plan's `bucket_bytes` but where one tensor is. Messages of the next bucket travel while the engine takes
    the last.
    """

    def __init__(
        self, plan: WeightPlan, rank: int, held: HeldBoxes, group: dist.ProcessGroup | None, *, mapped: bool
    ) -> None:
        """Works out this rank's steps.

        Args:
            group: of the ranks of its replica domain; None: it is the only one.
            mapped: whether processes of the engine map the buckets (`BucketMemory`).
        """
        self._plan, self._rank, self._held, self._group, self._mapped = plan, rank, held, group, mapped
        self._steps = plan.steps(rank)
        self._kept: tuple[BucketMemory, torch.Tensor] | None = None

    @property
    def traffic(self) -> Traffic:
        """What one sync moves."""
        steps = self._steps
        return Traffic(
            taken=sum(entry.num_bytes for step in steps for entry in step.entries),
            received=sum(_payload(message) for step in steps for message in step.receives),
            sent=sum(_payload(message) * len(message.receivers) for step in steps for message in step.sends),
            buckets=len(steps),
            bucket_bytes=max(step.num_bytes for step in steps),
            staging_bytes=max(step.staging_bytes for step in steps),
        )

    def checksums(self) -> dict[str, int]:
        """The checksum of every tensor, each rank's share of it from its own parameters. Collective over the domain."""
        domain = self._plan.domain_of(self._rank)
        sums = torch.zeros(len(self._plan.tensors), dtype=torch.int64)
        for number, tensor in enumerate(self._plan.tensors):
            total = 0
            for part in tensor.parts:
                holders = domain.holders[part.place]
                if holders[number % len(holders)] == self._rank:
                    total += box_checksum(self._held[tensor.name, part.box], part.box, tensor.shape)
            sums[number] = _as_int64(total)
        if self._group is not None:
            on_device = sums.to(platform.current().device)
            dist.all_reduce(on_device, group=self._group)  # sums of int64 wrap, as those of a checksum have to
            sums = on_device.cpu()
        return {tensor.name: value % 2**64 for tensor, value in zip(self._plan.tensors, sums.tolist(), strict=True)}

    def buckets(self, checksums: Mapping[str, int] | None) -> Iterator[Bucket]:
        """The buckets in order. Collective over the domain: every rank must exhaust it.

        Yields:
            A bucket that is overwritten when the next one is asked for.
        """
        memory, staging = self._buffers()
        works = self._start(self._steps[0], staging)
        for number, step in enumerate(self._steps):
            bucket = Bucket(step.entries, memory.data[: step.num_bytes], checksums, memory)
            for work in works:
                work.wait()
            self._fill(step, bucket, staging)
            if number + 1 < len(self._steps):
                works = self._start(self._steps[number + 1], staging)
            synchronize()  # the engine may be another process, which does not know this one's streams
            yield bucket

    def _buffers(self) -> tuple[BucketMemory, torch.Tensor]:
        """Memory of the bucket and of the messages. A CPU keeps it for the next sync, since there filling new pages
        takes several times as long; a GPU has its allocator for that, and between syncs other uses for the memory."""
        if self._kept is not None:
            return self._kept
        traffic = self.traffic
        memory = BucketMemory(traffic.bucket_bytes, mapped=self._mapped)
        staging = torch.empty(traffic.staging_bytes, dtype=torch.uint8, device=platform.current().device)
        if platform.current().is_cpu:
            self._kept = memory, staging
        return memory, staging

    def _start(self, step: Step, staging: torch.Tensor) -> Sequence[dist.Work]:
        """Packs what this rank gives, and starts all messages of a step."""
        operations = []
        for message in step.sends:
            for item in message.items:
                box = self._held[item.name, item.box]
                _view(staging, message, item, box.dtype, box.shape).copy_(box)
            data = _memory(staging, message)
            operations += [dist.P2POp(dist.isend, data, peer, self._group) for peer in message.receivers]
        for message in step.receives:
            operations.append(dist.P2POp(dist.irecv, _memory(staging, message), message.source, self._group))
        return dist.batch_isend_irecv(operations) if operations else []

    def _fill(self, step: Step, bucket: Bucket, staging: torch.Tensor) -> None:
        """Puts the rank's own boxes and those that came into the bucket."""
        tensors = dict(bucket.tensors())
        for name, box in step.copies:
            tensors[name][box_index(box)].copy_(self._held[name, box])
        for message in step.receives:
            for item in message.items:
                target = tensors[item.name][box_index(item.box)]
                target.copy_(_view(staging, message, item, target.dtype, target.shape))


def _memory(staging: torch.Tensor, message: Message) -> torch.Tensor:
    return staging[message.offset : message.offset + message.num_bytes]


def _view(
    staging: torch.Tensor, message: Message, item: Item, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """An item of a message in the staging memory."""
    start = message.offset + item.offset
    return staging[start : start + item.num_bytes].view(dtype).view(shape)


def _payload(message: Message) -> int:
    return sum(item.num_bytes for item in message.items)


def _as_int64(number: int) -> int:
    """The int64 that is equal modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63
